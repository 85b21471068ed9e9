"""What is wrong between the manifest's rows and the files, and its repair.

`diff` only looks, and is what `icehouse cache check` shows; `repair` acts on the same
findings in an order that a crash cannot turn into a lying row: rows are deleted before
their files move, and inserted after their files are known to be whole.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable, Sequence

from service.domain.blocks import LAYOUT_ABI
from service.domain.ids import BlockHash
from service.kv.block_file import read_head
from service.kv.block_head import BlockFile, BlockFileError, Damage
from service.kv.commit import move_to_quarantine
from service.kv.files import FileInfo, Files
from service.kv.manifest import Manifest
from service.kv.records import BlockRecord, record_of
from service.kv.store_paths import StorePaths, is_folder_name, is_partial_name, parse_block_name


class Finding(enum.StrEnum):
    """One kind of disagreement, with its repair."""

    PARTIAL = "partial file"
    """Delete."""
    ADOPTABLE = "file without row, valid"
    """Insert its row."""
    INVALID = "file without row, not valid"
    """Quarantine."""
    DIFFERS = "file is not what its row says"
    """Delete the row, quarantine the file."""
    EDITED_ROW = "row is not what was written"
    """Delete the row, quarantine the file."""
    MISSING = "row without file"
    """Delete the row."""
    OTHER_ABI = "other layout ABI"
    """Delete both."""
    UNKNOWN = "file we did not name"
    """Leave it."""
    RESTAMPED = "modification time changed, contents as the row says"
    """Store the new time."""


@dataclasses.dataclass(frozen=True, slots=True)
class Discrepancy:
    """One finding, with what its repair needs."""

    finding: Finding
    path: str
    size_bytes: int = 0
    hash: BlockHash | None = None
    detail: str = ""
    record: BlockRecord | None = None
    """The row as it should be, for ADOPTABLE and RESTAMPED."""
    file: BlockFile | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Diff:
    """Rows that need nothing, and everything else."""

    sound: tuple[BlockRecord, ...]
    """In the order of the rows given."""
    discrepancies: tuple[Discrepancy, ...]
    file_count: int

    def count(self, *findings: Finding) -> int:
        """Return how many discrepancies are of these kinds."""
        return sum(1 for item in self.discrepancies if item.finding in findings)


Progress = Callable[[int], None]
"""Called now and then with the number of files looked at so far."""


def diff(
    rows: Sequence[BlockRecord],
    edited: Iterable[BlockHash],
    *,
    files: Files,
    paths: StorePaths,
    now_time: float,
    progress: Progress = lambda _: None,
) -> Diff:
    """Compare every row with every file. Nothing is changed.

    A file whose size and modification time are its row's is not opened. Raises `OSError`
    when a folder cannot be listed.
    """
    by_path = {paths.block(row.fingerprint, row.hash): row for row in rows}
    edited_hashes = set(edited)
    found: list[Discrepancy] = []
    sound: set[BlockHash] = set()
    file_count = 0
    for folder in files.list(paths.blocks):
        folder_path = f"{paths.blocks}/{folder.name}"
        if not (folder.is_directory and is_folder_name(folder.name)):
            found.append(Discrepancy(Finding.UNKNOWN, folder_path, folder.size_bytes))
            continue
        for info in files.list(folder_path):
            path = f"{folder_path}/{info.name}"
            row = by_path.pop(path, None)
            if row is not None and row.mtime_ns == info.mtime_ns and row.file_bytes == info.size_bytes:
                if row.layout_abi == LAYOUT_ABI:
                    sound.add(row.hash)
                else:
                    found.append(Discrepancy(Finding.OTHER_ABI, path, info.size_bytes, row.hash))
            else:
                found.append(_examine(path, info, row, edited_hashes, files=files, now_time=now_time))
            file_count += 1
            if file_count % 1000 == 0:
                progress(file_count)
    found.extend(Discrepancy(Finding.MISSING, path, hash=row.hash) for path, row in by_path.items())
    with_file = {item.hash for item in found if item.finding is Finding.EDITED_ROW}
    found.extend(Discrepancy(Finding.MISSING, "", hash=item) for item in edited_hashes - with_file)
    progress(file_count)
    return Diff(tuple(row for row in rows if row.hash in sound), tuple(found), file_count)


def examine_row(row: BlockRecord, *, files: Files, paths: StorePaths, now_time: float) -> Discrepancy | None:
    """Compare one row with its file, as `diff` would; None when they agree."""
    path = paths.block(row.fingerprint, row.hash)
    try:
        info = files.stat(path)
    except FileNotFoundError:
        return Discrepancy(Finding.MISSING, path, hash=row.hash)
    if info.mtime_ns == row.mtime_ns and info.size_bytes == row.file_bytes:
        return None
    return _examine(path, info, row, set(), files=files, now_time=now_time)


def repair(result: Diff, *, files: Files, paths: StorePaths, manifest: Manifest, day: int) -> None:
    """Do what each finding asks for. Raises `OSError` or `sqlite3.Error`; running it again is safe."""
    items = result.discrepancies
    manifest.delete([item.hash for item in items if item.hash is not None and item.finding in _ROW_GOES])
    for item in items:
        if item.finding in (Finding.PARTIAL, Finding.OTHER_ABI):
            files.unlink(item.path)
        elif item.finding in (Finding.INVALID, Finding.DIFFERS, Finding.EDITED_ROW):
            name = item.hash or parse_block_name(item.path.rpartition("/")[2])
            assert name is not None, f"{item.path} is to be quarantined but is not named as a block"
            move_to_quarantine(name, path=item.path, files=files, paths=paths)
    adopted = [
        (item.record, item.file)
        for item in items
        if item.finding in (Finding.ADOPTABLE, Finding.RESTAMPED) and item.record and item.file
    ]
    for fingerprint in {record.fingerprint for record, _ in adopted}:
        manifest.add_fingerprint(fingerprint, details={}, now_time=max(r.created_time for r, _ in adopted))
    manifest.insert(adopted, day=day, written_bytes=0)


_ROW_GOES = frozenset({Finding.DIFFERS, Finding.EDITED_ROW, Finding.MISSING, Finding.OTHER_ABI})


def _examine(
    path: str,
    info: FileInfo,
    row: BlockRecord | None,
    edited: set[BlockHash],
    *,
    files: Files,
    now_time: float,
) -> Discrepancy:
    """Look into a file that is not plainly what a row says."""
    if not info.is_directory and is_partial_name(info.name):
        return Discrepancy(Finding.PARTIAL, path, info.size_bytes)
    name_hash = None if info.is_directory else parse_block_name(info.name)
    if name_hash is None:
        return Discrepancy(Finding.UNKNOWN, path, info.size_bytes)
    if name_hash in edited:
        return Discrepancy(Finding.EDITED_ROW, path, info.size_bytes, name_hash, "its checksum does not match")
    file, problem = _read(path, files)
    if problem is not None and problem.damage is Damage.OTHER_ABI:
        return Discrepancy(Finding.OTHER_ABI, path, info.size_bytes, name_hash, str(problem))
    if file is not None and StorePaths("").block(file.header.fingerprint, file.header.hash) not in path:
        problem = BlockFileError(Damage.MISMATCH, "the file holds another block than its name says")
    if file is None or problem is not None:
        finding = Finding.INVALID if row is None else Finding.DIFFERS
        return Discrepancy(finding, path, info.size_bytes, name_hash, str(problem))
    fresh = record_of(file, mtime_ns=info.mtime_ns, used_time=min(info.mtime_ns / 1e9, now_time))
    if row is None:
        return Discrepancy(Finding.ADOPTABLE, path, info.size_bytes, name_hash, "", fresh, file)
    same = dataclasses.replace(
        fresh,
        created_time=row.created_time,
        last_used_time=row.last_used_time,
        hit_count=row.hit_count,
        pinned=row.pinned,
    )
    if dataclasses.replace(row, mtime_ns=info.mtime_ns) == same:
        return Discrepancy(Finding.RESTAMPED, path, info.size_bytes, name_hash, "", same, file)
    return Discrepancy(Finding.DIFFERS, path, info.size_bytes, name_hash, "its header is not what the row says")


def _read(path: str, files: Files) -> tuple[BlockFile | None, BlockFileError | None]:
    try:
        descriptor = files.open(path)
        try:
            return read_head(files, descriptor), None
        finally:
            files.close(descriptor)
    except BlockFileError as error:
        return None, error
    except OSError as error:
        return None, BlockFileError(Damage.IO, f"it cannot be read: {error}")
