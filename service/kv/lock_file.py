"""One process per cache directory."""

from __future__ import annotations

import os

from service.errors import Reason, StartError
from service.kv.files import Files, read_text
from service.kv.store_paths import StorePaths


def take_lock(files: Files, paths: StorePaths) -> int:
    """Take the directory's lock, making the directory if needed; return the descriptor that holds it.

    Raises `StartError` naming the owner when another process has it, `OSError` from the disk.
    """
    files.make_dir(paths.root)
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
