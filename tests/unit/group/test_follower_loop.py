"""The follower loop: orders one after the other, nothing after one that failed, and an end with rank 0."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from icehouse.group.v1 import group_service_pb2 as group
from icehouse_server.errors import Reason, StartError
from icehouse_server.group import follower_loop
from icehouse_server.group.channel import ChannelBroken
from icehouse_server.group.follower_loop import FollowerLoop

from tests.fixtures.patience import BOUND_S

BEGIN = group.Order(begin=group.Begin(memory_limit_bytes=7))
END = group.Order(end=group.End())


def open_of(number: int) -> group.Order:
    return group.Order(open=group.Open(sequence_id=number))


class ScriptedClient:
    """A channel whose other end is a test."""

    def __init__(self, *parts: list[group.Order] | Exception) -> None:
        self._parts = parts
        self.sent: list[str | None] = []
        self.has_joined = threading.Event()
        self.beats: queue.SimpleQueue[group.FollowRequest] = queue.SimpleQueue()
        self.has_sent = threading.Event()
        self.has_sent.set()
        self.is_broken = threading.Event()
        """Nothing more comes, and the call does not end, until a test says so."""
        self.has_said_goodbye = threading.Event()
        self.answers_late = False

    def orders(self) -> Iterator[list[group.Order]]:
        for part in self._parts:
            if isinstance(part, Exception):
                raise part
            yield part
        self.is_broken.wait(BOUND_S)

    def send(self, report: group.FollowRequest) -> None:
        self.sent.append(report.WhichOneof("report"))
        self.has_joined.set()

    def report(self, report: group.FollowRequest) -> threading.Event:
        self.beats.put(report)
        return self.has_sent

    def close(self) -> None:
        self.sent.append("bye")
        self.has_said_goodbye.set()
        if not self.answers_late:
            self.is_broken.set()


class ScriptedFollower:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.done: list[object] = []
        self.has_ended = False
        self.fails_at: int | None = None
        self.counted = threading.Semaphore(0)
        self.hangs = threading.Event()
        """Set: it does not."""
        self.hangs.set()

    def open(self) -> None:
        self.done.append("open")

    def load(self, *, memory_limit_bytes: int) -> None:
        self.done.append(f"load in {memory_limit_bytes}")

    def count(self) -> None:
        self.counted.release()

    def heartbeat(self) -> group.FollowRequest:
        return group.FollowRequest(heartbeat=group.Heartbeat())

    def carry_out(self, order: group.Order) -> None:
        self.hangs.wait(BOUND_S)
        if order.open.sequence_id == self.fails_at:
            raise ValueError("it does not fit")
        self.done.append(order.open.sequence_id if order.HasField("open") else "end")
        self.has_ended = order.HasField("end")


@pytest.fixture(autouse=True)
def stays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note who would have ended the process."""
    codes: list[int] = []
    monkeypatch.setattr(follower_loop, "leave_later", codes.append)
    return codes


