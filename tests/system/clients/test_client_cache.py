"""Removals from the cache with the Python client: of a prompt, of everything, and how far they are."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from icehouse_client import AsyncClient, Client, IcehouseClientError
from icehouse_server.domain.cache_commands import (
    EndSession,
    EvictBlocks,
    EvictReport,
    ListKnown,
    SessionEndReport,
)
from icehouse_server.domain.ids import BlockHash, CacheScope, Tenant

from tests.system.clients.test_python_client import threaded
from tests.unit.rpc.conftest import RunningServer

KNOWN = tuple(BlockHash(i.to_bytes(32, "big")) for i in range(300))


async def test_removals_tell_how_far_they_are(served: RunningServer) -> None:
    served.engine.stored = KNOWN
    served.engine.order_answer = EvictReport(1, 10, 2, 20)
    told: list[tuple[int, int]] = []

    def note(progress: Any) -> None:
        told.append((progress.processed_block_count, progress.block_count))

    def use(client: Client) -> Any:
        return client.cache.evict("Hi", tenant="blue", on_progress=note), client.cache.evict_all()

    removed, at_once = await threaded(served, use)
    assert removed == at_once and removed.ssd_block_count == 4
    assert told == [(0, 300), (256, 300), (300, 300)]
    async with AsyncClient(served.server.address) as client:
        assert await client.cache.evict_all(model="tiny", on_progress=note) == removed
        assert told[3:] == told[:3]
    slices = [EvictBlocks(KNOWN[:256]), EvictBlocks(KNOWN[256:])]
    of_prompt = ListKnown(tuple(b"Hi"), CacheScope(Tenant("blue")))
    assert served.engine.orders == [of_prompt, *slices, *[ListKnown(None), *slices] * 2]


async def test_a_session_ends(served: RunningServer) -> None:
    served.engine.order_answer = SessionEndReport(block_count=2, ram_bytes=10)
    ended = await threaded(served, lambda client: client.cache.end_session("talk"))
    async with AsyncClient(served.server.address) as client:
        assert await client.cache.end_session("talk", tenant="blue") == ended
    assert ended.block_count == 2
    assert served.engine.orders == [EndSession("talk"), EndSession("talk", Tenant("blue"))]


async def test_what_is_told_of_progress_can_end_a_removal(served: RunningServer) -> None:
    served.engine.stored = KNOWN
    served.engine.order_answer = EvictReport()

    def enough(progress: object) -> None:
        raise InterruptedError

    async with AsyncClient(served.server.address) as client:
        with pytest.raises(InterruptedError):
            await client.cache.evict_all(on_progress=enough)


async def test_counters_come_until_the_reader_leaves(served: RunningServer) -> None:
    def read(client: Client) -> list[int]:
        answers = client.watch_stats(interval_s=0.1)
        return [stats.collect_time.ToNanoseconds() for stats in itertools.islice(answers, 2)]

    assert len(await threaded(served, read)) == 2
    async with AsyncClient(served.server.address) as client:
        answers = client.watch_stats()
        assert (await anext(answers)).HasField("collect_time")
        await answers.aclose()
        with pytest.raises(IcehouseClientError) as caught:
            await anext(client.watch_stats(interval_s=0.01))
    assert caught.value.field == "interval"


def test_a_removal_of_everything_knows_its_options() -> None:
    with Client("127.0.0.1:1") as nobody, pytest.raises(TypeError, match="there is no option"):
        nobody.cache.evict_all(tenant="blue")  # type: ignore[call-arg]
