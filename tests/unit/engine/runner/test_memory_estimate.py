"""The memory guard's estimates against what mlx really takes, at every chunk and in decode passes.

Held: at no chunk, and in no pass, is the estimate below the measured peak, and where a limit would matter,
at those that take most, it is not above `_MOST` times that.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from icehouse_server.clock import SystemClock
from icehouse_server.domain.ids import SequenceId
from icehouse_server.domain.sampling import SamplingParams
from icehouse_server.engine.core.memory_budget import MemoryBudget
from icehouse_server.engine.core.memory_model import MemoryModel
from icehouse_server.engine.core.ports import Chunk, DecodeRow
from icehouse_server.engine.runner import model_loader
from icehouse_server.engine.runner.forward.splits import Attention
from icehouse_server.engine.runner.runner import ModelRunner, RunnerSettings
from icehouse_server.engine.scheduling.memory_guard import MemoryGuard

from tests.fixtures.engine import load_at_once
from tests.fixtures.models import tiny_model_dir

_MOST = 2.5
_PROMPT = 640
_SEQUENCE = SequenceId(1)
_SMALL: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
_MODELS: dict[str, dict[str, Any]] = {
    "llama": {**_SMALL, "num_hidden_layers": 3},
    "gemma3_text": {**_SMALL, "num_hidden_layers": 6, "sliding_window": 256},
    "lfm2": {**_SMALL, "block_dim": 128, "block_ff_dim": 384, "num_key_value_heads": 2, "head_dim": 32},
}


@dataclasses.dataclass(frozen=True)
class MeasuredChunk:
    """One chunk of a prompt: where it ended, what was estimated, what it took at its peak and left behind."""

    stop: int
    estimated_bytes: int
    peak_bytes: int
    held_bytes: int


@dataclasses.dataclass(frozen=True)
class MeasuredPrompt:
    """A prompt's chunks, and what was in use before it."""

    model: MemoryModel
    began_bytes: int
    chunks: list[MeasuredChunk]


def run_prompt(runner: ModelRunner, guard: MemoryGuard, *, chunk: int) -> Iterator[MeasuredChunk]:
    """Prefill one prompt and measure each chunk from what was in use before it."""
    runner.open(_SEQUENCE)
    for stop in range(chunk, _PROMPT + 1, chunk):
        estimated_bytes = guard.chunk_bytes(chunk, stop)
        before_bytes = mx.get_active_memory()
        mx.reset_peak_memory()
        runner.run([Chunk(_SEQUENCE, [5 + i % 200 for i in range(chunk)])])
        peak_bytes, held_bytes = mx.get_peak_memory() - before_bytes, mx.get_active_memory()
        yield MeasuredChunk(stop, estimated_bytes, peak_bytes, held_bytes)


def loaded_runner(folder: Path, *, kv_bits: int = 0) -> ModelRunner:
    """A runner with nothing left to collect: an earlier one's weights and what the trial at load made hold
    themselves in cycles, and would be given back while this one's bytes are counted."""
    source = model_loader.ModelSource(path=folder, model_id="small")
    runner = ModelRunner(
        source=source,
        tokenizer=model_loader.load_tokenizer(source),
        settings=RunnerSettings(is_pipelined=False, kv_bits=kv_bits, attention=Attention.ROWS),
        clock=SystemClock(),
    )
    load_at_once(runner)
    gc.collect()
    return runner


@pytest.fixture(scope="module")
def measure(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., MeasuredPrompt]:
    """Run a prompt, each of its kind once."""

    @functools.cache
    def measured(architecture: str, *, chunk: int, kv_bits: int) -> MeasuredPrompt:
        folder = tiny_model_dir(tmp_path_factory.mktemp("models"), architecture, **_MODELS[architecture])
        runner = loaded_runner(folder, kv_bits=kv_bits)
        model = runner.memory_model()
        share = MemoryBudget(1 << 40).enter()
        guard = MemoryGuard(model, share=share, weight_bytes=0, chunk_token_count=chunk)
        began_bytes = mx.get_active_memory()
        chunks = list(run_prompt(runner, guard, chunk=chunk))
        runner.close()
        return MeasuredPrompt(model, began_bytes, chunks)

    return measured


