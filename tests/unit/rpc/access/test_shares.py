"""Places and turns: nobody gets all, nobody is forgotten, nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from icehouse_server.errors import Overloaded, Reason
from icehouse_server.rpc.access.shares import FairQueue, FairShare, QueueHold
from icehouse_server.rpc.calls.methods import CallPool, shares_of

from tests.fixtures.patience import BOUND_S


def fill(share: FairShare, origin: str, held: contextlib.ExitStack) -> int:
    """Take places until refused; return how many."""
    count = 0
    while True:
        try:
            held.enter_context(share.hold(origin))
        except Overloaded:
            return count
        count += 1


def test_one_caller_gets_its_part_and_others_find_theirs() -> None:
    share = FairShare(limit=1024, factor=3.0, what="calls")
    with contextlib.ExitStack() as held:
        assert fill(share, "a", held) == 768
        assert fill(share, "b", held) == 192
        assert fill(share, "c", held) == 48
    with contextlib.ExitStack() as held:
        assert fill(share, "d", held) == 768


def test_of_an_amount_one_caller_gets_half_at_most_and_gives_all_back() -> None:
    share = FairShare(limit=1000, factor=1.0, what="bytes")
    for _ in range(2):
        with contextlib.ExitStack() as held:
            held.enter_context(share.hold("a", 300))
            for amount in (201, 701, 2000):
                with pytest.raises(Overloaded), share.hold("a", amount):
                    pass
            held.enter_context(share.hold("a", 200))
            held.enter_context(share.hold("b", 250))
            with pytest.raises(Overloaded), share.hold("c", 251):
                pass


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_however_few_there_are_the_first_caller_gets_one(limit: int) -> None:
    with contextlib.ExitStack() as held:
        assert fill(FairShare(limit=limit, factor=1 / 32, what="calls"), "a", held) == 1


def test_as_many_callers_as_there_are_connections_find_a_place() -> None:
    share = shares_of(concurrent_call_limit=1, connection_limit=100)[CallPool.HEALTH]
    with contextlib.ExitStack() as held:
        assert {fill(share, f"peer:{index}", held) for index in range(100)} == {8}


def test_a_refusal_says_how_many_and_when_to_come_back() -> None:
    share = FairShare(limit=1, factor=3.0, what="calls")
    with share.hold("a"), pytest.raises(Overloaded) as caught, share.hold("b"):
        pass
    assert caught.value.reason is Reason.QUEUE_FULL
    assert caught.value.metadata == {"in_flight": "1", "yours": "0", "limit": "1"}
    assert caught.value.retry_after_s


async def wait_for(queue: FairQueue, origin: str, amount: int = 1) -> asyncio.Task[QueueHold]:
    """Begin to wait and return when that has begun."""
    task = asyncio.ensure_future(queue.take(origin, amount))
    await asyncio.sleep(0)
    return task


async def test_turns_go_round_the_callers() -> None:
    queue = FairQueue(capacity=1)
    hold = await queue.take("a")
    waiting = {name: await wait_for(queue, name[0]) for name in ("a1", "a2", "a3", "b1", "b2")}
    order = []
    while waiting:
        hold.release()
        await asyncio.sleep(0)
        [name] = [name for name, task in waiting.items() if task.done()]
        order.append(name)
        hold = waiting.pop(name).result()
    assert order == ["a1", "b1", "a2", "b2", "a3"]


async def test_one_caller_leaves_room_where_there_is_a_factor() -> None:
    queue = FairQueue(capacity=100, factor=1.0)
    first = await queue.take("a", 40)
    second = await wait_for(queue, "a", 40)
    assert not second.done()
    other = await queue.take("b", 50)
    other.release()
    first.shrink(10)
    await asyncio.sleep(0)
    assert second.done()


async def test_who_goes_away_before_its_turn_takes_nothing() -> None:
    queue = FairQueue(capacity=1)
    hold = await queue.take("a")
    gone, next_one = await wait_for(queue, "a"), await wait_for(queue, "a")
    gone.cancel()
    hold.release()
    # In the same turn of the loop in which it got its place.
    next_one.cancel()
    await asyncio.gather(gone, next_one, return_exceptions=True)
    (await asyncio.wait_for(queue.take("b"), 1)).release()
    assert queue.waiting_count == 0


async def test_more_than_there_is_counts_as_all_of_it() -> None:
    queue = FairQueue(capacity=10, factor=0.5)
    hold = await queue.take("a", 1000)
    assert hold.amount == 10
    hold.release()
    hold.release()
    assert (await queue.take("b", 10)).amount == 10


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 12), st.integers(0, 4)), max_size=30))
def test_everybody_gets_a_turn_and_all_of_it_comes_back(calls: list[tuple[str, int, int]]) -> None:
    async def run() -> None:
        queue = FairQueue(capacity=10, factor=1.0)

        async def one(origin: str, amount: int, turns: int) -> None:
            hold = await queue.take(origin, amount)
            for _ in range(turns):
                await asyncio.sleep(0)
            hold.release()

        async with asyncio.timeout(BOUND_S):
            await asyncio.gather(*(one(*call) for call in calls))
        hold = await queue.take("d", 10)
        assert hold.amount == 10 and queue.waiting_count == 0

    asyncio.run(run())
