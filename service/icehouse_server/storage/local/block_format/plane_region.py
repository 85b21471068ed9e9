"""Plane region: a whole region in byte planes, encoded from its tensors and decoded back into them.

Nothing here holds more than a few chunks; `planes` defines a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import xxhash

from icehouse_server.domain.blocks import BlockDamage, HostRegion
from icehouse_server.storage.api import TensorShape
from icehouse_server.storage.local.block_format.header import DTYPE_BYTES, BlockFileError
from icehouse_server.storage.local.block_format.planes import (
    CHUNK_BYTES,
    DamagedChunk,
    PlaneDecoder,
    PlaneEncoder,
    table_bytes,
    table_sizes,
)
from icehouse_server.storage.local.block_format.region_input import GROUP_BYTES, RegionInput

_GAIN_DIVISOR = 64
"""A region is stored in planes if a sample of it shrinks by at least this part."""
_SAMPLE_COUNT = 4
_SAMPLE_BYTES = 64 << 10


class _Chunk(NamedTuple):
    width: int
    """Bytes of one number."""
    size_bytes: int
    """Of the tensors in it."""


def _chunks(tensors: Iterable[TensorShape], *, limit_bytes: int = CHUNK_BYTES) -> Iterator[_Chunk]:
    """Yield the chunks of a region with these tensors."""
    for width, run in groupby(tensors, key=lambda tensor: DTYPE_BYTES[tensor.dtype]):
        size_bytes = sum(tensor.size_bytes for tensor in run)
        for begin in range(0, size_bytes, limit_bytes):
            yield _Chunk(width, min(limit_bytes, size_bytes - begin))


def stored_limit_bytes(tensors: Iterable[TensorShape]) -> int:
    """Return the most bytes that a region of these tensors takes in planes."""
    return sum(chunk.size_bytes + table_bytes(chunk.width) for chunk in _chunks(tensors))


def gains(region: HostRegion, tensors: Sequence[TensorShape]) -> bool:
    """Return whether planes would save at least 1/64 of the region's bytes, judged by a sample."""
    pieces = list(_chunks(tensors, limit_bytes=_SAMPLE_BYTES))
    step = max(1, math.ceil(len(pieces) / _SAMPLE_COUNT))
    encoder, source = PlaneEncoder(), _Cursor([tensor.data for tensor in region.tensors])
    sampled_bytes = stored_bytes = 0
    for number, piece in enumerate(pieces):
        if number % step:
            source.skip(piece.size_bytes)
            continue
        data = np.empty(piece.size_bytes, np.uint8)
        source.copy_to(data.data)
        sampled_bytes += piece.size_bytes
        stored_bytes += sum(part.nbytes for part in encoder.encode(data, width=piece.width))
    return stored_bytes * _GAIN_DIVISOR <= sampled_bytes * (_GAIN_DIVISOR - 1) and sampled_bytes > 0


class PlaneOutput:
    """Encodes a region. `checksum` is that of its tensors' bytes, once all groups have been taken."""

    def __init__(self, region: HostRegion, tensors: Sequence[TensorShape]) -> None:
        self._source = _Cursor([tensor.data for tensor in region.tensors])
        self._chunks = _chunks(tensors)
        self._digest = xxhash.xxh3_64()

    @property
    def checksum(self) -> int:
        return self._digest.intdigest()

    def groups(self) -> Iterator[tuple[list[memoryview], int]]:
        """Yield the bytes to write, a chunk at a time, with their count; valid until the next one."""
        encoder, scratch = PlaneEncoder(), np.empty(CHUNK_BYTES, np.uint8)
        for chunk in self._chunks:
            data = scratch[: chunk.size_bytes]
            self._source.copy_to(data.data)
            self._digest.update(data.data)
            group = encoder.encode(data, width=chunk.width)
            yield group, sum(part.nbytes for part in group)


