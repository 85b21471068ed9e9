"""Every verb fails once; the disk fills, turns read-only, vanishes. The tier lives and tells the truth."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3

import pytest
from icehouse_server.domain.blocks import Damage
from icehouse_server.domain.cache_stats import SpillDropCause
from icehouse_server.storage.loads import Loaded, LoadFailed
from icehouse_server.storage.messages import Evicted, Health, Inventory, Persisted, SpillDropped, TaskGivenUp

from tests.storage.blocks import make_block, make_chain
from tests.storage.faults import VERBS, FaultyFiles
from tests.storage.house import ManualClock, StorageHouse
from tests.storage.loading import assert_holds, plan
from tests.storage.test_crash import check_is_clean


def use_everything(house: StorageHouse, blocks) -> None:
    """Spill, load, touch, verify, evict; give the disk time to recover in between."""
    for block in blocks:
        house.spill(block)
        house.clock.advance(100)
        house.settle()
    house.storage.load(plan(blocks))
    house.storage.touch([block.header.hash for block in blocks])
    house.clock.advance(100)
    house.settle()
    house.storage.verify()
    house.settle()
    house.storage.evict([blocks[-1].header.hash])
    house.settle()
    house.clock.advance(100)
    house.settle()


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
        house = StorageHouse(directory, files=files, clock=clock)
        files.is_armed = True
        with house:
            clock.advance(100)
            use_everything(house, chain)
            outcomes = list(house.outcomes)
            stats = house.stats()
            assert stats.writes_enabled, stats.writes_detail
            assert_every_spill_has_one_outcome(outcomes, chain, stats)
            for loaded in (o for o in outcomes if isinstance(o, Loaded)):
                assert_holds(loaded, chain[: len(loaded.blocks)])
        with StorageHouse(directory, clock=clock) as again:
            again.settle()
            check_is_clean(directory)
            known = {record.hash for record in again.take_inventory()}
            assert known <= {block.header.hash for block in chain}
        if files.failed_count == 0:
            break
        assert call_number < 200
    assert call_number > 1, f"{verb} was never called"


def assert_every_spill_has_one_outcome(outcomes, chain, stats) -> None:
    persisted = [o.record.hash for o in outcomes if isinstance(o, Persisted)]
    dropped = [o.hash for o in outcomes if isinstance(o, SpillDropped)]
    assert sorted(persisted + dropped) == sorted(block.header.hash for block in chain)
    assert stats.spill_accepted_total == 3
    assert stats.spill_persisted_total == len(persisted)
    assert sum(count for _, count in stats.spill_dropped_totals) == len(dropped)


def test_a_full_disk_evicts_once_then_stops_until_there_is_space(tmp_path):
    old = make_block(seed=1)
    new, later = make_block(seed=2), make_block(seed=3)
    files = FaultyFiles("write", 1, errno.ENOSPC, times=10_000)
    with StorageHouse(tmp_path, files=files) as house:
        house.spill(old)
        house.take()
        files.is_armed = True
        house.spill(new, later)
        outcomes = house.take()
        assert Evicted((old.header.hash,)) in outcomes
        drops = [o.cause for o in outcomes if isinstance(o, SpillDropped)]
        assert drops == [SpillDropCause.DISK_FULL, SpillDropCause.WRITES_OFF]
        (health,) = (o for o in outcomes if isinstance(o, Health))
        assert not health.writes_enabled and "full" in health.detail
        assert files.calls["write"] == 2
        files.is_armed = False
        house.clock.advance(5)
        house.spill(later)
        assert [type(o) for o in house.take()] == [Health, Persisted]


def test_one_enospc_is_cured_by_evicting(tmp_path):
    files = FaultyFiles("write", 1, errno.ENOSPC)
    old, new = make_block(seed=1), make_block(seed=2)
    with StorageHouse(tmp_path, files=files) as house:
        house.spill(old)
        files.is_armed = True
        house.take()
        house.spill(new)
        assert [type(o) for o in house.take()] == [Evicted, Persisted]


def test_the_free_space_floor_is_kept(tmp_path):
    free_bytes = shutil.disk_usage(tmp_path).free
    with StorageHouse(tmp_path, free_floor_bytes=2 * free_bytes) as house:
        house.spill(make_block())
        assert house.take()[-1].cause is SpillDropCause.DISK_FULL


def test_a_deleted_directory_is_made_anew(tmp_path):
    directory = tmp_path / "cache"
    first, second = make_block(seed=1), make_block(seed=2)
    house = StorageHouse(directory)
    with house:
        house.spill(first)
        house.take()
        shutil.rmtree(directory)
        house.storage.load(plan([first]))
        house.spill(second)
        outcomes = house.take()
        assert next(o for o in outcomes if isinstance(o, LoadFailed)).failure.cause is Damage.MISSING
        assert next(o for o in outcomes if isinstance(o, SpillDropped)).cause in (
            SpillDropCause.WRITE_FAILED,
            SpillDropCause.WRITES_OFF,
        )
        assert not next(o for o in outcomes if isinstance(o, Health)).writes_enabled
        house.clock.advance(100)
        house.spill(second)
        outcomes = house.take()
        assert [type(o) for o in outcomes] == [Inventory, Health, Persisted]
        assert outcomes[0].records == ()
        house.storage.load(plan([second]))
        assert_holds(house.take()[0], [second])
    check_is_clean(directory)


def test_a_read_only_directory_leaves_the_tier_off_but_alive(tmp_path):
    files = FaultyFiles("create", 1, errno.EROFS, times=10_000)
    files.is_armed = True
    with StorageHouse(tmp_path, files=files) as house:
        assert [type(o) for o in house.take()] == [Inventory, Health]
        house.spill(make_block())
        assert house.take()[0].cause is SpillDropCause.WRITES_OFF
        assert "Read-only" in house.stats().writes_detail
        house.clock.advance(3600)
        files.is_armed = False
        house.spill(make_block())
        assert [type(o) for o in house.take()] == [Inventory, Health, Persisted]


def test_orders_to_a_directory_given_up_are_answered_at_once(tmp_path):
    files = FaultyFiles("create", 1, errno.EIO, times=10_000)
    with StorageHouse(tmp_path, files=files, task_queue_limit_count=3) as house:
        house.take()
        files.is_armed = True
        house.spill(make_block())
        house.take()
        ids = [house.storage.verify(), house.storage.evict([make_block().header.hash]), house.storage.purge()]
        outcomes = house.take()
        assert [o.task_id for o in outcomes if isinstance(o, TaskGivenUp)] == ids
        assert all("nothing is written until" in o.detail for o in outcomes)
        assert house.storage.verify() is not None, "their places in the queue were not given back"


def test_a_manifest_that_fails_at_run_time_is_opened_anew(tmp_path, monkeypatch):
    blocks = [make_block(seed=seed) for seed in range(3)]
    with StorageHouse(tmp_path) as house:
        house.spill(blocks[0])
        house.take()

        def refuse(*_args, **_kwargs):
            raise sqlite3.OperationalError("disk I/O error")

        with monkeypatch.context() as patch:
            patch.setattr("icehouse_server.storage.directory.manifest.Manifest.insert", refuse)
            house.spill(blocks[1])
        outcomes = house.take()
        assert [type(o) for o in outcomes] == [SpillDropped, Health]
        assert not os.path.exists(house.path(blocks[1]))
        house.clock.advance(100)
        house.spill(blocks[2])
        outcomes = house.take()
        assert [type(o) for o in outcomes] == [Inventory, Health, Persisted]
        assert [record.hash for record in outcomes[0].records] == [blocks[0].header.hash]


def test_a_read_error_is_a_miss(tmp_path):
    block = make_block()
    files = FaultyFiles("read_into", 2, errno.EIO)
    with StorageHouse(tmp_path, files=files) as house:
        house.spill(block)
        house.take()
        files.is_armed = True
        house.storage.load(plan([block]))
        outcomes = house.take()
        assert next(o for o in outcomes if isinstance(o, LoadFailed)).failure.cause is Damage.IO
        assert Evicted((block.header.hash,)) in outcomes


def test_a_directory_that_could_not_be_locked_is_not_touched_until_it_is(tmp_path):
    """A disk that refuses the lock does not stop the start; another owner does, and later keeps us out."""
    files = FaultyFiles("lock", 1, errno.EIO, times=2)
    files.is_armed = True
    house = StorageHouse(tmp_path, files=files)
    with house:
        assert [type(o) for o in house.take()] == [Inventory, Health]
        assert os.listdir(tmp_path) == []
        with StorageHouse(tmp_path) as other:
            house.clock.advance(100)
            house.spill(make_block())
            assert house.take()[-1].cause is SpillDropCause.WRITES_OFF
            assert "in use by another process" in house.stats().writes_detail
            other.spill(make_block())
        house.clock.advance(100)
        house.settle()
        assert len(house.take_inventory()) == 1 and house.stats().writes_enabled
