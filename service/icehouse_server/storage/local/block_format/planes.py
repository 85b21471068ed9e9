"""Byte planes: a lossless code for tensors, chunk by chunk. Pure functions over bytes.

Signs and exponents of neighbouring values are much alike; the low bits of their mantissas are noise. So the
low bytes of all numbers in a chunk are put together, then the second bytes, and so on. Each such plane is
compressed by Zstandard, or left as it is if that gains nothing.

A chunk is a table of each plane's size in bytes (unsigned, 32 bits, little endian), then the planes, the low
byte first. A plane with as many bytes as numbers is not compressed; a shorter one is a Zstandard frame.
Chunks cover a region in file order; none contains numbers of two widths, or more than `CHUNK_BYTES`.

NumPy and Zstandard work without the interpreter's lock, and a chunk takes a fraction of a millisecond, so the
inference thread never waits for either.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import zstandard

CHUNK_BYTES = 256 << 10
"""Most bytes of tensors in a chunk."""
RATIO_LIMIT = 16
"""A chunk is stored uncompressed if it would shrink to less than 1/16 of its bytes. So a file cannot declare
more memory than this times its size."""
_PARAMETERS = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST,
    target_length=0,
    window_log=CHUNK_BYTES.bit_length() - 1,
    hash_log=zstandard.HASHLOG_MIN,
    min_match=zstandard.MINMATCH_MAX,
)
"""Of Zstandard: its entropy coder, with its cheapest search for repeats. KV repeats only by chance, and such
a repeat takes more bytes and time than the same numbers coded one by one."""
_SIZE = struct.Struct("<I")

Plane = npt.NDArray[np.uint8]


class DamagedChunk(Exception):
    """A chunk is not one that the encoder writes."""


def table_bytes(width: int) -> int:
    """Return the bytes of a chunk's table; `width` is the bytes of each number in the chunk."""
    return width * _SIZE.size


class PlaneEncoder:
    """Encodes chunks, one after another. One thread."""

    def __init__(self) -> None:
        self._zstd = zstandard.ZstdCompressor(compression_params=_PARAMETERS)

    def encode(self, data: Plane, *, width: int) -> list[memoryview]:
        """Return a chunk's table and planes."""
        numbers = data.view(f"<u{width}")
        # Several times as fast as strided copies.
        shifted = (numbers >> 8 * number if number else numbers for number in range(width))
        planes = [plane.astype(np.uint8, copy=False) for plane in shifted]
        stored = [self._shorter(plane) for plane in planes]
        if sum(map(len, stored)) * RATIO_LIMIT < data.nbytes:
            stored = [plane.data for plane in planes]
        table = b"".join(_SIZE.pack(len(plane)) for plane in stored)
        return [memoryview(table), *stored]

    def _shorter(self, plane: Plane) -> memoryview:
        compressed = self._zstd.compress(plane.data)
        return memoryview(compressed) if len(compressed) < plane.nbytes else plane.data


class PlaneDecoder:
    """Decodes chunks, one after another. One thread."""

    def __init__(self) -> None:
        self._zstd = zstandard.ZstdDecompressor(max_window_size=CHUNK_BYTES)

    def decode(self, sizes: Sequence[int], planes: memoryview, target: Plane, *, width: int) -> None:
        """Write a chunk's bytes into `target`, which has their size; `sizes` are those of the planes, low
        byte first. Raises `DamagedChunk`."""
        decoded = []
        begin = 0
        for size_bytes in sizes:
            decoded.append(self._plane(planes[begin : begin + size_bytes], target.nbytes // width))
            begin += size_bytes
        if width == 2:
            # Three times as fast as two strided copies.
            numbers = target.view("<u2")
            np.multiply(decoded[1], 256, out=numbers, dtype=np.uint16)
            np.add(numbers, decoded[0], out=numbers)
            return
        for number, plane in enumerate(decoded):
            target[number::width] = plane

    def _plane(self, stored: memoryview, plane_bytes: int) -> Plane:
        if len(stored) == plane_bytes:
            return np.frombuffer(stored, np.uint8)
        try:
            # The decompressor allocates the size that the frame declares, so check that first.
            declared_bytes = zstandard.frame_content_size(stored)
            if declared_bytes != plane_bytes:
                raise DamagedChunk(f"a frame declares {declared_bytes} bytes, where {plane_bytes} were due")
            return np.frombuffer(self._zstd.decompress(stored, allow_extra_data=False), np.uint8)
        except zstandard.ZstdError as error:
            raise DamagedChunk(f"a plane cannot be decompressed: {error}") from error


def table_sizes(table: bytes, *, plane_bytes: int) -> list[int]:
    """Return the stored bytes of each plane. Raises `DamagedChunk` for more bytes than it has numbers."""
    sizes = [size for (size,) in _SIZE.iter_unpack(table)]
    if not all(0 < size <= plane_bytes for size in sizes):
        raise DamagedChunk(f"planes of {plane_bytes} bytes cannot take {sizes}")
    return sizes
