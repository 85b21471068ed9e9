"""Every verb fails once; the disk fills, turns read-only, vanishes. The tier lives and tells the truth."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3

import pytest
from icehouse_server.domain.blocks import BlockDamage
from icehouse_server.domain.cache_stats import SpillDropCause
from icehouse_server.pins import UNTIL_UNPINNED
from icehouse_server.storage.api import (
    BlockPersisted,
    BlocksEvicted,
    BlocksLoaded,
    BlocksPurged,
    Inventory,
    StorageFailure,
    StorageTrouble,
    Verified,
)
from icehouse_server.storage.local.directory.manifest import Manifest

from tests.fixtures.storage.blocks import FINGERPRINT, RATES, make_block, make_chain
from tests.fixtures.storage.faults import VERBS, FaultyFiles
from tests.fixtures.storage.loading import assert_holds, plan
from tests.fixtures.storage.storage_thread import ManualClock, StorageThread, drops
from tests.unit.storage.local.test_crash import check_is_clean


def use_everything(served: StorageThread, blocks) -> None:
    """Spill, load, touch, verify, evict; give the disk time to recover in between."""
    for block in blocks:
        served.spill(block)
        served.clock.advance(100)
        served.settle()
    served.storage.get_into(*plan(blocks))
    served.storage.touch(tuple(block.header.hash for block in blocks))
    served.storage.keep_rates(RATES)
    served.clock.advance(100)
    served.settle()
    served.storage.verify()
    served.settle()
    served.storage.delete((blocks[-1].header.hash,))
    served.settle()
    served.clock.advance(100)
    served.settle()


@pytest.mark.parametrize("error_number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_failing_once(tmp_path, verb, error_number):
    chain = make_chain(3)
    call_number = 0
    while True:
        call_number += 1
        directory = tmp_path / str(call_number)
        files = FaultyFiles(verb, call_number, error_number)
        clock = ManualClock()
        served = StorageThread(directory, files=files, clock=clock)
        files.is_armed = True
        with served:
            clock.advance(100)
            use_everything(served, chain)
            outcomes = list(served.outcomes)
            stats = served.stats()
            assert not stats.disk.writes_off_detail
            assert_every_spill_has_one_outcome(outcomes, chain, stats)
            for loaded in (o for o in outcomes if isinstance(o, BlocksLoaded)):
                assert_holds(loaded, chain[: len(loaded.blocks)])
        with StorageThread(directory, clock=clock) as again:
            again.settle()
            check_is_clean(directory)
            known = {record.hash for record in again.take_inventory()}
            assert known <= {block.header.hash for block in chain}
        if files.failed_count == 0:
            break
        assert call_number < 200
    assert call_number > 1, f"{verb} was never called"


def assert_every_spill_has_one_outcome(outcomes, chain, stats) -> None:
    persisted = [o.record.hash for o in outcomes if isinstance(o, BlockPersisted)]
    dropped = [o.hash for o in drops(outcomes) if o.hash is not None]
    assert sorted(persisted + dropped) == sorted(block.header.hash for block in chain)
    assert stats.spill.accepted_block_total == 3
    assert stats.spill.persisted_block_total == len(persisted)
    assert sum(drop.block_total for drop in stats.spill.drops) == len(dropped)


def test_a_full_disk_evicts_once_then_stops_until_there_is_space(tmp_path):
    old = make_block(seed=1)
    new, later = make_block(seed=2), make_block(seed=3)
    files = FaultyFiles("write", 1, errno.ENOSPC, times=10_000)
    with StorageThread(tmp_path, files=files) as served:
        served.spill(old)
        served.take()
        files.is_armed = True
        served.spill(new, later)
        outcomes = served.take()
        assert BlocksEvicted((old.header.hash,)) in outcomes
        assert [o.cause for o in drops(outcomes)] == [SpillDropCause.DISK_FULL, SpillDropCause.WRITES_OFF]
        assert "full" in served.stats().disk.writes_off_detail
        assert files.calls["write"] == 2
        files.is_armed = False
        served.clock.advance(5)
        served.spill(later)
        assert [type(o) for o in served.take()] == [BlockPersisted]


def test_one_enospc_is_cured_by_evicting(tmp_path):
    files = FaultyFiles("write", 1, errno.ENOSPC)
    old, new = make_block(seed=1), make_block(seed=2)
    with StorageThread(tmp_path, files=files) as served:
        served.spill(old)
        files.is_armed = True
        served.take()
        served.spill(new)
        assert [type(o) for o in served.take()] == [BlocksEvicted, BlockPersisted]


def test_the_free_space_floor_is_kept(tmp_path):
    free_bytes = shutil.disk_usage(tmp_path).free
    with StorageThread(tmp_path, free_floor_bytes=2 * free_bytes) as served:
        served.spill(make_block())
        assert served.take()[-1].cause is SpillDropCause.DISK_FULL


def test_a_deleted_directory_is_made_anew(tmp_path):
    directory = tmp_path / "cache"
    first, second = make_block(seed=1), make_block(seed=2)
    served = StorageThread(directory)
    with served:
        served.spill(first)
        served.take()
        shutil.rmtree(directory)
        served.storage.get_into(*plan([first]))
        served.spill(second)
        outcomes = served.take()
        assert next(o for o in outcomes if isinstance(o, StorageFailure)).cause is BlockDamage.MISSING
        assert drops(outcomes)[0].cause in (
            SpillDropCause.WRITE_FAILED,
            SpillDropCause.WRITES_OFF,
        )
        assert served.stats().disk.writes_off_detail
        served.clock.advance(100)
        served.spill(second)
        outcomes = served.take()
        assert [type(o) for o in outcomes] == [Inventory, BlockPersisted]
        assert outcomes[0].records == ()
        served.storage.get_into(*plan([second]))
        assert_holds(served.take()[0], [second])
    check_is_clean(directory)


def test_a_read_only_directory_leaves_the_tier_off_but_alive(tmp_path):
    files = FaultyFiles("create", 1, errno.EROFS, times=10_000)
    files.is_armed = True
    with StorageThread(tmp_path, files=files) as served:
        assert [type(o) for o in served.take()] == [Inventory]
        served.spill(make_block())
        assert served.take()[0].cause is SpillDropCause.WRITES_OFF
        assert "Read-only" in served.stats().disk.writes_off_detail
        served.clock.advance(3600)
        files.is_armed = False
        served.spill(make_block())
        assert [type(o) for o in served.take()] == [Inventory, BlockPersisted]


def test_orders_to_a_directory_given_up_are_answered_at_once(tmp_path):
    files = FaultyFiles("create", 1, errno.EIO, times=10_000)
    with StorageThread(tmp_path, files=files, task_queue_limit_count=3) as served:
        served.take()
        files.is_armed = True
        served.spill(make_block())
        served.take()
        tickets = [
            served.storage.verify(),
            served.storage.delete((make_block().header.hash,)),
            served.storage.names(block_limit=0),
        ]
        served.settle()
        outcomes = [ticket.outcome for ticket in tickets if ticket is not None]
        assert len(outcomes) == 3 and all(isinstance(o, StorageFailure) for o in outcomes)
        assert all("nothing is written until" in o.detail for o in outcomes)
        assert served.storage.verify() is not None, "their places in the queue were not given back"


def test_a_manifest_that_fails_at_run_time_is_opened_anew(tmp_path, monkeypatch):
    blocks = [make_block(seed=seed) for seed in range(3)]
    with StorageThread(tmp_path) as served:
        served.spill(blocks[0])
        served.take()

        def refuse(*_args, **_kwargs):
            raise sqlite3.OperationalError("disk I/O error")

        with monkeypatch.context() as patch:
            patch.setattr("icehouse_server.storage.local.directory.manifest.Manifest.insert", refuse)
            served.spill(blocks[1])
        outcomes = served.take()
        assert [type(o) for o in outcomes] == [StorageFailure]
        assert not os.path.exists(served.path(blocks[1]))
        served.clock.advance(100)
        served.spill(blocks[2])
        outcomes = served.take()
        assert [type(o) for o in outcomes] == [Inventory, BlockPersisted]
        assert [record.hash for record in outcomes[0].records] == [blocks[0].header.hash]


def test_a_read_error_is_a_miss(tmp_path):
    block = make_block()
    files = FaultyFiles("read_into", 2, errno.EIO)
    with StorageThread(tmp_path, files=files) as served:
        served.spill(block)
        served.take()
        files.is_armed = True
        served.storage.get_into(*plan([block]))
        outcomes = served.take()
        assert next(o for o in outcomes if isinstance(o, StorageFailure)).cause is BlockDamage.IO
        assert BlocksEvicted((block.header.hash,)) in outcomes


SHORTAGES = [errno.EMFILE, errno.ENFILE, errno.ENOMEM]


@pytest.mark.parametrize("error_number", SHORTAGES)
def test_a_process_short_of_descriptors_or_memory_loses_no_block(tmp_path, error_number):
    """Others' connections may have all of them: the file is whole, and is read once they are gone."""
    block = make_block()
    files = FaultyFiles("open", 1, error_number, times=2)
    with StorageThread(tmp_path, files=files) as served:
        served.spill(block)
        served.take()
        files.is_armed = True
        served.storage.get_into(*plan([block]))
        served.storage.verify()
        outcomes = served.take()
        assert next(o for o in outcomes if isinstance(o, StorageFailure)).cause is BlockDamage.MEMORY
        verified = next(o for o in outcomes if isinstance(o, Verified))
        assert (verified.checked_count, verified.damaged) == (0, ())
        assert not any(isinstance(o, BlocksEvicted) for o in outcomes) and files.failed_count == 2
        served.storage.get_into(*plan([block]))
        assert_holds(next(o for o in served.take() if isinstance(o, BlocksLoaded)), [block])
    check_is_clean(tmp_path)


