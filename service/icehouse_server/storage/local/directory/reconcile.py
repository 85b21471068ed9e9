"""Reconciliation: what is wrong between the manifest's rows and the files, and its repair.

A `Walk` only looks, and is what `icehouse cache check` shows; `reconcile` acts on the same
findings in an order that a crash cannot turn into a lying row: rows are deleted before
their files move, and inserted after their files are known to be whole.
"""

from __future__ import annotations

import dataclasses
import enum
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, islice
from operator import attrgetter

from icehouse_server.domain.blocks import LAYOUT_ABI, Damage
from icehouse_server.domain.ids import BlockHash
from icehouse_server.storage.disk_error import is_shortage
from icehouse_server.storage.files import FileInfo, Files, opened
from icehouse_server.storage.local.block_format.block_file import read_head
from icehouse_server.storage.local.block_format.header import BlockFile, BlockFileError
from icehouse_server.storage.local.directory.commit import move_to_quarantine
from icehouse_server.storage.local.directory.manifest import Manifest
from icehouse_server.storage.local.directory.record import BlockRecord, record_of
from icehouse_server.storage.local.encryption.constants import KEY_DETAIL, Cipher
from icehouse_server.storage.paths import StorePaths, is_folder_name, is_partial_name, parse_block_name


class Finding(enum.StrEnum):
    """One kind of disagreement, with its repair."""

    PARTIAL = "partial file"
    """Delete."""
    ADOPTABLE = "file without row, valid"
    """Insert its row."""
    INVALID = "file without row, not valid"
    """Quarantine."""
    DIFFERS = "file of a row, not valid"
    """Delete the row, quarantine the file."""
    REPLACED = "valid file, its row is of the one before it"
    """Store what the file says; its history goes on."""
    EDITED_ROW = "row is not what was written, its file is valid"
    """Store what the file says."""
    MISSING = "row without file"
    """Delete the row."""
    OTHER_ABI = "other layout ABI"
    """Delete both."""
    UNKNOWN = "file we did not name"
    """Leave it."""
    RESTAMPED = "time or inode changed, header as the row says"
    """Store the new ones."""


@dataclasses.dataclass(frozen=True, slots=True)
class Discrepancy:
    """One finding, with what its repair needs."""

    finding: Finding
    path: str
    size_bytes: int = 0
    hash: BlockHash | None = None
    detail: str = ""
    record: BlockRecord | None = None
    """The row as it should be, for ADOPTABLE, RESTAMPED, REPLACED and EDITED_ROW."""
    file: BlockFile | None = None


Progress = Callable[[int], None]
"""Called now and then with the number of files looked at so far."""


class Walk:
    """One pass over all rows and files. Iterating yields the discrepancies and changes nothing.

    A file whose size, time and inode are its row's is not opened. Raises `OSError`
    when a folder cannot be listed, or the process has no descriptor left to look with.
    Afterwards `sound` holds the rows that need nothing.
    """

    def __init__(
        self,
        rows: Sequence[BlockRecord],
        edited: Iterable[BlockHash],
        *,
        files: Files,
        paths: StorePaths,
        now_time: float,
        cipher: Cipher | None = None,
        progress: Progress = lambda _: None,
    ) -> None:
        self.sound: list[BlockRecord] = []
        self.counts: Counter[Finding] = Counter()
        self.file_count = 0
        self.unknown_bytes = 0
        self._given = rows
        self._rows: dict[str, BlockRecord] = {}
        self._edited = set(edited)
        self._files = files
        self._paths = paths
        self._now_time = now_time
        self._cipher = cipher
        self._progress = progress

    def __iter__(self) -> Iterator[Discrepancy]:
        for item in self._find():
            self.counts[item.finding] += 1
            if item.finding is Finding.UNKNOWN:
                self.unknown_bytes += item.size_bytes
            yield item

    def _find(self) -> Iterator[Discrepancy]:
        self._rows = {self._paths.block(row.fingerprint, row.hash): row for row in self._given}
        for folder in self._files.list(self._paths.blocks):
            path = f"{self._paths.blocks}/{folder.name}"
            if folder.is_directory and is_folder_name(folder.name):
                yield from self._find_in_folder(path)
            else:
                yield Discrepancy(Finding.UNKNOWN, path, folder.size_bytes)
        for path, row in self._rows.items():
            yield Discrepancy(Finding.MISSING, path, hash=row.hash)
        for block_hash in self._edited:
            yield Discrepancy(Finding.MISSING, "", hash=block_hash)
        self._progress(self.file_count)

    def _find_in_folder(self, folder_path: str) -> Iterator[Discrepancy]:
        # In the order of their hashes, rows that are adopted fill the manifest's pages one after another.
        for info in sorted(self._files.list(folder_path), key=attrgetter("name")):
            path = f"{folder_path}/{info.name}"
            row = self._rows.pop(path, None)
            self.file_count += 1
            if self.file_count % 1000 == 0:
                self._progress(self.file_count)
            if row is not None and row.layout_abi != LAYOUT_ABI:
                yield Discrepancy(Finding.OTHER_ABI, path, info.size_bytes, row.hash)
            elif row is not None and row.is_stamped(info):
                self.sound.append(row)
            else:
                yield self._examine(path, info, row)

    def _examine(self, path: str, info: FileInfo, row: BlockRecord | None) -> Discrepancy:
        found = examine_file(path, info, row, files=self._files, now_time=self._now_time, cipher=self._cipher)
        name_hash = parse_block_name(info.name)
        if row is not None or name_hash not in self._edited:
            return found
        self._edited.remove(name_hash)
        # A row may be damaged, or a lie: the file proves itself, whatever the row says.
        of_row = {Finding.ADOPTABLE: Finding.EDITED_ROW, Finding.INVALID: Finding.DIFFERS}
        return dataclasses.replace(found, finding=of_row.get(found.finding, found.finding))


