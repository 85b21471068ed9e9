"""Sequences that give way to memory pressure and go on later, on real models: nobody can tell.

The device's counters are replaced, not its memory: at chosen decode steps they say that far more
is in use than is allowed, until a sequence has been parked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from icehouse_server.domain.events import Delta, PrefillProgress
from icehouse_server.domain.request import LogprobsWanted
from icehouse_server.domain.sampling import SamplingParams
from icehouse_server.engine.core.memory_budget import MemoryBudget
from icehouse_server.engine.core.ports import Chunk, MemoryUse, PassResult
from icehouse_server.engine.runner.runner import ModelRunner

from tests.fixtures.models import tiny_model_dir
from tests.system.cache import server as cache_server
from tests.system.cache.server import BLOCK, CacheServer
from tests.system.cache.test_reuse import prompt

_LIMIT_BYTES = 1 << 30
_PRESSED_STEPS = (6, 7, 15, 30)
"""Decode steps before which memory runs short; two in a row park two sequences."""
_OUTPUT = 40
_SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=7)
_PENALIZED = SamplingParams(
    temperature=0.7,
    seed=11,
    top_k=20,
    xtc_probability=0.3,
    repetition_penalty=1.2,
    frequency_penalty=0.6,
    frequency_window=9,
    banned=((60, 61), (62,)),
    min_output_token_count=20,
)
_REQUESTS: dict[str, tuple[list[int], SamplingParams]] = {
    "greedy": (prompt(3 * BLOCK + 5), SamplingParams()),
    "sampled": (prompt(2 * BLOCK + 9, salt=1), _SAMPLED),
    "short": (prompt(7, salt=2), SamplingParams()),
    "warm": (prompt(4 * BLOCK, salt=3), _PENALIZED),
}


class PressedRunner(ModelRunner):
    """Says at the chosen steps that memory is full, until something is released."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._step = 0
        self._is_full = False

    def run(
        self,
        chunks: Sequence[Chunk],
        *,
        before_wait: Callable[[], None] | None = None,
        reads_at_once: bool = False,
    ) -> PassResult:
        self._step += not chunks
        self._is_full = not chunks and self._step in _PRESSED_STEPS
        return super().run(chunks, before_wait=before_wait, reads_at_once=reads_at_once)

    def release(self, sequence_ids: Any) -> None:
        self._is_full = False
        super().release(sequence_ids)

    def memory(self) -> MemoryUse:
        return MemoryUse(2 * _LIMIT_BYTES if self._is_full else 0, 0)


@pytest.mark.parametrize("with_ssd", [True, False], ids=["to SSD", "from RAM or anew"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "lfm2"])
def test_parked_sequences_go_on_with_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, with_ssd: bool
) -> None:
    folder = tiny_model_dir(tmp_path, architecture)
    with CacheServer(folder, None, is_enabled=False) as served:
        undisturbed = {
            name: served.ask(name, tokens, sampling=sampling, max_output_tokens=_OUTPUT).tokens
            for name, (tokens, sampling) in _REQUESTS.items()
        }
    monkeypatch.setattr(cache_server, "ModelRunner", PressedRunner)
    with CacheServer(
        folder,
        tmp_path / "blocks" if with_ssd else None,
        is_pipelined=not with_ssd,
        budget=MemoryBudget(_LIMIT_BYTES),
    ) as served:
        for name, (tokens, sampling) in _REQUESTS.items():
            served.submit(
                name,
                tokens,
                sampling=sampling,
                max_output_tokens=_OUTPUT,
                logprobs=LogprobsWanted(of_prompt=True),
            )
        parked = {name: served.answer(name).tokens for name in _REQUESTS}
        engine, _ = served.stats()
    # Two of four on a busy machine: who runs at a pressed step depends on when the requests arrive.
    assert engine.parked_total >= len(_PRESSED_STEPS) // 2
    assert parked == undisturbed
    for name, (tokens, _) in _REQUESTS.items():
        events = served.recorder.events[name]
        of_prompt = [
            entry for event in events if isinstance(event, PrefillProgress) for entry in event.logprobs
        ]
        of_output = [entry for event in events if isinstance(event, Delta) for entry in event.logprobs]
        assert [entry.token_id for entry in of_prompt] == tokens[1:]
        assert [entry.token_id for entry in of_output] == parked[name]
