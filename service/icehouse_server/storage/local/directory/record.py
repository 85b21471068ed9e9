"""Record of a block on SSD, known without opening its file: the manifest's row in memory."""

from __future__ import annotations

import struct
from typing import NamedTuple

import xxhash

from icehouse_server.domain.blocks import LAYOUT_ABI, RegionKind
from icehouse_server.domain.ids import BlockHash, Fingerprint
from icehouse_server.storage.files import FileInfo
from icehouse_server.storage.local.block_format.header import BlockFile

_FACTS = struct.Struct("<32s32s32s10qQ")


class BlockRecord(NamedTuple):
    """One committed block; sizes in bytes.

    A tuple and not a frozen dataclass as elsewhere: a start makes 100,000 of them, in a quarter of the time.
    The fields up to `header_checksum` are facts about the file and never change without it;
    the rest is what happened to the block.
    """

    hash: BlockHash
    parent: BlockHash
    fingerprint: Fingerprint
    start_token_index: int
    token_count: int
    block_token_limit: int
    kv_bytes: int
    window_bytes: int
    checkpoint_bytes: int
    file_bytes: int
    mtime_ns: int
    """The file's modification time when the row was written; another one means: look inside."""
    inode: int
    """The file's inode number then; another one means: look inside."""
    layout_abi: int
    header_checksum: int
    created_time: float
    last_used_time: float
    """Wall clock, seconds since the epoch."""
    hit_count: int
    pinned: bool

    @property
    def depth(self) -> int:
        """Blocks of this chain before this one."""
        return self.start_token_index // self.block_token_limit

    def region_bytes(self, kind: RegionKind) -> int:
        """Return the bytes of the region of this kind; 0 when the block has none."""
        sizes = {
            RegionKind.KV: self.kv_bytes,
            RegionKind.WINDOW: self.window_bytes,
            RegionKind.CHECKPOINT: self.checkpoint_bytes,
        }
        return sizes[kind]

    def used_by_now(self, now_time: float) -> BlockRecord:
        """Return this with no use in the future: a clock that was wrong once must not keep it for ever."""
        if self.last_used_time <= now_time:
            return self
        return self._replace(last_used_time=now_time, created_time=min(self.created_time, now_time))

    def is_of(self, file: BlockFile) -> bool:
        """Say whether every fact is what this file says."""
        fresh = record_of(file, mtime_ns=self.mtime_ns, inode=self.inode, used_time=0.0)
        return fresh.facts_checksum() == self.facts_checksum()

    def is_stamped(self, info: FileInfo) -> bool:
        """Say whether a directory entry is, by all that it tells, the file this row was written for."""
        return (self.mtime_ns, self.inode, self.file_bytes) == (info.mtime_ns, info.inode, info.size_bytes)

    def facts_checksum(self) -> int:
        """Return the xxh3 of the facts, stored in the row, so that a row edited by hand is seen."""
        return xxhash.xxh3_64_intdigest(
            _FACTS.pack(
                self.hash,
                self.parent,
                self.fingerprint,
                self.start_token_index,
                self.token_count,
                self.block_token_limit,
                self.kv_bytes,
                self.window_bytes,
                self.checkpoint_bytes,
                self.file_bytes,
                self.mtime_ns,
                self.inode,
                self.layout_abi,
                self.header_checksum,
            )
        )


def record_of(file: BlockFile, *, mtime_ns: int, inode: int, used_time: float) -> BlockRecord:
    """Return the record of a file as it is committed or adopted."""
    outline = file.outline
    return BlockRecord(
        hash=outline.hash,
        parent=outline.parent,
        fingerprint=outline.fingerprint,
        start_token_index=outline.start_token_index,
        token_count=outline.token_count,
        block_token_limit=outline.block_token_limit,
        kv_bytes=file.region_bytes(RegionKind.KV),
        window_bytes=file.region_bytes(RegionKind.WINDOW),
        checkpoint_bytes=file.region_bytes(RegionKind.CHECKPOINT),
        file_bytes=file.file_bytes,
        mtime_ns=mtime_ns,
        inode=inode,
        layout_abi=LAYOUT_ABI,
        header_checksum=file.header_checksum,
        created_time=used_time,
        last_used_time=used_time,
        hit_count=0,
        pinned=False,
    )
