"""Page pool: whose a page is and when it is another one's, and what a pool that is full does."""

from __future__ import annotations

import dataclasses
import gc
import queue
import threading

import mlx.core as mx
import numpy as np
import pytest
from icehouse_server.device import Backend
from icehouse_server.engine.attention.port import PoolShape
from icehouse_server.engine.kv import pool as kv_pool
from icehouse_server.engine.kv.pool import PagePool, PassClock, can_reserve, uninitialised

SHAPE = PoolShape(layer_count=2, kv_head_count=3, head_size=4, page_token_count=8, dtype=mx.float32)


def bounded(page_count: int, *, passes: PassClock | None = None) -> PagePool:
    return PagePool(SHAPE, passes=passes or PassClock(), size_bytes=page_count * SHAPE.page_bytes)


def test_a_full_pool_that_is_all_kv_may_take_refuses_what_can_be_done_without() -> None:
    """It would be copied, and old and new might not fit the device."""
    pool = bounded(20)
    array = pool.array
    held = pool.take(18)
    assert pool.take_spare(3) is None
    assert len(pool.take_spare(2) or ()) == 2
    del held
    assert len(pool.take_spare(20) or ()) == 20
    assert pool.array is array


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_the_memory_of_a_pool_of_more_than_2_gib_can_be_written(dtype: mx.Dtype) -> None:
    """Of 3 GiB nothing but the last page is touched."""
    shape = dataclasses.replace(SHAPE, page_token_count=8192, dtype=dtype)
    pool = PagePool(shape, passes=PassClock(), size_bytes=3 << 30)
    memory = pool.memory()
    assert memory is not None and memory.nbytes == pool.page_count * shape.page_bytes > 1 << 31
    memory[-shape.page_bytes :] = 0
    assert not mx.any(pool.array[-1]).item()


def test_memory_is_asked_for_before_a_pool_is_made_of_it() -> None:
    assert can_reserve(1 << 20) and not can_reserve(1 << 60) and not can_reserve(1 << 80)


def test_a_row_that_was_let_in_has_its_pages_all_the_same() -> None:
    pool = bounded(20)
    held = pool.take(20)
    assert len({page.number for page in (*held, *pool.take(1))}) == 21


def test_a_pool_that_may_grow_refuses_nothing() -> None:
    pool = PagePool(SHAPE, passes=PassClock())
    before = pool.page_count
    assert len(pool.take_spare(3 * before) or ()) == 3 * before


@pytest.mark.parametrize("ended", [0, 1])
def test_pages_that_a_pass_may_still_read_are_not_handed_out(ended: int) -> None:
    passes = PassClock()
    pool = bounded(20, passes=passes)
    held = pool.take(20)
    number = passes.dispatch()
    del held
    if ended:
        passes.end(number)
    assert (pool.take_spare(20) is not None) is bool(ended)


def test_memory_is_the_arrays_own_and_may_be_let_go_of_anywhere() -> None:
    pool = bounded(20)
    memory = pool.memory()
    assert memory is not None and memory.nbytes == 20 * SHAPE.page_bytes
    memory[:] = 0
    memory[SHAPE.page_bytes : 2 * SHAPE.page_bytes].view(np.float32)[:] = 1.5
    assert mx.array_equal(pool.array[1], mx.full(pool.array.shape[1:], 1.5)).item()
    assert not mx.any(pool.array[0]).item()
    work: queue.SimpleQueue[object] = queue.SimpleQueue()
    work.put(memory)
    del memory
    thread = threading.Thread(target=lambda: (work.get(), gc.collect()))
    thread.start()
    thread.join()


def test_where_the_host_has_no_part_in_the_device_s_memory_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = bounded(20)
    monkeypatch.setattr(kv_pool, "find_backend", lambda: Backend.CUDA)
    assert pool.memory() is None


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_unwritten_arrays_are_arrays(dtype: mx.Dtype) -> None:
    array = uninitialised((3, 5), dtype=dtype)
    assert (array.shape, array.dtype) == ((3, 5), dtype)
    array[:] = 2.0
    assert mx.array_equal(array, mx.full((3, 5), 2.0, dtype)).item()
    assert uninitialised((3, 0), dtype=dtype).shape == (3, 0)