@pytest.mark.parametrize("error_number", SHORTAGES)
def test_a_start_that_cannot_look_into_files_puts_none_of_them_aside(tmp_path, error_number):
    block = make_block()
    with StorageThread(tmp_path) as served:
        served.spill(block)
        path = served.path(block)
    os.utime(path, ns=(1, 1))
    os.unlink(tmp_path / "clean.json")
    # Before it the mark of a clean end is looked for.
    files = FaultyFiles("open", 2, error_number)
    files.is_armed = True
    with StorageThread(tmp_path, files=files) as served:
        assert [type(o) for o in served.take()] == [Inventory]
        assert os.path.exists(path), "put aside unseen"
        served.clock.advance(100)
        served.settle()
        assert [record.hash for record in served.take_inventory()] == [block.header.hash]


def test_a_directory_that_could_not_be_locked_is_not_touched_until_it_is(tmp_path):
    """A disk that refuses the lock does not stop the start; another owner does, and later keeps us out."""
    files = FaultyFiles("lock", 1, errno.EIO, times=2)
    files.is_armed = True
    served = StorageThread(tmp_path, files=files)
    with served:
        assert [type(o) for o in served.take()] == [Inventory]
        assert os.listdir(tmp_path) == []
        with StorageThread(tmp_path) as other:
            served.clock.advance(100)
            served.spill(make_block())
            assert served.take()[-1].cause is SpillDropCause.WRITES_OFF
            assert "in use by another process" in served.stats().disk.writes_off_detail
            other.spill(make_block())
        served.clock.advance(100)
        served.settle()
        assert len(served.take_inventory()) == 1 and not served.stats().disk.writes_off_detail


