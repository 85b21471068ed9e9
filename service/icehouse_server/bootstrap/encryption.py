"""Cipher of the cache, from the configured key. `cryptography` is needed only from here on.

The key comes from a file or a command, never from a flag or a variable: every user of the machine can read
flags (`ps`), and whoever may debug the process can read its variables.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import logging
import os
import shlex
import subprocess
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from icehouse_server.config import CacheConfig
from icehouse_server.errors import Reason, StartError, extra_command
from icehouse_server.small_file import read_small_file
from icehouse_server.storage.files import Files, in_time
from icehouse_server.storage.local.directory.lock import take_lock
from icehouse_server.storage.store_paths import StorePaths

if TYPE_CHECKING:
    # This needs an optional extra, and is loaded only if a key is configured.
    from icehouse_server.storage.local.encryption.aes_gcm import Cipher

_log = logging.getLogger("icehouse.boot")


def open_cipher(cache: CacheConfig, files: Files, *, in_group: bool = False) -> Cipher | None:
    """Return the cipher for a server's blocks; None if no key is configured. The ranks of a group share a
    data key, since rank 0 names the blocks of all ranks.

    Creates the directory and its data key at the first start. Raises StartError: better no server than one
    that writes prompts in the clear although a key was configured.
    """
    if not cache.is_encrypted:
        return None
    data_keys, master_key = encryption(), read_master_key(cache)
    assert master_key is not None, "an encrypted cache has a key"
    paths = StorePaths(str(cache.block_directory.absolute()))
    is_shared = cache.shared_url is not None or in_group

    def open_key() -> Any:
        lock = take_lock(files, paths)
        try:
            return data_keys.open_key(files, paths, master_key=master_key, is_shared=is_shared)
        finally:
            files.close(lock)

    try:
        opened = in_time(open_key)
    except OSError as error:
        # A disk that only refuses writes stops no start: the tier begins with writes off.
        cipher = None
        with contextlib.suppress(OSError):
            cipher = in_time(
                lambda: _existing_cipher(data_keys, files, paths, master_key, is_shared=is_shared)
            )
        if cipher is None:
            raise _unusable(paths, error) from error
        _log.warning("cache_key_read_only", extra={"key": cipher.key_id.hex(), "detail": str(error)})
        return cipher
    cipher = _cipher(opened.data_key, wrapped_key=opened.wrapped)
    _log.info("cache_key_opened", extra={"key": cipher.key_id.hex(), "is_new": opened.is_new})
    if opened.is_new and opened.other_key_count:
        _log.warning(
            "cache_key_unknown",
            extra={
                "other_keys": opened.other_key_count,
                "detail": "this key opens none of the data keys here, so the cache begins empty; blocks "
                "under other keys stay unread until they age out. Is this the right key?",
            },
        )
    return cipher


def find_cipher(cache: CacheConfig, files: Files) -> Cipher | None:
    """Return the cipher that opens the directory's blocks, read-only; None if the key opens no data key."""
    if not cache.is_encrypted:
        return None
    data_keys, master_key = encryption(), read_master_key(cache)
    assert master_key is not None, "an encrypted cache has a key"
    paths = StorePaths(str(cache.block_directory.absolute()))
    try:
        return _existing_cipher(data_keys, files, paths, master_key, is_shared=cache.shared_url is not None)
    except OSError as error:
        raise _unusable(paths, error) from error


def encryption() -> ModuleType:
    """Return the module of data keys. Raises StartError if `cryptography` is not installed."""
    try:
        from icehouse_server.storage.local.directory import data_keys
    except ImportError as error:
        raise StartError(
            Reason.ENCRYPTION_MISSING,
            f"encrypting blocks needs a package that cannot be loaded ({error.name}); "
            f"run {extra_command('encryption')}",
            metadata={"package": error.name},
        ) from error
    return data_keys


def _cipher(data_key: bytes, *, wrapped_key: bytes = b"") -> Cipher:
    from icehouse_server.storage.local.encryption.aes_gcm import Cipher

    return Cipher(data_key, wrapped_key=wrapped_key)


def _existing_cipher(
    data_keys: ModuleType, files: Files, paths: StorePaths, master_key: bytes, *, is_shared: bool
) -> Cipher | None:
    """Return the cipher of an existing data key, without writing anything."""
    data_key = data_keys.find_key(files, paths, master_key=master_key, is_shared=is_shared)
    return None if data_key is None else _cipher(data_key)


def _unusable(paths: StorePaths, error: OSError) -> StartError:
    return StartError(
        Reason.STORE_UNUSABLE,
        f"the keys of cache directory {paths.root} cannot be used: {error}; "
        "check its path and permissions, or start without a key",
        metadata={"directory": paths.root},
    )


KEY_BYTES = 32
_LIMIT_BYTES = 4096
_COMMAND_TIMEOUT_S = 60.0
"""A keychain may ask its user first."""
_ADVICE = "it must be 32 random bytes in base64 or hex, as `icehouse key new` prints them"


def new_key_text() -> str:
    """Return a new random key as text."""
    return base64.b64encode(os.urandom(KEY_BYTES)).decode()


def read_master_key(cache: CacheConfig) -> bytes | None:
    """Return the configured key; None without one. Raises StartError if it is not available."""
    if cache.key_file is not None:
        return key_of_file(Path(cache.key_file))
    return None if cache.key_command is None else key_of_command(cache.key_command)


def key_of_file(path: Path) -> bytes:
    """Return the key in a file that only its owner can read. Raises StartError."""
    try:
        file = read_small_file(path, limit_bytes=_LIMIT_BYTES)
    except OSError as error:
        raise _refuse(
            f"the key file {path} cannot be read: {error.strerror}; {_ADVICE}", what=str(path)
        ) from error
    if file.mode & 0o077:
        raise _refuse(
            f"the key file {path} has mode {file.mode:04o}, so others may read it; run chmod 600 {path}",
            what=str(path),
        )
    return _parse(file.content, f"the key file {path}")


def key_of_command(command: str) -> bytes:
    """Return the key that a command prints. Raises StartError."""
    what = f"the key command {command!r}"
    try:
        words = shlex.split(command)
        if not words:
            raise ValueError("it names no program")
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, timeout=_COMMAND_TIMEOUT_S, check=False
        )
    except (OSError, ValueError) as error:
        raise _refuse(f"{what} cannot be run: {error}", what=command) from error
    except subprocess.TimeoutExpired as error:
        raise _refuse(f"{what} did not end within {_COMMAND_TIMEOUT_S:.0f} s", what=command) from error
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise _refuse(
            f"{what} ended with {done.returncode}: {said[-1] if said else 'it printed nothing'}", what=command
        )
    return _parse(done.stdout, f"what {what} prints")


def _parse(text: bytes, what: str) -> bytes:
    words = text.decode("ascii", errors="replace").split()
    if len(words) == 1:
        for decode in (bytes.fromhex, functools.partial(base64.b64decode, validate=True)):
            with contextlib.suppress(ValueError):
                key = decode(words[0])
                if len(key) == KEY_BYTES:
                    return key
    raise _refuse(f"{what} is not a key: {_ADVICE}", what=what)


def _refuse(message: str, *, what: str) -> StartError:
    return StartError(Reason.CACHE_KEY_INVALID, message, metadata={"source": what})
