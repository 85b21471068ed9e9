"""A block on SSD that gains a region (a checkpoint taken later) is written again in its own place."""

from __future__ import annotations

import dataclasses
import errno
import os

import pytest
from icehouse_server.domain.blocks import HostBlock, RegionKind
from icehouse_server.storage.loads import Loaded
from icehouse_server.storage.messages import Evicted, Persisted, SpillDropped

from tests.storage.blocks import make_block
from tests.storage.faults import FaultyFiles
from tests.storage.house import StorageHouse
from tests.storage.loading import assert_holds, plan
from tests.storage.test_crash import check_is_clean


def poorer(block: HostBlock) -> HostBlock:
    regions = tuple(region for region in block.regions if region.kind is not RegionKind.CHECKPOINT)
    return dataclasses.replace(block, regions=regions)


def test_the_richer_block_takes_the_place_and_keeps_the_history(tmp_path):
    block = make_block(checkpoint=True)
    with StorageHouse(tmp_path) as house:
        house.spill(poorer(block))
        house.storage.pin([block.header.hash])
        house.storage.touch([block.header.hash])
        house.take()
        house.spill(block)
        (persisted,) = house.take()
        assert isinstance(persisted, Persisted) and persisted.record.checkpoint_bytes > 0
        assert persisted.record.pinned and persisted.record.hit_count == 1
        assert (
            house.storage._store.used_bytes()
            == house.storage._store.space.other_bytes() + os.path.getsize(house.path(block))
        )
        house.spill(block, poorer(block))
        assert [type(o) for o in house.take()] == 2 * [SpillDropped]
    check_is_clean(tmp_path)
    with StorageHouse(tmp_path) as house:
        house.take()
        house.storage.load(plan([block]))
        loaded = next(o for o in house.take() if isinstance(o, Loaded))
        assert_holds(loaded, [block])


@pytest.mark.parametrize("verb", ["create", "write", "fsync", "rename"])
def test_a_disk_that_refuses_the_richer_one_keeps_the_other(tmp_path, verb):
    block = make_block(checkpoint=True)
    files = FaultyFiles(verb, 1, errno.EIO)
    with StorageHouse(tmp_path, files=files) as house:
        house.spill(poorer(block))
        house.take()
        files.is_armed = True
        house.spill(block)
        outcomes = house.take()
        assert files.failed_count == 1
        assert [o.hash for o in outcomes if isinstance(o, SpillDropped)] == [block.header.hash]
        assert not any(isinstance(o, Evicted) for o in outcomes)
        house.clock.advance(60)
        house.take()
        assert [record.checkpoint_bytes for record in house.storage._store.index] == [0]
    check_is_clean(tmp_path)