@pytest.fixture
def quick_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is counted in beats, as many as ever."""
    monkeypatch.setattr(follower_loop, "BEAT_S", 0.02)


def loop_of(
    follower: ScriptedFollower, client: ScriptedClient, left: queue.SimpleQueue[int] | None = None
) -> FollowerLoop:
    leave = (left or queue.SimpleQueue[int]()).put
    parts: tuple[Any, Any] = follower, client
    return FollowerLoop(*parts, leave=leave)


def test_orders_are_carried_out_one_after_the_other() -> None:
    follower, client = ScriptedFollower(), ScriptedClient([BEGIN], [], [open_of(1), open_of(2)], [END])
    loop = loop_of(follower, client)
    loop.run()
    loop.close()
    assert follower.done == ["open", "load in 7", 1, 2, "end"]
    assert client.sent == ["joining", "bye"]


def test_nothing_is_carried_out_after_an_order_that_failed(stays: list[int]) -> None:
    follower, client = ScriptedFollower(), ScriptedClient([BEGIN, open_of(1), open_of(2), open_of(3), END])
    follower.fails_at = 2
    loop = loop_of(follower, client)
    with pytest.raises(ValueError, match="it does not fit"):
        loop.run()
    loop.close()
    assert follower.done == ["open", "load in 7", 1]
    assert client.sent == ["joining", "failed", "bye"] and stays == [1]


def test_a_refusal_is_raised() -> None:
    refusal = StartError(Reason.CONFIG_INVALID, "rank 0 refused: it does not fit")
    client = ScriptedClient(refusal)
    loop = loop_of(ScriptedFollower(), client)
    with pytest.raises(StartError, match="it does not fit"):
        loop.run()
    loop.close()


@pytest.mark.parametrize("error", [ChannelBroken("gone"), AssertionError("no sense")])
def test_a_rank_0_that_is_gone_ends_the_process(error: Exception) -> None:
    left: queue.SimpleQueue[int] = queue.SimpleQueue()
    client = ScriptedClient([BEGIN], error)
    loop = loop_of(ScriptedFollower(), client, left)
    threading.Thread(target=loop.run, daemon=True).start()
    assert left.get(timeout=BOUND_S) == 1
    loop.close()


def test_a_rank_0_that_goes_after_the_end_ends_nothing() -> None:
    left: queue.SimpleQueue[int] = queue.SimpleQueue()
    client = ScriptedClient([BEGIN, END], ChannelBroken("gone"))
    follower = ScriptedFollower()
    loop = loop_of(follower, client, left)
    loop.run()
    for thread in threading.enumerate():
        if thread.name == "group-orders":
            thread.join(BOUND_S)
    loop.close()
    assert follower.has_ended and left.empty()


@pytest.mark.usefixtures("quick_beats")
def test_a_rank_without_orders_counts_what_its_tier_does_still() -> None:
    follower, client = ScriptedFollower(), ScriptedClient([BEGIN])
    loop = loop_of(follower, client)
    threading.Thread(target=loop.run, daemon=True).start()
    assert all(follower.counted.acquire(timeout=BOUND_S) for _ in range(2))
    loop.close()


@pytest.mark.usefixtures("quick_beats")
def test_a_rank_0_that_is_silent_ends_the_process_and_this_rank_speaks_all_the_time() -> None:
    left: queue.SimpleQueue[int] = queue.SimpleQueue()
    client = ScriptedClient([BEGIN])
    loop = loop_of(ScriptedFollower(), client, left)
    threading.Thread(target=loop.run, daemon=True).start()
    assert left.get(timeout=BOUND_S) == 1
    loop.close()
    assert client.beats.qsize() >= 6


@pytest.mark.usefixtures("quick_beats")
def test_while_rank_0_takes_no_report_one_beat_waits_for_it() -> None:
    client = ScriptedClient([BEGIN])
    client.has_sent.clear()
    left: queue.SimpleQueue[int] = queue.SimpleQueue()
    loop = loop_of(ScriptedFollower(), client, left)
    threading.Thread(target=loop.run, daemon=True).start()
    assert left.get(timeout=BOUND_S) == 1, "six beats later"
    loop.close()
    assert client.beats.qsize() == 1


@pytest.mark.usefixtures("quick_beats")
@pytest.mark.parametrize("hangs_at", [BEGIN, open_of(1)])
def test_a_rank_that_hangs_in_an_order_tells_rank_0_and_ends(
    monkeypatch: pytest.MonkeyPatch, hangs_at: group.Order
) -> None:
    monkeypatch.setattr(follower_loop, "ORDER_S", 1.0)
    follower, client = ScriptedFollower(), ScriptedClient([BEGIN, hangs_at])
    follower.hangs.clear()
    if hangs_at is BEGIN:
        follower.load = lambda **_: follower.hangs.wait(BOUND_S)  # type: ignore[assignment,method-assign,return-value]
    left: queue.SimpleQueue[int] = queue.SimpleQueue()
    loop = loop_of(follower, client, left)
    threading.Thread(target=loop.run, daemon=True).start()
    assert left.get(timeout=BOUND_S) == 1
    # Loading takes as long as it takes: there it was rank 0's silence that was noticed.
    assert ("failed" in client.sent) is (hangs_at is not BEGIN)
    follower.hangs.set()
    loop.close()


def test_a_rank_that_is_too_far_behind_tells_rank_0_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_loop, "ORDER_LIMIT", 8)
    follower, client = ScriptedFollower(), ScriptedClient([BEGIN], [open_of(n) for n in range(20)])
    follower.hangs.clear()
    left: queue.SimpleQueue[int] = queue.SimpleQueue()
    loop = loop_of(follower, client, left)
    threading.Thread(target=loop.run, daemon=True).start()
    assert left.get(timeout=BOUND_S) == 1
    assert "failed" in client.sent
    follower.hangs.set()
    loop.close()


def test_a_rank_that_nobody_has_told_to_begin_ends_when_it_is_asked_to() -> None:
    follower, client = ScriptedFollower(), ScriptedClient([])
    loop = loop_of(follower, client)
    assert loop.stop()
    loop.run()
    loop.close()
    assert follower.done == ["open", "end"] and client.sent == []
    client.is_broken.set()


class Told:
    """A rank that is told to stop while it is at an order."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self.follower, self.client = ScriptedFollower(), ScriptedClient([BEGIN, open_of(1)])
        self.follower.hangs.clear()
        self.left: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.loop = loop_of(self.follower, self.client, self.left)
        self.running = threads.submit(self.loop.run)
        assert self.client.has_joined.wait(BOUND_S)
        assert not self.loop.stop()

    def reports(self) -> list[str | None]:
        beats = self.client.beats
        return [beats.get_nowait().WhichOneof("report") for _ in range(beats.qsize())]


