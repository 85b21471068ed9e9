"""Directory exchange: copies blocks of a cache directory to an archive, and from an archive into a directory.

For the `icehouse cache` commands. Both take the directory's lock, so no server may be using it. Block files
are copied unchanged: encrypted ones stay encrypted, and only a directory with the same key can use them.
Imported blocks are committed by the same store as a server's, so a crash leaves only whole blocks, and a
partial file that the next start removes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import itertools
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
from icehouse_server.storage.local.directory.manifest import BlockRecord
from icehouse_server.storage.local.directory.offline import ManifestRows, OfflineStore
from icehouse_server.storage.local.directory.store import BlockStore
from icehouse_server.storage.local.encryption.constants import KEY_DETAIL, Cipher
from icehouse_server.storage.storage_settings import StorageSettings
from icehouse_server.storage.store_paths import PARTIAL_SUFFIX, StorePaths

CHUNK_BYTES = 1 << 20
"""Bytes read and written at a time."""
_DETAIL_LIMIT = 256
"""Characters of a fingerprint's detail, or of its name."""
Progress = Callable[[int], None]
"""Called with the number of blocks done so far."""


class BlockRefusal(enum.StrEnum):
    """Why a block of an archive was not adopted."""

    DAMAGED = "damaged"
    PARENT_MISSING = "the block before it was not adopted"
    SSD_FULL = "no space within the SSD limit"


@dataclasses.dataclass(frozen=True, slots=True)
class ExportReport:
    """The contents of an archive that was written."""

    block_count: int
    size_bytes: int
    left_out_count: int
    """Blocks that are damaged, or whose prompt's beginning is missing."""


@dataclasses.dataclass(slots=True)
class ImportReport:
    """What became of an archive's blocks."""

    adopted_count: int = 0
    adopted_bytes: int = 0
    known_count: int = 0
    """Blocks that were stored already."""
    refused: Counter[BlockRefusal] = dataclasses.field(default_factory=Counter)
    stop_detail: str = ""
    """Why the rest of the archive was not read; empty if all of it was."""


class ExportSource:
    """The blocks of one model in a directory, which is locked during the export."""

    def __init__(self, store: OfflineStore, *, files: Files, cipher: Cipher | None = None) -> None:
        self._store = store
        self._files = files
        self._cipher = cipher

    def stream(
        self, *, fingerprint: str = "", block: str = "", progress: Progress = lambda _: None
    ) -> Iterator[bytes | ExportReport]:
        """Yield the bytes of an archive, and last its report.

        `fingerprint` is the beginning of a model's (hexadecimal); required if there are several models. With
        `block`, the beginning of a block's name, export only the blocks of the prompt that ends with it.
        Raises `NotFound`, `StartError` if a server has the directory, `StorageError` from the disk.
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
        self, rows: ManifestRows, records: list[BlockRecord], progress: Progress
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
    """Path of the partial file."""
    offset: int = 0


class ImportTarget:
    """A directory that takes the blocks of one archive; created if it does not exist."""

    def __init__(
        self,
        directory: str,
        *,
        files: Files,
        clock: Clock,
        limit_bytes: int,
        free_floor_bytes: int,
        cipher: Cipher | None = None,
    ) -> None:
        """`limit_bytes` is for all block files and the manifest; `free_floor_bytes` stay free on the disk."""
        settings = StorageSettings(
            directory=directory,
            limit_bytes=limit_bytes,
            free_floor_bytes=free_floor_bytes,
            daily_write_limit_bytes=0,
            spill_queue_limit_bytes=0,
            load_queue_limit_count=0,
            task_queue_limit_count=0,
            reader_thread_count=0,
        )
        self._store = BlockStore(settings, files=files, clock=clock, cipher=cipher)
        self._fingerprint: Fingerprint | None = None
        """The archive's model, once it was admitted."""
        self._writing: _Writing | None = None
        self._report = ImportReport()

    def adopt(self, stream: Iterable[bytes], *, progress: Progress = lambda _: None) -> ImportReport:
        """Adopt an archive's blocks, up to the first byte that is not as written. Call it once.

        Raises `StorageError` if the archive is of a model that is not this directory's, or if the disk
        refuses from the start; `StartError` if a server has the directory.
        """
        store = self._store
        try:
            store.lock()
            store.open()
            self._read(stream, progress)
        except (OSError, sqlite3.Error) as error:
            raise _unusable(store.paths, error) from error
        finally:
            store.close()
            store.unlock()
        return self._report

    def _read(self, stream: Iterable[bytes], progress: Progress) -> None:
        reader = ArchiveReader()
        try:
            for item in itertools.chain.from_iterable(map(reader.feed, stream)):
                self._take(item)
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

    def _take(self, item: object) -> None:
        writing = self._writing
        if isinstance(item, ArchiveHeader):
            self._admit(item)
        elif isinstance(item, BlockEntry):
            self._begin(item)
        elif isinstance(item, bytes) and writing is not None:
            self._store.files.write(writing.descriptor, [item], offset=writing.offset)
            writing.offset += len(item)
        elif isinstance(item, BlockEnd) and writing is not None:
            self._end(writing)

    def _admit(self, header: ArchiveHeader) -> None:
        """Make the folder for an archive's model; raises `StorageError` if it is not this directory's."""
        known, cipher = self._store.manifest.fingerprints(), self._store.cipher
        key_id = header.details.get(KEY_DETAIL, "")
        # A new directory takes any unencrypted model; it could not open blocks encrypted under another key.
        # A directory with a key takes no unencrypted blocks.
        is_foreign = header.fingerprint not in known and (known or key_id)
        if is_foreign or (cipher is not None and not key_id):
            directory, own = self._store.paths.root, ", ".join(each.hex() for each in known) or "none yet"
            raise StorageError(
                Reason.STORE_UNUSABLE,
                f"the archive is of model {header.fingerprint.hex()}, "
                + (f"encrypted under key {key_id}" if key_id else "in the clear")
                + f"; the directory {directory} is of {own}"
                + ("" if cipher is None else f" with key {cipher.key_id.hex()}")
                + "; use another directory, or let servers do it (`icehouse export` and `import`), which "
                "re-encrypt",
                metadata={"archive": header.fingerprint.hex(), "directory": own},
            )
        # Details are a stranger's text, which commands print; they replace no details of ours.
        words = {} if header.fingerprint in known else header.details
        details = {_printable(name): _printable(value) for name, value in words.items()}
        self._store.admit(header.fingerprint, details)
        self._fingerprint = header.fingerprint

    def _begin(self, entry: BlockEntry) -> None:
        assert self._fingerprint is not None
        store = self._store
        if entry.hash in store.index:
            self._report.known_count += 1
        elif entry.start_token_index and entry.parent not in store.index:
            self._report.refused[BlockRefusal.PARENT_MISSING] += 1
        elif not store.has_space(entry.file_bytes):
            self._report.refused[BlockRefusal.SSD_FULL] += 1
        else:
            path = store.paths.block(self._fingerprint, entry.hash) + PARTIAL_SUFFIX
            self._writing = _Writing(entry, store.files.create(path), path)

    def _end(self, writing: _Writing) -> None:
        is_adopted = self._commit(writing)
        # This removes nothing of an adopted block, which has its final name by now.
        self._discard(writing)
        self._writing = None
        if not is_adopted:
            self._report.refused[BlockRefusal.DAMAGED] += 1
            return
        self._report.adopted_count += 1
        self._report.adopted_bytes += writing.entry.file_bytes

    def _commit(self, writing: _Writing) -> bool:
        """Make a written file durable, verify it and commit it; False if it is not the block that its entry
        names."""
        assert self._fingerprint is not None
        store = self._store
        store.files.fsync(writing.descriptor)
        try:
            file = verify_block(store.files, writing.path, cipher=store.cipher)
        except BlockFileError:
            return False
        if not _is_entry(file, writing.entry, self._fingerprint):
            return False
        store.commit(file, writing.path)
        return True

    def _discard(self, writing: _Writing) -> None:
        """Close and remove a partial file."""
        with contextlib.suppress(OSError):
            self._store.files.close(writing.descriptor)
        with contextlib.suppress(OSError):
            remove(self._store.files, writing.path)


