"""The outbox: order, merging above the event limit, the byte bound."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from icehouse_server.domain.events import CacheReport, Delta, Event, Failed, PrefillProgress, Started
from icehouse_server.domain.request import Logprob, TokenLogprobs
from icehouse_server.errors import Cancelled, Overloaded, Reason
from icehouse_server.rpc.engine_client.outbox import Outbox

STARTED = Started(prompt_token_count=1, cache=CacheReport(), queue_s=0)
CANCELLED = Failed(Cancelled(Reason.CANCELLED, "cancelled"))


def outbox(*, event_limit: int = 4, byte_limit: int = 10_000) -> tuple[Outbox, list[str]]:
    stalls: list[str] = []
    return Outbox(
        event_limit=event_limit, byte_limit=byte_limit, on_stall=lambda: stalls.append("stall")
    ), stalls


async def take_all(box: Outbox) -> list[Event]:
    return [await box.take() for _ in range(box.waiting_count)]


@given(
    texts=st.lists(st.text(max_size=4), max_size=40),
    taken_early=st.integers(0, 10),
    event_limit=st.integers(1, 6),
)
def test_nothing_is_lost_or_reordered(texts: list[str], taken_early: int, event_limit: int) -> None:
    async def scenario() -> None:
        box, stalls = outbox(event_limit=event_limit)
        received: list[Event] = []
        box.put(STARTED)
        for index, text in enumerate(texts):
            box.put(Delta(text, (index,), (TokenLogprobs(index, -1.0, 1),)))
            assert box.waiting_count <= event_limit + 1
            if index < taken_early:
                received.append(await box.take())
        box.put(CANCELLED)
        received += await take_all(box)
        deltas = [event for event in received if isinstance(event, Delta)]
        assert "".join(delta.text for delta in deltas) == "".join(texts)
        assert [i for delta in deltas for i in delta.token_ids] == list(range(len(texts)))
        assert [entry.token_id for delta in deltas for entry in delta.logprobs] == list(range(len(texts)))
        assert received[0] == STARTED and received[-1] is CANCELLED
        assert box.ended and box.waiting_bytes == 0 and stalls == []

    asyncio.run(scenario())


class CountedTokens(tuple[int, ...]):
    """Token ids that count how often one of them is copied, and whose sums do so too."""

    copied_count = 0

    def __iter__(self) -> Iterator[int]:
        CountedTokens.copied_count += len(self)
        return super().__iter__()

    def __add__(self, other: Any) -> CountedTokens:
        CountedTokens.copied_count += len(self) + len(other)
        return CountedTokens(super().__add__(other))


async def test_merging_a_long_output_copies_each_token_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CountedTokens, "copied_count", 0)
    box, _ = outbox(event_limit=1, byte_limit=1 << 20)
    count = 1000
    for index in range(count):
        box.put(Delta("x", CountedTokens((index,))))
    [event] = await take_all(box)
    assert isinstance(event, Delta) and list(event.token_ids) == list(range(count))
    assert CountedTokens.copied_count <= 10 * count


async def test_newest_progress_replaces_the_one_before() -> None:
    box, _ = outbox()
    box.put(PrefillProgress(1, 9))
    box.put(PrefillProgress(5, 9))
    assert await take_all(box) == [PrefillProgress(5, 9)]


async def test_log_probabilities_of_merged_progress_are_all_told_and_counted() -> None:
    box, stalls = outbox(byte_limit=40)
    first, second = TokenLogprobs(3, -0.5, 1), TokenLogprobs(4, -1.5, 2)
    box.put(PrefillProgress(1, 9, (first,)))
    box.put(PrefillProgress(5, 9, (second,)))
    assert await take_all(box) == [PrefillProgress(5, 9, (first, second))]
    assert box.waiting_bytes == 0 and stalls == []
    box.put(PrefillProgress(9, 9, (first,) * 3))
    assert stalls == ["stall"]


async def test_what_waits_of_log_probabilities_is_told_in_pieces() -> None:
    box, stalls = outbox(event_limit=2, byte_limit=1 << 20)
    entry = TokenLogprobs(3, -0.5, 1)
    for number in range(1, 12):
        box.put(PrefillProgress(100 * number, 9000, (entry,) * 100))
    told = [await box.take() for _ in range(box.waiting_count)]
    assert [len(event.logprobs) for event in told] == [500, 500, 100]
    assert [event.processed_token_count for event in told] == [500, 1000, 1100]
    for _ in range(1200):
        box.put(Delta("x", (3,), (entry,)))
    told = [await box.take() for _ in range(box.waiting_count)]
    counts = [len(event.logprobs) for event in told]
    assert (sum(counts), max(counts)) == (1200, 512) and len(told) <= 4
    assert box.waiting_bytes == 0 and stalls == []


async def test_log_probabilities_that_were_asked_for_count_as_others_do() -> None:
    box, stalls = outbox(byte_limit=100)
    box.put(PrefillProgress(1, 9, (TokenLogprobs(3, -0.5, 1, (), (Logprob(4, -1.0),) * 6),)))
    assert stalls == ["stall"]


async def test_passing_the_byte_limit_drops_all_and_ends_with_stalled() -> None:
    box, stalls = outbox(byte_limit=100)
    box.put(STARTED)
    for _ in range(200):
        box.put(Delta("x", ()))
    assert stalls == ["stall"]
    assert (box.waiting_count, box.waiting_bytes) == (1, 0)
    event = await box.take()
    assert isinstance(event, Failed) and isinstance(event.error, Overloaded)
    assert event.error.reason is Reason.READER_STALLED
    assert box.ended


async def test_reader_who_keeps_up_never_stalls() -> None:
    box, stalls = outbox(byte_limit=100)
    for _ in range(1000):
        box.put(Delta("x" * 90, ()))
        await box.take()
    assert stalls == []


async def test_events_after_the_last_are_ignored() -> None:
    box, _ = outbox()
    box.put(CANCELLED)
    box.put(Delta("late", (1,)))
    assert await take_all(box) == [CANCELLED]


async def test_take_waits_for_put() -> None:
    box, _ = outbox()
    taking = asyncio.create_task(box.take())
    await asyncio.sleep(0)
    assert not taking.done()
    box.put(STARTED)
    assert await taking == STARTED


async def test_taking_beyond_the_end_is_a_broken_invariant() -> None:
    box, _ = outbox()
    box.put(CANCELLED)
    await box.take()
    with pytest.raises(AssertionError, match="last event"):
        await box.take()
