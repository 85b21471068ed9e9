"""The order of a commit and of its undoing. This order is the design.

Commit: write `<name>.partial` (exclusively created) -> fsync -> close -> rename -> fsync the
directory -> insert the row. Removal: delete the row -> unlink. So a crash at any point leaves
garbage that the next start repairs (a partial, a file without a row), never a row that lies.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Sequence

from service.domain.ids import BlockHash
from service.kv.block_file import PreparedBlock, write_block
from service.kv.file_facts import BlockFile
from service.kv.files import Files
from service.kv.manifest import Manifest
from service.kv.records import BlockRecord, record_of
from service.kv.store_paths import PARTIAL_SUFFIX, StorePaths


def commit_block(
    prepared: PreparedBlock, *, files: Files, paths: StorePaths, manifest: Manifest, now_time: float, day: int
) -> BlockRecord:
    """Write a block's file and insert its row; return the row.

    Raises `OSError` or `sqlite3.Error`; no row is there then, and neither is a file unless
    even removing it failed.
    """
    header = prepared.block.header
    path = paths.block(header.fingerprint, header.hash)
    partial = path + PARTIAL_SUFFIX
    try:
        file = _write_partial(prepared, partial, files)
        files.rename(partial, path)
        files.fsync_dir(paths.folder(header.fingerprint))
        info = files.stat(path)
        record = record_of(file, mtime_ns=info.mtime_ns, inode=info.inode, used_time=now_time)
        manifest.insert([(record, file)], day=day, written_bytes=record.file_bytes)
    except (OSError, sqlite3.Error):
        # What cannot be removed now is removed or adopted by the next start.
        for leftover in (partial, path):
            with contextlib.suppress(OSError):
                files.unlink(leftover)
        raise
    return record


def _write_partial(prepared: PreparedBlock, partial: str, files: Files) -> BlockFile:
    """Have the whole file on the medium under its partial name."""
    descriptor = files.create(partial)
    try:
        file = write_block(files, descriptor, prepared)
        files.fsync(descriptor)
    except OSError:
        # The first error is the one to tell; a close that fails too adds nothing.
        with contextlib.suppress(OSError):
            files.close(descriptor)
        raise
    files.close(descriptor)
    return file


def remove_blocks(
    records: Sequence[BlockRecord], *, files: Files, paths: StorePaths, manifest: Manifest
) -> list[str]:
    """Delete rows, then unlink their files; return the paths of files that could not be removed.

    A file that is gone already counts as removed. Raises `sqlite3.Error` before anything
    was unlinked.
    """
    manifest.delete([record.hash for record in records])
    stuck = []
    for record in records:
        path = paths.block(record.fingerprint, record.hash)
        try:
            files.unlink(path)
        except FileNotFoundError:
            continue
        except OSError:
            stuck.append(path)
    return stuck


def move_to_quarantine(record_hash: BlockHash, *, path: str, files: Files, paths: StorePaths) -> None:
    """Move a damaged file out of the way, where a person can look at it; its row must be gone."""
    files.rename(path, paths.quarantined(record_hash))
