"""The kernels as CUDA, compiled without a GPU where NVRTC is."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from icehouse_server.engine.attention.gpu import nvrtc
from icehouse_server.engine.attention.gpu.kernels import CUDA
from icehouse_server.engine.attention.gpu.launch import GpuAttention
from icehouse_server.engine.attention.port import AttentionCall, PoolShape

from tests.unit.engine.attention.pools import RandomPool, ints, places_in


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_compiles_for_cuda(dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    if not nvrtc.is_available():
        pytest.skip("no NVRTC here: the kernels are not compiled for CUDA")
    ran: list[str] = []

    def run(
        *, name: str, compiled_source: bytes, output_shapes: Any, output_dtypes: Any, **_: Any
    ) -> list[mx.array]:
        assert compiled_source.startswith(b"\x7fELF") and name.encode() in compiled_source
        ran.append(name)
        return [mx.zeros(*each) for each in zip(output_shapes, output_dtypes, strict=True)]

    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", run)
    monkeypatch.setattr(mx, "device_info", lambda: {"architecture": "sm_90"})
    attention = GpuAttention(nvrtc.make_kernel, CUDA)
    pool = RandomPool.of(PoolShape(2, 2, 128, 16, dtype), page_count=20)
    keys, queries = mx.zeros((1, 2, 1, 128), dtype), mx.zeros((1, 10, 1, 128), dtype)
    places = places_in([range(20)], [(0, 300)])
    attention.write(pool, keys, keys, places, layer=1)
    for sinks in (None, mx.zeros((10,), dtype)):
        for window in (None, 20):
            attention.attend(
                pool, queries, places, AttentionCall(layer=1, scale=0.1, window=window, sinks=sinks)
            )
    attention.gather_row(pool, places, row=0, layer=1, first_token=0, key_count=64)
    attention.copy_pages(pool, ints([0]), ints([1]))
    assert len(set(ran)) == 8


def test_a_kernel_that_does_not_compile_is_told() -> None:
    if not nvrtc.is_available():
        with pytest.raises(nvrtc.NvrtcError, match=r"libnvrtc\.so\.13"):
            nvrtc.compile_cubin("", architecture="sm_90")
    else:
        with pytest.raises(nvrtc.NvrtcError, match="nonsense"):
            nvrtc.compile_cubin("nonsense", architecture="sm_90")
