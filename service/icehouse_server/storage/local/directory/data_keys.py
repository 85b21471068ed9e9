"""Data keys under which blocks are encrypted: created here, stored in the directory wrapped by a master key.

The master key belongs to whoever runs the server and is never stored in the directory. It can be
changed by wrapping the data key again (`rewrap`): blocks stay unchanged and readable. A master
key that opens none of the wrapped keys gets a new data key. The other keys stay for those who
can open them, and so do their blocks, until they age out like those of another model.

The caller holds the directory's lock. Every function raises `OSError` from the disk.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Callable, Sequence

from icehouse_server.storage.files import Files, exists, read_text, replace_file
from icehouse_server.storage.local.encryption.aes_gcm import KEY_BYTES, shared_data_key, unwrap_key, wrap_key
from icehouse_server.storage.store_paths import StorePaths

_log = logging.getLogger(__name__)

_FORMAT = "icehouse.keys.v1"
_LIMIT_BYTES = 64 << 10
_LIMIT_COUNT = 64
"""Wrapped keys that are stored; one more replaces the oldest, whose blocks are long gone by then."""


@dataclasses.dataclass(frozen=True, slots=True)
class OpenedKey:
    """The data key of a directory for one master key."""

    data_key: bytes = dataclasses.field(repr=False)
    wrapped: bytes
    """The data key as stored in the directory."""
    other_key_count: int
    """Data keys that the master key does not open."""
    is_new: bool


def open_key(
    files: Files,
    paths: StorePaths,
    *,
    master_key: bytes,
    is_shared: bool = False,
    random_bytes: Callable[[int], bytes] = os.urandom,
) -> OpenedKey:
    """Return the newest data key that the master key opens; create one if there is none. With `is_shared`,
    only the key that all servers with this master key derive will do."""
    wrapped = _read(files, paths)
    data_key = shared_data_key(master_key) if is_shared else random_bytes(KEY_BYTES)
    mine = [item for item in _opened(wrapped, master_key) if not is_shared or item[0] == data_key]
    if mine:
        return OpenedKey(*mine[-1], other_key_count=len(wrapped) - len(mine), is_new=False)
    own = wrap_key(data_key, master_key=master_key)
    _write(files, paths, [*wrapped, own])
    return OpenedKey(data_key, own, other_key_count=len(wrapped), is_new=True)


def restore_key(files: Files, paths: StorePaths, *, wrapped: bytes) -> None:
    """Write the data key in use again if the key file is gone, so that its blocks stay readable after the
    next start. An existing file is left alone: the key may have been changed."""
    if not exists(files, paths.data_keys):
        _log.warning("data_key_put_back", extra={"path": paths.data_keys})
        _write(files, paths, [wrapped])


def find_key(files: Files, paths: StorePaths, *, master_key: bytes, is_shared: bool = False) -> bytes | None:
    """Return the data key that `open_key` would return, or None. Changes nothing and needs no lock."""
    mine = _opened(_stored(files, paths) or [], master_key)
    shared = shared_data_key(master_key) if is_shared else None
    return next((key for key, _ in reversed(mine) if shared in (None, key)), None)


def rewrap(files: Files, paths: StorePaths, *, old_master_key: bytes, new_master_key: bytes) -> int:
    """Rewrap all keys that the old master key opens with the new one; return their count."""
    changed = 0
    wrapped = []
    for item in _read(files, paths):
        data_key = unwrap_key(item, master_key=old_master_key)
        changed += data_key is not None
        wrapped.append(item if data_key is None else wrap_key(data_key, master_key=new_master_key))
    if changed:
        _write(files, paths, wrapped)
    return changed


def _opened(wrapped: Sequence[bytes], master_key: bytes) -> list[tuple[bytes, bytes]]:
    """Return the data keys that the master key opens, each with its wrapped form."""
    keys = ((unwrap_key(item, master_key=master_key), item) for item in wrapped)
    return [(data_key, item) for data_key, item in keys if data_key is not None]


def _read(files: Files, paths: StorePaths) -> list[bytes]:
    wrapped = _stored(files, paths)
    if wrapped is None:
        # Blocks cannot be opened without their wrapped key, but somebody may repair the file by hand. Each
        # file moved aside earlier may contain keys that no other has, so none is replaced.
        numbered = map(paths.data_keys_aside, range(1, _LIMIT_COUNT))
        aside = next(
            (path for path in numbered if not exists(files, path)), paths.data_keys_aside(_LIMIT_COUNT - 1)
        )
        _log.warning("data_keys_moved_aside", extra={"path": aside})
        files.rename(paths.data_keys, aside)
        return []
    return wrapped


def _stored(files: Files, paths: StorePaths) -> list[bytes] | None:
    """Return the wrapped keys, oldest first; None if the file is not as it was written."""
    if not exists(files, paths.data_keys):
        return []
    try:
        document = json.loads(read_text(files, paths.data_keys, limit_bytes=_LIMIT_BYTES))
        if document["format"] != _FORMAT:
            return None
        return [bytes.fromhex(item) for item in document["wrapped"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _write(files: Files, paths: StorePaths, wrapped: Sequence[bytes]) -> None:
    """Replace the file durably: from now on blocks are written under its newest key."""
    text = json.dumps({"format": _FORMAT, "wrapped": [item.hex() for item in wrapped[-_LIMIT_COUNT:]]})
    replace_file(files, paths.data_keys, text.encode())
    files.fsync_dir(paths.root)
