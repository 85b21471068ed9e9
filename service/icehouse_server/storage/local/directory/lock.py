"""Lock of a cache directory: one process at a time, no files of others, and the mark of a clean shutdown.

The mark records what the directory looked like when it was closed. A folder's modification time changes
whenever a file is created, removed or renamed in it, and the manifest's with every row. If all of them match
the mark, rows and files still agree and the start need not scan the files. What this cannot detect, a file
changed in place, is detected by the deferred scan and by the checksums of every load. The mark needs no
fsync, because a mark that outlives a change no longer matches.
"""

from __future__ import annotations

import contextlib
import json
import os

from icehouse_server.domain.blocks import LAYOUT_ABI
from icehouse_server.errors import Reason, StartError
from icehouse_server.storage.files import FileInfo, Files, distrust, read_text, write_anew
from icehouse_server.storage.store_paths import StorePaths, is_folder_name, is_root_file_name

_MARK_LIMIT_BYTES = 1 << 20


def take_lock(files: Files, paths: StorePaths) -> int:
    """Take the directory's lock, creating the directory if needed; return the descriptor that holds it.

    Raises `StartError` naming the owner if another process has it, or naming the part of the directory
    that others could swap or write; `OSError` from the disk.
    """
    files.make_dir(paths.root)
    check_trust(files, paths)
    try:
        return files.lock(paths.lock, owner=f"{os.getpid()}\n")
    except BlockingIOError as error:
        owner = read_text(files, paths.lock, limit_bytes=64).strip() or "unknown"
        raise StartError(
            Reason.STORE_LOCKED,
            f"Cache directory {paths.root} is in use by process {owner}; "
            "stop that process or choose another directory",
            metadata={"directory": paths.root, "owner_pid": owner},
        ) from error


def check_trust(files: Files, paths: StorePaths) -> None:
    """Refuse a directory that others may write, or whose parts are links or belong to others, and make
    `files` enforce that from now on.

    The root itself may be a link, to a larger disk for example; then its target is checked.
    Raises `StartError`, or `OSError` from the disk.
    """
    root = os.path.realpath(paths.root)
    _check(root, files.stat(root), is_folder=True)
    files.guard(paths.root)
    folders = {paths.blocks, paths.quarantine}
    for info in files.list(paths.root):
        path = f"{paths.root}/{info.name}"
        if path in folders or is_root_file_name(info.name):
            _check(path, info, is_folder=path in folders)
    with contextlib.suppress(FileNotFoundError):
        for info in files.list(paths.blocks):
            if is_folder_name(info.name):
                _check(f"{paths.blocks}/{info.name}", info, is_folder=True)


def _check(path: str, info: FileInfo, *, is_folder: bool) -> None:
    problem = distrust(info, is_folder=is_folder)
    if problem:
        raise StartError(
            Reason.STORE_UNUSABLE,
            f"{path} {problem}, or choose another cache directory",
            metadata={"path": path},
        )


def leave_mark(files: Files, paths: StorePaths) -> None:
    """Write the mark; the manifest must be closed. Raises `OSError`."""
    write_anew(files, paths.clean_mark, json.dumps(_snapshot(files, paths), sort_keys=True).encode())


def take_mark(files: Files, paths: StorePaths) -> bool:
    """Remove the mark; return whether the directory still matches it.

    Raises `OSError` if it cannot be removed: it must not outlive the next change.
    """
    try:
        text = read_text(files, paths.clean_mark, limit_bytes=_MARK_LIMIT_BYTES)
    except FileNotFoundError:
        return False
    files.unlink(paths.clean_mark)
    try:
        return bool(json.loads(text) == _snapshot(files, paths))
    except (ValueError, RecursionError, FileNotFoundError):
        return False


def _snapshot(files: Files, paths: StorePaths) -> dict[str, int]:
    """Return the times and sizes that a mark records, by name."""
    manifest = files.stat(paths.manifest)
    return {
        # Another version of this program must check everything: it may delete what this one retains.
        "layout_abi": LAYOUT_ABI,
        "manifest.size_bytes": manifest.size_bytes,
        "manifest.mtime_ns": manifest.mtime_ns,
        "blocks.mtime_ns": files.stat(paths.blocks).mtime_ns,
        **{f"{folder.name}.mtime_ns": folder.mtime_ns for folder in files.list(paths.blocks)},
    }
