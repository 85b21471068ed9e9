"""Regions of a block on the device, cut from live caches, and their transfer to host memory and back.

Inference thread only. `to_host` copies nothing. The views it returns keep the evaluated arrays alive and,
unlike an mx.array, may be read and dropped on any thread.

Arrays of a region with the same dtype and shape share a buffer, one after the other: a block of 48 layers has
one or two buffers, not 96. Metal allows half a million buffers at once (MLX's `resource_limit`). With one per
tensor, a RAM tier would exceed that at 65 GB of short tails. In files each tensor is separate.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple, cast

import mlx.core as mx
import numpy as np

from icehouse_server.domain.blocks import HostRegion, HostTensor, RegionKind

TOKEN_AXIS: Final = 2
"""K/V arrays are [batch, heads, tokens, width], in files and host buffers too."""

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
"""Unsigned integers by item size: NumPy has no bfloat16, and integers carry any bits unchanged."""


@dataclasses.dataclass(frozen=True, slots=True)
class TokenArrays:
    """Tokens [end - count, end) of one sequence in a live cache, at `first`, `first + 1`, ... along the token
    axis. Indices wrap at the axis' length: a full ring starts at its oldest token."""

    tensors: tuple[tuple[str, mx.array], ...] = ()
    """(suffix, array), suffixes ascending: "k", "k.biases", ..., "v"; arrays are [1, heads, slots, width]."""
    first: int = 0
    count: int = 0
    end: int = 0

    def cut(self, start: int, stop: int) -> tuple[tuple[str, mx.array], ...]:
        """Return tokens [start, stop), [1, heads, stop - start, width], lazily and not copied yet."""
        assert 0 <= start < stop, (start, stop)
        assert self.end - self.count <= start and stop <= self.end, (
            f"Tokens [{start}, {stop}) were asked of a cache that holds [{self.end - self.count}, {self.end})"
        )
        return tuple((suffix, self._cut_one(array, start, stop)) for suffix, array in self.tensors)

    def _cut_one(self, array: mx.array, start: int, stop: int) -> mx.array:
        slots = array.shape[TOKEN_AXIS]
        low = self.first + start - (self.end - self.count)
        high = low + stop - start
        if low >= slots:
            low, high = low - slots, high - slots
        if high <= slots:
            return array[:, :, low:high, :]
        return mx.concatenate([array[:, :, low:, :], array[:, :, : high - slots, :]], axis=TOKEN_AXIS)


class BufferSlice(NamedTuple):
    """One array of a region: some rows of a buffer."""

    name: str
    buffer: int
    first: int
    stop: int


@dataclasses.dataclass(frozen=True, slots=True)
class ArrayRegion:
    """The arrays of one kind, by name, names ascending. Lazy until `compute`."""

    kind: RegionKind
    buffers: tuple[mx.array, ...]
    slices: tuple[BufferSlice, ...]
    _views: list[tuple[str, mx.array]] = dataclasses.field(default_factory=list, compare=False, repr=False)
    _flat: list[mx.array] = dataclasses.field(default_factory=list, compare=False, repr=False)

    def __post_init__(self) -> None:
        names = [part.name for part in self.slices]
        assert names == sorted(set(names)), f"Region names must ascend: {names}"

    @classmethod
    def of(cls, kind: RegionKind, arrays: Sequence[tuple[str, mx.array]]) -> ArrayRegion:
        """Copy arrays, lazily, into one buffer per dtype and shape. An array alone in its buffer is copied,
        too, if it is part of something much larger, so that a block never keeps a whole cache alive."""
        slices = _slices_of([(name, array.dtype, tuple(array.shape)) for name, array in arrays])
        together: list[list[mx.array]] = [[] for _ in range(1 + max((p.buffer for p in slices), default=-1))]
        for part, (_, array) in zip(slices, arrays, strict=True):
            together[part.buffer].append(array)
        buffers = [mx.concatenate(each) if len(each) > 1 else mx.contiguous(each[0]) for each in together]
        return cls(kind, tuple(buffers), slices)

    @property
    def arrays(self) -> tuple[tuple[str, mx.array], ...]:
        """The arrays, each a view of its buffer: the same objects on every call."""
        if not self._views:
            self._views.extend((part.name, self._view(part)) for part in self.slices)
        return tuple(self._views)

    @property
    def flat(self) -> Sequence[mx.array]:
        """The buffers as bytes, evaluated with them: later, that would wait for a pass in flight."""
        if not self._flat:
            self._flat.extend(b.reshape(-1).view(mx.uint8) if b.size else b for b in self.buffers)
        return self._flat

    def _view(self, part: BufferSlice) -> mx.array:
        buffer = self.buffers[part.buffer]
        is_whole = buffer.ndim == 0 or part.stop - part.first == buffer.shape[0]
        return buffer if is_whole else buffer[part.first : part.stop]

    @property
    def size_bytes(self) -> int:
        """Bytes of all arrays; known before they are evaluated."""
        return sum(buffer.nbytes for buffer in self.buffers)


