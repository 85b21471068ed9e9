"""Offline store: a cache directory seen from outside, for the `icehouse cache` commands.

`rows`, `inspect`, `check` and `verify` change nothing and may run beside a running server, whose
unfinished work can then appear as a discrepancy that is gone a moment later.
`purge` takes the directory's lock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence

from icehouse_server.clock import Clock
from icehouse_server.domain.blocks import BlockDamage
from icehouse_server.domain.ids import BlockHash, Fingerprint
from icehouse_server.errors import NotFound, Reason, StorageError
from icehouse_server.storage.files import FileInfo, Files, exists, opened, remove
from icehouse_server.storage.local.block_format.block_file import read_head, verify_block
from icehouse_server.storage.local.block_format.header import BlockFile, BlockFileError
from icehouse_server.storage.local.directory.lock import take_lock
from icehouse_server.storage.local.directory.manifest import BlockRecord, Manifest
from icehouse_server.storage.local.directory.open import create_private
from icehouse_server.storage.local.directory.reconcile import Discrepancy, Progress, Scan
from icehouse_server.storage.local.encryption.constants import Cipher
from icehouse_server.storage.store_paths import (
    PARTIAL_SUFFIX,
    StorePaths,
    is_data_keys_name,
    is_folder_name,
    is_partial_name,
    parse_block_name,
)

_PURGE_BATCH_COUNT = 64


@dataclasses.dataclass(frozen=True, slots=True)
class ManifestRows:
    """The contents of the manifest."""

    records: tuple[BlockRecord, ...]
    """From the least to the most recently used."""
    edited: tuple[BlockHash, ...]
    """Rows that are not as they were written."""
    fingerprints: Mapping[Fingerprint, Mapping[str, str]]
    """Human-readable details by fingerprint."""


@dataclasses.dataclass(frozen=True, slots=True)
class BlockVerdict:
    """One verified block; `damage` is None if it is sound and matches its row."""

    record: BlockRecord
    damage: BlockDamage | None
    detail: str


class PurgeScope(enum.Enum):
    """What to remove in addition to the blocks that were chosen by their rows."""

    CHOSEN = enum.auto()
    """Nothing."""
    CLEAR_TEXT = enum.auto()
    """Everything readable without a key, with a row or without, and the quarantine."""
    EVERYTHING = enum.auto()
    """All blocks, whatever their rows say, the quarantine, the manifest and the data keys."""


class OfflineStore:
    """One cache directory. Every method opens what it needs and closes it again."""

    def __init__(self, directory: str, *, files: Files, clock: Clock, cipher: Cipher | None = None) -> None:
        """With a `cipher`, blocks under its key are read completely; of others only the outline."""
        self._cipher = cipher
        self.paths = StorePaths(os.path.abspath(directory))
        self._files = files
        self._clock = clock

    def rows(self) -> ManifestRows:
        """Return the manifest's rows; none if there is no manifest. Raises `StorageError`."""
        if not exists(self._files, self.paths.manifest):
            return ManifestRows((), (), {})
        with self._manifest() as manifest:
            if not manifest.has_rows:
                return ManifestRows((), (), {})
            records, edited = manifest.load()
            return ManifestRows(tuple(records), tuple(edited), manifest.fingerprints())

    def find(self, prefix: str) -> BlockRecord:
        """Return the one block whose hash begins with `prefix` (hexadecimal). Raises `NotFound`."""
        matches = [record for record in self.rows().records if record.hash.hex().startswith(prefix.lower())]
        if len(matches) != 1:
            raise NotFound(
                Reason.BLOCK_NOT_FOUND,
                f"{len(matches)} blocks begin with {prefix!r}; give more of the hash, from `cache ls`",
                metadata={"prefix": prefix, "count": len(matches)},
            )
        return matches[0]

    def inspect(self, record: BlockRecord) -> BlockFile:
        """Return what a block's file says about itself. Raises `StorageError`."""
        path = self._path(record)
        try:
            with opened(self._files, path) as descriptor:
                return read_head(self._files, descriptor, cipher=self._cipher)
        except (OSError, BlockFileError) as error:
            raise StorageError(
                Reason.STORE_UNUSABLE,
                f"Block file {path} cannot be used: {error}; the next server start repairs this",
                metadata={"path": path},
            ) from error

    def check(self, *, progress: Progress) -> tuple[list[Discrepancy], int]:
        """Return what the next start would repair, and how many files there are. Raises `StorageError`."""
        rows = self.rows()
        scan = Scan(
            rows.records,
            rows.edited,
            files=self._files,
            paths=self.paths,
            now_time=self._clock.wall(),
            cipher=self._cipher,
            progress=progress,
        )
        try:
            # A finding is shown without the bulky facts of its file.
            items = [dataclasses.replace(item, file=None) for item in scan]
        except OSError as error:
            raise self._unusable(error) from error
        return items, scan.file_count

    def verify(self, records: Sequence[BlockRecord]) -> Iterator[BlockVerdict]:
        """Read and hash blocks one by one. Raises `StorageError`."""
        if not records:
            return  # there may be no manifest after an interrupted purge
        with self._manifest() as manifest:
            for record in records:
                try:
                    file = verify_block(self._files, self._path(record), cipher=self._cipher)
                    manifest.check(record, file)
                except BlockFileError as error:
                    yield BlockVerdict(record, error.damage, str(error))
                else:
                    yield BlockVerdict(record, None, "")

    def purge(
        self,
        choose: Callable[[BlockRecord], bool],
        *,
        scope: PurgeScope,
        progress: Callable[[int, int], None],
    ) -> tuple[int, int]:
        """Remove chosen blocks, or everything in the scope, under the directory's lock; return the number of
        files removed and their bytes.

        The manifest's data about them is overwritten. `progress` gets how many of how many chosen
        blocks are gone. Raises `StartError` if a server has the directory, `StorageError` if the
        disk refuses: what is gone by then stays gone, and a second call does the rest.
        """
        lock = take_lock(self._files, self.paths)
        try:
            # Whatever happens now, the next start must check the files.
            remove(self._files, self.paths.clean_mark)
            is_clear_text = scope is PurgeScope.CLEAR_TEXT
            if scope is PurgeScope.EVERYTHING:
                sizes = list(self._purge_everything())
            else:
                sizes = list(self._purge_chosen(choose, progress, with_clear_text=is_clear_text))
            return len(sizes), sum(sizes)
        except (OSError, sqlite3.Error) as error:
            raise self._unusable(error) from error
        finally:
            self._files.close(lock)

    def _purge_chosen(
        self,
        choose: Callable[[BlockRecord], bool],
        progress: Callable[[int, int], None],
        *,
        with_clear_text: bool,
    ) -> Iterator[int]:
        """Remove the chosen blocks, and with `with_clear_text` everything readable without a key; yield the
        bytes of each file removed."""
        try:
            rows = self.rows()
        except StorageError:
            if not with_clear_text:
                raise
            # An unreadable manifest may contain token ids; everything it says is in the files too.
            self._drop_manifest()
            rows = ManifestRows((), (), {})
        chosen = [record for record in rows.records if choose(record)]
        if exists(self._files, self.paths.manifest):
            with contextlib.closing(Manifest.open(self.paths.manifest)) as manifest:
                for start in range(0, len(chosen), _PURGE_BATCH_COUNT):
                    batch = chosen[start : start + _PURGE_BATCH_COUNT]
                    manifest.delete([record.hash for record in batch])
                    for record in batch:
                        with contextlib.suppress(OSError):
                            remove(self._files, self._path(record))
                        yield record.file_bytes
                    progress(start + len(batch), len(chosen))
                if with_clear_text:
                    # Rows that were not written by us may contain token ids nevertheless.
                    manifest.delete(rows.edited)
                manifest.scrub()
        if with_clear_text:
            remaining = {self._path(record) for record in rows.records}.difference(map(self._path, chosen))
            yield from self._drop_files(lambda path: path not in remaining and not self._is_encrypted(path))
            yield from self._drop_quarantine()

    def _purge_everything(self) -> Iterator[int]:
        """Remove everything in the directory that comes from prompts, with or without a usable manifest;
        yield the bytes of each file removed.

        The keys go first: without them everything encrypted is unreadable. Then the files, and the rows only
        after them: a row without a file is nothing, a file without a row is a block.
        """
        for info in self._list(self.paths.root):
            if is_data_keys_name(info.name):
                remove(self._files, f"{self.paths.root}/{info.name}")
        self._files.fsync_dir(self.paths.root)
        yield from self._drop_quarantine()
        yield from self._drop_files(lambda _: True)
        self._drop_manifest()

    def _drop_files(self, may_go: Callable[[str], bool]) -> Iterator[int]:
        """Remove the block files, unfinished ones too, that `may_go` allows; yield the bytes of each."""
        for folder in self._list(self.paths.blocks):
            if not (folder.is_directory and is_folder_name(folder.name)):
                continue
            folder_path = f"{self.paths.blocks}/{folder.name}"
            for info in self._list(folder_path):
                path = f"{folder_path}/{info.name}"
                is_ours = parse_block_name(info.name) is not None or is_partial_name(info.name)
                if is_ours and not info.is_directory and may_go(path):
                    remove(self._files, path)
                    yield info.size_bytes
            self._files.fsync_dir(folder_path)

    def _is_encrypted(self, path: str) -> bool:
        """Return whether a file is a sound block under some key; an unfinished one may contain anything."""
        if path.endswith(PARTIAL_SUFFIX):
            return False
        try:
            with opened(self._files, path) as descriptor:
                return bool(read_head(self._files, descriptor, cipher=self._cipher).key_id)
        except (OSError, BlockFileError):
            return False

    def _drop_quarantine(self) -> Iterator[int]:
        """Remove everything set aside; yield the bytes of each damaged block."""
        for info in self._list(self.paths.quarantine):
            remove(self._files, f"{self.paths.quarantine}/{info.name}")
            yield info.size_bytes
        # A manifest that could not be read contains token ids like any other.
        for path in self.paths.manifests_aside:
            remove(self._files, path)

    def _drop_manifest(self) -> None:
        """Remove the manifest and its logs, but keep the bytes written by day, for the daily budget."""
        written: dict[int, int] = {}
        if exists(self._files, self.paths.manifest):
            with contextlib.suppress(StorageError), self._manifest() as manifest:
                written = manifest.written_days()
        # Its logs before the manifest itself, or they would outlive it.
        manifest_path = self.paths.manifest
        for path in (
            *self.paths.manifests_aside,
            *(manifest_path + suffix for suffix in ("-wal", "-shm", "-journal", "")),
        ):
            remove(self._files, path)
        if written:
            create_private(self._files, self.paths)
            with contextlib.closing(Manifest.open(manifest_path)) as manifest:
                for day, size_bytes in written.items():
                    manifest.insert([], day=day, written_bytes=size_bytes)
        self._files.fsync_dir(self.paths.root)

    def _list(self, path: str) -> list[FileInfo]:
        """Return the entries of a folder; none if a backup was restored without the folder."""
        try:
            return self._files.list(path)
        except FileNotFoundError:
            return []

    def _path(self, record: BlockRecord) -> str:
        return self.paths.block(record.fingerprint, record.hash)

    @contextlib.contextmanager
    def _manifest(self) -> Iterator[Manifest]:
        try:
            manifest = Manifest.open_read_only(self.paths.manifest)
            try:
                yield manifest
            finally:
                manifest.close(checkpoint=False)
        except sqlite3.Error as error:
            raise self._unusable(error) from error

    def _unusable(self, error: OSError | sqlite3.Error) -> StorageError:
        return StorageError(
            Reason.STORE_UNUSABLE,
            f"Cache directory {self.paths.root} cannot be used: {error}; "
            "check its path and permissions, or start a server on it, which repairs what it can",
            metadata={"directory": self.paths.root},
        )
