"""Block bytes: one block file in memory, in the clear, for archives that go over the wire.

Any thread may call these functions. Nothing that is decoded is trusted: head and regions are checked as those
of a file on disk are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import xxhash

from icehouse_server.domain.blocks import HostBlock, HostRegion
from icehouse_server.storage.files import Files
from icehouse_server.storage.local.block_format.block_file import host_region, prepare_block
from icehouse_server.storage.local.block_format.file_region import FileRegion
from icehouse_server.storage.local.block_format.header import (
    BlockFileError,
    encode_head,
    head_length,
    parse_head,
)
from icehouse_server.storage.local.block_format.plane_region import read_planes
from icehouse_server.storage.local.block_format.region_input import RegionInput


class BlockBytes:
    """Block files as bytes; what rpc knows of the format."""

    def encode(self, block: HostBlock) -> list[memoryview]:
        """Return the parts of a block's file, in order. Its header's name is without a secret."""
        prepared, regions = prepare_block(block), []
        for region, planned in zip(block.regions, prepared.regions, strict=True):
            digest = xxhash.xxh3_64()
            for tensor in region.tensors:
                digest.update(tensor.data)
            offset = prepared.head_bytes + planned.offset
            regions.append(dataclasses.replace(planned, offset=offset, checksum=digest.intdigest()))
        head, _ = encode_head(block.header, regions)
        return [memoryview(head), *(t.data for region in block.regions for t in region.tensors)]

    def decode(self, data: memoryview) -> HostBlock:
        """Return the block of a file; its tensors are views of `data`, or of
        what its planes hold. Raises ValueError for what is none."""
        try:
            head_bytes = head_length(bytes(data[:8]), file_bytes=data.nbytes)
            file = parse_head(bytes(data[:head_bytes]), file_bytes=data.nbytes)
            if file.header is None:
                raise ValueError("it is encrypted")
            return HostBlock(file.header, tuple(_region(data, region) for region in file.regions))
        except BlockFileError as error:
            raise ValueError(str(error)) from error


class _InMemory(Files):
    """One file that was read already."""

    def __init__(self, data: memoryview) -> None:
        super().__init__()
        self._data = data

    def read_into(self, descriptor: int, parts: Sequence[memoryview], *, offset: int) -> int:
        begin = offset
        for part in parts:
            piece = self._data[offset : offset + part.nbytes]
            part[: piece.nbytes] = piece
            offset += piece.nbytes
        return offset - begin


def _region(data: memoryview, region: FileRegion) -> HostRegion:
    if region.planes is None:
        whole = data[region.offset : region.offset + region.size_bytes]
        if xxhash.xxh3_64_intdigest(whole) != region.checksum:
            raise ValueError(f"region {region.kind} does not have the checksum of its header")
    else:
        whole = memoryview(bytearray(region.size_bytes))
        read_planes(RegionInput(_InMemory(data), 0, region, cipher=None), [whole])
    return host_region(region, whole)
