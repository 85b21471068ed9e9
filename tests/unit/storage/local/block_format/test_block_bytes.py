"""Block bytes: the same bytes as a block's file, and nothing that was changed is taken for a block."""

from __future__ import annotations

from pathlib import Path

import pytest
from icehouse_server.storage.local.block_format.block_bytes import BlockBytes

from tests.fixtures.storage.blocks import make_block, make_chain
from tests.fixtures.storage.ciphers import CIPHER
from tests.fixtures.storage.storage_thread import StorageThread

BLOCK = make_block(checkpoint=True, row_width=1, head_count=1)


def joined(parts: list[memoryview]) -> bytes:
    return b"".join(parts)


def test_they_are_the_bytes_of_the_file(tmp_path: Path) -> None:
    block = make_chain(1, checkpoint=True)[0]
    with StorageThread(tmp_path) as served:
        served.spill(block)
    data = joined(BlockBytes().encode(block))
    assert data == Path(StorageThread(tmp_path).path(block)).read_bytes()
    again = BlockBytes().decode(memoryview(data))
    assert again.header == block.header
    for ours, theirs in zip(again.regions, block.regions, strict=True):
        assert ours.kind is theirs.kind
        assert [(t.name, t.dtype, t.shape, bytes(t.data)) for t in ours.tensors] == [
            (t.name, t.dtype, t.shape, bytes(t.data)) for t in theirs.tensors
        ]


def test_no_changed_byte_and_no_other_length_is_a_block() -> None:
    data = joined(BlockBytes().encode(BLOCK))
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 1
        with pytest.raises(ValueError):
            BlockBytes().decode(memoryview(bytes(changed)))
    for length in (0, 7, 8, len(data) // 2, len(data) - 1):
        with pytest.raises(ValueError):
            BlockBytes().decode(memoryview(data[:length]))
    with pytest.raises(ValueError):
        BlockBytes().decode(memoryview(data + b"\0"))


def test_what_is_encrypted_is_none(tmp_path: Path) -> None:
    block = make_chain(1, cipher=CIPHER)[0]
    with StorageThread(tmp_path, cipher=CIPHER) as served:
        served.spill(block)
    data = Path(StorageThread(tmp_path).path(block)).read_bytes()
    with pytest.raises(ValueError, match="encrypted"):
        BlockBytes().decode(memoryview(data))
