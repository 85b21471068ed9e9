"""Crash after every single step; reopen; nothing committed is lost and nothing lies."""

from __future__ import annotations

import functools
import os
import sqlite3

import pytest
from icehouse_server.storage.api import BlockPersisted, BlocksLoaded, StorageFailure
from icehouse_server.storage.files import Files
from icehouse_server.storage.local.directory.manifest import Manifest
from icehouse_server.storage.local.directory.reconcile import Scan
from icehouse_server.storage.local.encryption.aes_gcm import Cipher
from icehouse_server.storage.store_paths import StorePaths

from tests.fixtures.storage.blocks import FINGERPRINT, RATES, make_block, make_chain
from tests.fixtures.storage.ciphers import BOTH_WAYS
from tests.fixtures.storage.faults import Crash, CrashingFiles
from tests.fixtures.storage.loading import assert_holds, plan
from tests.fixtures.storage.storage_thread import ManualClock, StorageThread

_MANIFEST_STEPS = ("insert", "delete", "touch", "set_pins", "set_rates", "add_fingerprint", "close")
STEP_LIMIT = 400


@pytest.fixture
def crashing_manifest(monkeypatch):
    """Let every write of the manifest count as a step of the file system it crashes with."""
    current: dict[str, CrashingFiles] = {}

    def wrap(name):
        original = getattr(Manifest, name)

        def method(self, *args, **kwargs):
            result = original(self, *args, **kwargs)
            if "files" in current:
                current["files"].step()
            return result

        monkeypatch.setattr(Manifest, name, method)

    for name in _MANIFEST_STEPS:
        wrap(name)
    return current


def run_until_crash(served: StorageThread, scenario) -> bool:
    """Play a scenario; True when the crash came. The manifest's handles are dropped as by the system."""
    store = served.storage._store
    try:
        with served:
            scenario(served)
    except Crash:
        manifest = store._manifest
        if manifest is not None:
            manifest._database.conn.close()
        return True
    return False


def check_is_clean(directory) -> None:
    """Prove what `check` would: no discrepancy between rows and files."""
    paths = StorePaths(os.path.abspath(directory))
    manifest = Manifest.open_read_only(paths.manifest)
    rows, edited = manifest.load()
    walk = Scan(rows, edited, files=Files(), paths=paths, now_time=0.0)
    assert [(item.finding, item.path) for item in walk] == []
    manifest.close(checkpoint=False)


def spill_scenario(served: StorageThread, cipher: Cipher | None) -> None:
    served.files.is_armed = True
    served.storage.keep_rates(RATES)
    served.spill(*make_chain(2, seed=2, checkpoint=True, cipher=cipher))


def evict_scenario(served: StorageThread, cipher: Cipher | None) -> None:
    served.files.is_armed = True
    served.storage.delete((make_chain(2, seed=1, cipher=cipher)[1].header.hash,))
    served.settle()


def quarantine_scenario(served: StorageThread, cipher: Cipher | None) -> None:
    victim = make_chain(2, seed=1, cipher=cipher)[1]
    os.truncate(served.path(victim), os.path.getsize(served.path(victim)) - 1)
    served.files.is_armed = True
    served.storage.get_into(*plan([victim]))
    served.settle()


def richer(cipher: Cipher | None):
    """The first chain's second block with a checkpoint that was taken later."""
    return make_chain(2, seed=1, cipher=cipher, checkpoint=True)[1]


def replace_scenario(served: StorageThread, cipher: Cipher | None) -> None:
    served.files.is_armed = True
    served.spill(richer(cipher))


SCENARIOS = {
    # name: what happens, and how many blocks of the first chain must survive it
    "spill": (spill_scenario, 2),
    "evict": (evict_scenario, 1),
    "replace": (replace_scenario, 2),
    "quarantine": (quarantine_scenario, 1),
}


@pytest.mark.parametrize("cipher", **BOTH_WAYS)
@pytest.mark.parametrize("name", SCENARIOS)
def test_crash_after_every_step(tmp_path, crashing_manifest, name, cipher):
    scenario, surviving_count = SCENARIOS[name]
    committed = make_chain(2, seed=1, cipher=cipher)
    crash_at = 0
    while crash_at < STEP_LIMIT:
        crash_at += 1
        directory = tmp_path / str(crash_at)
        crashing_manifest.clear()
        with StorageThread(directory, cipher=cipher) as served:
            served.spill(*committed)
        files = CrashingFiles(crash_at)
        crashing_manifest["files"] = files
        dead = StorageThread(directory, files=files, cipher=cipher)
        has_crashed = run_until_crash(dead, functools.partial(scenario, cipher=cipher))
        persisted = {o.record.hash for o in dead.outcomes if isinstance(o, BlockPersisted)}
        crashing_manifest.clear()
        if not has_crashed:
            break
        with StorageThread(directory, cipher=cipher) as served:
            check_is_clean(directory)
            known = {record.hash for record in served.take_inventory()}
            assert served.storage._store.rates in ({}, {FINGERPRINT: RATES})
            expected = list(committed)
            if name == "replace":
                assert_no_damage(served)
                record = served.storage._store.index.get(committed[1].header.hash)
                if record is not None and record.checkpoint_bytes:
                    expected[1] = richer(cipher)
            blocks = [*expected, *make_chain(2, seed=2, checkpoint=True, cipher=cipher)]
            assert_whatever_is_known_is_right(served, blocks)
            assert {block.header.hash for block in committed[:surviving_count]} | persisted <= known
    assert 5 < crash_at < STEP_LIMIT


