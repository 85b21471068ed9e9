"""Block bytes: one block file in memory, unencrypted, for archives that are sent over the network.

Any thread may call these functions. Nothing that is decoded is trusted: it is checked like a file on disk.
"""

from __future__ import annotations

from collections.abc import Sequence

from icehouse_server.domain.blocks import HostBlock
from icehouse_server.storage.api import PlannedBlock
from icehouse_server.storage.files import Buffer, Files
from icehouse_server.storage.local.block_format.block_file import (
    prepare_block,
    read_block,
    read_head,
    write_block,
)
from icehouse_server.storage.local.block_format.header import BlockFileError


class BlockBytes:
    """Block files as bytes; all that rpc knows of the format."""

    def encode(self, block: HostBlock) -> list[memoryview]:
        """Return the parts of a block's file, in order. Its header's name must depend on no secret."""
        file = _FileInMemory(memoryview(b""))
        write_block(file, 0, prepare_block(block))
        return [memoryview(part) for _, parts in sorted(file.written.items()) for part in parts]

    def decode(self, data: memoryview) -> HostBlock:
        """Return the block in a file's bytes. Raises ValueError if they are none."""
        memory = _FileInMemory(data)
        try:
            file = read_head(memory, 0)
            if file.header is None:
                raise ValueError("it is encrypted")
            planned = PlannedBlock(file.header, frozenset(region.kind for region in file.regions))
            loaded = read_block(memory, 0, file, planned, None, before_read=lambda: None)
        except BlockFileError as error:
            raise ValueError(str(error)) from error
        return HostBlock(file.header, loaded.regions)


class _FileInMemory(Files):
    """One file: reads come from bytes in memory, and writes keep what they are given without a copy."""

    def __init__(self, data: memoryview) -> None:
        super().__init__()
        self._data = data
        self.written: dict[int, Sequence[Buffer]] = {}
        """By offset."""

    def size(self, descriptor: int) -> int:
        return self._data.nbytes

    def write(self, descriptor: int, parts: Sequence[Buffer], *, offset: int) -> None:
        self.written[offset] = parts

    def read_into(self, descriptor: int, parts: Sequence[memoryview], *, offset: int) -> int:
        begin = offset
        for part in parts:
            piece = self._data[offset : offset + part.nbytes]
            part[: piece.nbytes] = piece
            offset += piece.nbytes
        return offset - begin
