"""A block on SSD that gains a region (a checkpoint taken later) is written again in its own place."""

from __future__ import annotations

import dataclasses
import errno
import os
import sqlite3

import pytest
from icehouse_server.domain.blocks import HostBlock, RegionKind
from icehouse_server.pins import UNTIL_UNPINNED
from icehouse_server.storage.api import BlockPersisted, BlocksEvicted, BlocksLoaded, Verified
from icehouse_server.storage.local.directory.manifest import Manifest

from tests.fixtures.storage.blocks import make_block, make_chain
from tests.fixtures.storage.faults import FaultyFiles
from tests.fixtures.storage.loading import assert_holds, plan
from tests.fixtures.storage.storage_thread import StorageThread, drops
from tests.unit.storage.local.test_crash import check_is_clean
from tests.unit.storage.local.test_storage import flip


def poorer(block: HostBlock) -> HostBlock:
    regions = tuple(region for region in block.regions if region.kind is not RegionKind.CHECKPOINT)
    return dataclasses.replace(block, regions=regions)


def test_the_richer_block_takes_the_place_and_keeps_the_history(tmp_path):
    block = make_block(checkpoint=True)
    with StorageThread(tmp_path) as served:
        served.spill(poorer(block))
        served.storage.pin((block.header.hash,), UNTIL_UNPINNED)
        served.storage.touch([block.header.hash])
        served.take()
        served.spill(block)
        (persisted,) = served.take()
        assert isinstance(persisted, BlockPersisted) and persisted.record.checkpoint_bytes > 0
        assert persisted.record.pin_end_time == UNTIL_UNPINNED and persisted.record.hit_count == 1
        assert (
            served.storage._store.used_bytes()
            == served.storage._store.space.other_bytes() + os.path.getsize(served.path(block))
        )
        served.spill(block, poorer(block))
        assert [type(o) for o in served.take()] == 2 * [BlockPersisted]
    check_is_clean(tmp_path)
    with StorageThread(tmp_path) as served:
        served.take()
        served.storage.get_into(*plan([block]))
        loaded = next(o for o in served.take() if isinstance(o, BlocksLoaded))
        assert_holds(loaded, [block])


def test_a_disk_that_refuses_the_name_of_the_richer_one_keeps_it(tmp_path):
    """The poorer one is gone by then: the new file proves itself, whatever its row says."""
    block = make_block(checkpoint=True)
    files = FaultyFiles("fsync_dir", 1, errno.EIO)
    with StorageThread(tmp_path, files=files) as served:
        served.spill(poorer(block))
        served.storage.pin((block.header.hash,), UNTIL_UNPINNED)
        served.take()
        files.is_armed = True
        served.spill(block)
        assert files.failed_count == 1
        served.clock.advance(60)
        served.take()
        (record,) = served.storage._store.index
        assert record.checkpoint_bytes > 0 and record.pin_end_time == UNTIL_UNPINNED
        assert served.stats().integrity.quarantined_block_total == 0
        served.storage.get_into(*plan([block]))
        loaded = next(o for o in served.take() if isinstance(o, BlocksLoaded))
        assert_holds(loaded, [block])
    check_is_clean(tmp_path)


@pytest.mark.parametrize("is_verified_first", [True, False])
def test_a_full_disk_that_refuses_the_row_of_the_richer_one_gets_it_later(
    tmp_path, monkeypatch, is_verified_first
):
    block = make_block(checkpoint=True)
    with StorageThread(tmp_path) as served:
        # The first ones go to make room, which does not help.
        served.spill(*make_chain(4, seed=9), poorer(block))
        served.storage.touch([block.header.hash])
        served.take()
        with monkeypatch.context() as patch:
            patch.setattr(Manifest, "insert", refuse_for_want_of_space)
            served.spill(block)
        served.take()
        if is_verified_first:
            served.storage.verify()
            verified = next(o for o in served.take() if isinstance(o, Verified))
            assert verified.damaged == ()
        served.clock.advance(60)
        served.take()
        record = served.storage._store.index.get(block.header.hash)
        assert record.checkpoint_bytes > 0 and record.hit_count == 1
    check_is_clean(tmp_path)


def refuse_for_want_of_space(*_args, **_kwargs):
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL
    error.sqlite_errorname = "SQLITE_FULL"
    raise error


@pytest.mark.parametrize("verb", ["create", "write", "fsync", "rename"])
def test_a_disk_that_refuses_the_richer_one_keeps_the_other(tmp_path, verb):
    block = make_block(checkpoint=True)
    files = FaultyFiles(verb, 1, errno.EIO)
    with StorageThread(tmp_path, files=files) as served:
        served.spill(poorer(block))
        served.take()
        files.is_armed = True
        served.spill(block)
        outcomes = served.take()
        assert files.failed_count == 1
        assert [o.hash for o in drops(outcomes)] == [block.header.hash]
        assert not any(isinstance(o, BlocksEvicted) for o in outcomes)
        served.clock.advance(60)
        served.take()
        assert [record.checkpoint_bytes for record in served.storage._store.index] == [0]
    check_is_clean(tmp_path)


def test_what_became_of_the_poorer_one_is_told_before_the_richer_one_is_there(tmp_path):
    """The other way round the engine forgot a block that is there, and sent it as a duplicate ever after."""
    block = make_block(checkpoint=True)
    with StorageThread(tmp_path) as served:
        served.spill(poorer(block))
        served.take()
        flip(served.path(block), os.path.getsize(served.path(block)) - 1)
        served.storage.put(block)
        served.storage._loop.step()
        served.storage.get_into(*plan([poorer(block)]))
        told = [o for o in served.take() if isinstance(o, BlocksEvicted | BlockPersisted)]
        assert [type(o) for o in told] == [BlocksEvicted, BlockPersisted]
        assert block.header.hash in served.storage._store.index
    check_is_clean(tmp_path)
