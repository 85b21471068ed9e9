"""Checks of the SSD tier: is there space, how is its directory, is it encrypted?"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
from pathlib import Path

from icehouse_client.cli.figures import size_text

from icehouse_server.bootstrap.encryption import find_cipher
from icehouse_server.cli.doctor.check import Check, Verdict
from icehouse_server.config import Config
from icehouse_server.errors import StartError
from icehouse_server.rpc.own_server import OwnServer, find_own_server
from icehouse_server.storage.files import Files, read_text
from icehouse_server.storage.store_paths import StorePaths


def check_disk(config: Config) -> Check:
    """Is there room for the SSD tier, and may it be written?"""
    if not config.cache.has_ssd:
        return Check("disk", Verdict.OK, "the SSD tier is off")
    folder = config.cache.block_directory
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not existing.is_dir() or not os.access(existing, os.R_OK | os.W_OK | os.X_OK):
        return Check("disk", Verdict.FAIL, f"{existing} is not writable", "choose another --cache-directory")
    free_bytes = shutil.disk_usage(existing).free
    wanted_bytes = config.cache.ssd_bytes + config.cache.free_space_floor_bytes
    detail = f"{size_text(free_bytes)} free, SSD tier up to {size_text(config.cache.ssd_bytes)}"
    if free_bytes + _size_bytes(folder) < wanted_bytes:
        advice = "the SSD tier will be smaller than its limit; lower --ssd-bytes or free some space"
        return Check("disk", Verdict.WARN, detail, advice)
    return Check("disk", Verdict.OK, detail)


def check_cache(config: Config) -> Check:
    """How is the cache directory: whose, how full, closed cleanly, anything damaged in it?"""
    folder = config.cache.block_directory
    if not config.cache.has_ssd:
        return Check("cache", Verdict.OK, "the SSD tier is off")
    if not folder.is_dir() or not os.access(folder, os.R_OK | os.X_OK):
        return Check("cache", Verdict.OK, f"{folder}: made by the first server")
    store = StorePaths(str(folder))
    used = f"{size_text(_size_bytes(folder))} of {size_text(config.cache.ssd_bytes)} used"
    owner = _owner(store)
    if owner is not None and find_own_server(config.server, config.security) is not OwnServer.ABSENT:
        used += f", in use by the server that runs (process {owner})"
    elif owner is not None:
        advice = "one server at a time: stop that process, or choose another --cache-directory"
        return Check("cache", Verdict.FAIL, f"{folder}: {used}, in use by process {owner}", advice)
    if stat.S_IMODE(folder.stat().st_mode) & 0o077:
        advice = f"its files hold prompts: chmod 700 {folder}"
        return Check("cache", Verdict.WARN, f"{folder}: {used}, open to other users", advice)
    damaged_count = _entry_count(store.quarantine)
    if damaged_count:
        advice = "they are not used and count as used space; icehouse cache purge --all removes everything"
        return Check(
            "cache", Verdict.WARN, f"{folder}: {used}, {damaged_count} damaged files set aside", advice
        )
    if owner is None and os.path.exists(store.manifest) and not os.path.exists(store.clean_mark):
        advice = "no harm: the next start looks at every file; icehouse cache check does so now"
        return Check("cache", Verdict.WARN, f"{folder}: {used}, not closed cleanly last time", advice)
    return Check("cache", Verdict.OK, f"{folder}: {used}")


def check_encryption(config: Config) -> Check:
    """Are blocks encrypted, and does the key open those that are there?"""
    cache = config.cache
    if not cache.has_ssd:
        return Check("at rest", Verdict.OK, "the SSD tier is off")
    if not cache.is_encrypted:
        return Check("at rest", Verdict.OK, "blocks are in the clear, readable by their owner only")
    folder = cache.block_directory
    try:
        cipher = find_cipher(cache, Files())
    except StartError as error:
        return Check("at rest", Verdict.FAIL, error.message, "see docs/at-rest.md")
    if cipher is None and os.path.exists(StorePaths(str(folder)).data_keys):
        advice = "the cache would begin empty beside blocks under another key; was it meant to be that one?"
        return Check("at rest", Verdict.WARN, f"the key opens no data key in {folder}", advice)
    key = f"data key {cipher.key_id.hex()}" if cipher else "the first start makes its data key"
    return Check("at rest", Verdict.OK, f"blocks are encrypted (AES-256-GCM), {key}")


def _owner(store: StorePaths) -> str | None:
    """Return the process id that the lock's holder wrote down, None when nobody holds the lock."""
    files = Files()
    try:
        lock = files.open(store.lock)
        try:
            # A shared lock, given back at once: two doctors do not disturb each other.
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return read_text(files, store.lock, limit_bytes=64).strip() or "unknown"
        finally:
            files.close(lock)
    except OSError:
        return None
    return None


def _size_bytes(folder: Path) -> int:
    """Return the bytes of every file below `folder`; files that go meanwhile count nothing."""
    total_bytes = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total_bytes += os.lstat(os.path.join(place, name)).st_size
            except FileNotFoundError:
                continue
    return total_bytes


def _entry_count(path: str) -> int:
    try:
        return len(os.listdir(path))
    except OSError:
        return 0
