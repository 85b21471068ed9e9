"""Commit: the order in which a block becomes durable, and of its undoing. This order is the design.

Commit: write `<name>.partial` (exclusively created) -> fsync -> close -> rename -> fsync the
directory -> insert the row. Removal: delete the row -> unlink. So a crash at any point leaves
garbage that the next start repairs (a partial, a file without a row), never a row that lies.
One block may be written while the disk makes the one before it durable; each keeps its own order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sqlite3
from collections.abc import Sequence
from concurrent.futures import Executor, Future

from icehouse_server.clock import Clock
from icehouse_server.domain.ids import BlockHash
from icehouse_server.storage.files import Files, remove
from icehouse_server.storage.local.block_format.block_file import PreparedBlock, write_block
from icehouse_server.storage.local.block_format.header import BlockFile
from icehouse_server.storage.local.directory.manifest import Manifest
from icehouse_server.storage.local.directory.record import BlockRecord, record_of
from icehouse_server.storage.paths import PARTIAL_SUFFIX, StorePaths


@dataclasses.dataclass(frozen=True, slots=True)
class Writing:
    """A block whose file is written under its partial name, and perhaps not durable yet."""

    prepared: PreparedBlock
    file: BlockFile
    descriptor: int
    path: str
    """The name it will have."""
    synced: Future[None] | None
    """Done when the file is on the medium; None when that is still to be asked for."""
    began: float
    """`Clock.monotonic`."""
    start_time: float
    """Wall clock."""

    @property
    def partial(self) -> str:
        return self.path + PARTIAL_SUFFIX


def begin_commit(
    prepared: PreparedBlock, *, files: Files, paths: StorePaths, syncs: Executor | None, clock: Clock
) -> Writing:
    """Write a block's file, and have `syncs` make it durable; `finish_commit` or `undo_commit` follows.

    Raises `OSError`; no file is there then unless even removing it failed.
    """
    header, began, start_time = prepared.block.header, clock.monotonic(), clock.wall()
    path = paths.block(header.fingerprint, header.hash)
    try:
        descriptor = files.create(path + PARTIAL_SUFFIX)
        try:
            file = write_block(files, descriptor, prepared)
        except OSError:
            # The first error is the one to tell; a close that fails too adds nothing.
            with contextlib.suppress(OSError):
                files.close(descriptor)
            raise
    except OSError:
        with contextlib.suppress(OSError):
            files.unlink(path + PARTIAL_SUFFIX)
        raise
    synced = syncs.submit(files.fsync, descriptor) if syncs else None
    return Writing(prepared, file, descriptor, path, synced, began, start_time)


def finish_commit(
    writing: Writing,
    *,
    files: Files,
    paths: StorePaths,
    manifest: Manifest,
    now_time: float,
    day: int,
    pinned: bool,
    replaced: BlockRecord | None = None,
) -> BlockRecord:
    """Wait until a block's file is durable, give it its name and insert its row; return the row.

    A block of this name with fewer regions is `replaced`, file and row, and its history goes on.
    Raises `OSError` or `sqlite3.Error`; no row is there then, and neither is a file unless
    even removing it failed. One that has replaced another stays, under the row of that one.
    """
    leftover: str | None = writing.partial
    try:
        _sync_and_close(writing, files)
        files.rename(writing.partial, writing.path)
        # What it replaced is gone: the new file is all there is of the block, and proves itself.
        leftover = writing.path if replaced is None else None
        files.fsync_dir(paths.folder(writing.file.outline.fingerprint))
        info = files.stat(writing.path)
        record = record_of(writing.file, mtime_ns=info.mtime_ns, inode=info.inode, used_time=now_time)
        record = record._replace(pinned=pinned)
        if replaced is not None:
            record = record._replace(
                created_time=replaced.created_time,
                hit_count=replaced.hit_count,
                pinned=pinned or replaced.pinned,
            )
        manifest.insert([(record, writing.file)], day=day, written_bytes=record.file_bytes)
    except (OSError, sqlite3.Error):
        # What cannot be removed now is removed or adopted by the next start.
        if leftover is not None:
            with contextlib.suppress(OSError):
                files.unlink(leftover)
        raise
    return record


def undo_commit(writing: Writing, *, files: Files) -> None:
    """Remove a file that was begun; one that cannot be removed is left to the next start."""
    with contextlib.suppress(OSError):
        # Never under a sync that is under way: the descriptor's number would be another file's.
        _sync_and_close(writing, files)
    with contextlib.suppress(OSError):
        files.unlink(writing.partial)


def _sync_and_close(writing: Writing, files: Files) -> None:
    """Return when the file is on the medium; it is closed even when this raises."""
    try:
        if writing.synced is None:
            files.fsync(writing.descriptor)
        else:
            writing.synced.result()
    except OSError:
        with contextlib.suppress(OSError):
            files.close(writing.descriptor)
        raise
    files.close(writing.descriptor)


def remove_blocks(
    records: Sequence[BlockRecord], *, files: Files, paths: StorePaths, manifest: Manifest
) -> list[str]:
    """Delete rows, then unlink their files; return the paths of files that could not be removed.

    Raises `sqlite3.Error` before anything was unlinked.
    """
    manifest.delete([record.hash for record in records])
    return unlink_blocks(records, files=files, paths=paths)


def unlink_blocks(records: Sequence[BlockRecord], *, files: Files, paths: StorePaths) -> list[str]:
    """Unlink files whose rows are gone; return the paths of those that could not be removed.

    A file that is gone already counts as removed.
    """
    stuck = []
    for record in records:
        path = paths.block(record.fingerprint, record.hash)
        try:
            remove(files, path)
        except OSError:
            stuck.append(path)
    return stuck


def move_to_quarantine(record_hash: BlockHash, *, path: str, files: Files, paths: StorePaths) -> None:
    """Move a damaged file out of the way, where a person can look at it; its row must be gone."""
    files.rename(path, paths.quarantined(record_hash))
