"""Reconciliation: finds where the manifest's rows and the files disagree, and repairs it.

Iterating over a `Scan` changes nothing; `icehouse cache check` shows its findings. `reconcile` repairs in an
order that a crash cannot turn into a row that lies: rows are deleted before their files move, and inserted
after their files are known to be whole.
"""

from __future__ import annotations

import dataclasses
import enum
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, islice
from operator import attrgetter

from icehouse_server.domain.blocks import LAYOUT_ABI, BlockDamage
from icehouse_server.domain.ids import BlockHash
from icehouse_server.storage.disk_error import is_shortage
from icehouse_server.storage.files import FileInfo, Files, opened
from icehouse_server.storage.local.block_format.block_file import read_head
from icehouse_server.storage.local.block_format.header import BlockFile, BlockFileError
from icehouse_server.storage.local.directory.manifest import BlockRecord, Manifest, record_of
from icehouse_server.storage.local.encryption.constants import KEY_DETAIL, Cipher
from icehouse_server.storage.store_paths import StorePaths, is_folder_name, is_partial_name, parse_block_name

_BATCH_COUNT = 512
"""Discrepancies repaired in one transaction; bounds the memory when all files are adopted."""


class ReconcileFinding(enum.StrEnum):
    """One kind of disagreement; each docstring below names its repair."""

    PARTIAL = "partial file"
    """Delete."""
    ADOPTABLE = "file without row, valid"
    """Insert its row."""
    INVALID = "file without row, not valid"
    """Quarantine."""
    DIFFERS = "file of a row, not valid"
    """Delete the row, quarantine the file."""
    REPLACED = "valid file, its row is of the one before it"
    """Store what the file says; the row's history stays."""
    EDITED_ROW = "row is not what was written, its file is valid"
    """Store what the file says."""
    MISSING = "row without file"
    """Delete the row."""
    OTHER_ABI = "other layout ABI"
    """Delete both."""
    UNKNOWN = "file we did not name"
    """Leave it."""
    RESTAMPED = "time or inode changed, header as the row says"
    """Store the new time and inode."""


