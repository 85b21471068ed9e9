"""Freed buffers that MLX keeps: those freed last stay, whatever came before."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest
from icehouse_server import heap
from icehouse_server.engine.runner.freed_buffers import FreedBuffers

MIB = 1 << 20
LIMIT_BYTES = 128 * MIB

pytestmark = pytest.mark.skipif(
    mx.default_device() != mx.Device(mx.cpu), reason="the device's allocator lets go of the oldest by itself"
)


@pytest.fixture
def freed(monkeypatch: pytest.MonkeyPatch) -> Iterator[FreedBuffers]:
    # A test that serves sets the heap of this process for good.
    monkeypatch.setattr(heap, "is_kept", lambda: False)
    mx.clear_cache()
    before = mx.set_cache_limit(LIMIT_BYTES)
    freed = FreedBuffers()
    freed.bound(1, memory_limit_bytes=8 << 30)  # little KV a token: the least that is kept
    yield freed
    mx.set_cache_limit(before)
    mx.clear_cache()


def free_one(size_mib: int) -> None:
    mx.eval(mx.zeros(size_mib * MIB // 4))


def test_what_is_freed_later_finds_room(freed: FreedBuffers) -> None:
    for size_mib in (20, 21, 22, 23, 24, 17):  # nearly full, of sizes that nobody asks for again
        free_one(size_mib)
        freed.trim()
    assert mx.get_cache_memory() <= LIMIT_BYTES
    free_one(11)
    with_it = mx.get_cache_memory()
    held = mx.zeros(11 * MIB // 4)
    mx.eval(held)
    assert mx.get_cache_memory() == with_it - 11 * MIB, "It is used again"


def test_what_is_freed_is_kept_while_there_is_room(freed: FreedBuffers) -> None:
    for size_mib in (10, 11, 12):
        free_one(size_mib)
        freed.trim()
    assert mx.get_cache_memory() >= 33 * MIB


def test_a_small_machine_keeps_an_eighth_of_what_may_be_used(freed: FreedBuffers) -> None:
    freed.bound(128 << 10, memory_limit_bytes=400 * MIB)
    assert mx.set_cache_limit(LIMIT_BYTES) == 50 * MIB


def test_a_large_one_keeps_the_kv_of_so_many_tokens(freed: FreedBuffers) -> None:
    freed.bound(64 << 10, memory_limit_bytes=64 << 30)
    assert mx.set_cache_limit(LIMIT_BYTES) == (24 << 10) * (64 << 10)


def test_a_device_that_does_not_say_what_it_has_keeps_some(freed: FreedBuffers) -> None:
    freed.bound(128 << 10, memory_limit_bytes=0)
    assert mx.set_cache_limit(LIMIT_BYTES) == 1 << 30


def test_what_is_kept_gives_way_to_what_is_in_use(freed: FreedBuffers) -> None:
    held = mx.zeros(64 * MIB // 4)
    mx.eval(held)
    freed.bound(1, memory_limit_bytes=1 << 30)
    free_one(60)
    freed.trim()
    assert mx.get_cache_memory() >= 60 * MIB
    freed.bound(1, memory_limit_bytes=mx.get_active_memory() + 400 * MIB)  # an eighth of it is kept now
    more = mx.zeros(380 * MIB // 4)
    mx.eval(more)
    freed.trim()
    assert mx.get_cache_memory() <= 20 * MIB, "With it, more than may be used"
    assert held.size and more.size


def test_nothing_is_bound_before_a_model_is_known() -> None:
    before = mx.set_cache_limit(LIMIT_BYTES)
    try:
        FreedBuffers().trim()
        assert mx.set_cache_limit(LIMIT_BYTES) == LIMIT_BYTES
    finally:
        mx.set_cache_limit(before)
