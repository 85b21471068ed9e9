"""Restores from every mix of sources, at any token, without touching the blocks they came from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from icehouse_server.domain.blocks import HostRegion, RegionKind
from icehouse_server.engine.kv_cache.cache_layout import CacheRebuild
from icehouse_server.engine.kv_cache.regions import ArrayRegion, compute, to_host
from icehouse_server.engine.prefix_cache.tiers.runner_port import PlacedBlock
from icehouse_server.errors import Reason, StorageError

from tests.unit.engine.kv_cache.runs import (
    BLOCK,
    CHUNK,
    Recording,
    feed,
    greedy,
    model_of,
    prompt,
    rebuilt,
    same_bits,
    uninterrupted,
)

LENGTH = 4 * CHUNK
KV, WINDOW, CHECKPOINT = RegionKind


def _restore(recording: Recording, blocks: tuple[PlacedBlock, ...], token_count: int) -> list[Any]:
    return rebuilt(recording.layout, blocks, recording.make_caches(), token_count=token_count)


def _check(recording: Recording, restored: list[Any], position: int) -> None:
    """Compare with an uninterrupted run that was cut short, which keeps the grid's chunks."""
    expected = uninterrupted(recording.model, recording.tokens[:position])
    cold, warm = (greedy(recording.model, caches, 11, 16) for caches in (expected, restored))
    assert warm[0] == cold[0]


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [("llama", {}), ("deepseek_v3", {}), ("gemma3_text", {}), ("llama4", {"attention_chunk_size": 16})],
)
def test_a_match_may_end_inside_a_block(architecture: str, overrides: dict[str, int]) -> None:
    recording = Recording(model_of(architecture, **overrides), prompt(LENGTH))
    assert recording.layout.facts.cuttable_inside
    for position in (1, BLOCK - 1, BLOCK + 1, 3 * CHUNK - 5, LENGTH - 1):
        _check(recording, recording.restore(position), position)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "llama4", "falcon_h1", "lfm2"])
def test_a_tail_is_a_block_with_fewer_tokens(architecture: str) -> None:
    tokens = prompt(CHUNK + BLOCK + 5)
    recording = Recording(model_of(architecture), tokens)
    assert recording.blocks(stop=len(tokens))[-1].token_count == 5
    _check(recording, recording.restore(len(tokens), through_host=True), len(tokens))


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "llama4", "mamba2", "falcon_h1"])
def test_running_on_never_writes_into_a_block(architecture: str) -> None:
    """Restoring twice from the same blocks, with a run between, gives the same bits."""
    tokens = prompt(BLOCK)
    recording = Recording(model_of(architecture), tokens)
    blocks = recording.blocks(stop=BLOCK)
    before = _bytes(blocks)
    first = greedy(recording.model, _restore(recording, blocks, BLOCK), 11, 20)
    assert _bytes(blocks) == before
    second = greedy(recording.model, _restore(recording, blocks, BLOCK), 11, 20)
    assert second[0] == first[0]
    assert all(map(same_bits, second[1], first[1]))


def test_a_live_cache_never_writes_under_a_host_view() -> None:
    """A cut that spans nearly a whole cache may share its buffer; decode must then copy, not write."""
    recording = Recording(model_of("llama"), prompt(CHUNK))
    caches = recording.restore(CHUNK)
    host = to_host(recording.layout.cut_tokens(RegionKind.KV, caches, start=0, stop=CHUNK))
    before = [bytes(tensor.data) for tensor in host.tensors]
    greedy(recording.model, caches, 11, 8)
    for cache in caches:
        cache.trim(CHUNK)
    feed(recording.model, caches, prompt(CHUNK, seed=3))
    assert [bytes(tensor.data) for tensor in host.tensors] == before


def test_a_restore_can_be_taken_step_by_step() -> None:
    recording = Recording(model_of("llama"), prompt(CHUNK))
    blocks, caches = recording.blocks(stop=CHUNK), recording.make_caches()
    rebuild = CacheRebuild(recording.layout.parts, caches, blocks, token_count=CHUNK)
    for _ in recording.layout.parts:
        assert not rebuild.is_done
        with pytest.raises(AssertionError, match="not finished"):
            _ = rebuild.caches
        mx.eval(rebuild.next_part())
    assert rebuild.is_done
    _check(recording, rebuild.caches, CHUNK)


def _without(
    blocks: tuple[PlacedBlock, ...],
    index: int,
    kind: RegionKind,
    change: Callable[[ArrayRegion], ArrayRegion] | None = None,
) -> tuple[PlacedBlock, ...]:
    """Return the blocks, one of them without a region or with a damaged one."""
    regions = dict(blocks[index].regions)
    region = regions.pop(kind)
    if change is not None:
        assert isinstance(region, ArrayRegion)
        regions[kind] = change(region)
    changed = dataclasses.replace(blocks[index], regions=regions)
    return (*blocks[:index], changed, *blocks[index + 1 :])


def _drop(region: ArrayRegion) -> ArrayRegion:
    return ArrayRegion.of(region.kind, region.arrays[1:])


def _cast(region: ArrayRegion) -> ArrayRegion:
    return ArrayRegion.of(region.kind, [(name, array.astype(mx.float16)) for name, array in region.arrays])


def _shorten(region: ArrayRegion) -> ArrayRegion:
    return ArrayRegion.of(region.kind, tuple((name, array[:, :, 1:]) for name, array in region.arrays))


@pytest.mark.parametrize(
    ("architecture", "damage", "message"),
    [
        ("llama", lambda b: _without(b, 1, KV), "kv starts at token 32 where 16 is next"),
        ("llama", lambda b: b[:2], "kv ends at token 32 of 64"),
        ("llama", lambda b: _without(b, 1, KV, _drop), "cannot rebuild 000"),
        ("llama", lambda b: _without(b, 1, KV, _cast), "does not fit together"),
        (
            "llama",
            lambda b: _without(b, 1, KV, _shorten),
            "holds 15 tokens of a block of 16",
        ),
        ("gemma3_text", lambda b: _without(b, 3, WINDOW), "lacks tokens"),
        ("gemma3_text", lambda b: _without(b, 2, WINDOW), "lacks tokens"),
        ("gemma3_text", lambda b: _without(b, 3, WINDOW, _drop), "cannot rebuild 000"),
        ("lfm2", lambda b: _without(b, 3, CHECKPOINT), "no checkpoint at token 64"),
        (
            "lfm2",
            lambda b: _without(b, 3, CHECKPOINT, _drop),
            "cannot rebuild 000",
        ),
    ],
)
def test_a_source_that_does_not_fit_is_refused(architecture: str, damage: Any, message: str) -> None:
    recording = Recording(model_of(architecture), prompt(4 * BLOCK))
    blocks = damage(recording.blocks(stop=4 * BLOCK))
    with pytest.raises(StorageError, match=message) as caught:
        _restore(recording, blocks, 4 * BLOCK)
    assert caught.value.reason is Reason.STORE_UNUSABLE


def _bytes(blocks: tuple[PlacedBlock, ...]) -> list[bytes]:
    regions = [r for b in blocks for r in b.regions.values() if isinstance(r, ArrayRegion)]
    compute(regions, waits=True)
    hosts: list[HostRegion] = [to_host(region) for region in regions]
    return [bytes(tensor.data) for host in hosts for tensor in host.tensors]