def _slices_of(facts: Iterable[tuple[str, mx.Dtype, tuple[int, ...]]]) -> tuple[BufferSlice, ...]:
    """Return where arrays of these names, dtypes and shapes go: equal ones in one buffer, in this order."""
    numbers: dict[Any, int] = {}
    counts: list[int] = []
    slices: list[BufferSlice] = []
    for name, dtype, shape in facts:
        can_share = bool(shape) and math.prod(shape) > 0
        number = numbers.setdefault((dtype, shape) if can_share else name, len(counts))
        if number == len(counts):
            counts.append(0)
        row_count = shape[0] if shape else 1
        slices.append(BufferSlice(name, number, counts[number], counts[number] + row_count))
        counts[number] += row_count
    return tuple(slices)


def dtype_name(dtype: mx.Dtype) -> str:
    """Return safetensors' name of this dtype."""
    return _DTYPE_NAMES[dtype]


def compute(regions: Iterable[ArrayRegion], *, waits: bool) -> None:
    """Compute every array of these regions after the device's current work, and perhaps wait for it.

    The arrays they were cut from may be overwritten from now on: a device works in the order of dispatch.
    """
    arrays = [array for region in regions for array in (*region.buffers, *region.flat)]
    if waits:
        mx.eval(arrays)
    else:
        mx.async_eval(arrays)  # type: ignore[no-untyped-call]


def to_host(region: ArrayRegion) -> HostRegion:
    """Return views of the region's bytes, bit for bit, without a copy. Waits for a region that was
    dispatched, but for nothing after it.

    A view owns a reference to its array's buffer, so the bytes stay until the last view goes.
    """
    views = [bytes_of(each) for each in region.flat]
    return HostRegion(region.kind, tuple(_host_tensor(region, part, views) for part in region.slices))


def _host_tensor(region: ArrayRegion, part: BufferSlice, views: Sequence[memoryview]) -> HostTensor:
    buffer, view = region.buffers[part.buffer], views[part.buffer]
    shape = (part.stop - part.first, *buffer.shape[1:]) if buffer.ndim else ()
    row_bytes = buffer.nbytes // buffer.shape[0] if buffer.size and buffer.ndim else buffer.nbytes
    data = view[part.first * row_bytes : part.stop * row_bytes]
    return HostTensor(part.name, _DTYPE_NAMES[buffer.dtype], shape, data)


def from_host(region: HostRegion) -> ArrayRegion:
    """Copy host bytes into arrays, bit for bit; any remaining computation is lazy.

    Raises ValueError if a tensor's bytes do not fill its shape or its dtype is unknown.
    """
    arrays = [(tensor.name, array_of(tensor)) for tensor in region.tensors]
    return ArrayRegion.of(region.kind, sorted(arrays, key=lambda pair: pair[0]))


def array_of(tensor: HostTensor) -> mx.array:
    """Copy one host tensor into an array (only the final reinterpretation of bits is lazy)."""
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
    """Return a writable view of an array of bytes, evaluated; it owns a reference to the array's buffer."""
    if flat.size == 0:
        return memoryview(b"")
    # An mx.array has the buffer protocol; its type stubs do not say so.
    view = memoryview(cast(Any, flat))
    assert view.format == "B" and view.ndim == 1 and view.c_contiguous, (view.format, view.shape)
    return view
