"""Blocks cut out of live caches while passes run."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from icehouse_server.device import Backend
from icehouse_server.domain.blocks import HostRegion, RegionKind
from icehouse_server.domain.ids import SequenceId
from icehouse_server.domain.sampling import SamplingParams
from icehouse_server.engine.core.ports import Chunk, DecodeRow
from icehouse_server.engine.kv import pool as kv_pool
from icehouse_server.engine.kv import runner_blocks
from icehouse_server.engine.kv_cache import regions
from icehouse_server.engine.prefix_cache.tiers.runner_port import PlacedBlock, RestoreInput
from icehouse_server.engine.runner.forward.splits import Attention
from icehouse_server.errors import StorageError

from tests.fixtures.models import tiny_model_dir
from tests.fixtures.patience import BOUND_S
from tests.unit.engine.runner.test_mixed_rows import runner_of

PROMPT = tuple(3 + j * 7 % 290 for j in range(20))
CUTS_WHILE_IT_DECODES = 8
KINDS = {
    "llama": [RegionKind.KV],
    "gemma3_text": [RegionKind.KV, RegionKind.WINDOW],
    "lfm2": [RegionKind.KV, RegionKind.CHECKPOINT],
}


class Waits:
    """Counts the calls that wait for the device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        really = mx.eval

        def evaluate(*arrays: object) -> None:
            self.count += 1
            really(*arrays)

        monkeypatch.setattr(mx, "eval", evaluate)
        for name in ("item", "tolist", "__int__", "__float__", "__bool__"):
            monkeypatch.setattr(mx.array, name, self._counting(getattr(mx.array, name)))

    def _counting(self, really: Callable[[mx.array], Any]) -> Callable[[mx.array], Any]:
        def look(array: mx.array) -> Any:
            self.count += 1
            return really(array)

        return look


def cut_beside_passes(
    folder: Path, kinds: list[RegionKind], waits: Waits, *, is_pipelined: bool
) -> tuple[list[HostRegion], int]:
    """Cut the prompt's blocks behind the pass that ends it, go on decoding, and read them last of all."""
    runner = runner_of(folder, is_pipelined=is_pipelined, attention=Attention.ROWS)
    row = DecodeRow(SamplingParams(), prompt_token_ids=PROMPT)
    sequence_id = SequenceId(1)
    runner.open(sequence_id)
    runner.run([Chunk(sequence_id, PROMPT[:16])])
    before = waits.count
    found = runner.blocks.cut(sequence_id, start=0, stop=16, kinds=kinds)
    wait_count = waits.count - before
    runner.run([Chunk(sequence_id, PROMPT[16:], row=row)])
    for _ in range(CUTS_WHILE_IT_DECODES):
        runner.run([])
        before = waits.count
        runner.blocks.cut(sequence_id, start=0, stop=16, kinds=[RegionKind.KV])
        wait_count += waits.count - before
    return list(runner.blocks.begin_to_host([found[kind] for kind in kinds]).take()), wait_count


