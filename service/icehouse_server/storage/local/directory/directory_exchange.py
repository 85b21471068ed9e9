"""Directory exchange: blocks of a cache directory to an archive, and from an archive into a directory.

For the `icehouse cache` commands. Both take the directory's lock, so no server may use it. Block files are
copied as they are: what is encrypted stays encrypted, and only a directory with the same key can use it.
An imported block is committed as a spilled one is, so a crash leaves whole blocks, and a partial file
that the next start removes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import itertools
import os
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from icehouse_server.clock import Clock
from icehouse_server.domain.ids import BlockHash, Fingerprint
from icehouse_server.errors import NotFound, Reason, StorageError
from icehouse_server.storage.archive import (
    ArchiveError,
    ArchiveHeader,
    ArchiveReader,
    ArchiveWriter,
    BlockEnd,
    BlockEntry,
    reachable,
)
from icehouse_server.storage.files import Files, opened, remove
from icehouse_server.storage.local.block_format.block_file import verify_block
from icehouse_server.storage.local.block_format.header import BlockFile, BlockFileError
from icehouse_server.storage.local.directory.lock import take_lock
from icehouse_server.storage.local.directory.manifest import (
    LOG_ALLOWANCE_BYTES,
    BlockRecord,
    Manifest,
    record_of,
)
from icehouse_server.storage.local.directory.offline import OfflineStore, Rows
from icehouse_server.storage.local.directory.open import create_private
from icehouse_server.storage.local.directory.space import day_of
from icehouse_server.storage.local.encryption.constants import KEY_DETAIL, Cipher
from icehouse_server.storage.store_paths import PARTIAL_SUFFIX, StorePaths

CHUNK_BYTES = 1 << 20
"""Read and written at a time."""
_DETAIL_LIMIT = 256
"""Characters of a fingerprint's detail, or of its name."""
Progress = Callable[[int], None]
"""Called with the blocks done so far."""


class Refusal(enum.StrEnum):
    """Why a block of an archive was not adopted."""

    DAMAGED = "damaged"
    PARENT_MISSING = "the block before it was not adopted"
    SSD_FULL = "no space within the SSD limit"


@dataclasses.dataclass(frozen=True, slots=True)
class ExportReport:
    """What an archive was made of."""

    block_count: int
    size_bytes: int
    left_out_count: int
    """Blocks that are damaged, or whose prompt's beginning is gone."""


@dataclasses.dataclass(slots=True)
class ImportReport:
    """What became of an archive's blocks."""

    adopted_count: int = 0
    adopted_bytes: int = 0
    known_count: int = 0
    """Blocks that were there already."""
    refused: Counter[Refusal] = dataclasses.field(default_factory=Counter)
    stop_detail: str = ""
    """Why the rest of the archive was not read; empty when all of it was."""


@dataclasses.dataclass(frozen=True, slots=True)
class ImportLimits:
    """What a directory may take; in bytes."""

    size_bytes: int
    """Of all block files and the manifest."""
    free_floor_bytes: int
    """What stays free on the disk."""


