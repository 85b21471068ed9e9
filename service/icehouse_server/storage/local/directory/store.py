"""Store: the SSD directory as a whole. Its lock, manifest, files and limits always agree.

Owned by the storage thread; every method does its work before it returns. Errors of the disk are
raised as `OSError` or `sqlite3.Error` and leave the store consistent: a block is either
committed and in the index, or neither. The order of a commit is the design.

Commit: write `<name>.partial` (exclusively created) -> fsync -> close -> rename -> fsync the
directory -> insert the row. Removal: delete the row -> unlink. So a crash at any point leaves
only garbage that the next start repairs (a partial file, a file without a row), never a row that lies.
One block may be written while the disk makes the previous one durable; each keeps its own order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future

from icehouse_server.clock import Clock
from icehouse_server.domain.blocks import BlockDamage
from icehouse_server.domain.cache_stats import (
    IntegrityStats,
    PromoteStats,
    ReconcileReport,
    SpillDropCause,
    SpillStats,
    TierStats,
)
from icehouse_server.domain.ids import BlockHash, Fingerprint
from icehouse_server.pins import NOT_PINNED, pin_end_time
from icehouse_server.storage.api import LearnedRates, StorageFailure
from icehouse_server.storage.files import Files, exists, size_at
from icehouse_server.storage.local.block_format.block_file import PreparedBlock, write_block
from icehouse_server.storage.local.block_format.header import BlockFile
from icehouse_server.storage.local.directory.disk_index import DiskIndex
from icehouse_server.storage.local.directory.lock import leave_mark, take_lock
from icehouse_server.storage.local.directory.manifest import (
    LOG_ALLOWANCE_BYTES,
    BlockRecord,
    Manifest,
    record_of,
)
from icehouse_server.storage.local.directory.open import changed_code, open_store
from icehouse_server.storage.local.directory.reconcile import ReconcileFinding, Scan
from icehouse_server.storage.local.directory.space import (
    BALLAST_BYTES,
    BallastFile,
    ExtraFiles,
    Space,
    SpaceReclaim,
    day_of,
)
from icehouse_server.storage.local.encryption.constants import Cipher
from icehouse_server.storage.storage_settings import StorageSettings
from icehouse_server.storage.store_paths import PARTIAL_SUFFIX, StorePaths

_EVICTION_BATCH_COUNT = 8
"""Blocks evicted by one call, so that other work never waits long behind evictions."""


@dataclasses.dataclass(frozen=True, slots=True)
class Writing:
    """A block whose file is written under its partial name, and perhaps not durable yet."""

    prepared: PreparedBlock
    file: BlockFile
    descriptor: int
    path: str
    """The final name."""
    synced: Future[None] | None
    """Done once the file is on the medium; None if no sync was requested yet."""
    began: float
    """`Clock.monotonic`."""
    start_time: float
    """Wall clock."""

    @property
    def partial(self) -> str:
        return self.path + PARTIAL_SUFFIX


@dataclasses.dataclass(slots=True)
class ModelCounts:
    """What has happened to one model's blocks since it was opened, counted by the storage thread."""

    spill: SpillStats = dataclasses.field(default_factory=SpillStats)
    """Accepted = persisted + dropped + still queued."""
    drops: Counter[SpillDropCause] = dataclasses.field(default_factory=Counter)
    """Drops by this thread; the engine counts blocks refused because the queue was full."""
    promote: PromoteStats = dataclasses.field(default_factory=PromoteStats)
    tier: TierStats = dataclasses.field(default_factory=TierStats)
    """Blocks that left the tier."""
    integrity: IntegrityStats = dataclasses.field(default_factory=IntegrityStats)
    """Damage that was found."""

    @property
    def finished_spill_total(self) -> int:
        """Accepted blocks that have their outcome; those of one model finish in the order of acceptance."""
        return self.spill.persisted_block_total + self.drops.total()

    @property
    def queued_spill_count(self) -> int:
        return self.spill.accepted_block_total - self.finished_spill_total


