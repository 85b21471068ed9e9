"""Across to host memory and back: every bit of every dtype, no copy, no mx.array on the other side."""

from __future__ import annotations

import gc
import hashlib
import queue
import threading
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from icehouse_server.domain.blocks import HostRegion, HostTensor, RegionKind
from icehouse_server.engine.kv_cache import regions
from icehouse_server.engine.kv_cache.cache_classes import class_of, quantize_caches
from icehouse_server.engine.kv_cache.regions import ArrayRegion, compute, from_host, to_host
from icehouse_server.storage.local.block_format.header import DTYPE_BYTES
from mlx_lm.models.cache import make_prompt_cache

from tests.fixtures.patience import BOUND_S
from tests.unit.engine.kv_cache.runs import (
    BLOCK,
    Recording,
    feed,
    model_of,
    prompt,
    same_bits,
    same_regions,
)


def _all_patterns(dtype: mx.Dtype) -> mx.array:
    """Every 16-bit pattern, or 4,096 spread 32-bit ones: infinities, NaN payloads, -0, subnormals."""
    if dtype.size == 2:
        bits = np.arange(1 << 16, dtype=np.uint16)
    else:
        bits = (np.arange(4096, dtype=np.uint64) * 1_048_583 % (1 << 32)).astype(np.uint32)
    return mx.array(bits).view(dtype).reshape(1, 2, -1, 32)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16, mx.uint32])
def test_any_bit_pattern_survives(dtype: mx.Dtype) -> None:
    region = ArrayRegion.of(RegionKind.KV, (("000.k", _all_patterns(dtype)),))
    host = to_host(region)
    bits = np.asarray(region.arrays[0][1].view(mx.uint8)).tobytes()
    assert host.tensors[0].data.tobytes() == bits
    assert host.size_bytes == region.size_bytes == len(bits)
    assert same_regions(from_host(host), region)


def test_slices_come_out_compact_and_in_order() -> None:
    whole = mx.arange(2 * 3 * 8 * 4).astype(mx.bfloat16).reshape(2, 3, 8, 4)
    host = to_host(ArrayRegion.of(RegionKind.KV, (("000.k", whole[1:, :, 2:5, :]),)))
    tensor = host.tensors[0]
    assert tensor.shape == (1, 3, 3, 4) and tensor.dtype == "BF16"
    expected = np.asarray(whole.astype(mx.float32))[1:, :, 2:5, :]
    back = np.asarray(from_host(host).arrays[0][1].astype(mx.float32))
    assert np.array_equal(back, expected)


@pytest.mark.parametrize(
    ("architecture", "kv_bits", "kv_count", "window_count"),
    [("llama", 0, 1, 0), ("gemma3_text", 0, 1, 1), ("llama", 8, 2, 0), ("deepseek_v3", 0, 2, 0)],
)
def test_a_region_is_few_buffers_however_many_layers_there_are(
    architecture: str, kv_bits: int, kv_count: int, window_count: int
) -> None:
    """Metal allows only so many buffers at once, and a short tail costs as many as a whole block."""
    model = model_of(architecture)

    def make_caches() -> list[Any]:
        caches = make_prompt_cache(model)
        return quantize_caches(caches, bits=kv_bits, group_size=32) if kv_bits else caches

    recording = Recording(model, prompt(2 * BLOCK), make_caches=make_caches)
    kv = recording.layout.cut_tokens(RegionKind.KV, recording.caches, start=BLOCK, stop=BLOCK + 1)
    window = recording.layout.cut_tokens(RegionKind.WINDOW, recording.caches, start=BLOCK, stop=2 * BLOCK)
    assert (len(kv.buffers), len(window.buffers)) == (kv_count, window_count)
    assert len(kv.arrays) > kv_count
    back = from_host(to_host(kv))
    assert len(back.buffers) == kv_count and same_regions(back, kv)


def test_each_tensor_crosses_by_itself_whatever_lies_beside_it() -> None:
    arrays = [
        ("000.k", mx.arange(24).astype(mx.float16).reshape(1, 2, 3, 4)),
        ("000.v", mx.arange(24, 48).astype(mx.float16).reshape(1, 2, 3, 4)),
        ("001.00", mx.zeros((0,), mx.uint8)),
        ("001.k", mx.arange(24).astype(mx.uint32).reshape(1, 2, 3, 4)),
        ("001.v", mx.arange(48, 72).astype(mx.float16).reshape(1, 2, 3, 4)),
        ("002.00", mx.zeros((0,), mx.uint8)),
        ("002.01", mx.array(7, mx.int32)),
        ("002.02", mx.array(8, mx.int32)),
    ]
    region = ArrayRegion.of(RegionKind.CHECKPOINT, arrays)
    assert region.size_bytes == sum(array.nbytes for _, array in arrays)
    host = to_host(region)
    assert [tensor.name for tensor in host.tensors] == [name for name, _ in arrays]
    for tensor, (_, array) in zip(host.tensors, arrays, strict=True):
        assert tensor.shape == tuple(array.shape)
        assert tensor.data.tobytes() == (np.asarray(array).tobytes() if array.size else b"")
    for (_, view), (_, array) in zip(from_host(host).arrays, arrays, strict=True):
        assert same_bits(view, array) if array.ndim else view.item() == array.item()


