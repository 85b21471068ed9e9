"""Turns on the storage thread: spills, orders, verifications and upkeep each go on beside the others."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Iterator

import pytest
from icehouse_server.domain.blocks import HostBlock
from icehouse_server.domain.cache_stats import CacheStats
from icehouse_server.domain.ids import BlockHash
from icehouse_server.storage.api import (
    BlockPersisted,
    BlocksEvicted,
    BlocksPurged,
    Inventory,
    Verified,
)
from icehouse_server.storage.local.tier import _purge

from tests.fixtures.storage.blocks import make_block, make_chain
from tests.fixtures.storage.faults import FaultyFiles
from tests.fixtures.storage.storage_thread import StorageThread


def keep_spilling(served: StorageThread) -> Iterator[HostBlock]:
    """Work with a queue of spills that is never empty: before each step two of them wait."""
    blocks = (make_block(seed=1_000 + number) for number in range(400))
    waiting: list[HostBlock] = []
    for block in blocks:
        served.storage.put(block)
        waiting.append(block)
        while len(served.storage._loop.spiller) + served.storage._loop._inbox.qsize() > 2:
            served.storage.step()
        yield block


def test_an_order_is_done_while_spills_keep_coming(tmp_path):
    stored = make_chain(3)
    with StorageThread(tmp_path) as served:
        served.spill(*stored)
        spilling = keep_spilling(served)
        for _ in range(5):
            next(spilling)
        ticket = served.storage.delete((stored[-1].header.hash,))
        for _ in range(8):
            next(spilling)
        assert (
            ticket is not None
            and isinstance(ticket.outcome, BlocksPurged)
            and ticket.outcome.block_count == 1
        )


def test_an_order_comes_after_the_spills_accepted_before_it(tmp_path):
    blocks = [make_block(seed=seed) for seed in range(3)]
    with StorageThread(tmp_path) as served:
        for block in blocks:
            served.storage.put(block)
        served.storage.delete(tuple(block.header.hash for block in blocks))
        outcomes = [o for o in served.take() if not isinstance(o, Inventory)]
        assert [type(o) for o in outcomes] == [BlockPersisted] * 3 + [BlocksEvicted, BlocksPurged]
        assert outcomes[-1].block_count == 3 and len(served.storage._store.index) == 0


def test_an_eviction_does_not_wait_for_a_verification_of_everything(tmp_path):
    stored = make_chain(40)
    with StorageThread(tmp_path) as served:
        served.spill(*stored)
        served.take()
        served.storage.verify()
        served.storage.delete((stored[-1].header.hash,))
        outcomes = [type(o) for o in served.take()]
        assert outcomes == [BlocksEvicted, BlocksPurged, Verified]


def test_uses_are_written_while_spills_keep_coming(tmp_path):
    stored = make_block(seed=1)
    with StorageThread(tmp_path) as served:
        served.spill(stored)
        spilling = keep_spilling(served)
        served.storage.touch((stored.header.hash,))
        for _ in range(5):
            next(spilling)
        served.clock.advance(10)
        for _ in range(10):
            next(spilling)
        rows, _ = served.storage._store.manifest.load()
        assert {row.hash: row.hit_count for row in rows}[stored.header.hash] == 1


def test_a_purge_of_many_looks_at_each_block_once(tmp_path, monkeypatch: pytest.MonkeyPatch):
    stored = make_chain(3 * 64 + 5)
    with StorageThread(tmp_path) as served:
        served.spill(*stored)
        served.take()
        looked: Counter[BlockHash] = Counter()
        index = served.storage._store.index
        get = index.get
        monkeypatch.setattr(index, "get", lambda name: looked.update([name]) or get(name))
        pieces = list(_purge(served.storage._store, tuple(block.header.hash for block in stored)))
        assert len(pieces) == 3 and len(index) == 0
        assert set(looked.values()) == {1} and len(looked) == len(stored)


def test_whoever_asks_for_the_counters_at_once_gets_one_count(tmp_path):
    with StorageThread(tmp_path) as served:
        served.take()
        tickets = [served.storage.stats() for _ in range(10)]
        served.settle()
        assert len({id(ticket.outcome) for ticket in tickets if ticket is not None}) == 1
        assert all(ticket is not None and isinstance(ticket.outcome, CacheStats) for ticket in tickets)


def test_a_large_inventory_comes_in_parts_between_other_work(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("icehouse_server.storage.local.storage_loop._INVENTORY_PART_COUNT", 4)
    chain = make_chain(18)
    with StorageThread(tmp_path) as served:
        served.spill(*chain)
    with StorageThread(tmp_path) as served:
        assert [type(o) for o in served.outcomes] == [Inventory], "the start waits for one part only"
        served.storage.delete((chain[-1].header.hash,))
        served.storage.put(make_block(seed=99))
        outcomes = served.take()
        parts = [o for o in outcomes if isinstance(o, Inventory)]
        assert [(part.is_first, part.is_last) for part in parts] == [
            (True, False),
            *[(False, False)] * 3,
            (False, True),
        ]
        # In the order of the chain, and what was evicted meanwhile is in none of them.
        named = [record.start_token_index for part in parts for record in part.records]
        assert named == sorted(named) and len(named) == 17
        places = [number for number, o in enumerate(outcomes) if isinstance(o, Inventory)]
        assert any(isinstance(o, BlockPersisted) for o in outcomes[: places[-1]]), (
            "spills waited for the inventory"
        )


@pytest.mark.parametrize("is_opened_again", [False, True])
def test_nobody_waits_for_the_rest_of_an_inventory_when_the_disk_fails_between_its_parts(
    tmp_path, monkeypatch: pytest.MonkeyPatch, is_opened_again: bool
):
    monkeypatch.setattr("icehouse_server.storage.local.storage_loop._INVENTORY_PART_COUNT", 4)
    chain = make_chain(18)
    with StorageThread(tmp_path) as served:
        served.spill(*chain)
    files = FaultyFiles("create", 1, errno.EIO, times=10_000)
    with StorageThread(tmp_path, files=files) as served:
        [first] = served.outcomes
        assert (first.is_first, first.is_last) == (True, False)
        files.is_armed = True
        served.storage.put(make_block(seed=99))
        parts = [o for o in served.take() if isinstance(o, Inventory)]
        # Those whose turn came before the spill's, and one without blocks that nothing follows.
        assert [part.is_last for part in parts] == [False] * (len(parts) - 1) + [True]
        assert not any(part.is_first for part in parts[1:]) and parts[-1].records == ()
        assert sum(len(part.records) for part in parts) < len(chain)
        files.is_armed = not is_opened_again
        served.clock.advance(3600)
        parts = [o for o in served.take() if isinstance(o, Inventory)]
        # What the engine knows it keeps, until the directory tells the whole of it.
        assert sum(len(part.records) for part in parts) == (len(chain) if is_opened_again else 0)
        assert bool(parts) is is_opened_again