class BlockStore:
    """Blocks by hash on one disk. Call `lock`, `open`, `admit` for each model whose blocks are written, then
    anything, and `close` at the end."""

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
        self.counts: dict[Fingerprint, ModelCounts] = {}
        """Of the open models, in the order in which they were opened."""
        self._nobodys_counts = ModelCounts()
        self.syncs: Executor | None = None
        """Makes files durable in parallel to the storage thread; None: the storage thread does it itself."""
        self.extras = ExtraFiles(files, self.paths)
        self.space = Space(settings, self.extras)
        self.ballast = BallastFile(files, self.paths.ballast)
        self._manifest: Manifest | None = None
        self._lock: int | None = None
        self._uses: dict[BlockHash, tuple[float, int]] = {}
        self.rates: dict[Fingerprint, LearnedRates] = {}
        """The latest learned rates of each model."""
        self._new_rates: dict[Fingerprint, LearnedRates] = {}
        """Rates that the manifest does not have yet."""
        self._gone: defaultdict[Fingerprint, list[BlockHash]] = defaultdict(list)
        self._unrecorded: set[BlockHash] = set()
        """Blocks whose file may differ from their row, because the disk refused to write the row."""

    @property
    def is_open(self) -> bool:
        return self._manifest is not None

    @property
    def manifest(self) -> Manifest:
        assert self._manifest is not None, "The store is not open"
        return self._manifest

    def counts_of(self, record: BlockRecord) -> ModelCounts:
        """Return the counts for a block's events: its model's, or if that is not open those of the first open
        model, so that sums over the open models leave nothing out."""
        first = next(iter(self.counts.values()), self._nobodys_counts)
        return self.counts.get(record.fingerprint, first)

    def lock(self) -> None:
        """Lock the directory for this process. Raises `StartError` naming the owner, or `OSError`."""
        self._lock = take_lock(self.files, self.paths)

    def unlock(self) -> None:
        if self._lock is not None:
            descriptor, self._lock = self._lock, None
            with contextlib.suppress(OSError):
                self.files.close(descriptor)

    def open(self) -> None:
        """Open the manifest and repair disagreements; `report` and `index` hold the result.

        Raises `StartError` if an earlier `lock` failed and another process has the directory now.
        """
        if self._lock is None:
            self.lock()
        opened = open_store(self.paths, files=self.files, clock=self.clock, cipher=self.cipher)
        self._manifest = opened.manifest
        self.report = opened.report
        self.index = DiskIndex(opened.records)
        self._unrecorded.clear()
        self.extras.leftovers.clear()
        self.extras.quarantined = opened.quarantined
        self.extras.unknown_bytes = opened.unknown_bytes
        sizes = {path: size_at(self.files, path) for path in self.paths.manifests_aside}
        self.extras.aside = {path: size for path, size in sizes.items() if size}
        self.extras.trim_quarantine()
        self.space.written_by_day = opened.manifest.written_days()
        self.rates = opened.manifest.rates() | self._new_rates
        if not self.ballast.is_there:
            with contextlib.suppress(OSError):
                self.ballast.write()
        self._weigh_manifest()

    def admit(self, fingerprint: Fingerprint, details: Mapping[str, str]) -> tuple[str, ...]:
        """Create the folder and the row of a model. Return the changed modules of its code, if they are the
        reason why it has no blocks. Raises `OSError` or `sqlite3.Error`; running it again is safe."""
        self.files.make_dir(self.paths.folder(fingerprint))
        self.files.fsync_dir(self.paths.blocks)
        self.manifest.add_fingerprint(fingerprint, details=details, now_time=self.clock.wall())
        self._weigh_manifest()
        if self.index.has_blocks_of(fingerprint):
            return ()
        return changed_code(details, self.manifest.fingerprints(), self.index)

    def close(self) -> bool:
        """Flush recency, close the manifest and mark the directory clean; True if all of it worked."""
        if self._manifest is None:
            return False
        try:
            self.maintain()
            self._manifest.close()
            self._manifest = None
            if not (self.extras.leftovers or self.extras.unknown_bytes):
                leave_mark(self.files, self.paths)
        except (OSError, sqlite3.Error):
            self.abandon()
            return False
        return True

    def abandon(self) -> None:
        """Forget the manifest as a crash would; committed blocks stay committed."""
        manifest, self._manifest = self._manifest, None
        if manifest is not None:
            with contextlib.suppress(sqlite3.Error):
                manifest.close(checkpoint=False)

    def begin(self, prepared: PreparedBlock) -> Writing:
        """Write the file of a block that is not completely stored, and have `syncs` make it durable;
        `finish` or `undo` must follow.

        Raises `OSError`; then no file remains unless even removing it failed.
        """
        header, began, start_time = prepared.block.header, self.clock.monotonic(), self.clock.wall()
        assert not self.index.covers(prepared.block), f"Block {header.hash.hex()} is stored already"
        path = self.paths.block(header.fingerprint, header.hash)
        try:
            descriptor = self.files.create(path + PARTIAL_SUFFIX)
            try:
                file = write_block(self.files, descriptor, prepared)
            except OSError:
                # Report the first error; a close that fails too adds nothing.
                with contextlib.suppress(OSError):
                    self.files.close(descriptor)
                raise
        except OSError:
            self.extras.remove(path + PARTIAL_SUFFIX)
            raise
        self.space.partial_bytes += prepared.file_bytes
        synced = self.syncs.submit(self.files.fsync, descriptor) if self.syncs else None
        return Writing(prepared, file, descriptor, path, synced, began, start_time)

    def finish(self, writing: Writing, *, pin_end_time: float = NOT_PINNED) -> BlockRecord:
        """Wait until a block's file is durable, give it its name and insert its row; return the row.

        A stored block of this name with fewer regions is replaced, file and row, and keeps its history.
        Raises `OSError` or `sqlite3.Error`; then there is no row, and no file unless even removing it failed.
        A file that has replaced another stays, under the other's row.
        """
        self.space.partial_bytes -= writing.prepared.file_bytes
        try:
            self._sync_and_close(writing)
        except OSError:
            self.extras.remove(writing.partial)
            raise
        return self.commit(writing.file, writing.partial, pin_end_time=pin_end_time)

    def commit(self, file: BlockFile, partial: str, *, pin_end_time: float = NOT_PINNED) -> BlockRecord:
        """Give a block's durable file its name and insert its row; return the row. Raises like `finish`."""
        now_time = self.clock.wall()
        outline = file.outline
        path = self.paths.block(outline.fingerprint, outline.hash)
        replaced = self.index.get(outline.hash)
        try:
            self.files.rename(partial, path)
            self.files.fsync_dir(self.paths.folder(outline.fingerprint))
            info = self.files.stat(path)
            record = record_of(file, mtime_ns=info.mtime_ns, inode=info.inode, used_time=now_time)
            record = record.with_history_of(replaced) if replaced else record
            end_time = max(pin_end_time, record.pin_end_time)
            record = record._replace(last_used_time=now_time, pin_end_time=end_time)
            self.manifest.insert([(record, file)], day=day_of(now_time), written_bytes=record.file_bytes)
        except (OSError, sqlite3.Error):
            self.extras.remove(partial)
            if replaced is None:
                self.extras.remove(path)
            else:
                # The new file may be the block's only copy. It proves itself.
                self._unrecorded.add(replaced.hash)
            raise
        self.extras.leftovers.pop(path, None)
        self.index.put(record)
        self.space.note_written(record.file_bytes, now_time=now_time)
        self._weigh_manifest()
        return record

    def undo(self, writing: Writing) -> None:
        self.space.partial_bytes -= writing.prepared.file_bytes
        with contextlib.suppress(OSError):
            # Never close it during a sync: the descriptor's number could then be another file's.
            self._sync_and_close(writing)
        self.extras.remove(writing.partial)

    def _sync_and_close(self, writing: Writing) -> None:
        """Return once the file is on the medium; it is closed even when this raises."""
        try:
            if writing.synced is None:
                self.files.fsync(writing.descriptor)
            else:
                writing.synced.result()
        except OSError:
            with contextlib.suppress(OSError):
                self.files.close(writing.descriptor)
            raise
        self.files.close(writing.descriptor)

    def has_space(self, size_bytes: int) -> bool:
        """Return whether `size_bytes` more may be written without evicting anything."""
        return self._shortage_bytes(size_bytes) == 0

    def make_space(self, size_bytes: int) -> SpaceReclaim:
        """Evict a few blocks if `size_bytes` more would exceed the limit or violate the free-space floor."""
        shortage_bytes = self._shortage_bytes(size_bytes)
        return self.reclaim(shortage_bytes) if shortage_bytes else SpaceReclaim.READY

    def reclaim(self, size_bytes: int) -> SpaceReclaim:
        """Remove one retained file, or a batch of least recently used blocks, up to `size_bytes`."""
        if self.extras.reclaim():
            return SpaceReclaim.PROGRESS
        self.index.end_pins(self.clock.wall())
        victims: list[BlockRecord] = []
        freed_bytes = 0
        while len(victims) < _EVICTION_BATCH_COUNT and freed_bytes < size_bytes:
            victim = self.index.next_victim()
            if victim is None:
                break
            # Removed now, so that its parent may be next; put back if its row cannot be deleted.
            self.index.remove(victim.hash)
            victims.append(victim)
            freed_bytes += victim.file_bytes
        if not victims:
            return SpaceReclaim.FULL
        try:
            self.remove(victims)
        except sqlite3.Error:
            for victim in reversed(victims):
                self.index.put(victim)
            raise
        for victim in victims:
            tier = self.counts_of(victim).tier
            tier.evicted_block_total += 1
            tier.evicted_byte_total += victim.file_bytes
        return SpaceReclaim.PROGRESS

    def remove(self, records: Sequence[BlockRecord]) -> None:
        """Remove blocks, pinned or not, rows first. Raises `sqlite3.Error`."""
        self.forget(records)
        for record in records:
            self.extras.remove(self.paths.block(record.fingerprint, record.hash))
        self._weigh_manifest()

    def put_in_quarantine(self, record: BlockRecord) -> None:
        """Delete a damaged block's row, then move its file to quarantine."""
        self.forget([record])
        self.counts_of(record).integrity.quarantined_block_total += 1
        with contextlib.suppress(FileNotFoundError):
            path = self.paths.block(record.fingerprint, record.hash)
            self.extras.put_in_quarantine(record.hash, path=path)

    def forget(self, records: Sequence[BlockRecord]) -> None:
        """Delete rows, before anything else of their blocks is removed; on a full disk the ballast frees
        space for that."""
        hashes = [record.hash for record in records]
        try:
            self.manifest.delete(hashes)
        except sqlite3.Error:
            if not self.ballast.free():
                raise
            self.manifest.delete(hashes)
        for record in records:
            self.index.remove(record.hash)
            self._gone[record.fingerprint].append(record.hash)

    def retire(self, failure: StorageFailure) -> None:
        """Remove from the store a block that could not be used, unless it was replaced since it was read.
        Raises `OSError` or `sqlite3.Error`."""
        record = None if failure.hash is None else self.index.get(failure.hash)
        if record is None or failure.cause is BlockDamage.MEMORY:
            return
        if failure.cause is BlockDamage.MISSING:
            if not exists(self.files, self.paths.block(record.fingerprint, record.hash)):
                self.forget([record])
        elif failure.header_checksum in (None, record.header_checksum):
            self.put_in_quarantine(record)

    def check_rows(self, hashes: Iterable[BlockHash]) -> list[BlockHash]:
        """Compare these blocks' rows with their files and repair differences; return those that differed."""
        records = [record for name in hashes if (record := self.index.get(name)) is not None]
        scan = Scan(
            records, files=self.files, paths=self.paths, now_time=self.clock.wall(), cipher=self.cipher
        )
        differing = []
        for record, item in scan.examine_rows():
            differing.append(record.hash)
            if item.finding is ReconcileFinding.MISSING:
                self.forget([record])
            elif item.record is not None:
                scan.repair([item], self.manifest)
                self.index.replace(item.record)
            else:
                self.put_in_quarantine(record)
        return differing

    def touch(self, hashes: Iterable[BlockHash]) -> None:
        """Note a use of each stored block; `maintain` writes it to the manifest."""
        now_time = self.clock.wall()
        for block_hash in hashes:
            if self.index.touch(block_hash, now_time=now_time):
                self._uses[block_hash] = (now_time, self._uses.get(block_hash, (0.0, 0))[1] + 1)

    def keep_rates(self, fingerprint: Fingerprint, rates: LearnedRates) -> None:
        """Note a model's learned rates; `maintain` writes them to the manifest."""
        self.rates[fingerprint] = self._new_rates[fingerprint] = rates

    def maintain(self) -> None:
        """Write the noted uses and rates, and try again to remove leftovers.

        Raises `OSError` if the lock file was removed: another process may then take the directory.
        """
        if self._lock is not None and not self.files.is_at(self._lock, self.paths.lock):
            raise OSError(errno.ESTALE, "The lock of the cache directory is gone")
        if self._uses:
            self.manifest.touch(self._uses)
            self._uses = {}
        if self._new_rates:
            self.manifest.set_rates(self._new_rates)
            self._new_rates = {}
        self.check_rows(self._unrecorded)
        self._unrecorded.clear()
        for path in list(self.extras.leftovers):
            self.extras.remove(path)
        if not self.ballast.is_there:
            with contextlib.suppress(OSError):
                if self.has_space(BALLAST_BYTES):
                    self.ballast.write()

    def pin(self, hashes: Iterable[BlockHash], end_time: float) -> None:
        """Pin the stored ones among these blocks until then (`Clock.wall`), or unpin them."""
        stored = filter(None, map(self.index.get, hashes))
        end_times = {record.hash: pin_end_time(record.pin_end_time, end_time) for record in stored}
        self.manifest.set_pins(end_times)
        for block_hash, time in end_times.items():
            self.index.set_pin(block_hash, time)

    def take_gone(self) -> Mapping[Fingerprint, Sequence[BlockHash]]:
        """Return the blocks of each model that left since the last call, for any reason."""
        gone, self._gone = self._gone, defaultdict(list)
        return gone

    def used_bytes(self) -> int:
        return self.index.block_bytes + self.space.other_bytes()

    def _shortage_bytes(self, size_bytes: int) -> int:
        return self.space.shortage_bytes(
            size_bytes,
            block_bytes=self.index.block_bytes,
            free_bytes=self.files.free_bytes(self.paths.root),
        )

    def _weigh_manifest(self) -> None:
        # The log grows and shrinks with every row; a fixed allowance covers it between these calls.
        manifest_bytes = self.files.stat(self.paths.manifest).size_bytes
        self.space.manifest_bytes = manifest_bytes + LOG_ALLOWANCE_BYTES
