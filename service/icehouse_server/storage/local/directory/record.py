"""Record of a block on SSD, known without opening its file: the manifest's row in memory."""

from __future__ import annotations

import dataclasses
import struct
from typing import NamedTuple

import xxhash

from icehouse_server.domain.blocks import LAYOUT_ABI, RegionKind
from icehouse_server.domain.ids import BlockHash, Fingerprint
from icehouse_server.pins import NOT_PINNED
from icehouse_server.storage.files import FileInfo
from icehouse_server.storage.local.block_format.header import BlockFile

_FACTS = struct.Struct("<32s32s32s10qQ")
_FACT_COUNT = 14


class BlockRecord(NamedTuple):
    """One committed block; sizes in bytes.

    A tuple and not a frozen dataclass as elsewhere: a start makes 100,000 of them, in a quarter of the time.
    The fields up to `header_checksum` are facts about the file and never change without it;
    the rest is the block's history.
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
    """The file's modification time when the row was written; if it differs, the file is read again."""
    inode: int
    """The file's inode number then; if it differs, the file is read again."""
    layout_abi: int
    header_checksum: int
    created_time: float
    last_used_time: float
    """Wall clock, seconds since the epoch."""
    hit_count: int
    pin_end_time: float
    """Wall clock; `DiskIndex.end_pins` takes it off."""

    @property
    def depth(self) -> int:
        """Blocks of this chain before this one."""
        return self.start_token_index // self.block_token_limit

    @property
    def is_pinned(self) -> bool:
        return self.pin_end_time > NOT_PINNED

    def region_bytes(self, kind: RegionKind) -> int:
        """Return the bytes of the region of this kind; 0 when the block has none."""
        return int(getattr(self, f"{kind}_bytes"))

    def used_by_now(self, now_time: float) -> BlockRecord:
        """Return this with no use in the future: a clock that was wrong once must not retain it for ever."""
        return self._replace(
            last_used_time=min(self.last_used_time, now_time), created_time=min(self.created_time, now_time)
        )

    def with_history_of(self, other: BlockRecord) -> BlockRecord:
        """Return these facts with another record's history."""
        return BlockRecord._make((*self[:_FACT_COUNT], *other[_FACT_COUNT:]))

    def is_of(self, file: BlockFile) -> bool:
        """Return whether every fact is what this file says."""
        return record_of(file, mtime_ns=self.mtime_ns, inode=self.inode, used_time=0.0)._facts == self._facts

    def is_stamped(self, info: FileInfo) -> bool:
        """Return whether a directory entry looks like the file this row was written for."""
        return (self.mtime_ns, self.inode, self.file_bytes) == (info.mtime_ns, info.inode, info.size_bytes)

    def facts_checksum(self) -> int:
        """Return the xxh3 of the facts, stored in the row, so that a row edited by hand is detected."""
        return xxhash.xxh3_64_intdigest(_FACTS.pack(*self._facts))

    @property
    def _facts(self) -> tuple[object, ...]:
        return self[:_FACT_COUNT]


def record_of(file: BlockFile, *, mtime_ns: int, inode: int, used_time: float) -> BlockRecord:
    """Return the record of a file as it is committed or adopted."""
    return BlockRecord(
        **dataclasses.asdict(file.outline),
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
        pin_end_time=NOT_PINNED,
    )