def read_planes(source: RegionInput, target: Iterable[memoryview]) -> None:
    """Decode a region into `target`, which covers its tensors in order, and check both checksums.

    Raises `BlockFileError`; the target then holds bytes that must not be used.
    """
    region, meter = source.region, source.meter
    assert region.planes is not None and region.planes.checksum is not None, region.kind
    stored, decoder, sink = _Stored(source), PlaneDecoder(), _Cursor(list(target))
    scratch, digest = np.empty(CHUNK_BYTES, np.uint8), xxhash.xxh3_64()
    for chunk in _chunks(region.tensors):
        data = scratch[: chunk.size_bytes]
        try:
            # The table is copied: the planes are read into the same buffer.
            table = bytes(stored.take(table_bytes(chunk.width)))
            sizes = table_sizes(table, plane_bytes=chunk.size_bytes // chunk.width)
            planes = stored.take(sum(sizes))
            began_s = meter.now()
            decoder.decode(sizes, planes, data, width=chunk.width)
        except DamagedChunk as error:
            raise BlockFileError(BlockDamage.CHECKSUM, f"region {region.kind}: {error}") from error
        digest.update(data.data)
        sink.copy_from(data.data)
        meter.decode_s += meter.now() - began_s
        meter.decoded_bytes += chunk.size_bytes
    if source.left_bytes or stored.left_bytes:
        raise BlockFileError(BlockDamage.CHECKSUM, f"region {region.kind} has more bytes than its chunks")
    source.finish()
    if digest.intdigest() != region.planes.checksum:
        raise BlockFileError(
            BlockDamage.CHECKSUM,
            f"the tensors of region {region.kind} do not have the checksum of its header",
        )


class _Stored:
    """Hands out the stored bytes of a region in portions of any size, reading a group at a time."""

    def __init__(self, source: RegionInput) -> None:
        self._source = source
        self._buffer = np.empty(2 * CHUNK_BYTES, np.uint8).data
        self._begin = self._end = 0

    @property
    def left_bytes(self) -> int:
        """Bytes read but not handed out."""
        return self._end - self._begin

    def take(self, size_bytes: int) -> memoryview:
        """Return the next bytes, at most a chunk; valid until the next call. Raises `BlockFileError`."""
        while self.left_bytes < size_bytes:
            self._read()
        self._begin += size_bytes
        return self._buffer[self._begin - size_bytes : self._begin]

    def _read(self) -> None:
        left_bytes = self.left_bytes
        # Less than a chunk is left, and a group is no more than a chunk. The parts may overlap.
        self._buffer[:left_bytes] = bytes(self._buffer[self._begin : self._end])
        self._begin, self._end = 0, left_bytes
        size_bytes = min(GROUP_BYTES, self._source.left_bytes)
        if not size_bytes:
            raise DamagedChunk("it ends within a chunk")
        self._source.fill([self._buffer[left_bytes : left_bytes + size_bytes]], size_bytes)
        self._end += size_bytes


class _Cursor:
    """A position in consecutive buffers."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._buffers = buffers
        self._index = self._offset = 0

    def skip(self, size_bytes: int) -> None:
        for _ in self._next(size_bytes):
            pass

    def copy_to(self, target: memoryview) -> None:
        """Fill `target` with the next bytes."""
        begin = 0
        for part in self._next(target.nbytes):
            target[begin : begin + part.nbytes] = part
            begin += part.nbytes

    def copy_from(self, source: memoryview) -> None:
        """Overwrite the next bytes with all of `source`."""
        begin = 0
        for part in self._next(source.nbytes):
            part[:] = source[begin : begin + part.nbytes]
            begin += part.nbytes

    def _next(self, size_bytes: int) -> Iterator[memoryview]:
        while size_bytes:
            buffer = self._buffers[self._index]
            part = buffer[self._offset : self._offset + size_bytes]
            self._offset += part.nbytes
            if self._offset == buffer.nbytes:
                self._index, self._offset = self._index + 1, 0
            size_bytes -= part.nbytes
            yield part