def test_a_manifest_without_a_page_for_a_row_gives_nothing_up(tmp_path):
    """What SQLite itself says of a full disk."""
    with StorageThread(tmp_path) as served:
        served.spill(*(make_block(seed=seed) for seed in range(20)))
        served.take()
        connection = served.storage._store.manifest._connection
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages}")
        served.spill(*(make_block(seed=seed) for seed in range(100, 130)))
        outcomes = served.take()
        assert drops(outcomes)[0].cause is SpillDropCause.DISK_FULL
        assert any(isinstance(o, BlocksEvicted) for o in outcomes)
        connection.execute(f"PRAGMA max_page_count = {10 * pages}")
        served.clock.advance(100)
        served.spill(make_block(seed=200))
        outcomes += served.take()
        assert isinstance(outcomes[-1], BlockPersisted)
        assert not any(isinstance(o, Inventory) for o in outcomes), "the directory was given up"
    check_is_clean(tmp_path)


def full_error(*_args, **_kwargs):
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL
    raise error


def test_a_manifest_that_stays_full_stops_writing_and_keeps_all_it_has(tmp_path, monkeypatch):
    stored = make_chain(3)
    with StorageThread(tmp_path) as served:
        served.spill(*stored)
        served.storage.touch((stored[0].header.hash,))
        served.storage.keep_rates(RATES)
        served.take()
        with monkeypatch.context() as patch:
            for verb in ("insert", "delete", "touch", "set_pins", "set_rates"):
                patch.setattr(f"icehouse_server.storage.local.directory.manifest.Manifest.{verb}", full_error)
            served.spill(make_block(seed=50), make_block(seed=51))
            served.clock.advance(6)
            served.storage.pin((stored[0].header.hash,), UNTIL_UNPINNED)
            outcomes = served.take()
            assert drops(outcomes)[0].cause is SpillDropCause.DISK_FULL and not any(
                isinstance(o, BlocksEvicted) for o in outcomes
            )
            assert "full" in served.stats().disk.writes_off_detail
            assert len(served.storage._store.index) == 3
            served.storage.get_into(*plan(stored))
            assert_holds(next(o for o in served.take() if isinstance(o, BlocksLoaded)), stored)
        served.clock.advance(100)
        served.spill(make_block(seed=52))
        outcomes = served.take()
        assert [type(o) for o in outcomes] == [BlockPersisted], "no walk, no new inventory"
    with StorageThread(tmp_path) as served:
        hits = {record.hash: record.hit_count for record in served.take_inventory()}
        assert len(hits) == 4 and hits[stored[0].header.hash] == 1
        assert served.storage._store.rates == {FINGERPRINT: RATES}
    check_is_clean(tmp_path)


