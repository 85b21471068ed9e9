"""Restored sequences that read KV where the prefix cache keeps it: which do, what it takes, what is drawn."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from icehouse_server.clock import SystemClock
from icehouse_server.domain.blocks import RegionKind
from icehouse_server.domain.ids import SequenceId
from icehouse_server.domain.sampling import SamplingParams
from icehouse_server.engine.core.decode_row import DecodeRow
from icehouse_server.engine.core.ports import Chunk
from icehouse_server.engine.prefix_cache.tiers.ports import PlacedBlock, RestoreInput
from icehouse_server.engine.runner import model_loader
from icehouse_server.engine.runner.forward import Attention
from icehouse_server.engine.runner.runner import ModelRunner, RunnerSettings

from tests.fixtures.models import tiny_model_dir
from tests.fixtures.patience import BOUND_S

ON_CPU = mx.default_device() == mx.Device(mx.cpu)
BLOCK = 256
PROMPT = [3 + j * 7 % 290 for j in range(3 * BLOCK)]
WIDE: dict[str, Any] = {
    "hidden_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
}


def runner_of(folder: Path, **settings: Any) -> ModelRunner:
    source = model_loader.ModelSource(path=folder, model_id="tiny")
    runner = ModelRunner(
        source=source,
        tokenizer=model_loader.load_tokenizer(source),
        settings=RunnerSettings(
            **{"is_pipelined": False, "kv_group_size": 32, "attention": Attention.ROWS, **settings}
        ),
        clock=SystemClock(),
    )
    runner.load()
    return runner


def blocks_of(runner: ModelRunner) -> tuple[PlacedBlock, ...]:
    """Compute the prompt and keep its blocks, as the prefix cache does."""
    sequence_id = SequenceId(1)
    runner.open(sequence_id)
    found = []
    for start in range(0, len(PROMPT), BLOCK):
        stop = start + BLOCK
        runner.run([Chunk(sequence_id, PROMPT[start:stop])])
        found.append(
            PlacedBlock(
                start, BLOCK, runner.blocks.cut(sequence_id, start=start, stop=stop, kinds=[RegionKind.KV])
            )
        )
    runner.release([sequence_id])
    return tuple(found)


def restore(runner: ModelRunner, name: int, blocks: Sequence[PlacedBlock]) -> None:
    count = BLOCK * len(blocks)
    runner.blocks.begin_restore(
        SequenceId(name),
        RestoreInput(tuple(blocks), None, 0, None, 0, token_count=count, capacity_token_count=count + BLOCK),
    )
    assert runner.blocks.continue_restore(SequenceId(name), budget_s=BOUND_S)


def drawn_by(runner: ModelRunner, names: Sequence[int]) -> dict[int, list[int]]:
    """Decode rows that differ by their first own token."""
    row = DecodeRow(SamplingParams(), prompt_token_ids=tuple(PROMPT))
    chunks = [Chunk(SequenceId(name), [10 + name], row=row) for name in names]
    found: dict[int, list[int]] = {name: [] for name in names}
    for result in (runner.run(chunks), *(runner.run([]) for _ in range(8))):
        for drawn in result.drawn:
            found[drawn.sequence_id].append(drawn.token_id)
    return found


@pytest.mark.skipif(not ON_CPU, reason="only a CPU's attention reads keys in pieces")
@pytest.mark.parametrize(
    ("architecture", "settings", "does"),
    [
        ("llama", {}, True),
        ("llama", {"attention": Attention.AUTO}, True),
        ("llama", {"kv_bits": 8}, False),
        ("gemma3_text", {}, True),
        ("mamba2", {}, False),
        ("deepseek_v3", {}, False),
    ],
)
def test_who_lends(tmp_path: Path, architecture: str, settings: dict[str, Any], does: bool) -> None:
    facts = runner_of(tiny_model_dir(tmp_path, architecture), **settings).blocks.facts
    assert (facts.least_lent_token_count > 0) is does
    assert not facts.lends(0)
    if does:
        assert facts.lends(facts.least_lent_token_count)
        assert not facts.lends(facts.least_lent_token_count - 1), "what takes little is copied"


@pytest.mark.skipif(not ON_CPU, reason="only a CPU's attention reads keys in pieces")
def test_numbers_of_sixteen_bits_are_copied(tmp_path: Path) -> None:
    runner = runner_of(tiny_model_dir(tmp_path, "llama", dtype="bfloat16"))
    assert runner.blocks.facts.least_lent_token_count == 0


@pytest.mark.skipif(not ON_CPU, reason="only a CPU's attention reads keys in pieces")
def test_rows_that_borrow_take_no_memory_for_it_and_draw_what_others_do(tmp_path: Path) -> None:
    folder = tiny_model_dir(tmp_path, "llama", **WIDE)
    names = (2, 3, 4, 5)
    taken: list[int] = []
    drawn: list[dict[int, list[int]]] = []
    for least in (0, 1 << 40):
        gc.collect()
        runner = runner_of(folder, least_lent_layer_bytes=least)
        blocks = blocks_of(runner)
        before = mx.get_active_memory()
        for name in names:
            restore(runner, name, blocks)
        taken.append(mx.get_active_memory() - before)
        drawn.append(drawn_by(runner, names))
        kv_bytes = runner.memory_model().kv_bytes_per_token * len(PROMPT)
        runner.close()
    assert drawn[0] == drawn[1] and len(set(map(tuple, drawn[0].values()))) > 1
    assert taken[0] < kv_bytes / 20 and taken[1] >= len(names) * kv_bytes


@pytest.mark.skipif(not ON_CPU, reason="only a CPU's attention reads keys in pieces")
def test_what_is_lent_lives_as_long_as_who_reads_it(tmp_path: Path) -> None:
    """The prefix cache may drop a block at any time, and its memory is free when the last row ends."""
    runner = runner_of(tiny_model_dir(tmp_path, "llama", **WIDE), least_lent_layer_bytes=0)
    expected = None
    for is_dropped in (False, True):
        blocks = blocks_of(runner)
        restore(runner, 2, blocks)
        restore(runner, 3, blocks)
        if is_dropped:
            del blocks
            gc.collect()
        found = drawn_by(runner, [2, 3])
        assert expected is None or found == expected
        expected = found
        held = mx.get_active_memory()
        runner.release([SequenceId(2), SequenceId(3)])
        runner.run([])
    gc.collect()
    assert held - mx.get_active_memory() >= runner.memory_model().kv_bytes_per_token * len(PROMPT)
