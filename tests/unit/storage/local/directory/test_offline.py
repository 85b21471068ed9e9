"""Removal from outside: after it nothing of a prompt can be read in the directory, whatever its state was."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from icehouse_server.domain.blocks import pack_tokens
from icehouse_server.errors import StorageError
from icehouse_server.storage.files import Files
from icehouse_server.storage.local.directory import data_keys
from icehouse_server.storage.local.directory.offline import OfflineStore, PurgeScope
from icehouse_server.storage.local.directory.reconcile import ReconcileFinding
from icehouse_server.storage.store_paths import StorePaths

from tests.fixtures.storage.blocks import make_chain
from tests.fixtures.storage.faults import Crash, CrashingFiles
from tests.fixtures.storage.storage_thread import ManualClock, StorageThread

CHAIN = make_chain(3)


def offline(directory: Path, files: object = None) -> OfflineStore:
    return OfflineStore(str(directory), files=files or Files(), clock=ManualClock())  # type: ignore


def purge(
    directory: Path, scope: PurgeScope = PurgeScope.EVERYTHING, files: object = None
) -> tuple[int, int]:
    return offline(directory, files).purge(lambda _: True, scope=scope, progress=lambda done, total: None)


def everything_in(directory: Path) -> bytes:
    """Return all bytes of all files, and their names."""
    files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    return b"\n".join(path.read_bytes() + path.name.encode() for path in files)


def secrets() -> list[bytes]:
    """Return what of a prompt must not be found: token ids as they are packed and as text, and kv."""
    found: list[bytes] = []
    for block in CHAIN:
        ids = block.header.token_ids
        found += [pack_tokens(ids), pack_tokens(ids).hex().encode(), str(list(ids[:4]))[1:-1].encode()]
        found.append(bytes(block.regions[0].tensors[0].data)[:64])
    return found


def traces(directory: Path) -> list[bytes]:
    whole = everything_in(directory)
    return [secret for secret in secrets() if secret in whole]


def lose_the_manifest(paths: StorePaths) -> None:
    for suffix in ("", "-wal", "-shm"):
        if os.path.exists(paths.manifest + suffix):
            os.unlink(paths.manifest + suffix)


def damage_the_manifest(paths: StorePaths) -> None:
    with open(paths.manifest, "r+b") as file:
        file.write(b"no database at all")


def edit_a_row(paths: StorePaths) -> None:
    connection = sqlite3.connect(paths.manifest)
    connection.execute("UPDATE blocks SET token_count = 3 WHERE hash = ?", (CHAIN[0].header.hash,))
    connection.commit()
    connection.close()


def lose_a_row(paths: StorePaths) -> None:
    connection = sqlite3.connect(paths.manifest)
    connection.execute("DELETE FROM blocks WHERE hash = ?", (CHAIN[1].header.hash,))
    connection.commit()
    connection.close()


def leave_a_partial(paths: StorePaths) -> None:
    path = paths.block(CHAIN[0].header.fingerprint, CHAIN[0].header.hash)
    shutil.copy(path, path.replace(CHAIN[0].header.hash.hex(), "0" * 64) + ".partial")


def lose_the_quarantine(paths: StorePaths) -> None:
    os.rmdir(paths.quarantine)


def make_the_manifest_half(paths: StorePaths) -> None:
    """A process was killed while it made a new manifest."""
    lose_the_manifest(paths)
    Path(paths.manifest).touch(0o600)


def lose_all_at_once(paths: StorePaths) -> None:
    leave_a_partial(paths)
    lose_the_quarantine(paths)
    lose_the_manifest(paths)


def set_things_aside(paths: StorePaths) -> None:
    path = paths.block(CHAIN[0].header.fingerprint, CHAIN[0].header.hash)
    shutil.copy(path, paths.quarantined(CHAIN[0].header.hash))
    for aside in paths.manifests_aside:
        shutil.copy(paths.manifest, aside)


STATES: list[Callable[[StorePaths], None]] = [
    lambda paths: None,
    lose_the_manifest,
    damage_the_manifest,
    edit_a_row,
    lose_a_row,
    leave_a_partial,
    lose_the_quarantine,
    make_the_manifest_half,
    lose_all_at_once,
    set_things_aside,
]
NAMES = ["as it was", *(state.__name__ for state in STATES[1:])]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Three blocks in the clear, closed."""
    root = tmp_path / "cache"
    with StorageThread(root) as served:
        served.spill(*CHAIN)
    assert len(traces(root)) > len(CHAIN), "the test does not find what it looks for"
    return root