_ROW_GOES = (
    ReconcileFinding.DIFFERS,
    ReconcileFinding.EDITED_ROW,
    ReconcileFinding.MISSING,
    ReconcileFinding.OTHER_ABI,
)
_OF_EDITED_ROW = {
    ReconcileFinding.ADOPTABLE: ReconcileFinding.EDITED_ROW,
    ReconcileFinding.INVALID: ReconcileFinding.DIFFERS,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Discrepancy:
    """One finding, with the data for its repair."""

    finding: ReconcileFinding
    path: str
    size_bytes: int = 0
    hash: BlockHash | None = None
    detail: str = ""
    record: BlockRecord | None = None
    """The row as it should be, for ADOPTABLE, RESTAMPED, REPLACED and EDITED_ROW."""
    file: BlockFile | None = None


Progress = Callable[[int], None]
"""Called now and then with the number of files checked so far."""


class Scan:
    """One scan of all rows and files. Iterating yields the discrepancies and changes nothing.

    A file is not opened if its size, time and inode match its row. Raises `OSError` if a folder cannot be
    listed, or the process has no descriptors left.
    Afterwards `sound` has the rows that need no repair.
    """

    def __init__(
        self,
        rows: Sequence[BlockRecord],
        edited: Iterable[BlockHash] = (),
        *,
        files: Files,
        paths: StorePaths,
        now_time: float,
        cipher: Cipher | None = None,
        progress: Progress = lambda _: None,
    ) -> None:
        """`edited` are the rows that are not as they were written."""
        self.sound: list[BlockRecord] = []
        self.counts: Counter[ReconcileFinding] = Counter()
        self.file_count = 0
        self.unknown_bytes = 0
        self._rows = rows
        self._edited = set(edited)
        self._files = files
        self._paths = paths
        self._now_time = now_time
        self._cipher = cipher
        self._progress = progress

    def examine_rows(self) -> Iterator[tuple[BlockRecord, Discrepancy]]:
        """Compare only these rows with their files, and yield those that disagree."""
        for folder, group in groupby(self._rows, key=lambda row: self._paths.folder(row.fingerprint)):
            by_name = {os.path.basename(self._paths.block(row.fingerprint, row.hash)): row for row in group}
            infos = self._files.stat_all(folder, list(by_name))
            for name, row in by_name.items():
                path, info = f"{folder}/{name}", infos.get(name)
                if info is None:
                    yield row, Discrepancy(ReconcileFinding.MISSING, path, hash=row.hash)
                elif not row.is_stamped(info):
                    yield row, self._examine(path, info, row)

    def reconcile(self, manifest: Manifest) -> list[BlockRecord]:
        """Repair all discrepancies, in batches; return all usable records, in no particular order.

        Raises `OSError` or `sqlite3.Error`; earlier repairs stay.
        """
        usable: list[BlockRecord] = []
        items = iter(self)
        while batch := list(islice(items, _BATCH_COUNT)):
            self.counts.update(item.finding for item in batch)
            self.unknown_bytes += sum(i.size_bytes for i in batch if i.finding is ReconcileFinding.UNKNOWN)
            usable.extend(self.repair(batch, manifest))
        return self.sound + usable

    def repair(self, items: Sequence[Discrepancy], manifest: Manifest) -> list[BlockRecord]:
        """Repair each finding; return the records that are usable afterwards."""
        manifest.delete([item.hash for item in items if item.hash is not None and item.finding in _ROW_GOES])
        for item in items:
            if item.finding in (ReconcileFinding.PARTIAL, ReconcileFinding.OTHER_ABI):
                self._files.unlink(item.path)
            elif item.finding in (ReconcileFinding.INVALID, ReconcileFinding.DIFFERS):
                assert item.hash is not None, f"{item.path} cannot be quarantined without a hash"
                self._files.rename(item.path, self._paths.quarantined(item.hash))
        usable = [(item.record, item.file) for item in items if item.record and item.file]
        # A process may have died right after it named a file: the name must be durable before its row is.
        for folder in dict.fromkeys(os.path.dirname(item.path) for item in items if item.file):
            self._files.fsync_dir(folder)
        known = manifest.fingerprints()
        for record, file in {record.fingerprint: (record, file) for record, file in usable}.values():
            if record.fingerprint not in known:
                details = {KEY_DETAIL: file.key_id.hex()} if file.key_id else {}
                manifest.add_fingerprint(record.fingerprint, details=details, now_time=record.created_time)
        manifest.insert(usable)
        return [record for record, _ in usable]

    def __iter__(self) -> Iterator[Discrepancy]:
        rows = {self._paths.block(row.fingerprint, row.hash): row for row in self._rows}
        for folder in self._files.list(self._paths.blocks):
            path = f"{self._paths.blocks}/{folder.name}"
            if folder.is_directory and is_folder_name(folder.name):
                yield from self._scan_folder(path, rows)
            else:
                yield Discrepancy(ReconcileFinding.UNKNOWN, path, folder.size_bytes)
        for path, row in rows.items():
            yield Discrepancy(ReconcileFinding.MISSING, path, hash=row.hash)
        for block_hash in self._edited:
            yield Discrepancy(ReconcileFinding.MISSING, "", hash=block_hash)
        self._progress(self.file_count)

    def _scan_folder(self, folder_path: str, rows: dict[str, BlockRecord]) -> Iterator[Discrepancy]:
        """Yield the discrepancies of one folder, and remove its files' rows from `rows`."""
        # In hash order, so that adopted rows fill the manifest's pages one after another.
        for info in sorted(self._files.list(folder_path), key=attrgetter("name")):
            path = f"{folder_path}/{info.name}"
            row = rows.pop(path, None)
            self.file_count += 1
            if self.file_count % 1000 == 0:
                self._progress(self.file_count)
            if row is not None and row.layout_abi != LAYOUT_ABI:
                yield Discrepancy(ReconcileFinding.OTHER_ABI, path, info.size_bytes, row.hash)
            elif row is not None and row.is_stamped(info):
                self.sound.append(row)
            else:
                item = self._examine(path, info, row)
                if row is None and item.hash in self._edited:
                    # A row may be damaged or wrong: the file proves itself, whatever the row says.
                    self._edited.remove(item.hash)
                    item = dataclasses.replace(item, finding=_OF_EDITED_ROW.get(item.finding, item.finding))
                yield item

    def _examine(self, path: str, info: FileInfo, row: BlockRecord | None) -> Discrepancy:
        """Look into a file that does not obviously match a row."""
        if not info.is_directory and is_partial_name(info.name):
            return Discrepancy(ReconcileFinding.PARTIAL, path, info.size_bytes)
        name_hash = None if info.is_directory else parse_block_name(info.name)
        if name_hash is None:
            return Discrepancy(ReconcileFinding.UNKNOWN, path, info.size_bytes)
        try:
            file = self._read(path)
        except BlockFileError as error:
            finding = ReconcileFinding.INVALID if row is None else ReconcileFinding.DIFFERS
            finding = ReconcileFinding.OTHER_ABI if error.damage is BlockDamage.OTHER_ABI else finding
            return Discrepancy(finding, path, info.size_bytes, name_hash, str(error))
        used_time = min(info.mtime_ns / 1e9, self._now_time)
        fresh = record_of(file, mtime_ns=info.mtime_ns, inode=info.inode, used_time=used_time)
        if row is None:
            finding = ReconcileFinding.ADOPTABLE
        else:
            fresh = fresh.with_history_of(row)
            is_same = row._replace(mtime_ns=info.mtime_ns, inode=info.inode) == fresh
            # After a crash between naming a richer file and writing its row, the row is of the earlier file.
            finding = ReconcileFinding.RESTAMPED if is_same else ReconcileFinding.REPLACED
        return Discrepancy(finding, path, info.size_bytes, name_hash, "", fresh, file)

    def _read(self, path: str) -> BlockFile:
        """Return what a file says; it must be the block of its name.

        Raises `BlockFileError`, and `OSError` if the process lacks descriptors or memory: then the file may
        be whole.
        """
        try:
            with opened(self._files, path) as descriptor:
                file = read_head(self._files, descriptor, cipher=self._cipher)
        except OSError as error:
            if is_shortage(error):
                raise
            raise BlockFileError(BlockDamage.IO, f"it cannot be read: {error}") from error
        if path != self._paths.block(file.outline.fingerprint, file.outline.hash):
            raise BlockFileError(BlockDamage.MISMATCH, "it holds another block than its name says")
        return file
