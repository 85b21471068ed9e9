"""Store: the SSD directory as one thing, its lock, manifest, files and limits always in agreement.

Owned by the storage thread; every method does its work before it returns. What the disk
refuses is raised as `OSError` or `sqlite3.Error` and leaves the store consistent: a block is
either committed and in the index, or neither.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor

from icehouse_server.clock import Clock
from icehouse_server.domain.cache_stats import IntegrityStats, ReconcileReport, TierStats
from icehouse_server.domain.ids import BlockHash
from icehouse_server.storage.files import Files, exists
from icehouse_server.storage.local.block_format.block_file import PreparedBlock
from icehouse_server.storage.local.directory.commit import (
    Writing,
    begin_commit,
    finish_commit,
    undo_commit,
    unlink_blocks,
)
from icehouse_server.storage.local.directory.disk_index import DiskIndex
from icehouse_server.storage.local.directory.lock import leave_mark, take_lock
from icehouse_server.storage.local.directory.manifest import LOG_ALLOWANCE_BYTES, Manifest
from icehouse_server.storage.local.directory.open import open_store
from icehouse_server.storage.local.directory.reconcile import Finding, examine_rows, repair
from icehouse_server.storage.local.directory.record import BlockRecord
from icehouse_server.storage.local.directory.space import (
    BALLAST_BYTES,
    Ballast,
    Leftovers,
    Quarantine,
    Reclaim,
    Space,
)
from icehouse_server.storage.local.encryption.constants import Cipher
from icehouse_server.storage.paths import PARTIAL_SUFFIX, StorePaths
from icehouse_server.storage.settings import StorageSettings

_EVICTION_BATCH_COUNT = 8
"""Blocks evicted by one call, so that a read never waits long behind evictions."""


class BlockStore:
    """Blocks by hash on one disk. `lock`, then `open`, then anything, then `close`."""

    def __init__(
        self, settings: StorageSettings, *, files: Files, clock: Clock, cipher: Cipher | None = None
    ) -> None:
        self.settings = settings
        self.cipher = cipher
        self.paths = StorePaths(os.path.abspath(settings.directory))
        self.files = files
        self.clock = clock
        self.index = DiskIndex()
        self.report = ReconcileReport()
        self.tier = TierStats()
        """What left the tier since start."""
        self.integrity = IntegrityStats()
        """What was found damaged since start."""
        self.last_verified: BlockHash | None = None
        """Up to where a check of the blocks has come, in the order of their hashes."""
        self.syncs: Executor | None = None
        """Makes files durable beside what the storage thread does; None: in their turn."""
        self.space = Space(
            limit_bytes=settings.limit_bytes,
            floor_bytes=settings.free_floor_bytes,
            daily_limit_bytes=settings.daily_write_limit_bytes,
        )
        self._leftovers = Leftovers(files)
        self.quarantined = Quarantine(files, self.paths, found={}, leftovers=self._leftovers)
        self._ballast = Ballast(files, self.paths)
        self._unknown_bytes = 0
        self._aside_bytes = 0
        """Of a manifest that could not be read, kept for a person to look at while there is room."""
        self._manifest: Manifest | None = None
        self._lock: int | None = None
        self._uses: dict[BlockHash, tuple[float, int]] = {}
        self._gone: list[BlockHash] = []
        self._unrecorded: set[BlockHash] = set()
        """Blocks whose file may be another than their row says, since a disk refused the row."""

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
        self._lock = take_lock(self.files, self.paths)

    def unlock(self) -> None:
        """Let another process have the directory."""
        if self._lock is not None:
            descriptor, self._lock = self._lock, None
            with contextlib.suppress(OSError):
                self.files.close(descriptor)

    def open(self) -> None:
        """Open the manifest and repair what disagrees; `report` and `index` tell what was found.

        Raises `StartError` when the lock could not be had before and another process has it now.
        """
        if self._lock is None:
            self.lock()
        opened = open_store(
            self.settings, paths=self.paths, files=self.files, clock=self.clock, cipher=self.cipher
        )
        self._manifest = opened.manifest
        self.report = opened.report
        now_time = self.clock.wall()
        self.index = DiskIndex.of(record.used_by_now(now_time) for record in opened.records)
        self._leftovers = Leftovers(self.files)
        self.quarantined = Quarantine(
            self.files, self.paths, found=opened.quarantined, leftovers=self._leftovers
        )
        self._unrecorded.clear()
        self._unknown_bytes = opened.unknown_bytes
        self._aside_bytes = self._size_bytes(self.paths.manifest_aside)
        day = self.space.turn_day(self.clock.wall())
        self.space.written_by_day = opened.manifest.written_days()
        self.space.written_today_bytes = self.space.written_by_day.get(day, 0)
        self.quarantined.trim()
        self._ballast.lay()
        self._weigh()

    def close(self) -> bool:
        """Flush recency, close the manifest and mark the directory clean; True when all of it worked."""
        if self._manifest is None:
            return False
        try:
            self.keep_up()
            self._manifest.close()
            self._manifest = None
            if not (self._leftovers or self._unknown_bytes):
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

    def begin(self, prepared: PreparedBlock) -> Writing:
        """Write the file of a block that is not stored whole yet; `finish` or `undo` follows.

        Raises `OSError`.
        """
        header = prepared.block.header
        assert not self.index.covers(prepared.block), f"Block {header.hash.hex()} is stored already"
        try:
            writing = begin_commit(
                prepared, files=self.files, paths=self.paths, syncs=self.syncs, clock=self.clock
            )
        except OSError:
            self._leftovers.note(self.paths.block(header.fingerprint, header.hash) + PARTIAL_SUFFIX)
            raise
        self.space.partial_bytes += prepared.file_bytes
        return writing

    def finish(self, writing: Writing, *, pinned: bool) -> BlockRecord:
        """Commit a block that was begun. Raises `OSError` or `sqlite3.Error`; it is no longer begun then."""
        now_time = self.clock.wall()
        day = self.space.turn_day(now_time)
        self.space.partial_bytes -= writing.prepared.file_bytes
        replaced = self.index.get(writing.file.outline.hash)
        try:
            record = finish_commit(
                writing,
                files=self.files,
                paths=self.paths,
                manifest=self.manifest,
                now_time=now_time,
                day=day,
                pinned=pinned,
                replaced=replaced,
            )
        except OSError:
            self._leftovers.note(writing.partial)
            self._note_unrecorded(writing, replaced)
            raise
        except sqlite3.Error:
            self._note_unrecorded(writing, replaced)
            raise
        self._leftovers.forget(writing.path)
        self.index.put(record)
        self.space.written_today_bytes += record.file_bytes
        self._weigh()
        return record

    def _note_unrecorded(self, writing: Writing, replaced: BlockRecord | None) -> None:
        """Remember a file that has a name and no row of its own: its row is made up for, or it goes."""
        if replaced is None:
            self._leftovers.note(writing.path)
        else:
            self._unrecorded.add(replaced.hash)

    def undo(self, writing: Writing) -> None:
        """Remove the file of a block that was begun."""
        self.space.partial_bytes -= writing.prepared.file_bytes
        undo_commit(writing, files=self.files)
        self._leftovers.note(writing.partial)

    def has_room(self, size_bytes: int) -> bool:
        """Say whether `size_bytes` more may be written and nothing need go for it."""
        return self._shortage_bytes(size_bytes) == 0

    def make_room(self, size_bytes: int) -> Reclaim:
        """Evict a few blocks if `size_bytes` more would pass the limit or the free-space floor."""
        shortage_bytes = self._shortage_bytes(size_bytes)
        return self.reclaim(shortage_bytes) if shortage_bytes else Reclaim.READY

    def reclaim(self, size_bytes: int) -> Reclaim:
        """Remove one quarantined file, or a batch of least recently used blocks of `size_bytes` together."""
        if self._aside_bytes:
            self._aside_bytes = 0
            self._leftovers.remove(self.paths.manifest_aside)
            self._weigh()
            return Reclaim.PROGRESS
        if self.quarantined:
            self.quarantined.drop_oldest()
            self._weigh()
            return Reclaim.PROGRESS
        victims: list[BlockRecord] = []
        freed_bytes = 0
        while len(victims) < _EVICTION_BATCH_COUNT and freed_bytes < size_bytes:
            victim = self.index.next_victim()
            if victim is None:
                break
            # So that its parent may be next; back in its place if its row cannot be deleted.
            self.index.remove(victim.hash)
            victims.append(victim)
            freed_bytes += victim.file_bytes
        if not victims:
            return Reclaim.FULL
        try:
            self.remove(victims)
        except sqlite3.Error:
            for victim in reversed(victims):
                self.index.add(victim)
            raise
        self.tier.evicted_block_total += len(victims)
        self.tier.evicted_byte_total += freed_bytes
        return Reclaim.PROGRESS

    def purge(self, records: Sequence[BlockRecord]) -> None:
        """Remove blocks by order, pinned or not. Raises `sqlite3.Error`."""
        self.remove(records)
        self.tier.purged_block_total += len(records)

    def remove(self, records: Sequence[BlockRecord]) -> None:
        """Remove blocks, rows first. Raises `sqlite3.Error`."""
        self._delete_rows([record.hash for record in records])
        for record in records:
            self.index.remove(record.hash)
        self._gone.extend(record.hash for record in records)
        for path in unlink_blocks(records, files=self.files, paths=self.paths):
            self._leftovers.note(path)
        self._weigh()

    def has_file(self, record: BlockRecord) -> bool:
        """Say whether a block's file is there. Raises `OSError`."""
        return exists(self.files, self.paths.block(record.fingerprint, record.hash))

    def quarantine(self, block_hash: BlockHash) -> bool:
        """Put a damaged block's file aside, its row first; False when it is not stored."""
        record = self.index.get(block_hash)
        if record is None:
            return False
        self._forget(block_hash)
        path = self.paths.block(record.fingerprint, block_hash)
        self.integrity.quarantined_block_total += 1
        try:
            self.quarantined.take_in(block_hash, path=path)
        except FileNotFoundError:
            return True
        self._weigh()
        return True

    def drop_missing(self, block_hash: BlockHash) -> bool:
        """Delete the row of a block whose file is gone; False when it is not stored."""
        if block_hash not in self.index:
            return False
        self._forget(block_hash)
        return True

    def _forget(self, block_hash: BlockHash) -> None:
        self._delete_rows([block_hash])
        self.index.remove(block_hash)
        self._gone.append(block_hash)

    def _delete_rows(self, hashes: Sequence[BlockHash]) -> None:
        """Delete rows, before anything else of their blocks goes; on a full disk in the ballast's place."""
        try:
            self.manifest.delete(hashes)
        except sqlite3.Error:
            if not self._ballast.free():
                raise
            self.manifest.delete(hashes)

    def is_out_of_space(self) -> bool:
        """Try whether a little can be written."""
        return self._ballast.is_refused()

    def check_rows(self, hashes: Iterable[BlockHash]) -> list[BlockHash]:
        """Compare the rows of these blocks with their files and repair what differs; return whose did."""
        records = [record for name in hashes if (record := self.index.get(name)) is not None]
        found = examine_rows(
            records, files=self.files, paths=self.paths, now_time=self.clock.wall(), cipher=self.cipher
        )
        wrong = []
        for item in found:
            assert item.hash is not None, item.path
            wrong.append(item.hash)
            if item.finding is Finding.MISSING:
                self.drop_missing(item.hash)
            elif item.record is not None:
                day = self.space.turn_day(self.clock.wall())
                repair([item], files=self.files, paths=self.paths, manifest=self.manifest, day=day)
                self.index.restamp(item.record)
            else:
                self.quarantine(item.hash)
        return wrong

    def touch(self, hashes: Iterable[BlockHash]) -> None:
        """Note a use of each stored block; written to the manifest by `keep_up`."""
        now_time = self.clock.wall()
        for block_hash in hashes:
            if self.index.touch(block_hash, now_time=now_time):
                self._uses[block_hash] = (now_time, self._uses.get(block_hash, (0.0, 0))[1] + 1)

    def keep_up(self) -> None:
        """Write the noted uses in one transaction, and try again to remove what would not go.

        Raises `OSError` when the lock's file was removed: another process may take the directory then.
        """
        if self._lock is not None and not self.files.is_at(self._lock, self.paths.lock):
            raise OSError(errno.ESTALE, "The lock of the cache directory is gone")
        if self._uses:
            self.manifest.touch(self._uses)
            self._uses = {}
        self.check_rows(self._unrecorded)
        self._unrecorded.clear()
        if self._leftovers:
            self._leftovers.retry()
            self._weigh()
        if not self._ballast.is_laid:
            with contextlib.suppress(OSError):
                if self.has_room(BALLAST_BYTES):
                    self._ballast.lay()

    def set_pinned(self, hashes: Sequence[BlockHash], *, pinned: bool) -> int:
        """Pin or unpin the stored ones of these blocks; return how many those were."""
        stored = [item for item in hashes if item in self.index]
        self.manifest.set_pinned(stored, pinned=pinned)
        for block_hash in stored:
            self.index.set_pinned(block_hash, pinned=pinned)
        return len(stored)

    def take_gone(self) -> tuple[BlockHash, ...]:
        """Return the blocks that left since the last call, for whatever reason."""
        gone, self._gone = self._gone, []
        return tuple(gone)

    def used_bytes(self) -> int:
        """Return all bytes the limit counts."""
        return self.index.block_bytes + self.space.other_bytes()

    def _shortage_bytes(self, size_bytes: int) -> int:
        return self.space.shortage_bytes(
            size_bytes,
            block_bytes=self.index.block_bytes,
            free_bytes=self.files.free_bytes(self.paths.root),
        )

    def _weigh(self) -> None:
        """Bring the ledger up to date with everything that is no block."""
        # The log grows and shrinks with every row; a fixed allowance keeps the limit true between looks.
        manifest_bytes = self.files.stat(self.paths.manifest).size_bytes
        self.space.manifest_bytes = manifest_bytes + LOG_ALLOWANCE_BYTES
        self.space.quarantine_bytes = self.quarantined.size_bytes
        self.space.leftover_bytes = self._unknown_bytes + self._leftovers.size_bytes + self._aside_bytes

    def _size_bytes(self, path: str) -> int:
        try:
            return self.files.stat(path).size_bytes
        except FileNotFoundError:
            return 0