def _chosen(rows: ManifestRows, fingerprint: str) -> list[BlockRecord]:
    """Return the rows of one model. Raises `NotFound` if there are none, or several models match."""
    records = [r for r in rows.records if r.fingerprint.hex().startswith(fingerprint.lower())]
    found = {record.fingerprint.hex() for record in records}
    if len(found) != 1:
        names = ", ".join(sorted(found)) or "none"
        raise NotFound(
            Reason.BLOCK_NOT_FOUND,
            f"an archive has the blocks of one model, but here are those of {len(found)} ({names}); "
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
            break  # no row of ours is like this
        chain.append(above)
    return chain


def _entry(record: BlockRecord) -> BlockEntry:
    return BlockEntry(
        record.hash, record.parent, record.start_token_index, record.token_count, record.file_bytes
    )


def _is_entry(file: BlockFile, entry: BlockEntry, fingerprint: Fingerprint) -> bool:
    """Return whether a file is the block that its archive entry describes."""
    outline = file.outline
    found = BlockEntry(
        outline.hash, outline.parent, outline.start_token_index, outline.token_count, file.file_bytes
    )
    return outline.fingerprint == fingerprint and found == dataclasses.replace(entry, adapter=None)


def _parts(files: Files, path: str, size_bytes: int) -> Iterator[bytes]:
    """Yield a file's bytes. Raises OSError if it has fewer than `size_bytes`."""
    with opened(files, path) as descriptor:
        for offset in range(0, size_bytes, CHUNK_BYTES):
            part = bytearray(min(CHUNK_BYTES, size_bytes - offset))
            if files.read_into(descriptor, [memoryview(part)], offset=offset) < len(part):
                raise OSError(f"{path} shrank while it was read")
            yield bytes(part)


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text[:_DETAIL_LIMIT])


def _unusable(paths: StorePaths, error: OSError | sqlite3.Error) -> StorageError:
    return StorageError(
        Reason.STORE_UNUSABLE,
        f"Cache directory {paths.root} cannot be used: {error}; check its path and permissions",
        metadata={"directory": paths.root},
    )
