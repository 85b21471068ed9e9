"""The mark of a clean shutdown: what the directory looked like when it was closed.

A folder's modification time changes with every file that comes, goes or is renamed in it,
and the manifest's with every row. When all of them are what the mark says, rows and files
still agree and the start need not walk the files. What this cannot see, a file changed in
place, is seen by the deferred walk and by the checksums of every load. The mark proves
itself: it needs no fsync, for a mark that outlives a change no longer matches.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping

from service.domain.blocks import LAYOUT_ABI
from service.kv.files import Files, read_text
from service.kv.store_paths import StorePaths

_LIMIT_BYTES = 1 << 20


def snapshot(files: Files, paths: StorePaths) -> dict[str, int]:
    """Return the times and sizes that a mark pins down, by name."""
    manifest = files.stat(paths.manifest)
    seen = {
        # Another version of this program must look at everything: it may delete what we keep.
        "layout_abi": LAYOUT_ABI,
        "manifest.size_bytes": manifest.size_bytes,
        "manifest.mtime_ns": manifest.mtime_ns,
        "blocks.mtime_ns": files.stat(paths.blocks).mtime_ns,
    }
    for folder in files.list(paths.blocks):
        seen[f"{folder.name}.mtime_ns"] = folder.mtime_ns
    return seen


def take_mark(files: Files, paths: StorePaths) -> Mapping[str, int] | None:
    """Remove the mark and return what it said; None when there is none that can be read.

    Raises `OSError` when it cannot be removed: it must not outlive the next change.
    """
    try:
        text = read_text(files, paths.clean_mark, limit_bytes=_LIMIT_BYTES)
    except FileNotFoundError:
        return None
    files.unlink(paths.clean_mark)
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def leave_mark(files: Files, paths: StorePaths) -> None:
    """Write the mark; the manifest is closed by now. Raises `OSError`."""
    text = json.dumps(snapshot(files, paths), sort_keys=True)
    with contextlib.suppress(FileNotFoundError):
        files.unlink(paths.clean_mark)
    descriptor = files.create(paths.clean_mark)
    try:
        files.write(descriptor, [text.encode()], offset=0)
    finally:
        files.close(descriptor)
