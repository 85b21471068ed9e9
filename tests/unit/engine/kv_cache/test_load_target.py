"""Arrays that readers fill become the cache where they are: no copy, neither then nor in the next step."""

from __future__ import annotations

import threading
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from icehouse_server.engine.kv_cache.load_target import KvShape, KvTarget
from icehouse_server.engine.kv_cache.regions import to_host
from icehouse_server.engine.kv_cache.restore import LoadedKv, RestoreSource

from tests.unit.engine.kv_cache.runs import BLOCK, CHUNK, Recording, greedy, made_target, model_of, prompt

SHAPES = (KvShape("000.k", mx.bfloat16, 2, 4), KvShape("000.v", mx.float32, 1, 8))


def _address(array: mx.array) -> int:
    flat = array.reshape(-1).view(mx.uint8)
    mx.eval(flat)
    return int(np.array(flat, copy=False).__array_interface__["data"][0])


def _fill(target: KvTarget, recording: Recording, *, start: int, stop: int) -> None:
    """Write rows from another thread and drop the views there, as a reader does."""
    region = to_host(recording.layout.cut_kv(recording.caches, start=start, stop=stop))
    work = [target.views()]

    def run() -> None:
        for view, tensor in zip(work.pop(), region.tensors, strict=True):
            heads, slots = view.shape[1], view.shape[2]
            rows = np.frombuffer(view.data, np.uint8).reshape(heads, slots, -1)
            rows[:, start:stop] = np.frombuffer(tensor.data, np.uint8).reshape(heads, stop - start, -1)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def test_arrays_are_made_one_a_step() -> None:
    target = KvTarget(SHAPES, capacity_token_count=3)
    made = []
    while not target.is_made:
        target.step()
        made.append(len(target._arrays))
    assert made == [1, 2]
    assert [view.name for view in target.views()] == ["000.k", "000.v"], "in the order of the model's layers"


def test_a_view_is_the_array() -> None:
    target = made_target(SHAPES, capacity_token_count=3)
    views = target.views()
    assert [(v.name, v.dtype, v.shape) for v in views] == [
        ("000.k", "BF16", (1, 2, 3, 4)),
        ("000.v", "F32", (1, 1, 3, 8)),
    ]
    views[0].data[:] = np.full(24, 1.5, np.float32).view(np.uint16)[1::2].tobytes()
    views[1].data[:] = np.arange(24, dtype=np.float32).tobytes()
    assert mx.array_equal(target.take("000.k", token_count=3), mx.full((1, 2, 3, 4), 1.5, mx.bfloat16))
    expected = mx.arange(24, dtype=mx.float32).reshape(1, 1, 3, 8)
    assert mx.array_equal(target.take("000.v", token_count=3), expected)


def test_an_array_is_handed_over_once_and_never_too_short() -> None:
    target = made_target(SHAPES, capacity_token_count=3)
    with pytest.raises(ValueError, match="3 slots, 4 are needed"):
        target.take("000.k", token_count=4)
    target.take("000.v", token_count=3)
    with pytest.raises(KeyError):
        target.take("000.v", token_count=3)


def test_a_tensor_of_no_width_is_one_too() -> None:
    """Some caches keep values of width 0 and everything in the keys."""
    target = made_target((KvShape("000.v", mx.float16, 2, 0),), capacity_token_count=5)
    (view,) = target.views()
    assert (view.shape, view.data.nbytes) == ((1, 2, 5, 0), 0)
    assert target.take("000.v", token_count=5).shape == (1, 2, 5, 0)


def _restored(recording: Recording, *, ram_token_count: int) -> tuple[list[Any], list[int]]:
    """Restore with a target; return the caches and the addresses its arrays had."""
    target = made_target(recording.layout.kv_shapes(recording.caches), capacity_token_count=256)
    addresses = [np.frombuffer(v.data, np.uint8).__array_interface__["data"][0] for v in target.views()]
    _fill(target, recording, start=ram_token_count, stop=2 * CHUNK)
    blocks = recording.blocks(stop=ram_token_count) if ram_token_count else ()
    source = RestoreSource(blocks, LoadedKv(target, ram_token_count, 2 * CHUNK))
    caches = recording.layout.restore(
        source, token_count=2 * CHUNK, capacity_token_count=256, make_caches=recording.make_caches
    )
    return caches, addresses


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ram_token_count", [0, BLOCK, CHUNK + BLOCK])
def test_what_was_read_is_the_cache_and_is_written_in_place(dtype: str, ram_token_count: int) -> None:
    recording = Recording(model_of("llama", dtype), prompt(2 * CHUNK))
    caches, addresses = _restored(recording, ram_token_count=ram_token_count)
    assert [_address(a) for cache in caches for a in (cache.keys, cache.values)] == addresses
    warm = greedy(recording.model, caches, 11, 4)
    assert [_address(a) for cache in caches for a in (cache.keys, cache.values)] == addresses
    assert warm[0] == greedy(recording.model, recording.caches, 11, 4)[0]


def test_a_view_that_is_kept_costs_a_copy_and_no_wrong_byte() -> None:
    """A reader that is slow to let go must not see the next tokens, nor they be lost."""
    recording = Recording(model_of("llama"), prompt(2 * CHUNK))
    target = made_target(recording.layout.kv_shapes(recording.caches), capacity_token_count=256)
    _fill(target, recording, start=0, stop=2 * CHUNK)
    kept = target.views()
    before = [bytes(view.data) for view in kept]
    caches = recording.layout.restore(
        RestoreSource((), LoadedKv(target, 0, 2 * CHUNK)),
        token_count=2 * CHUNK,
        capacity_token_count=256,
        make_caches=recording.make_caches,
    )
    warm = greedy(recording.model, caches, 11, 4)
    assert warm[0] == greedy(recording.model, recording.caches, 11, 4)[0]
    assert [bytes(view.data) for view in kept] == before
