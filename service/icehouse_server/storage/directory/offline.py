"""Offline store: a cache directory seen from outside, for the `icehouse cache` commands.

Looking (`rows`, `inspect`, `check`, `verify`) changes nothing and may happen beside a running
server, whose unfinished work can then show up as a discrepancy that is gone a moment later.
`purge` takes the directory's lock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from icehouse_server.clock import Clock
from icehouse_server.domain.blocks import Damage
from icehouse_server.domain.ids import BlockHash, Fingerprint
from icehouse_server.errors import NotFound, Reason, StorageError
from icehouse_server.storage.block_facts import BlockFile
from icehouse_server.storage.block_format.damage import BlockFileError
from icehouse_server.storage.block_format.file import read_head
from icehouse_server.storage.block_format.reader import verify_block
from icehouse_server.storage.directory.commit import remove_blocks
from icehouse_server.storage.directory.lock import take_lock
from icehouse_server.storage.directory.manifest import Manifest
from icehouse_server.storage.directory.reconcile import Discrepancy, Progress, Walk
from icehouse_server.storage.files import Files
from icehouse_server.storage.paths import StorePaths
from icehouse_server.storage.record import BlockRecord

if TYPE_CHECKING:
    # Of an optional extra: loaded only where a key is configured.
    from icehouse_server.storage.encryption.aes_gcm import Cipher

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
        try:
            self._files.stat(self.paths.manifest)
        except FileNotFoundError:
            return Rows((), (), {})
        with self._manifest() as manifest:
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
            descriptor = self._files.open(path)
            try:
                return read_head(self._files, descriptor, cipher=self._cipher)
            finally:
                self._files.close(descriptor)
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
        quarantine_too: bool,
        keys_too: bool = False,
        progress: Callable[[int, int], None],
    ) -> tuple[int, int]:
        """Remove chosen blocks under the directory's lock; return their count and bytes.

        What the manifest said of them is overwritten. `keys_too` removes the wrapped data keys.
        `progress` is told how many of how many blocks are gone. Raises `StartError` when a
        server has the directory, `StorageError` when the disk refuses.
        """
        lock = take_lock(self._files, self.paths)
        try:
            chosen = [record for record in self.rows().records if choose(record)]
            if chosen:
                manifest = Manifest.open(self.paths.manifest)
                try:
                    for start in range(0, len(chosen), _PURGE_BATCH_COUNT):
                        batch = chosen[start : start + _PURGE_BATCH_COUNT]
                        remove_blocks(batch, files=self._files, paths=self.paths, manifest=manifest)
                        progress(min(start + _PURGE_BATCH_COUNT, len(chosen)), len(chosen))
                    manifest.scrub()
                finally:
                    manifest.close()
            quarantined = self._drop_quarantine() if quarantine_too else (0, 0)
            if keys_too:
                self._drop_keys()
        except (OSError, sqlite3.Error) as error:
            raise self._unusable(error) from error
        finally:
            self._files.close(lock)
        return len(chosen) + quarantined[0], sum(r.file_bytes for r in chosen) + quarantined[1]

    def _drop_quarantine(self) -> tuple[int, int]:
        found = self._files.list(self.paths.quarantine)
        for info in found:
            self._files.unlink(f"{self.paths.quarantine}/{info.name}")
        with contextlib.suppress(FileNotFoundError):
            # A manifest that could not be read holds token ids like any other.
            self._files.unlink(self.paths.manifest_aside)
        return len(found), sum(info.size_bytes for info in found)

    def _drop_keys(self) -> None:
        for path in (self.paths.data_keys, self.paths.data_keys_aside):
            with contextlib.suppress(FileNotFoundError):
                self._files.unlink(path)

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