@pytest.fixture
def told() -> Iterator[Told]:
    with ThreadPoolExecutor() as threads:
        yield Told(threads)


def test_a_rank_that_is_told_to_stop_says_so_and_ends_in_order_once_rank_0_has_gone(
    told: Told, stays: list[int]
) -> None:
    assert told.reports().count("stopping") == 1
    told.client.is_broken.set()
    assert told.loop._has_heard_all.wait(BOUND_S)
    told.follower.hangs.set()
    told.running.result(BOUND_S)
    told.loop.close()
    assert told.follower.done == ["open", "load in 7", 1, "end"]
    assert told.client.sent == ["joining"] and stays == [0] and told.left.empty()


def test_a_rank_that_was_told_to_stop_ends_well_where_rank_0_goes_in_the_middle_of_a_pass(
    told: Told,
) -> None:
    told.follower.fails_at = 1
    told.client.is_broken.set()
    told.follower.hangs.set()
    with pytest.raises(ValueError, match="it does not fit"):
        told.running.result(BOUND_S)
    assert told.left.get(timeout=BOUND_S) == 0
    assert told.client.sent == ["joining"]
    told.loop.close()


def test_a_rank_that_was_told_to_stop_ends_with_the_group_where_all_are_told(stays: list[int]) -> None:
    follower, client = ScriptedFollower(), ScriptedClient([BEGIN], [open_of(1)], [END])
    loop = loop_of(follower, client)
    loop._has_begun = True
    assert not loop.stop()
    loop.run()
    loop.close()
    assert follower.done == ["open", "load in 7", 1, "end"] and client.sent == ["joining", "bye"]
    assert stays == []


def test_a_rank_ends_once_rank_0_has_taken_its_goodbye(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process ends right then, and what gRPC had not sent by then was lost with it."""
    monkeypatch.setattr(follower_loop, "SILENCE_S", BOUND_S)
    client = ScriptedClient([BEGIN, END])
    client.answers_late = True
    loop = loop_of(ScriptedFollower(), client)
    loop.run()
    ending = threading.Thread(target=loop.close)
    ending.start()
    assert client.has_said_goodbye.wait(BOUND_S)
    assert not loop._is_over.is_set()
    client.is_broken.set()
    ending.join(BOUND_S)
    assert loop._is_over.is_set()


def test_a_rank_that_has_begun_ends_with_the_group() -> None:
    follower, client = ScriptedFollower(), ScriptedClient([BEGIN, END])
    loop = loop_of(follower, client)
    loop.run()
    assert not loop.stop()
    loop.close()
    assert client.sent == ["joining", "bye"]