def examine_rows(
    rows: Iterable[BlockRecord], *, files: Files, paths: StorePaths, now_time: float, cipher: Cipher | None
) -> Iterator[Discrepancy]:
    """Compare a few rows with their files, as a walk would, and yield what disagrees."""
    for folder, group in groupby(rows, key=lambda row: paths.folder(row.fingerprint)):
        by_name = {os.path.basename(paths.block(row.fingerprint, row.hash)): row for row in group}
        infos = files.stat_all(folder, list(by_name))
        for name, row in by_name.items():
            path, info = f"{folder}/{name}", infos.get(name)
            if info is None:
                yield Discrepancy(Finding.MISSING, path, hash=row.hash)
            elif not row.is_stamped(info):
                yield examine_file(path, info, row, files=files, now_time=now_time, cipher=cipher)


def examine_file(
    path: str,
    info: FileInfo,
    row: BlockRecord | None,
    *,
    files: Files,
    now_time: float,
    cipher: Cipher | None,
) -> Discrepancy:
    """Look into a file that is not plainly what a row says."""
    if not info.is_directory and is_partial_name(info.name):
        return Discrepancy(Finding.PARTIAL, path, info.size_bytes)
    name_hash = None if info.is_directory else parse_block_name(info.name)
    if name_hash is None:
        return Discrepancy(Finding.UNKNOWN, path, info.size_bytes)
    file, problem = _read(path, files, cipher)
    if problem is not None and problem.damage is Damage.OTHER_ABI:
        return Discrepancy(Finding.OTHER_ABI, path, info.size_bytes, name_hash, str(problem))
    if file is not None and not path.endswith(
        StorePaths("").block(file.outline.fingerprint, file.outline.hash)
    ):
        problem = BlockFileError(Damage.MISMATCH, "it holds another block than its name says")
    if file is None or problem is not None:
        finding = Finding.INVALID if row is None else Finding.DIFFERS
        return Discrepancy(finding, path, info.size_bytes, name_hash, str(problem))
    used_time = min(info.mtime_ns / 1e9, now_time)
    fresh = record_of(file, mtime_ns=info.mtime_ns, inode=info.inode, used_time=used_time)
    if row is None:
        return Discrepancy(Finding.ADOPTABLE, path, info.size_bytes, name_hash, "", fresh, file)
    same = fresh._replace(
        created_time=row.created_time,
        last_used_time=row.last_used_time,
        hit_count=row.hit_count,
        pinned=row.pinned,
    )
    if row._replace(mtime_ns=info.mtime_ns, inode=info.inode) == same:
        return Discrepancy(Finding.RESTAMPED, path, info.size_bytes, name_hash, "", same, file)
    # A crash between a richer block's name and its row: the file proves itself, whatever the row says.
    return Discrepancy(Finding.REPLACED, path, info.size_bytes, name_hash, "", same, file)


def reconcile(
    walk: Walk, *, files: Files, paths: StorePaths, manifest: Manifest, day: int
) -> list[BlockRecord]:
    """Repair what a walk finds, in batches; return all usable records, in no order.

    Raises `OSError` or `sqlite3.Error`; whatever was repaired before stays repaired.
    """
    usable: list[BlockRecord] = []
    findings = iter(walk)
    while batch := list(islice(findings, _BATCH_COUNT)):
        usable.extend(repair(batch, files=files, paths=paths, manifest=manifest, day=day))
    return walk.sound + usable


def repair(
    items: Sequence[Discrepancy], *, files: Files, paths: StorePaths, manifest: Manifest, day: int
) -> list[BlockRecord]:
    """Do what each finding asks for; return the records that are usable after it."""
    manifest.delete([item.hash for item in items if item.hash is not None and item.finding in _ROW_GOES])
    for item in items:
        if item.finding in (Finding.PARTIAL, Finding.OTHER_ABI):
            files.unlink(item.path)
        elif item.finding in (Finding.INVALID, Finding.DIFFERS):
            assert item.hash is not None, f"{item.path} is to be quarantined but is not named as a block"
            move_to_quarantine(item.hash, path=item.path, files=files, paths=paths)
    kept = [(item.record, item.file) for item in items if item.record is not None and item.file is not None]
    # A name may be a dead process's, which came no further than giving it: it must not go behind its row.
    for folder in dict.fromkeys(os.path.dirname(item.path) for item in items if item.file is not None):
        files.fsync_dir(folder)
    unnamed = {record.fingerprint: (record, file) for record, file in kept}
    for fingerprint in manifest.fingerprints():
        unnamed.pop(fingerprint, None)
    for record, file in unnamed.values():
        details = {KEY_DETAIL: file.key_id.hex()} if file.key_id else {}
        manifest.add_fingerprint(record.fingerprint, details=details, now_time=record.created_time)
    manifest.insert(kept, day=day, written_bytes=0)
    return [record for record, _ in kept]


_BATCH_COUNT = 512
"""Discrepancies repaired in one transaction; bounds what an adoption of everything holds in memory."""
_ROW_GOES = frozenset({Finding.DIFFERS, Finding.EDITED_ROW, Finding.MISSING, Finding.OTHER_ABI})


def _read(path: str, files: Files, cipher: Cipher | None) -> tuple[BlockFile | None, BlockFileError | None]:
    try:
        with opened(files, path) as descriptor:
            return read_head(files, descriptor, cipher=cipher), None
    except BlockFileError as error:
        return None, error
    except OSError as error:
        if is_shortage(error):
            raise  # it may be whole
        return None, BlockFileError(Damage.IO, f"it cannot be read: {error}")