def test_a_pin_that_is_given_up_is_not_in_the_row_of_a_block_on_its_way(tmp_path, monkeypatch):
    stored, block = make_chain(2)
    with StorageThread(tmp_path) as served:
        served.spill(stored)
        served.storage.put(block)
        served.storage.step()
        with monkeypatch.context() as patch:
            patch.setattr("icehouse_server.storage.local.directory.manifest.Manifest.set_pins", full_error)
            served.storage.pin((stored.header.hash, block.header.hash), UNTIL_UNPINNED)
            outcomes = served.take()
        assert any(isinstance(o, StorageFailure) and o.cause is StorageTrouble.UNUSABLE for o in outcomes)
        assert outcomes[-1].record.hash == block.header.hash and not outcomes[-1].record.is_pinned


def test_a_quota_that_is_used_up_is_a_full_disk_though_sqlite_calls_it_an_error(tmp_path, monkeypatch):
    files = FaultyFiles("write", 1, errno.EDQUOT, times=10_000)
    stored = make_chain(3)
    with StorageThread(tmp_path, files=files) as served:
        served.spill(*stored)
        served.take()

        def refuse(*_args, **_kwargs):
            files.is_armed = True
            raise sqlite3.OperationalError("disk I/O error")

        with monkeypatch.context() as patch:
            patch.setattr("icehouse_server.storage.local.directory.manifest.Manifest.insert", refuse)
            served.spill(make_block(seed=50))
        outcomes = served.take()
        assert [o.cause for o in drops(outcomes)] == [SpillDropCause.DISK_FULL]
        assert any(isinstance(o, BlocksEvicted) for o in outcomes), "nothing was evicted for it"
        files.is_armed = False
        served.clock.advance(100)
        served.spill(make_block(seed=51))
        assert [type(o) for o in served.take()] == [BlockPersisted]
    check_is_clean(tmp_path)


def test_rows_are_deleted_in_the_space_of_the_ballast(tmp_path, monkeypatch):
    delete = Manifest.delete
    with StorageThread(tmp_path) as served:
        stored = make_chain(3)
        served.spill(*stored)
        served.take()
        assert os.path.getsize(tmp_path / "ballast") > 0

        def needs_space(self, hashes):
            if (tmp_path / "ballast").exists():
                full_error()
            delete(self, hashes)

        monkeypatch.setattr(Manifest, "delete", needs_space)
        served.storage.delete((stored[2].header.hash,))
        assert [type(o) for o in served.take()] == [BlocksEvicted, BlocksPurged]
        monkeypatch.undo()
        served.clock.advance(10)
        served.take()
        assert os.path.getsize(tmp_path / "ballast") > 0, "it is laid again when there is room"