class ExportSource:
    """The blocks of one model in a directory. Locked while it is open."""

    def __init__(self, store: OfflineStore, *, files: Files, cipher: Cipher | None = None) -> None:
        self._store = store
        self._files = files
        self._cipher = cipher

    def stream(
        self, *, fingerprint: str = "", block: str = "", progress: Progress = lambda _: None
    ) -> Iterator[bytes | ExportReport]:
        """Yield the bytes of an archive, at last the report of it.

        `fingerprint` is the beginning of a model's (hexadecimal); needed where there are several. With
        `block`, the beginning of a block's name, only the blocks of the prompt that ends with this one.
        Raises `NotFound`, `StartError` when a server has the directory, `StorageError` from the disk.
        """
        lock = take_lock(self._files, self._store.paths)
        try:
            rows = self._store.rows()
            last = self._store.find(block) if block else None
            records = _chosen(rows, last.fingerprint.hex() if last else fingerprint)
            if last is not None:
                records = _chain(records, last)
            yield from self._stream(rows, records, progress)
        except OSError as error:
            raise _unusable(self._store.paths, error) from error
        finally:
            self._files.close(lock)

    def _stream(
        self, rows: Rows, records: list[BlockRecord], progress: Progress
    ) -> Iterator[bytes | ExportReport]:
        first = records[0]
        writer = ArchiveWriter()
        details = rows.fingerprints.get(first.fingerprint, {})
        yield writer.begin(ArchiveHeader(first.fingerprint, first.block_token_limit, details))
        ordered, left_out_count = reachable([_entry(record) for record in records])
        written: set[BlockHash] = set()
        size_bytes = 0
        for number, entry in enumerate(ordered, start=1):
            path = self._store.paths.block(first.fingerprint, entry.hash)
            is_reached = not entry.start_token_index or entry.parent in written
            if is_reached and self._is_whole(path, entry, first.fingerprint):
                yield writer.block(entry)
                for part in _parts(self._files, path, entry.file_bytes):
                    writer.part(part)
                    yield part
                yield writer.end_block()
                written.add(entry.hash)
                size_bytes += entry.file_bytes
            else:
                left_out_count += 1
            progress(number)
        yield writer.end()
        yield ExportReport(len(written), size_bytes, left_out_count)

    def _is_whole(self, path: str, entry: BlockEntry, fingerprint: Fingerprint) -> bool:
        try:
            file = verify_block(self._files, path, cipher=self._cipher)
        except BlockFileError:
            return False
        return _is_entry(file, entry, fingerprint)


@dataclasses.dataclass(slots=True)
class _Writing:
    entry: BlockEntry
    descriptor: int
    path: str
    """The final name."""
    offset: int = 0

    @property
    def partial(self) -> str:
        return self.path + PARTIAL_SUFFIX


