"""Offline store: a cache directory seen from outside, for the `icehouse cache` commands.

Looking (`rows`, `inspect`, `check`, `verify`) changes nothing and may happen beside a running
server, whose unfinished work can then show up as a discrepancy that is gone a moment later.
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
from icehouse_server.domain.blocks import Damage
from icehouse_server.domain.ids import BlockHash, Fingerprint
from icehouse_server.errors import NotFound, Reason, StorageError
from icehouse_server.storage.files import FileInfo, Files, exists, opened, remove
from icehouse_server.storage.local.block_format.block_file import read_head, verify_block
from icehouse_server.storage.local.block_format.header import BlockFile, BlockFileError
from icehouse_server.storage.local.directory.commit import remove_blocks
from icehouse_server.storage.local.directory.lock import take_lock
from icehouse_server.storage.local.directory.manifest import Manifest
from icehouse_server.storage.local.directory.open import create_private
from icehouse_server.storage.local.directory.reconcile import Discrepancy, Progress, Walk
from icehouse_server.storage.local.directory.record import BlockRecord
from icehouse_server.storage.local.encryption.constants import Cipher
from icehouse_server.storage.paths import (
    PARTIAL_SUFFIX,
    StorePaths,
    is_folder_name,
    is_partial_name,
    parse_block_name,
)

_PURGE_BATCH_COUNT = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """What the manifest says."""

    records: tuple[BlockRecord, ...]
    """From the least to the most recently used."""
    edited: tuple[BlockHash, ...]
    """Rows whose facts are not those once written."""
    fingerprints: Mapping[Fingerprint, Mapping[str, str]]
    """Human-readable details by fingerprint."""


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """One verified block; `damage` is None when it is whole and what its row says."""

    record: BlockRecord
    damage: Damage | None
    detail: str


class PurgeScope(enum.Enum):
    """What goes beside the blocks that were chosen by their rows."""

    CHOSEN = enum.auto()
    """Nothing."""
    CLEAR_TEXT = enum.auto()
    """All that can be read without a key, with a row or without, and the quarantine."""
    EVERYTHING = enum.auto()
    """All blocks, whatever their rows say, the quarantine, the manifest and the data keys."""


class OfflineStore:
    """One cache directory. Every method opens what it needs and closes it again."""

    def __init__(self, directory: str, *, files: Files, clock: Clock, cipher: Cipher | None = None) -> None:
        """With a `cipher`, blocks under its key are looked into; of others only the outline is seen."""
        self._cipher = cipher
        self.paths = StorePaths(os.path.abspath(directory))
        self._files = files
        self._clock = clock

    def rows(self) -> Rows:
        """Return the manifest's rows; none when there is no manifest. Raises `StorageError`."""
        if not exists(self._files, self.paths.manifest):
            return Rows((), (), {})
        with self._manifest() as manifest:
            if not manifest.has_rows:
                return Rows((), (), {})
            records, edited = manifest.load()
            return Rows(tuple(records), tuple(edited), manifest.fingerprints())

    def find(self, prefix: str) -> BlockRecord:
        """Return the one block whose hash begins so (hexadecimal). Raises `NotFound`."""
        found = [record for record in self.rows().records if record.hash.hex().startswith(prefix.lower())]
        if len(found) != 1:
            raise NotFound(
                Reason.BLOCK_NOT_FOUND,
                f"{len(found)} blocks begin with {prefix!r}; give a hash, or enough of one, from `cache ls`",
                metadata={"prefix": prefix, "count": len(found)},
            )
        return found[0]

    def inspect(self, record: BlockRecord) -> BlockFile:
        """Return what a block's file says about itself. Raises `StorageError`."""
        path = self.paths.block(record.fingerprint, record.hash)
        try:
            with opened(self._files, path) as descriptor:
                return read_head(self._files, descriptor, cipher=self._cipher)
        except (OSError, BlockFileError) as error:
            raise StorageError(
                Reason.STORE_UNUSABLE,
                f"Block file {path} cannot be used: {error}; the next start of a server repairs this",
                metadata={"path": path},
            ) from error

    def check(self, *, progress: Progress) -> tuple[list[Discrepancy], int]:
        """Return what the next start would repair, and how many files there are. Raises `StorageError`."""
        rows = self.rows()
        walk = Walk(
            rows.records,
            rows.edited,
            files=self._files,
            paths=self.paths,
            now_time=self._clock.wall(),
            cipher=self._cipher,
            progress=progress,
        )
        try:
            # The bulky facts of each file are not needed to show what was found.
            found = [dataclasses.replace(item, file=None) for item in walk]
        except OSError as error:
            raise self._unusable(error) from error
        return found, walk.file_count

    def verify(self, records: Sequence[BlockRecord]) -> Iterator[Verdict]:
        """Read and hash blocks one by one. Raises `StorageError`."""
        if not records:
            return  # there may be no manifest, where a purge was cut short
        with self._manifest() as manifest:
            for record in records:
                try:
                    path = self.paths.block(record.fingerprint, record.hash)
                    file = verify_block(self._files, path, cipher=self._cipher)
                except BlockFileError as error:
                    yield Verdict(record, error.damage, str(error))
                else:
                    is_same = record.is_of(file) and manifest.holds(file)
                    damage = None if is_same else Damage.MISMATCH
                    yield Verdict(record, damage, "" if is_same else "the row is not what the file says")

    def purge(
        self,
        choose: Callable[[BlockRecord], bool],
        *,
        scope: PurgeScope,
        progress: Callable[[int, int], None],
    ) -> tuple[int, int]:
        """Remove chosen blocks, or all that the scope names, under the directory's lock; return how many
        files that were, and their bytes.

        What the manifest said of them is overwritten. `progress` is told how many of how many chosen
        blocks are gone. Raises `StartError` when a server has the directory, `StorageError` when the
        disk refuses: what is gone by then stays gone, and doing it again does the rest.
        """
        lock = take_lock(self._files, self.paths)
        try:
            # Whatever happens now, the next start has to look.
            self._drop(self.paths.clean_mark)
            if scope is PurgeScope.EVERYTHING:
                return self._purge_everything()
            chosen, edited = self._chosen(choose, scope)
            count, size_bytes = self._purge_chosen(chosen, edited, progress)
            if scope is PurgeScope.CLEAR_TEXT:
                strays = self._drop_clear_strays()
                aside = self._drop_quarantine()
                count, size_bytes = count + strays[0] + aside[0], size_bytes + strays[1] + aside[1]
            return count, size_bytes
        except (OSError, sqlite3.Error) as error:
            raise self._unusable(error) from error
        finally:
            self._files.close(lock)

    def _chosen(
        self, choose: Callable[[BlockRecord], bool], scope: PurgeScope
    ) -> tuple[list[BlockRecord], tuple[BlockHash, ...]]:
        """Return the rows to remove, and those that nobody wrote so: they may hold token ids all the same."""
        is_clear_text = scope is PurgeScope.CLEAR_TEXT
        try:
            rows = self.rows()
        except StorageError:
            if not is_clear_text:
                raise
            # A manifest that cannot be read may hold token ids; what it said stands in the files too.
            self._drop_manifest()
            return [], ()
        return [record for record in rows.records if choose(record)], rows.edited if is_clear_text else ()

    def _purge_chosen(
        self,
        chosen: Sequence[BlockRecord],
        edited: Sequence[BlockHash],
        progress: Callable[[int, int], None],
    ) -> tuple[int, int]:
        if exists(self._files, self.paths.manifest):
            manifest = Manifest.open(self.paths.manifest)
            try:
                for start in range(0, len(chosen), _PURGE_BATCH_COUNT):
                    batch = chosen[start : start + _PURGE_BATCH_COUNT]
                    remove_blocks(batch, files=self._files, paths=self.paths, manifest=manifest)
                    progress(min(start + _PURGE_BATCH_COUNT, len(chosen)), len(chosen))
                manifest.delete(edited)
                manifest.scrub()
            finally:
                manifest.close()
        return len(chosen), sum(record.file_bytes for record in chosen)

    def _purge_everything(self) -> tuple[int, int]:
        """Remove what the directory holds of prompts, whatever the manifest says of it, or if there is one.

        The keys go first: without them the rest is unreadable wherever it was encrypted. Then the files,
        and the rows only after them: a row without a file is nothing, a file without a row is a block.
        """
        for info in self._list(self.paths.root):
            if self.paths.is_data_keys_name(info.name):
                self._drop(f"{self.paths.root}/{info.name}")
        self._files.fsync_dir(self.paths.root)
        removed = [self._drop_quarantine()]
        for folder in self._list(self.paths.blocks):
            if folder.is_directory and is_folder_name(folder.name):
                removed.append(self._drop_folder(f"{self.paths.blocks}/{folder.name}", lambda _: True))
        self._drop_manifest()
        return sum(count for count, _ in removed), sum(size_bytes for _, size_bytes in removed)

    def _drop_clear_strays(self) -> tuple[int, int]:
        """Remove files without a row that somebody can read without a key, and unfinished ones."""
        rows = self.rows()
        kept = {self.paths.block(record.fingerprint, record.hash) for record in rows.records}
        removed = [
            self._drop_folder(
                f"{self.paths.blocks}/{folder.name}",
                lambda path: path not in kept and not self._is_encrypted(path),
            )
            for folder in self._list(self.paths.blocks)
            if folder.is_directory and is_folder_name(folder.name)
        ]
        return sum(count for count, _ in removed), sum(size_bytes for _, size_bytes in removed)

    def _drop_folder(self, folder: str, may_go: Callable[[str], bool]) -> tuple[int, int]:
        """Remove the files of ours that may go; return their count and bytes."""
        gone: list[FileInfo] = []
        for info in self._list(folder):
            path = f"{folder}/{info.name}"
            is_block = parse_block_name(info.name) is not None
            if info.is_directory or not (is_block or is_partial_name(info.name)) or not may_go(path):
                continue
            self._drop(path)
            gone.append(info)
        if gone:
            self._files.fsync_dir(folder)
        return len(gone), sum(info.size_bytes for info in gone)

    def _is_encrypted(self, path: str) -> bool:
        """Say whether a file is a sound block under some key; an unfinished one may hold anything."""
        if path.endswith(PARTIAL_SUFFIX):
            return False
        try:
            with opened(self._files, path) as descriptor:
                return bool(read_head(self._files, descriptor, cipher=self._cipher).key_id)
        except (OSError, BlockFileError):
            return False

    def _drop_quarantine(self) -> tuple[int, int]:
        found = self._list(self.paths.quarantine)
        for info in found:
            self._drop(f"{self.paths.quarantine}/{info.name}")
        # A manifest that could not be read holds token ids like any other.
        self._drop(self.paths.manifest_aside)
        return len(found), sum(info.size_bytes for info in found)

    def _drop_manifest(self) -> None:
        """Remove the manifest and its logs; what was written today is remembered, for the budget's sake."""
        written: dict[int, int] = {}
        if exists(self._files, self.paths.manifest):
            with contextlib.suppress(StorageError), self._manifest() as manifest:
                written = manifest.written_days()
        self._drop(self.paths.manifest_aside)
        # Its logs first, or they would outlive it.
        for suffix in ("-wal", "-shm", "-journal", ""):
            self._drop(self.paths.manifest + suffix)
        if written:
            create_private(self._files, self.paths)
            manifest = Manifest.open(self.paths.manifest)
            try:
                for day, size_bytes in written.items():
                    manifest.insert([], day=day, written_bytes=size_bytes)
            finally:
                manifest.close()
        self._files.fsync_dir(self.paths.root)

    def _list(self, path: str) -> list[FileInfo]:
        """Return what is in a folder; nothing when a backup was put back without it."""
        try:
            return self._files.list(path)
        except FileNotFoundError:
            return []

    def _drop(self, path: str) -> None:
        remove(self._files, path)

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