def test_values_of_no_width_cross_too() -> None:
    region = ArrayRegion.of(RegionKind.KV, (("000.v", mx.zeros((1, 1, 16, 0), mx.bfloat16)),))
    host = to_host(region)
    assert host.tensors[0].data.nbytes == 0
    assert from_host(host).arrays[0][1].shape == (1, 1, 16, 0)


def test_host_view_shares_the_arrays_memory() -> None:
    array = mx.zeros((1, 1, 16, 64))
    mx.eval(array)
    region = ArrayRegion.of(RegionKind.KV, (("000.k", array),))
    first, second = to_host(region).tensors[0].data, to_host(region).tensors[0].data
    addresses = [np.frombuffer(view, dtype=np.uint8).ctypes.data for view in (first, second)]
    assert addresses[0] == addresses[1], "to_host copied the bytes"


def test_a_block_does_not_keep_the_whole_cache_alive() -> None:
    gc.collect()
    mx.clear_cache()
    before_bytes = mx.get_active_memory()
    whole = mx.zeros((1, 1, 64 * 1024, 16))
    mx.eval(whole)
    part = ArrayRegion.of(RegionKind.KV, (("000.k", mx.contiguous(whole[:, :, 16:32, :])),))
    compute([part], waits=True)
    del whole
    gc.collect()
    kept_bytes = mx.get_active_memory() - before_bytes
    assert kept_bytes < 256 * 1024, f"a slice of {part.size_bytes} bytes keeps {kept_bytes} alive"


def test_views_are_read_and_freed_on_another_thread() -> None:
    gc.collect()
    mx.clear_cache()
    before_bytes = mx.get_active_memory()
    inbox: queue.Queue[HostRegion] = queue.Queue()
    answers: queue.Queue[str] = queue.Queue()

    def storage() -> None:
        region = inbox.get()
        answers.put(hashlib.sha256(region.tensors[0].data).hexdigest())
        del region
        gc.collect()
        answers.put("freed")

    thread = threading.Thread(target=storage)
    thread.start()
    array = mx.arange(1 << 20).astype(mx.float16)
    host = to_host(ArrayRegion.of(RegionKind.KV, (("000.k", array.reshape(1, 4, -1, 64)),)))
    expected = hashlib.sha256(np.asarray(array).tobytes()).hexdigest()
    inbox.put(host)
    del host, array
    assert answers.get(timeout=BOUND_S) == expected
    assert answers.get(timeout=BOUND_S) == "freed"
    thread.join(timeout=BOUND_S)
    mx.clear_cache()
    assert mx.get_active_memory() - before_bytes < 64 * 1024, "the buffer outlived its last view"


def test_a_lazy_array_off_its_thread_shows_the_error() -> None:
    """Why only host views cross: MLX's streams belong to the thread that made them."""
    recording = Recording(model_of("llama"), prompt(2 * BLOCK))
    lazy = recording.layout.cut_tokens(RegionKind.KV, recording.caches, start=0, stop=BLOCK)
    raised: list[BaseException] = []

    def storage() -> None:
        try:
            compute([lazy], waits=True)
        except RuntimeError as error:
            raised.append(error)

    thread = threading.Thread(target=storage)
    thread.start()
    thread.join(timeout=BOUND_S)
    assert len(raised) == 1 and "Stream" in str(raised[0])


@pytest.mark.parametrize("data", [mx.array([1, 2], mx.uint8), np.zeros(4, np.uint16).data, b"bytes"])
def test_a_host_tensor_cannot_hold_anything_but_flat_bytes(data: Any) -> None:
    with pytest.raises(AssertionError):
        HostTensor("000.k", "U8", (2,), data)


@pytest.mark.parametrize(("dtype", "shape"), [("F32", (3,)), ("F8_E4M3", (8,)), ("BF16", (2, 3))])
def test_bytes_that_do_not_fit_are_refused(dtype: str, shape: tuple[int, ...]) -> None:
    tensor = HostTensor("000.k", dtype, shape, memoryview(bytes(8)))
    with pytest.raises(ValueError, match=r"000\.k"):
        from_host(HostRegion(RegionKind.KV, (tensor,)))


def test_a_file_can_hold_the_types_that_a_region_can() -> None:
    """Of another one a header is damage; behind the readers it would end the inference thread."""
    assert {name: dtype.size for name, dtype in regions._DTYPES.items()} == DTYPE_BYTES


def test_cutting_tokens_that_are_gone_is_a_broken_invariant() -> None:
    recording = Recording(model_of("gemma3_text"), prompt(6 * BLOCK))
    feed(recording.model, recording.caches, [11])
    with pytest.raises(AssertionError, match="holds"):
        recording.layout.cut_tokens(RegionKind.WINDOW, recording.caches, start=0, stop=BLOCK)
    assert class_of(recording.caches[0]).tokens(recording.caches[0]).count == 24
