"""From the configured key to what encrypts blocks. `cryptography` is needed from here on only."""

from __future__ import annotations

import logging
from types import ModuleType

from service.cli.master_key import read_master_key
from service.config import CacheConfig
from service.errors import Reason, StartError
from service.kv.files import Files
from service.kv.lock_file import take_lock
from service.kv.store_paths import StorePaths
from service.kv.vault import Vault

_log = logging.getLogger("icehouse.boot")


def open_vault(cache: CacheConfig, files: Files) -> Vault | None:
    """Return what a server encrypts its blocks with; None when no key is configured.

    Makes the directory and its data key at the first start. Raises StartError: better no server
    than one that writes prompts in the clear where a key was configured.
    """
    if not cache.is_encrypted:
        return None
    data_keys = encryption()
    master_key = read_master_key(cache)
    assert master_key is not None, "an encrypted cache has a key"
    paths = StorePaths(str(cache.block_directory.absolute()))
    try:
        lock = take_lock(files, paths)
        try:
            opened = data_keys.open_key(files, paths, master_key=master_key)
        finally:
            files.close(lock)
    except OSError as error:
        raise _unusable(paths, error) from error
    vault = _vault(opened.data_key)
    _log.info("cache_key_opened", extra={"key": vault.key_id.hex(), "is_new": opened.is_new})
    if opened.is_new and opened.other_key_count:
        _log.warning(
            "cache_key_unknown",
            extra={
                "other_keys": opened.other_key_count,
                "detail": "this key opens none of the data keys here, so the cache begins empty; blocks "
                "under other keys stay, unread, until they age out. Was it meant to be another key?",
            },
        )
    return vault


def find_vault(cache: CacheConfig, files: Files) -> Vault | None:
    """Return what opens the directory's blocks, for looking only; None without a key that does."""
    if not cache.is_encrypted:
        return None
    data_keys = encryption()
    master_key = read_master_key(cache)
    assert master_key is not None, "an encrypted cache has a key"
    paths = StorePaths(str(cache.block_directory.absolute()))
    try:
        data_key = data_keys.find_key(files, paths, master_key=master_key)
    except OSError as error:
        raise _unusable(paths, error) from error
    return None if data_key is None else _vault(data_key)


def encryption() -> ModuleType:
    """Return the module of data keys. Raises StartError when `cryptography` is not installed."""
    try:
        from service.kv import data_keys
    except ImportError as error:
        raise StartError(
            Reason.ENCRYPTION_MISSING,
            f"encrypting blocks needs a package that cannot be loaded ({error.name}); "
            "pip install 'icehouse[encryption]'",
            metadata={"package": error.name},
        ) from error
    return data_keys


def _vault(data_key: bytes) -> Vault:
    from service.kv.vault_aes import AesVault

    return AesVault(data_key)


def _unusable(paths: StorePaths, error: OSError) -> StartError:
    return StartError(
        Reason.STORE_UNUSABLE,
        f"the keys of cache directory {paths.root} cannot be had: {error}; "
        "check its path and permissions, or start without a key",
        metadata={"directory": paths.root},
    )
