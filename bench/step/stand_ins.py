"""A GPU's graphs on a CPU: what a GPU has one kernel for is one primitive, and the code takes a GPU's ways.

MLX's CPU build makes ten primitives of a norm and twenty of a rotation, and attention there is computed by
NumPy: the host's time of a pass would be another one. The numbers are nonsense, and the same on both sides.
What building a custom kernel's call costs in MLX itself is not in it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any
from unittest.mock import patch

import mlx.core as mx
from icehouse_server.device import Backend, Device

GPU = Device(name="stand-in for a GPU", backend=Backend.CUDA, memory_bytes=8 << 30, free_bytes=4 << 30)


def take_gpu_ways() -> None:
    """Have all of this process believe that MLX computes on a GPU. Before the service is imported."""
    # Imported before: it makes a stream on the default device.
    import mlx_lm.generate  # noqa: F401

    mx.default_device = lambda: mx.Device(mx.gpu)


def have_one_primitive_each() -> None:
    """Put one primitive in the place of norms, rotations and attention. After models are tried and loaded."""

    def norm(array: mx.array, *_: Any, **__: Any) -> mx.array:
        return mx.tanh(array)  # bounded, as a norm's output is

    def rotation(array: mx.array, *_: Any, **__: Any) -> mx.array:
        return mx.negative(array)

    def attention(queries: mx.array, keys: mx.array, values: mx.array, **_: Any) -> mx.array:
        return mx.depends([queries], [keys, values])[0]

    mx.fast.rms_norm = norm  # type: ignore[assignment]
    mx.fast.rope = rotation  # type: ignore[assignment]
    mx.fast.scaled_dot_product_attention = attention  # type: ignore[assignment]


def have_page_kernels() -> None:
    """Have attention over pages launch stand-ins. Before models are loaded."""
    from icehouse_server.engine.attention.gpu.kernels import CUDA
    from icehouse_server.engine.attention.gpu.launch import GpuAttention

    backend = "icehouse_server.engine.runner.runner.kernels_for"

    def kernels(*_: Any, **__: Any) -> Generator[None, None, GpuAttention]:
        yield
        return GpuAttention(make_kernel, CUDA)

    patch(backend, kernels).start()


def make_kernel(**_: Any) -> Callable[..., list[mx.array]]:
    """Return what is called as a custom kernel is: one primitive, whose outputs are zeros."""
    zeros: dict[tuple[tuple[int, ...], mx.Dtype], mx.array] = {}

    def launch(
        *,
        inputs: Sequence[mx.array],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
        **_: Any,
    ) -> list[mx.array]:
        outputs = []
        for shape, dtype in zip(output_shapes, output_dtypes, strict=True):
            key = tuple(shape), dtype
            if key not in zeros:
                zeros[key] = mx.zeros(shape, dtype)
                mx.eval(zeros[key])
            outputs.append(zeros[key])
        return mx.depends(outputs, list(inputs))

    return launch
