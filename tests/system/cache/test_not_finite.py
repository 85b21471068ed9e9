"""A request whose logits are no numbers ends alone, and nothing that it computed is used again."""

from __future__ import annotations

from pathlib import Path

import pytest
from icehouse_server.domain.events import Failed
from icehouse_server.engine.core.ports import Drawn
from icehouse_server.engine.core.refusals import logits_not_finite
from icehouse_server.errors import Reason

from tests.system.cache.stepped_server import BLOCK, SteppedServer, prompt

TOKENS = prompt(4 * BLOCK + 1)
OTHERS = prompt(3 * BLOCK, salt=5)


def break_numbers(served: SteppedServer, patch: pytest.MonkeyPatch) -> None:
    """Let whoever has so many tokens behind this very prompt draw from no numbers."""
    draw = served.runner.draw

    def drawn() -> list[Drawn]:
        lengths = {i: len(h) for i, h in served.runner.history.items() if h[: len(TOKENS)] == TOKENS}
        return [
            each._replace(error=logits_not_finite(3))
            if lengths.get(each.sequence_id) == len(TOKENS) + 2
            else each
            for each in draw()
        ]

    patch.setattr(served.runner, "draw", drawn)


def reason_of(served: SteppedServer, name: str) -> Reason:
    end = served.recorder.end_of(name)
    assert isinstance(end, Failed)
    return end.error.reason


def test_it_ends_alone_and_its_blocks_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with SteppedServer(tmp_path) as served:
        served.ask("kept", OTHERS, max_output_tokens=3)
        served.ask("before", TOKENS[: 2 * BLOCK + 1], max_output_tokens=1)
        break_numbers(served, monkeypatch)
        served.submit("bad", TOKENS, max_output_tokens=20)
        served.submit("good", OTHERS, max_output_tokens=20)
        served.step_until_idle()
        assert reason_of(served, "bad") is Reason.LOGITS_NOT_FINITE
        assert len(served.answer("good").tokens) == 20
        monkeypatch.undo()
        assert served.ask("again", TOKENS, max_output_tokens=1).cache.cached_token_count == 0
        assert served.ask("other", OTHERS, max_output_tokens=1).cache.cached_token_count == len(OTHERS) - 1
        served.check()


def test_nothing_of_it_is_on_ssd_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with SteppedServer(tmp_path, ram_blocks=3) as served:
        break_numbers(served, monkeypatch)
        served.submit("bad", TOKENS, max_output_tokens=20)
        served.step_until_idle()
        assert reason_of(served, "bad") is Reason.LOGITS_NOT_FINITE
    with SteppedServer(tmp_path) as served:
        assert served.ask("again", TOKENS).cache.cached_token_count == 0
        served.check()
