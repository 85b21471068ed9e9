"""Regions of a block on the device, and the two ways across: to host memory and back.

Inference thread only. `to_host` copies nothing: the views it returns keep the evaluated arrays
alive and may be read and dropped on any thread, which an mx.array may not.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, Final, cast

import mlx.core as mx
import numpy as np

from icehouse_server.domain.blocks import HostRegion, HostTensor, RegionKind

TOKEN_AXIS: Final = 2
"""K/V arrays are [batch, heads, tokens, width]; in files and host buffers too."""

_DTYPE_NAMES: Final[dict[mx.Dtype, str]] = {
    mx.bool_: "BOOL",
    mx.uint8: "U8",
    mx.int8: "I8",
    mx.uint16: "U16",
    mx.int16: "I16",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.uint32: "U32",
    mx.int32: "I32",
    mx.float32: "F32",
    mx.uint64: "U64",
    mx.int64: "I64",
}
_DTYPES: Final = {name: dtype for dtype, name in _DTYPE_NAMES.items()}
_CARRIERS: Final[dict[int, type[np.generic]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
"""Unsigned integers by item size: numpy has no bfloat16, and integers carry any bits unchanged."""


@dataclasses.dataclass(frozen=True, slots=True)
class ArrayRegion:
    """The arrays of one kind, by name, names ascending. Lazy until `evaluate`."""

    kind: RegionKind
    arrays: tuple[tuple[str, mx.array], ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.arrays]
        assert names == sorted(set(names)), f"Region names must ascend: {names}"

    @property
    def size_bytes(self) -> int:
        """Bytes of all arrays; known before they are evaluated."""
        return sum(array.nbytes for _, array in self.arrays)


def can_hold(dtype: mx.Dtype) -> bool:
    """Tell whether a region may hold arrays of this dtype."""
    return dtype in _DTYPE_NAMES


def dtype_name(dtype: mx.Dtype) -> str:
    """Return what safetensors calls this dtype; `can_hold` says whether there is such a name."""
    return _DTYPE_NAMES[dtype]


def evaluate(regions: Iterable[ArrayRegion]) -> None:
    """Compute every array of these regions in one go."""
    mx.eval([array for region in regions for _, array in region.arrays])


def to_host(region: ArrayRegion) -> HostRegion:
    """Evaluate the region and return views of its bytes, bit for bit, without a copy.

    A view owns a reference to its array's buffer, so the bytes stay until the last view goes.
    """
    contiguous = [(name, mx.contiguous(array)) for name, array in region.arrays]
    flat = [array.reshape(-1).view(mx.uint8) if array.size else array for _, array in contiguous]
    mx.eval(flat)
    tensors = tuple(
        HostTensor(name, _DTYPE_NAMES[array.dtype], tuple(array.shape), bytes_of(view))
        for (name, array), view in zip(contiguous, flat, strict=True)
    )
    return HostRegion(region.kind, tensors)


def from_host(region: HostRegion) -> ArrayRegion:
    """Copy host bytes into evaluated arrays, bit for bit.

    Raises ValueError when a tensor's bytes do not fill its shape or its dtype is unknown.
    """
    arrays = tuple((tensor.name, array_of(tensor)) for tensor in region.tensors)
    built = ArrayRegion(region.kind, tuple(sorted(arrays, key=lambda pair: pair[0])))
    evaluate([built])
    return built


def array_of(tensor: HostTensor) -> mx.array:
    """Copy one host tensor into an array (lazy only in its last reinterpretation of bits)."""
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise ValueError(f"Tensor {tensor.name} has dtype {tensor.dtype}, which no cache class uses")
    expected_bytes = math.prod(tensor.shape) * dtype.size
    if tensor.data.nbytes != expected_bytes:
        raise ValueError(
            f"Tensor {tensor.name} {list(tensor.shape)} of {tensor.dtype} needs {expected_bytes} bytes, "
            f"has {tensor.data.nbytes}"
        )
    if expected_bytes == 0:
        return mx.zeros(tensor.shape, dtype)
    carrier = np.frombuffer(tensor.data, dtype=_CARRIERS[dtype.size]).reshape(tensor.shape)
    return mx.array(carrier).view(dtype)


def bytes_of(flat: mx.array) -> memoryview:
    """Return a writable view of an evaluated array of bytes; it owns a reference to the array's buffer."""
    if flat.size == 0:
        return memoryview(b"")
    # An mx.array has the buffer protocol; its type stubs do not say so.
    view = memoryview(cast(Any, flat))
    assert view.format == "B" and view.ndim == 1 and view.c_contiguous, (view.format, view.shape)
    return view