def assert_no_damage(served: StorageThread) -> None:
    """Prove that nothing was found to be broken, at the start or now."""
    assert served.storage._store.report.quarantined_count == 0
    assert served.stats().integrity.quarantined_block_total == 0


def assert_whatever_is_known_is_right(served: StorageThread, blocks) -> None:
    """Load every block the tier claims to have; each must come back with its own bytes."""
    known = {record.hash for record in served.take_inventory()}
    for block in blocks:
        if block.header.hash in known:
            served.storage.get_into(*plan([block]))
            outcome = next(o for o in served.take() if isinstance(o, BlocksLoaded | StorageFailure))
            if isinstance(outcome, BlocksLoaded):
                assert_holds(outcome, [block])
            else:
                # The only block allowed to be bad is the one a scenario damaged itself.
                assert block is blocks[1]


def spoil(directory, chain) -> None:
    """Leave one of each disagreement in a directory."""
    paths = StorePaths(os.path.abspath(directory))
    of = [paths.block(block.header.fingerprint, block.header.hash) for block in chain]
    os.unlink(of[1])
    os.truncate(of[2], 50)
    with open(of[0] + ".partial", "wb") as partial:
        partial.write(b"half")
    connection = sqlite3.connect(paths.manifest)
    connection.execute("DELETE FROM blocks WHERE hash = ?", (chain[3].header.hash,))
    connection.execute("UPDATE blocks SET token_count = 3 WHERE hash = ?", (chain[4].header.hash,))
    connection.commit()
    connection.close()


@pytest.mark.parametrize("cipher", **BOTH_WAYS)
def test_crash_after_every_step_of_reconcile(tmp_path, crashing_manifest, cipher):
    chain = make_chain(6, seed=1, cipher=cipher)
    crash_at = 0
    while crash_at < STEP_LIMIT:
        crash_at += 1
        directory = tmp_path / str(crash_at)
        crashing_manifest.clear()
        with StorageThread(directory, cipher=cipher) as served:
            served.spill(*chain)
        spoil(directory, chain)
        files = CrashingFiles(crash_at)
        files.is_armed = True
        crashing_manifest["files"] = files
        has_crashed = run_until_crash(
            StorageThread(directory, files=files, cipher=cipher), lambda served: None
        )
        crashing_manifest.clear()
        with StorageThread(directory, cipher=cipher) as served:
            check_is_clean(directory)
            known = {record.hash for record in served.take_inventory()}
            sound = {chain[index].header.hash for index in (0, 3, 5)}
            assert sound <= known <= sound | {chain[4].header.hash}
            assert_whatever_is_known_is_right(served, chain)
        if not has_crashed:
            break
    assert 10 < crash_at < STEP_LIMIT


@pytest.mark.parametrize("name", ["spill", "replace"])
def test_what_was_adopted_after_a_kill_outlives_the_power(tmp_path, crashing_manifest, name):
    """The next process finds names that no sync of a folder made durable, and tells of their blocks."""
    scenario, _ = SCENARIOS[name]
    for crash_at in range(1, STEP_LIMIT):
        directory = tmp_path / str(crash_at)
        crashing_manifest.clear()
        with StorageThread(directory) as served:
            served.spill(*make_chain(2, seed=1))
        files = CrashingFiles(crash_at, is_kill=True)
        crashing_manifest["files"] = files
        has_crashed = run_until_crash(
            StorageThread(directory, files=files), functools.partial(scenario, cipher=None)
        )
        crashing_manifest.clear()
        if not has_crashed:
            break
        files = files.taken_over()
        with StorageThread(directory, files=files) as served:
            told = {regions_of(record) for record in served.take_inventory()}
        files.lose_power()
        with StorageThread(directory) as served:
            assert {regions_of(record) for record in served.take_inventory()} == told, crash_at
    assert 5 < crash_at < STEP_LIMIT - 1


def regions_of(record):
    return record.hash, record.kv_bytes, record.window_bytes, record.checkpoint_bytes


def test_the_crashing_files_lose_what_was_not_synced(tmp_path):
    files = CrashingFiles(crash_at=3)
    descriptor = files.create(str(tmp_path / "a.partial"))
    files.is_armed = True
    files.write(descriptor, [b"12345678"], offset=0)
    files.rename(str(tmp_path / "a.partial"), str(tmp_path / "a"))
    with pytest.raises(Crash):
        files.close(descriptor)
    assert (tmp_path / "a.partial").read_bytes() == b"1234"
    assert not (tmp_path / "a").exists()


def test_the_directory_reopens_after_a_spill(tmp_path):
    clock = ManualClock()
    with StorageThread(tmp_path, clock=clock) as served:
        served.spill(make_block())
    with StorageThread(tmp_path, clock=clock) as served:
        assert len(served.take_inventory()) == 1
