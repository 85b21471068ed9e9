"""The parts of the shared tier by themselves: breaker, search for a chain's end, names, data key."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from icehouse_server.domain.ids import BlockHash
from icehouse_server.engine.prefix_cache.tiers.storage_waits import Rates
from icehouse_server.storage.api import ChainFound
from icehouse_server.storage.files import Files
from icehouse_server.storage.local.directory.data_keys import find_key, open_key
from icehouse_server.storage.shared.fetcher import Breaker, ChainReach, RecentNames
from icehouse_server.storage.shared.object_store import StoreError
from icehouse_server.storage.store_paths import StorePaths

from tests.fixtures.storage.storage_thread import ManualClock

MASTER, OTHER = b"m" * 32, b"o" * 32


def test_the_breaker_opens_at_the_third_failure_and_for_longer_each_time() -> None:
    clock = ManualClock()
    breaker = Breaker(clock)
    assert not breaker.fail("a") and not breaker.fail("b")
    assert breaker.begin() and breaker.pause_detail == ""
    assert breaker.fail("down") and breaker.pause_detail == "down"
    for pause_s in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0):
        assert breaker.pause_left_s == pause_s and not breaker.begin()
        clock.advance(pause_s)
        assert breaker.begin() and not breaker.begin(), "one tries"
        assert not breaker.fail("down"), "that is no news"
    breaker.succeed()
    assert breaker.begin() and breaker.pause_detail == "" and not breaker.fail("again")


@pytest.mark.parametrize(
    ("count", "stored_count"), [*itertools.product((1, 2, 3, 17), range(4)), (1000, 999), (1000, 257)]
)
def test_the_search_finds_the_end_of_a_chain(count: int, stored_count: int) -> None:
    asked = []

    async def size_of(index: int) -> int | None:
        asked.append(index)
        return 10 if index < stored_count else None

    reach = ChainReach(count, size_of)
    asyncio.run(reach.run())
    assert reach.found_count == min(stored_count, count)
    assert reach.size_bytes == 10 * reach.found_count
    assert len(asked) <= 40 and reach.has_answers


async def test_a_search_that_fails_leaves_no_request_under_way() -> None:
    """Each has a place among few, and a store that half works would take them all."""
    given_up = []

    async def size_of(index: int) -> int | None:
        if index == 0:
            await asyncio.sleep(0)  # the others have been asked for by then
            raise StoreError("the object store refuses these credentials")
        try:
            return await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            given_up.append(index)
            raise

    with pytest.raises(StoreError):
        await ChainReach(8, size_of).run()
    await asyncio.sleep(0)
    assert given_up == [1, 3, 7]


def test_names_are_forgotten_in_time_and_the_oldest_when_there_are_too_many() -> None:
    names = RecentNames()
    made = [BlockHash(number.to_bytes(32, "big")) for number in range((1 << 16) + 1)]
    names.add(made[0], end_time=5.0)
    assert names.has(made[0], 4.9) and not names.has(made[0], 5.0)
    for name in made[1:]:
        names.add(name)
    assert not names.has(made[0], 0.0) and names.has(made[1], 0.0)


def test_servers_with_one_key_have_one_data_key_and_others_another(tmp_path) -> None:
    paths = [StorePaths(str(tmp_path / name)) for name in ("a", "b", "c")]
    for each in paths:
        (tmp_path / each.root[-1]).mkdir()
    first, second = (open_key(Files(), each, master_key=MASTER, is_shared=True) for each in paths[:2])
    other = open_key(Files(), paths[2], master_key=OTHER, is_shared=True)
    assert first.data_key == second.data_key != other.data_key and MASTER not in (first.data_key,)
    assert not open_key(Files(), paths[0], master_key=MASTER, is_shared=True).is_new


def test_a_cache_that_begins_to_share_gets_the_shared_data_key_beside_its_own(tmp_path) -> None:
    paths = StorePaths(str(tmp_path))
    own = open_key(Files(), paths, master_key=MASTER)
    assert find_key(Files(), paths, master_key=MASTER, is_shared=True) is None
    shared = open_key(Files(), paths, master_key=MASTER, is_shared=True)
    assert shared.is_new and shared.data_key != own.data_key
    assert find_key(Files(), paths, master_key=MASTER, is_shared=True) == shared.data_key
    assert find_key(Files(), paths, master_key=MASTER) == shared.data_key, "the newest one"


def test_fetching_is_compared_with_computing_and_believed_less_each_time_it_is_not_tried() -> None:
    rates = Rates(prefill_tokens_per_s=100.0, read_bytes_per_s=1000.0)
    slow = ChainFound(block_count=4, size_bytes=1000, fetch_bytes_per_s=110.0)
    assert rates.fetch_is_slower(slow, token_count=1000)
    assert not rates.fetch_is_slower(ChainFound(4, 1000, 1000.0), token_count=1000)
    assert not rates.fetch_is_slower(ChainFound(4, 1000, 0.0), token_count=1000), "nothing was measured"
    rates.unfetched_count = 20
    assert not rates.fetch_is_slower(slow, token_count=1000)
