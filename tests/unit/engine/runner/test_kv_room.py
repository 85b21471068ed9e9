"""Room in a row's KV arrays: for what its length calls for, whatever class its caches are."""

from __future__ import annotations

from pathlib import Path

import pytest
from icehouse_server.device import Backend
from icehouse_server.domain.ids import SequenceId
from icehouse_server.domain.sampling import SamplingParams
from icehouse_server.engine.core.decode_row import DecodeRow
from icehouse_server.engine.core.kv_growth import KvGrowth, KvLength
from icehouse_server.engine.core.ports import Chunk
from icehouse_server.engine.kv_cache.caches import room_token_count
from icehouse_server.engine.runner.runner import ModelRunner

from tests.fixtures.models import tiny_model_dir
from tests.unit.engine.runner.test_mixed_rows import runner_of

ROW = SequenceId(3)
TOKENS = tuple(3 + (j * 7) % 290 for j in range(80))


def rooms(runner: ModelRunner, length: KvLength, *, output_count: int) -> list[int]:
    """Return the room behind each of two chunks, then behind each token."""
    runner.open(ROW)
    row = DecodeRow(SamplingParams(), prompt_token_ids=TOKENS)
    found = []
    for chunk in (Chunk(ROW, TOKENS[:9], length=length), Chunk(ROW, TOKENS[9:], length=length, row=row)):
        runner.run([chunk])
        found.append(room_token_count(runner.caches(ROW)))
    for _ in range(output_count):
        runner.run([])
        found.append(room_token_count(runner.caches(ROW)))
    runner.release([ROW])
    return found


@pytest.mark.parametrize("kv_bits", [0, 8])
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_arrays_have_the_room_that_the_guard_charges(tmp_path: Path, architecture: str, kv_bits: int) -> None:
    runner = runner_of(
        tiny_model_dir(tmp_path, architecture, head_dim=32), is_pipelined=False, kv_bits=kv_bits
    )
    for length in (KvLength(80, 1000), KvLength(80, 90), KvLength()):
        expected = [KvGrowth().room(count, length) for count in (9, *range(80, 80 + 71))]
        assert rooms(runner, length, output_count=70) == expected


def test_arrays_of_a_device_that_wants_multiples_are_multiples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("icehouse_server.engine.runner.model_loader.find_backend", lambda: Backend.CUDA)
    runner = runner_of(tiny_model_dir(tmp_path, "llama"), is_pipelined=False)
    assert rooms(runner, KvLength(80, 200), output_count=3) == [256] * 5
