"""What the demo sends, and how it ends."""

from __future__ import annotations

from pathlib import Path

import pytest
from icehouse_server.cli import demo
from icehouse_server.cli import main as cli
from typer.testing import CliRunner


def test_the_long_prompt_ends_inside_a_sentence_it_has_said_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "runs_on_cpu", lambda: True)
    for library, words in ((Path("/lib/libopenblas.so.0"), 750), (None, 500)):
        monkeypatch.setattr(demo, "find_openblas", lambda found=library: found)
        prompt = demo.long_prompt()
        last_words = prompt.rpartition('"')[2]
        assert not prompt.endswith((".", "\n"))
        assert prompt.count(last_words) >= 3 and len(last_words) > 20
        assert words <= len(prompt.split()) < words + 100


@pytest.mark.parametrize(("is_equal", "code"), [(True, 0), (False, 1)])
def test_differing_texts_are_an_exit_code(monkeypatch: pytest.MonkeyPatch, is_equal: bool, code: int) -> None:
    monkeypatch.setattr(demo, "run_demo", lambda **given: is_equal)
    assert CliRunner().invoke(cli.app, ["demo"]).exit_code == code
