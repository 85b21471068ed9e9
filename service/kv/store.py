"""The SSD directory as one thing: its lock, manifest, files and limits, always in agreement.

Owned by the storage thread; every method does its work before it returns. What the disk
refuses is raised as `OSError` or `sqlite3.Error` and leaves the store consistent: a block is
either committed and in the index, or neither.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import os
import sqlite3
from collections.abc import Iterable, Sequence

from service.clock import Clock
from service.domain.ids import BlockHash
from service.errors import Reason, StartError
from service.kv.block_file import PreparedBlock
from service.kv.clean_mark import leave_mark
from service.kv.commit import commit_block, move_to_quarantine, remove_blocks
from service.kv.disk_index import DiskIndex
from service.kv.files import Files, read_text
from service.kv.manifest import LOG_ALLOWANCE_BYTES, Manifest
from service.kv.messages import ReconcileReport, StorageSettings
from service.kv.open_store import open_store
from service.kv.reconcile import Finding, examine_row, repair
from service.kv.records import BlockRecord
from service.kv.space import Space
from service.kv.store_paths import StorePaths

_QUARANTINE_LIMIT_COUNT = 64
"""Damaged files kept to be looked at; the oldest goes when one more comes."""
_EVICTION_BATCH_COUNT = 8
"""Blocks evicted by one call, so that a read never waits long behind evictions."""


class Room(enum.Enum):
    """What `make_room` achieved."""

    READY = enum.auto()
    PROGRESS = enum.auto()
    """Something was evicted; call again."""
    FULL = enum.auto()
    """Nothing more can be evicted."""


@dataclasses.dataclass(slots=True)
class StoreCounters:
    """Since this object was made. Sizes in bytes."""

    written_bytes: int = 0
    evicted_count: int = 0
    evicted_bytes: int = 0
    purged_count: int = 0
    quarantined_count: int = 0


class BlockStore:
    """Blocks by hash on one disk. `lock`, then `open`, then anything, then `close`."""

    def __init__(self, settings: StorageSettings, *, files: Files, clock: Clock) -> None:
        self.settings = settings
        self.paths = StorePaths(os.path.abspath(settings.directory))
        self.files = files
        self.clock = clock
        self.index = DiskIndex()
        self.report = ReconcileReport()
        self.counters = StoreCounters()
        self.space = Space(
            limit_bytes=settings.limit_bytes,
            floor_bytes=settings.free_floor_bytes,
            daily_limit_bytes=settings.daily_write_limit_bytes,
        )
        self.quarantined: dict[BlockHash, int] = {}
        self._manifest: Manifest | None = None
        self._lock: int | None = None
        self._uses: dict[BlockHash, tuple[float, int]] = {}
        self._gone: list[BlockHash] = []

    @property
    def is_open(self) -> bool:
        """Whether the manifest is open."""
        return self._manifest is not None

    @property
    def manifest(self) -> Manifest:
        """The open manifest."""
        assert self._manifest is not None, "The store is not open"
        return self._manifest

    def lock(self) -> None:
        """Make the directory this process's own. Raises `StartError` naming the owner, or `OSError`."""
        self.files.make_dir(self.paths.root)
        try:
            self._lock = self.files.lock(self.paths.lock, owner=f"{os.getpid()}\n")
        except BlockingIOError as error:
            owner = read_text(self.files, self.paths.lock, limit_bytes=64).strip() or "unknown"
            raise StartError(
                Reason.STORE_LOCKED,
                f"Cache directory {self.paths.root} is in use by process {owner}; "
                "stop that process or choose another directory",
                metadata={"directory": self.paths.root, "owner_pid": owner},
            ) from error

    def unlock(self) -> None:
        """Let another process have the directory."""
        if self._lock is not None:
            descriptor, self._lock = self._lock, None
            with contextlib.suppress(OSError):
                self.files.close(descriptor)

    def open(self) -> None:
        """Open the manifest and repair what disagrees; `report` and `index` tell what was found."""
        opened = open_store(self.settings, paths=self.paths, files=self.files, clock=self.clock)
        self._manifest = opened.manifest
        self.report = opened.report
        self.index = DiskIndex.of(opened.records)
        self.quarantined = opened.quarantined
        self.space.leftover_bytes = opened.unknown_bytes
        self.space.quarantine_bytes = sum(opened.quarantined.values())
        self.space.written_today_bytes = 0
        day = self.space.turn_day(self.clock.wall())
        self.space.written_today_bytes = opened.manifest.written_bytes(day=day)
        self._trim_quarantine()
        self._weigh_manifest()

    def close(self) -> bool:
        """Flush recency, close the manifest and mark the directory clean; True when all of it worked."""
        if self._manifest is None:
            return False
        try:
            self.flush_uses()
            self._manifest.close()
            self._manifest = None
            leave_mark(self.files, self.paths)
        except (OSError, sqlite3.Error):
            self.abandon()
            return False
        return True

    def abandon(self) -> None:
        """Forget the manifest as a crash would; whatever is committed stays committed."""
        manifest, self._manifest = self._manifest, None
        if manifest is not None:
            with contextlib.suppress(sqlite3.Error):
                manifest.close(checkpoint=False)

    def put(self, prepared: PreparedBlock) -> BlockRecord:
        """Commit a block that is not stored yet; there must be room. Raises `OSError` or `sqlite3.Error`."""
        header = prepared.block.header
        assert header.hash not in self.index, f"Block {header.hash.hex()} is stored already"
        now_time = self.clock.wall()
        day = self.space.turn_day(now_time)
        record = commit_block(
            prepared,
            files=self.files,
            paths=self.paths,
            manifest=self.manifest,
            now_time=now_time,
            day=day,
        )
        self.index.add(record)
        self.space.written_today_bytes += record.file_bytes
        self.counters.written_bytes += record.file_bytes
        self._weigh_manifest()
        return record

    def make_room(self, size_bytes: int) -> Room:
        """Evict a few blocks if `size_bytes` more would pass the limit or the free-space floor."""
        shortage_bytes = self.space.shortage_bytes(
            size_bytes,
            block_bytes=self.index.block_bytes,
            free_bytes=self.files.free_bytes(self.paths.root),
        )
        if shortage_bytes == 0:
            return Room.READY
        return self.reclaim(shortage_bytes)

    def reclaim(self, size_bytes: int) -> Room:
        """Remove one quarantined file, or a batch of least recently used blocks of `size_bytes` together."""
        if self.quarantined:
            self._drop_quarantined(next(iter(self.quarantined)))
            return Room.PROGRESS
        victims: list[BlockRecord] = []
        freed_bytes = 0
        while len(victims) < _EVICTION_BATCH_COUNT and freed_bytes < size_bytes:
            victim = self.index.next_victim()
            if victim is None:
                break
            self.index.remove(victim.hash)
            victims.append(victim)
            freed_bytes += victim.file_bytes
        if not victims:
            return Room.FULL
        self.remove(victims)
        self.counters.evicted_count += len(victims)
        self.counters.evicted_bytes += freed_bytes
        return Room.PROGRESS

    def purge(self, records: Sequence[BlockRecord]) -> None:
        """Remove blocks by order, pinned or not. Raises `sqlite3.Error`."""
        self.remove(records)
        self.counters.purged_count += len(records)

    def remove(self, records: Sequence[BlockRecord]) -> None:
        """Remove blocks, rows first. Raises `sqlite3.Error`."""
        for record in records:
            self.index.remove(record.hash)
        self._gone.extend(record.hash for record in records)
        stuck = remove_blocks(records, files=self.files, paths=self.paths, manifest=self.manifest)
        sizes = {record.hash: record.file_bytes for record in records}
        self.space.leftover_bytes += sum(sizes[block_hash] for block_hash in stuck)
        self._weigh_manifest()

    def quarantine(self, block_hash: BlockHash) -> bool:
        """Put a damaged block's file aside, its row first; False when it is not stored."""
        record = self.index.remove(block_hash)
        if record is None:
            return False
        self._gone.append(block_hash)
        self.manifest.delete([block_hash])
        path = self.paths.block(record.fingerprint, block_hash)
        self.counters.quarantined_count += 1
        try:
            move_to_quarantine(block_hash, path=path, files=self.files, paths=self.paths)
        except FileNotFoundError:
            return True
        except OSError:
            self.space.leftover_bytes += record.file_bytes
            raise
        self._note_quarantined(block_hash, self.files.stat(self.paths.quarantined(block_hash)).size_bytes)
        return True

    def drop_missing(self, block_hash: BlockHash) -> bool:
        """Delete the row of a block whose file is gone; False when it is not stored."""
        if self.index.remove(block_hash) is None:
            return False
        self._gone.append(block_hash)
        self.manifest.delete([block_hash])
        return True

    def check_row(self, record: BlockRecord) -> bool:
        """Compare one row with its file and repair what differs; True when they agreed."""
        found = examine_row(record, files=self.files, paths=self.paths, now_time=self.clock.wall())
        if found is None:
            return True
        if found.finding is Finding.MISSING:
            self.drop_missing(record.hash)
        elif found.finding is Finding.RESTAMPED and found.record is not None:
            self.index.restamp(found.record)
            day = self.space.turn_day(self.clock.wall())
            repair([found], files=self.files, paths=self.paths, manifest=self.manifest, day=day)
        else:
            self.quarantine(record.hash)
        return False

    def touch(self, hashes: Iterable[BlockHash]) -> None:
        """Note a use of each stored block; written to the manifest by `flush_uses`."""
        now_time = self.clock.wall()
        for block_hash in hashes:
            if self.index.touch(block_hash, now_time=now_time):
                self._uses[block_hash] = (now_time, self._uses.get(block_hash, (0.0, 0))[1] + 1)

    def flush_uses(self) -> None:
        """Write the noted uses in one transaction."""
        if self._uses:
            uses, self._uses = self._uses, {}
            self.manifest.touch(uses)

    def set_pinned(self, hashes: Sequence[BlockHash], *, pinned: bool) -> int:
        """Pin or unpin the stored ones of these blocks; return how many those were."""
        stored = [item for item in hashes if self.index.set_pinned(item, pinned=pinned)]
        self.manifest.set_pinned(stored, pinned=pinned)
        return len(stored)

    def take_gone(self) -> tuple[BlockHash, ...]:
        """Return the blocks that left since the last call, for whatever reason."""
        gone, self._gone = self._gone, []
        return tuple(gone)

    def used_bytes(self) -> int:
        """Return all bytes the limit counts."""
        return self.index.block_bytes + self.space.other_bytes()

    def _weigh_manifest(self) -> None:
        # The log grows and shrinks with every row; a fixed allowance keeps the limit true between looks.
        size_bytes = self.files.stat(self.paths.manifest).size_bytes
        self.space.manifest_bytes = size_bytes + LOG_ALLOWANCE_BYTES

    def _note_quarantined(self, block_hash: BlockHash, size_bytes: int) -> None:
        self.space.quarantine_bytes += size_bytes - self.quarantined.pop(block_hash, 0)
        self.quarantined[block_hash] = size_bytes
        self._trim_quarantine()

    def _trim_quarantine(self) -> None:
        while len(self.quarantined) > _QUARANTINE_LIMIT_COUNT:
            self._drop_quarantined(next(iter(self.quarantined)))

    def _drop_quarantined(self, block_hash: BlockHash) -> None:
        self.space.quarantine_bytes -= self.quarantined.pop(block_hash)
        with contextlib.suppress(FileNotFoundError):
            self.files.unlink(self.paths.quarantined(block_hash))