class ImportTarget:
    """A directory that takes the blocks of one archive; made where there is none."""

    def __init__(
        self,
        directory: str,
        *,
        files: Files,
        clock: Clock,
        limits: ImportLimits,
        cipher: Cipher | None = None,
    ) -> None:
        self._paths = StorePaths(os.path.abspath(directory))
        self._files = files
        self._clock = clock
        self._limits = limits
        self._cipher = cipher
        self._stored: set[BlockHash] = set()
        self._used_bytes = 0
        self._fingerprint: Fingerprint | None = None
        """The archive's model, once it was admitted."""
        self._writing: _Writing | None = None
        self._report = ImportReport()

    def adopt(self, stream: Iterable[bytes], *, progress: Progress = lambda _: None) -> ImportReport:
        """Adopt an archive's blocks, up to the first byte that is not as it was written. Once.

        Raises `StorageError` for an archive of a model that is not this directory's, and where the disk
        refuses from the start; `StartError` when a server has the directory.
        """
        lock = take_lock(self._files, self._paths)
        try:
            self._prepare()
            with contextlib.closing(Manifest.open(self._paths.manifest)) as manifest:
                records, _ = manifest.load()
                self._stored.update(record.hash for record in records)
                self._used_bytes = sum(record.file_bytes for record in records)
                self._read(stream, manifest, progress)
        except (OSError, sqlite3.Error) as error:
            raise _unusable(self._paths, error) from error
        finally:
            self._files.close(lock)
        return self._report

    def _prepare(self) -> None:
        for path in (self._paths.root, self._paths.blocks, self._paths.quarantine):
            self._files.make_dir(path)
        # Whatever happens now, the next start has to look.
        remove(self._files, self._paths.clean_mark)
        create_private(self._files, self._paths)

    def _read(self, stream: Iterable[bytes], manifest: Manifest, progress: Progress) -> None:
        reader = ArchiveReader()
        try:
            for item in itertools.chain.from_iterable(map(reader.feed, stream)):
                self._take(item, manifest)
                if isinstance(item, BlockEnd):
                    progress(self._report.adopted_count + self._report.known_count)
            reader.finish()
        except ArchiveError as error:
            self._report.stop_detail = str(error)
        except (OSError, sqlite3.Error) as error:
            if self._fingerprint is None:
                raise
            self._report.stop_detail = f"the disk refused: {error}"
        finally:
            if self._writing is not None:
                self._discard(self._writing)

    def _take(self, item: object, manifest: Manifest) -> None:
        writing = self._writing
        if isinstance(item, ArchiveHeader):
            self._admit(item, manifest)
        elif isinstance(item, BlockEntry):
            self._begin(item)
        elif isinstance(item, bytes) and writing is not None:
            self._files.write(writing.descriptor, [item], offset=writing.offset)
            writing.offset += len(item)
        elif isinstance(item, BlockEnd) and writing is not None:
            self._end(writing, manifest)

    def _admit(self, header: ArchiveHeader, manifest: Manifest) -> None:
        """Make the folder for an archive's model; raises `StorageError` where it is not this directory's."""
        known = manifest.fingerprints()
        key_id = header.details.get(KEY_DETAIL, "")
        # A new directory takes any model; but nothing in it could open what is encrypted under another key,
        # and nobody wants blocks in the clear beside a key.
        is_foreign = header.fingerprint not in known and (known or key_id)
        if is_foreign or (self._cipher is not None and not key_id):
            own = ", ".join(fingerprint.hex() for fingerprint in known) or "none yet"
            raise StorageError(
                Reason.STORE_UNUSABLE,
                f"the archive is of model {header.fingerprint.hex()}, "
                + (f"encrypted under key {key_id}" if key_id else "in the clear")
                + f"; the directory {self._paths.root} is of {own}"
                + ("" if self._cipher is None else f" with key {self._cipher.key_id.hex()}")
                + "; take another directory, or let servers do it (`icehouse export` and `import`), which "
                "encrypt anew",
                metadata={"archive": header.fingerprint.hex(), "directory": own},
            )
        self._files.make_dir(self._paths.folder(header.fingerprint))
        self._files.fsync_dir(self._paths.blocks)
        if header.fingerprint not in known:
            # Somebody else's words, which commands print.
            details = {_printable(name): _printable(value) for name, value in header.details.items()}
            manifest.add_fingerprint(header.fingerprint, details=details, now_time=self._clock.wall())
        self._fingerprint = header.fingerprint

    def _begin(self, entry: BlockEntry) -> None:
        assert self._fingerprint is not None
        if entry.hash in self._stored:
            self._report.known_count += 1
        elif entry.start_token_index and entry.parent not in self._stored:
            self._report.refused[Refusal.PARENT_MISSING] += 1
        elif not self._has_space(entry.file_bytes):
            self._report.refused[Refusal.SSD_FULL] += 1
        else:
            path = self._paths.block(self._fingerprint, entry.hash)
            remove(self._files, path + PARTIAL_SUFFIX)  # what a crash left
            self._writing = _Writing(entry, self._files.create(path + PARTIAL_SUFFIX), path)

    def _has_space(self, size_bytes: int) -> bool:
        """Return whether a block still fits the limits."""
        manifest_bytes = self._files.stat(self._paths.manifest).size_bytes + LOG_ALLOWANCE_BYTES
        free_bytes = self._files.free_bytes(self._paths.root)
        return (
            self._used_bytes + manifest_bytes + size_bytes <= self._limits.size_bytes
            and size_bytes + self._limits.free_floor_bytes <= free_bytes
        )

    def _end(self, writing: _Writing, manifest: Manifest) -> None:
        is_adopted = self._commit(writing, manifest)
        # Removes nothing of a block that was adopted: it has its name by now.
        self._discard(writing)
        self._writing = None
        if not is_adopted:
            self._report.refused[Refusal.DAMAGED] += 1
            return
        self._stored.add(writing.entry.hash)
        self._used_bytes += writing.entry.file_bytes
        self._report.adopted_count += 1
        self._report.adopted_bytes += writing.entry.file_bytes

    def _commit(self, writing: _Writing, manifest: Manifest) -> bool:
        """Make a written file durable, verify it, give it its name and insert its row; False when it is not
        the block that its entry names."""
        assert self._fingerprint is not None
        self._files.fsync(writing.descriptor)
        try:
            file = verify_block(self._files, writing.partial, cipher=self._cipher)
        except BlockFileError:
            return False
        if not _is_entry(file, writing.entry, self._fingerprint):
            return False
        self._files.rename(writing.partial, writing.path)
        self._files.fsync_dir(self._paths.folder(self._fingerprint))
        info, now_time = self._files.stat(writing.path), self._clock.wall()
        record = record_of(file, mtime_ns=info.mtime_ns, inode=info.inode, used_time=now_time)
        manifest.insert([(record, file)], day=day_of(now_time), written_bytes=record.file_bytes)
        return True

    def _discard(self, writing: _Writing) -> None:
        """Close and remove a partial file."""
        with contextlib.suppress(OSError):
            self._files.close(writing.descriptor)
        with contextlib.suppress(OSError):
            remove(self._files, writing.partial)