@pytest.mark.parametrize("architecture", KINDS)
def test_a_cut_waits_for_no_pass_in_flight_and_holds_what_a_waited_one_holds(
    tmp_path: Path, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, kinds = tiny_model_dir(tmp_path, architecture), KINDS[architecture]
    waits = Waits(monkeypatch)
    ahead, wait_count = cut_beside_passes(folder, kinds, waits, is_pipelined=True)
    assert wait_count == 0
    waited, wait_count = cut_beside_passes(folder, kinds, waits, is_pipelined=False)
    assert wait_count == 1 + CUTS_WHILE_IT_DECODES, "the counter sees nothing"
    assert [region.kind for region in ahead] == kinds
    for ours, theirs in zip(ahead, waited, strict=True):
        for one, other in zip(ours.tensors, theirs.tensors, strict=True):
            assert (one.name, one.dtype, one.shape) == (other.name, other.dtype, other.shape)
            assert bytes(one.data) == bytes(other.data)


@pytest.mark.parametrize("architecture", KINDS)
def test_bytes_of_a_block_are_there_without_work_behind_the_pass_in_flight(
    tmp_path: Path, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full RAM tier spills a block for each that it takes in: once a prompt's chunk in steady state."""
    kinds = KINDS[architecture]
    runner = runner_of(tiny_model_dir(tmp_path, architecture), is_pipelined=True)
    runner.open(SequenceId(1))
    runner.run([Chunk(SequenceId(1), PROMPT[:16])])
    found = runner.blocks.cut(SequenceId(1), start=0, stop=16, kinds=kinds)
    runner.run([Chunk(SequenceId(1), PROMPT[16:], row=DecodeRow(SamplingParams(), prompt_token_ids=PROMPT))])
    waits, graph, really = Waits(monkeypatch), io.StringIO(), regions.bytes_of

    def read(flat: mx.array) -> memoryview:
        mx.export_to_dot(graph, flat)
        return really(flat)

    monkeypatch.setattr(regions, "bytes_of", read)
    runner.blocks.begin_to_host([found[kind] for kind in kinds]).take()
    assert graph.getvalue() and "shape=rectangle" not in graph.getvalue(), "something was left to compute"
    assert waits.count == 0


@pytest.mark.parametrize("attention", Attention)
def test_a_copy_to_the_host_is_done_when_a_pass_behind_it_has_ended(
    tmp_path: Path, attention: Attention, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can ask the device, and nobody waits for it."""
    runner = runner_of(tiny_model_dir(tmp_path, "llama"), is_pipelined=True, attention=attention)
    row = DecodeRow(SamplingParams(), prompt_token_ids=PROMPT)
    runner.open(SequenceId(1))
    runner.run([Chunk(SequenceId(1), PROMPT[:16])])
    found = runner.blocks.cut(SequenceId(1), start=0, stop=16, kinds=[RegionKind.KV])
    runner.run([Chunk(SequenceId(1), PROMPT[16:], row=row)])
    waits = Waits(monkeypatch)
    copy = runner.blocks.begin_to_host([found[RegionKind.KV]])
    assert waits.count == 0 and copy.is_apart is (attention is Attention.AUTO)
    done = [copy.is_done]
    for _ in range(3):
        runner.run([])
        done.append(copy.is_done)
    assert done == [False, False, True, True], "one pass was in flight, and the next one ends a call later"
    before = waits.count
    (host,) = copy.take()
    assert waits.count == before and host.size_bytes
    runner.release([SequenceId(1)])
    runner.run([])
    at_once = runner.blocks.begin_to_host([found[RegionKind.KV]])
    assert at_once.is_done, "nothing is in flight"
    assert [bytes(t.data) for t in at_once.take()[0].tensors] == [bytes(t.data) for t in host.tensors]


@pytest.mark.parametrize("is_unified", [True, False])
def test_what_is_written_is_memory_of_the_host(
    tmp_path: Path, is_unified: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A view of memory that is the device's own would have it moved to the host for good."""
    if not is_unified:
        monkeypatch.setattr(runner_blocks, "find_backend", lambda: Backend.CUDA)
    runner = runner_of(tiny_model_dir(tmp_path, "llama"), is_pipelined=False, attention=Attention.ROWS)
    runner.open(SequenceId(1))
    runner.run([Chunk(SequenceId(1), PROMPT[:16])])
    region = runner.blocks.cut(SequenceId(1), start=0, stop=16, kinds=[RegionKind.KV])[RegionKind.KV]
    assert isinstance(region, regions.ArrayRegion)
    copy = runner.blocks.begin_to_host([region])
    (host,) = copy.take()
    assert copy.is_apart is not is_unified
    views = regions.to_host(region)
    for mine, own in zip(host.tensors, views.tensors, strict=True):
        assert (mine.name, mine.dtype, mine.shape, mine.data) == (own.name, own.dtype, own.shape, own.data)
        assert np.shares_memory(np.asarray(mine.data), np.asarray(own.data)) is is_unified


def test_a_copy_of_pages_is_not_copied_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading what a device without unified memory shows the host is slow, and not this thread's work."""
    for module in (runner_blocks, kv_pool):
        monkeypatch.setattr(module, "find_backend", lambda: Backend.CUDA)
    runner = runner_of(tiny_model_dir(tmp_path, "llama"), is_pipelined=False)
    runner.open(SequenceId(1))
    runner.run([Chunk(SequenceId(1), PROMPT[:16])])
    region = runner.blocks.cut(SequenceId(1), start=0, stop=16, kinds=[RegionKind.KV])[RegionKind.KV]
    shown, really = [], regions.bytes_of

    def read(flat: mx.array) -> memoryview:
        shown.append(really(flat))
        return shown[-1]

    monkeypatch.setattr(regions, "bytes_of", read)
    copy = runner.blocks.begin_to_host([region])
    (host,) = copy.take()
    assert copy.is_apart
    for tensor in host.tensors:
        assert any(np.shares_memory(np.asarray(tensor.data), np.asarray(view)) for view in shown)


def test_where_pages_are_memory_of_the_host_their_bytes_are_copied_once(tmp_path: Path) -> None:
    """Not by MLX, whose copies of a block are three: rows that decode wait for them meanwhile."""
    runner = runner_of(tiny_model_dir(tmp_path, "llama"), is_pipelined=False)
    runner.open(SequenceId(1))
    runner.run([Chunk(SequenceId(1), PROMPT[:16])])
    region = runner.blocks.cut(SequenceId(1), start=0, stop=16, kinds=[RegionKind.KV])[RegionKind.KV]
    mx.reset_peak_memory()
    before_bytes = mx.get_active_memory()
    copy = runner.blocks.begin_to_host([region])
    (host,) = copy.take()
    assert copy.is_apart and copy.is_done
    assert mx.get_peak_memory() - before_bytes < host.size_bytes


def restore_beside_passes(
    folder: Path,
    kinds: list[RegionKind],
    waits: Waits,
    *,
    is_pipelined: bool,
    attention: Attention = Attention.ROWS,
) -> tuple[dict[int, list[int]], int, int]:
    """Put a sequence back, from blocks that came from SSD but for the kv, while another one decodes, and go
    on with both. Return their tokens, the steps that it took, and how often it waited for the device."""
    runner = runner_of(folder, is_pipelined=is_pipelined, attention=attention)
    blocks, row = runner.blocks, DecodeRow(SamplingParams(), prompt_token_ids=PROMPT)
    runner.open(SequenceId(1))
    runner.run([Chunk(SequenceId(1), PROMPT[:16])])
    found = blocks.cut(SequenceId(1), start=0, stop=16, kinds=kinds)
    others = [kind for kind in kinds if kind is not RegionKind.KV]
    read = blocks.begin_to_host([found[kind] for kind in others]).take()
    told = [runner.run([Chunk(SequenceId(1), PROMPT[16:], row=row)])]
    before, step_count = waits.count, 1
    block = PlacedBlock(0, 16, {**found, **{region.kind: blocks.from_host(region) for region in read}})
    restore = RestoreInput((block,), token_count=16)
    blocks.begin_restore(SequenceId(2), restore)
    while not blocks.continue_restore(SequenceId(2), budget_s=0.0):
        step_count += 1
    wait_count = waits.count - before
    told += [runner.run([Chunk(SequenceId(2), PROMPT[16:], row=row)]), *(runner.run([]) for _ in range(6))]
    runner.release([SequenceId(1), SequenceId(2)])
    tokens: dict[int, list[int]] = {1: [], 2: []}
    for drawn in (drawn for result in told for drawn in result.drawn):
        tokens[drawn.sequence_id].append(drawn.token_id)
    return tokens, step_count, wait_count


@pytest.mark.parametrize("attention", Attention)
@pytest.mark.parametrize("architecture", KINDS)
def test_a_restore_waits_for_no_pass_in_flight_and_takes_one_step(
    tmp_path: Path, architecture: str, attention: Attention, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer a pass is what it took: each waited behind the pass in flight, and its time was over."""
    folder, waits = tiny_model_dir(tmp_path, architecture), Waits(monkeypatch)
    ahead = restore_beside_passes(folder, KINDS[architecture], waits, is_pipelined=True, attention=attention)
    waited = restore_beside_passes(folder, KINDS[architecture], waits, is_pipelined=False)
    tokens, step_count, wait_count = ahead
    assert (step_count, wait_count) == (1, 0)
    assert waited[1] > 1 and waited[2] >= waited[1], "the counter sees nothing"
    assert tokens[1][:6] == tokens[2][:6] == waited[0][1][:6] == waited[0][2][:6]


def test_a_block_of_pages_shares_what_its_row_reads(tmp_path: Path) -> None:
    folder = tiny_model_dir(tmp_path, "llama")
    for attention, is_shared in ((Attention.AUTO, True), (Attention.ROWS, False)):
        runner = runner_of(folder, is_pipelined=True, attention=attention)
        assert runner.blocks.facts.shares_blocks is is_shared


def test_a_long_restore_takes_a_step_for_so_many_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All at once, it would keep those that decode from the device."""
    folder, waits = tiny_model_dir(tmp_path, "llama"), Waits(monkeypatch)
    whole = restore_beside_passes(folder, [RegionKind.KV], waits, is_pipelined=True)
    monkeypatch.setattr(runner_blocks, "_RESTORED_BYTES", 1)
    parts = restore_beside_passes(folder, [RegionKind.KV], waits, is_pipelined=True)
    assert (parts[0], parts[2]) == (whole[0], 0) and parts[1] > 1


def test_nothing_is_kept_of_a_restore_that_failed(tmp_path: Path) -> None:
    """Its caches and blocks stayed as long as the sequence that was computed instead."""
    runner = runner_of(tiny_model_dir(tmp_path, "llama"), is_pipelined=False, attention=Attention.ROWS)
    runner.open(SequenceId(1))
    runner.run([Chunk(SequenceId(1), PROMPT[:16])])
    cut = runner.blocks.cut(SequenceId(1), start=0, stop=16, kinds=[RegionKind.KV])
    (host,) = runner.blocks.begin_to_host([cut[RegionKind.KV]]).take()
    lacking = runner.blocks.from_host(HostRegion(RegionKind.KV, host.tensors[:-1]))
    block = PlacedBlock(0, 16, {RegionKind.KV: lacking})
    restore = RestoreInput((block,), token_count=16)
    runner.blocks.begin_restore(SequenceId(2), restore)
    with pytest.raises(StorageError, match="cannot rebuild"):
        runner.blocks.continue_restore(SequenceId(2), budget_s=BOUND_S)
    assert not runner.blocks._restoring