@pytest.mark.parametrize("scope", [PurgeScope.EVERYTHING, PurgeScope.CLEAR_TEXT])
@pytest.mark.parametrize("spoil", STATES, ids=NAMES)
def test_nothing_of_a_prompt_is_left(
    directory: Path, spoil: Callable[[StorePaths], None], scope: PurgeScope
) -> None:
    spoil(StorePaths(str(directory)))
    count, size_bytes = purge(directory, scope)
    assert count >= 3 and size_bytes > 0
    assert traces(directory) == []
    with StorageThread(directory) as served:
        assert served.take_inventory() == ()
        assert served.stats().last_reconcile.adopted_count == 0


@pytest.mark.parametrize("spoil", STATES, ids=NAMES)
def test_a_crash_at_any_step_brings_nothing_back_that_was_gone(
    tmp_path: Path, directory: Path, spoil: Callable[[StorePaths], None]
) -> None:
    spoil(StorePaths(str(directory)))
    for crash_at in range(1, 200):
        copy = tmp_path / str(crash_at)
        shutil.copytree(directory, copy)
        files = CrashingFiles(crash_at)
        files.is_armed = True
        try:
            purge(copy, files=files)
        except Crash:
            left = {path.name for path in copy.rglob("*.safetensors")}
            with StorageThread(copy) as served:
                served.settle()
                assert {f"{record.hash.hex()}.safetensors" for record in served.take_inventory()} <= left
            # Doing it again does the rest.
            purge(copy)
            assert traces(copy) == []
        else:
            assert crash_at > 5
            return
    raise AssertionError("the purge never came to its end")


def test_nothing_is_left_of_what_only_the_write_ahead_log_holds(directory: Path) -> None:
    """A killed server leaves its last rows in the log; nobody has folded them into the manifest."""
    served = StorageThread(directory)
    served.__enter__()
    served.spill(*make_chain(3, seed=9))
    log = Path(f"{StorePaths(str(directory)).manifest}-wal")
    copy = directory.with_name("killed")
    shutil.copytree(directory, copy)
    served.__exit__(None, None, None)
    tokens = [pack_tokens(block.header.token_ids) for block in make_chain(3, seed=9)]
    assert all(secret in (copy / log.name).read_bytes() for secret in tokens)
    purge(copy)
    assert traces(copy) == [] and not any(secret in everything_in(copy) for secret in tokens)


def test_a_manifest_whose_making_was_cut_short_has_no_rows(directory: Path) -> None:
    make_the_manifest_half(StorePaths(str(directory)))
    assert offline(directory).rows().records == ()
    found, _ = offline(directory).check(progress=lambda count: None)
    assert [item.finding for item in found] == [ReconcileFinding.ADOPTABLE] * 3


def test_a_directory_without_a_manifest_has_nothing_to_verify(directory: Path) -> None:
    """A purge that was killed leaves one."""
    store = offline(directory)
    lose_the_manifest(store.paths)
    assert list(store.verify(store.rows().records)) == []


def test_the_keys_go_before_the_blocks(tmp_path: Path, directory: Path) -> None:
    files, paths = Files(), StorePaths(str(directory))
    data_keys.open_key(files, paths, master_key=bytes(32))
    for name in ("keys.damaged.json", "keys.damaged.2.json", "keys.json.partial"):
        (directory / name).write_text("wrapped")
    seen: list[str] = []

    class Watched(Files):
        def unlink(self, path: str) -> None:
            seen.append(os.path.basename(path))
            super().unlink(path)

    purge(directory, files=Watched())
    keys = [number for number, name in enumerate(seen) if name.startswith("keys.")]
    blocks = [number for number, name in enumerate(seen) if name.endswith(".safetensors")]
    assert len(keys) == 4 and len(blocks) == 3 and max(keys) < min(blocks)
    assert not list(directory.glob("keys*"))


def test_what_was_written_today_is_remembered(directory: Path) -> None:
    with StorageThread(directory) as served:
        written_bytes = served.stats().spill.written_today_bytes
    assert written_bytes > 0
    purge(directory)
    with StorageThread(directory) as served:
        assert served.stats().spill.written_today_bytes == written_bytes


def test_a_file_that_is_not_ours_stays(directory: Path) -> None:
    foreign = directory / "blocks" / "notes.txt"
    foreign.write_text("mine")
    purge(directory)
    assert foreign.read_text() == "mine"


def test_a_part_is_not_removed_from_a_manifest_that_cannot_be_read(directory: Path) -> None:
    damage_the_manifest(StorePaths(str(directory)))
    with pytest.raises(StorageError):
        purge(directory, PurgeScope.CHOSEN)
