"""A block on SSD that gains a region (a checkpoint taken later) is written again in its own place."""

from __future__ import annotations

import dataclasses
import errno
import os

import pytest
from icehouse_server.domain.blocks import HostBlock, RegionKind
from icehouse_server.storage.loads import Loaded
from icehouse_server.storage.messages import Evicted, Persisted, SpillDropped

from tests.fixtures.storage.blocks import make_block
from tests.fixtures.storage.faults import FaultyFiles
from tests.fixtures.storage.loading import assert_holds, plan
from tests.fixtures.storage.storage_thread import StorageThread
from tests.unit.storage.worker.test_crash import check_is_clean


def poorer(block: HostBlock) -> HostBlock:
    regions = tuple(region for region in block.regions if region.kind is not RegionKind.CHECKPOINT)
    return dataclasses.replace(block, regions=regions)


def test_the_richer_block_takes_the_place_and_keeps_the_history(tmp_path):
    block = make_block(checkpoint=True)
    with StorageThread(tmp_path) as served:
        served.spill(poorer(block))
        served.storage.pin([block.header.hash])
        served.storage.touch([block.header.hash])
        served.take()
        served.spill(block)
        (persisted,) = served.take()
        assert isinstance(persisted, Persisted) and persisted.record.checkpoint_bytes > 0
        assert persisted.record.pinned and persisted.record.hit_count == 1
        assert (
            served.storage._store.used_bytes()
            == served.storage._store.space.other_bytes() + os.path.getsize(served.path(block))
        )
        served.spill(block, poorer(block))
        assert [type(o) for o in served.take()] == 2 * [SpillDropped]
    check_is_clean(tmp_path)
    with StorageThread(tmp_path) as served:
        served.take()
        served.storage.load(plan([block]))
        loaded = next(o for o in served.take() if isinstance(o, Loaded))
        assert_holds(loaded, [block])


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
        assert [o.hash for o in outcomes if isinstance(o, SpillDropped)] == [block.header.hash]
        assert not any(isinstance(o, Evicted) for o in outcomes)
        served.clock.advance(60)
        served.take()
        assert [record.checkpoint_bytes for record in served.storage._store.index] == [0]
    check_is_clean(tmp_path)