@pytest.mark.parametrize(
    ("architecture", "chunk", "kv_bits"),
    [
        *((name, 128, 0) for name in sorted(_MODELS)),
        *(pytest.param(name, 32, 0, marks=pytest.mark.slow) for name in sorted(_MODELS)),
        ("llama", 32, 8),
        ("llama", 72, 0),
        ("llama", 128, 4),
    ],
)
def test_no_chunk_takes_more_than_estimated_nor_far_less(
    measure: Callable[..., MeasuredPrompt], architecture: str, chunk: int, kv_bits: int
) -> None:
    found = measure(architecture, chunk=chunk, kv_bits=kv_bits)
    chunks = found.chunks
    assert [c for c in chunks if c.estimated_bytes < c.peak_bytes] == []
    heaviest = max(chunks, key=lambda c: c.peak_bytes)
    assert heaviest.estimated_bytes <= _MOST * heaviest.peak_bytes, heaviest
    held_bytes = chunks[-1].held_bytes - found.began_bytes
    # A window being prefilled holds up to a chunk more than the window.
    assert held_bytes / 1.3 <= found.model.kv_bytes(_PROMPT) <= 1.3 * held_bytes


@pytest.mark.parametrize("architecture", sorted(_MODELS))
def test_a_whole_prompt_stays_within_what_it_was_let_in_for(
    measure: Callable[..., MeasuredPrompt], architecture: str
) -> None:
    found = measure(architecture, chunk=128, kv_bits=0)
    guard = MemoryGuard(found.model, share=MemoryBudget(1).enter(), weight_bytes=0, chunk_token_count=128)
    refusal = guard.never_fits(_PROMPT)
    assert refusal is not None
    estimated_bytes = int(refusal.metadata["estimated_bytes"])
    before = [found.began_bytes, *(chunk.held_bytes for chunk in found.chunks)]
    peaks = (held + chunk.peak_bytes for held, chunk in zip(before, found.chunks, strict=False))
    peak_bytes = max(peaks) - found.began_bytes
    assert peak_bytes <= estimated_bytes <= _MOST * peak_bytes


@pytest.mark.parametrize(
    "architecture",
    [
        name if name != "gemma3_text" else pytest.param(name, marks=pytest.mark.slow)
        for name in sorted(_MODELS)
    ],
)
def test_a_row_that_begins_to_decode_takes_no_copy_of_the_others(tmp_path: Path, architecture: str) -> None:
    runner = loaded_runner(tiny_model_dir(tmp_path, architecture, **_MODELS[architecture]))
    model = runner.memory_model()
    token_counts: list[int] = []
    # Equal rows, one longer than all before it, and shorter ones; some grow with their first token.
    for number, token_count in enumerate([192, 192, 256, 640, 64, 256]):
        sequence_id = SequenceId(number)
        runner.open(sequence_id)
        row = DecodeRow(SamplingParams(), prompt_token_ids=(5,) * (token_count + 1))
        runner.run([Chunk(sequence_id, [5 + i % 200 for i in range(token_count)])])
        # Rows that were there have a token more with every pass, two for each row that came later.
        grown = [*(count + 1 for count in token_counts), token_count + 1]
        before_bytes = mx.get_active_memory()
        mx.reset_peak_memory()
        runner.run([Chunk(sequence_id, [7], row=row)])
        peak_bytes = mx.get_peak_memory() - before_bytes
        estimated_bytes = sum(model.kv_bytes(count) - model.kv_bytes(count - 1) for count in grown)
        estimated_bytes += model.chunk_bytes(chunk_token_count=len(grown), context_token_count=640)
        estimated_bytes += model.growth_bytes(chunk_token_count=1, context_token_count=token_count + 1)
        estimated_bytes += model.fixed_bytes_per_sequence  # a window that a chunk left too long is cut
        assert peak_bytes <= estimated_bytes, (number, peak_bytes, estimated_bytes)
        token_counts = [count + 2 for count in token_counts] + [token_count + 1]
    runner.close()