def _chosen(rows: Rows, fingerprint: str) -> list[BlockRecord]:
    """Return the rows of one model. Raises `NotFound` where there is none, or more than one."""
    records = [r for r in rows.records if r.fingerprint.hex().startswith(fingerprint.lower())]
    found = {record.fingerprint.hex() for record in records}
    if len(found) != 1:
        names = ", ".join(sorted(found)) or "none"
        raise NotFound(
            Reason.BLOCK_NOT_FOUND,
            f"an archive has the blocks of one model, and here are those of {len(found)} ({names}); "
            "choose one with --fingerprint, see `cache ls`",
            metadata={"count": len(found)},
        )
    return records


def _chain(records: Iterable[BlockRecord], last: BlockRecord) -> list[BlockRecord]:
    """Return a block and those before it in its prompt."""
    by_name = {record.hash: record for record in records}
    chain = [last]
    while (above := by_name.get(chain[-1].parent)) is not None:
        if above.start_token_index >= chain[-1].start_token_index:
            break  # no row of ours says so
        chain.append(above)
    return chain


def _entry(record: BlockRecord) -> BlockEntry:
    return BlockEntry(
        record.hash, record.parent, record.start_token_index, record.token_count, record.file_bytes
    )


def _is_entry(file: BlockFile, entry: BlockEntry, fingerprint: Fingerprint) -> bool:
    """Return whether a file is the block that an archive says it is."""
    outline = file.outline
    found = BlockEntry(
        outline.hash, outline.parent, outline.start_token_index, outline.token_count, file.file_bytes
    )
    return outline.fingerprint == fingerprint and found == dataclasses.replace(entry, adapter=None)


def _parts(files: Files, path: str, size_bytes: int) -> Iterator[bytes]:
    """Yield the bytes of a file. Raises OSError where it has fewer."""
    with opened(files, path) as descriptor:
        for offset in range(0, size_bytes, CHUNK_BYTES):
            part = bytearray(min(CHUNK_BYTES, size_bytes - offset))
            if files.read_into(descriptor, [memoryview(part)], offset=offset) < len(part):
                raise OSError(f"{path} became shorter while it was read")
            yield bytes(part)


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text[:_DETAIL_LIMIT])


def _unusable(paths: StorePaths, error: OSError | sqlite3.Error) -> StorageError:
    return StorageError(
        Reason.STORE_UNUSABLE,
        f"Cache directory {paths.root} cannot be used: {error}; check its path and permissions",
        metadata={"directory": paths.root},
    )
