"""Load target: K/V arrays of full length that readers fill, so that what is read is the cache.

An evaluated mx.array is host memory too, and writing through a view of it is writing the array
(MLX's manual, "Conversion to NumPy and Other Frameworks"). So the inference thread makes the
arrays, readers fill the views, and the arrays become the caches when all was verified. Memory
made so comes from MLX's allocator: it is counted, and freed buffers are used again. On a 2-core
x86 machine that saved copying 134 MB, 19 ms of a restore, and fresh pages, up to 170 ms more.

Inference thread only, but for the views.
"""

from __future__ import annotations

import dataclasses
import io
import math
import struct
from collections.abc import Iterable
from typing import Any, Final, cast

import mlx.core as mx

from icehouse_server.domain.blocks import HostTensor
from icehouse_server.engine.kv_cache.regions import TOKEN_AXIS, bytes_of, dtype_name
from icehouse_server.storage.api import KvPlace, NewRows
from icehouse_server.storage.row_buffers import RowBuffers


@dataclasses.dataclass(frozen=True, slots=True)
class KvShape:
    """One kv tensor of a model: [1, heads, tokens, width], for any number of tokens."""

    name: str
    dtype: mx.Dtype
    head_count: int
    width: int


class KvTarget:
    """Arrays by tensor name, each taken out once. Rows that nobody wrote hold anything.

    They are made one by one: an array costs 0.05 ms, and some models have 200.
    """

    def __init__(self, shapes: Iterable[KvShape], *, capacity_token_count: int) -> None:
        """Prepare arrays of this many rows along the token axis."""
        self._to_make = list(shapes)[::-1]
        self._capacity = capacity_token_count
        self._arrays: dict[str, mx.array] = {}

    @property
    def is_made(self) -> bool:
        return not self._to_make

    def step(self) -> None:
        """Make the next array, uninitialised."""
        shape = self._to_make.pop()
        self._arrays[shape.name] = uninitialised(
            (1, shape.head_count, self._capacity, shape.width), dtype=shape.dtype
        )

    def place(self, rows: NewRows) -> KvPlace:
        """Return the arrays as a place that these rows are read to."""
        return RowBuffers(self.views(), rows)

    def views(self) -> tuple[HostTensor, ...]:
        """Return the arrays' own bytes for another thread to write and drop.

        An array is updated in place only after its views are gone; while one is there, mlx copies.
        """
        assert self.is_made
        # On the host's own stream, where no pass is in flight that this would be waited for behind.
        with mx.stream(mx.cpu):
            flat = {
                name: array.reshape(-1).view(mx.uint8) for name, array in self._arrays.items() if array.size
            }
        mx.eval(flat)
        return tuple(
            HostTensor(
                name,
                dtype_name(array.dtype),
                tuple(array.shape),
                bytes_of(flat[name]) if name in flat else memoryview(b""),
            )
            for name, array in self._arrays.items()
        )

    def take(self, name: str, *, token_count: int) -> mx.array:
        """Hand an array over for good, so that its new owner may update it in place.

        Raises KeyError without such a tensor, ValueError when it has fewer rows than asked for.
        """
        array = self._arrays.pop(name)
        if array.shape[TOKEN_AXIS] < token_count:
            raise ValueError(f"{name} has {array.shape[TOKEN_AXIS]} slots, {token_count} are needed")
        return array


_DESCRIPTIONS: Final = {mx.float32: "<f4", mx.float16: "<f2"}
"""Types as a .npy file names them: what is loaded so needs no view, which would take as long again."""


def uninitialised(shape: tuple[int, ...], *, dtype: mx.Dtype) -> mx.array:
    """Return an array over memory that nobody has written.

    MLX has no other way (its `empty` is `zeros`): filling 134 MB took 11 ms, and 50 where every
    page was new, on the thread that others wait for; so it took 3 ms.
    """
    if math.prod(shape) == 0:
        return mx.zeros(shape, dtype)
    description = _DESCRIPTIONS.get(dtype, f"<u{dtype.size}")
    # On the host's own stream: this waits until it is made, and no pass is in flight there.
    loaded = mx.load(cast(Any, _Unwritten(shape, description)), format="npy", stream=mx.cpu)
    assert isinstance(loaded, mx.array)
    return loaded if loaded.dtype == dtype else loaded.view(dtype, stream=mx.cpu)


class _Unwritten(io.RawIOBase):
    """A .npy file of an array: reading its header works, reading its content leaves the buffer as it is."""

    _MAGIC: Final = b"\x93NUMPY\x01\x00"

    def __init__(self, shape: tuple[int, ...], description: str) -> None:
        super().__init__()
        facts = f"{{'descr': '{description}', 'fortran_order': False, 'shape': {shape}, }}".encode()
        self._head = self._MAGIC + struct.pack("<H", len(facts)) + facts
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        assert whence == io.SEEK_SET, whence
        self._position = offset
        return offset

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        piece = self._head[self._position : self._position + len(buffer)]
        buffer[: len(piece)] = piece
        self._position += len(buffer)
        return len(buffer)
