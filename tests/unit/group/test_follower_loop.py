"""The follower loop: orders one after the other, nothing after one that failed, and an end with rank 0."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from icehouse.group.v1 import group_service_pb2 as group
from icehouse_server.errors import Reason, StartError
from icehouse_server.group import follower_loop
from icehouse_server.group.channel import ChannelBroken
from icehouse_server.group.follower_loop import FollowerLoop

from tests.fixtures.patience import BOUND_S

BEGIN = group.Order(begin=group.Begin())
END = group.Order(end=group.End())


def open_of(number: int) -> group.Order:
    return group.Order(open=group.Open(sequence_id=number))


class ScriptedClient:
    """A channel whose other end is a test."""

    def __init__(self, *parts: list[group.Order] | Exception) -> None:
        self._parts = parts
        self.sent: list[str | None] = []
        self.beats: queue.SimpleQueue[group.FollowRequest] = queue.SimpleQueue()
        self.is_broken = threading.Event()
        """Nothing more comes, and the call does not end, until a test says so."""

    def orders(self) -> Iterator[list[group.Order]]:
        for part in self._parts:
            if isinstance(part, Exception):
                raise part
            yield part
        self.is_broken.wait(BOUND_S)

    def send(self, report: group.FollowRequest) -> None:
        self.sent.append(report.WhichOneof("report"))

    def report(self, report: group.FollowRequest) -> None:
        self.beats.put(report)

    def close(self) -> None:
        self.sent.append("bye")
        self.is_broken.set()


class ScriptedFollower:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.done: list[object] = []
        self.has_ended = False
        self.fails_at: int | None = None
        self.counted = threading.Semaphore(0)

    def open(self) -> None:
        self.done.append("open")

    def load(self) -> None:
        self.done.append("load")

    def count(self) -> None:
        self.counted.release()

    def heartbeat(self) -> group.FollowRequest:
        return group.FollowRequest(heartbeat=group.Heartbeat())

    def carry_out(self, order: group.Order) -> None:
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
    assert follower.done == ["open", "load", 1, 2, "end"]
    assert client.sent == ["joining", "bye"]


def test_nothing_is_carried_out_after_an_order_that_failed(stays: list[int]) -> None:
    follower, client = ScriptedFollower(), ScriptedClient([BEGIN, open_of(1), open_of(2), open_of(3), END])
    follower.fails_at = 2
    loop = loop_of(follower, client)
    with pytest.raises(ValueError, match="it does not fit"):
        loop.run()
    loop.close()
    assert follower.done == ["open", "load", 1]
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


def test_a_rank_without_orders_counts_what_its_tier_does_still() -> None:
    follower, client = ScriptedFollower(), ScriptedClient([BEGIN])
    loop = loop_of(follower, client)
    threading.Thread(target=loop.run, daemon=True).start()
    assert all(follower.counted.acquire(timeout=BOUND_S) for _ in range(2))
    loop.close()


def test_a_rank_0_that_is_silent_ends_the_process_and_this_rank_speaks_all_the_time() -> None:
    left: queue.SimpleQueue[int] = queue.SimpleQueue()
    client = ScriptedClient([BEGIN])
    loop = loop_of(ScriptedFollower(), client, left)
    threading.Thread(target=loop.run, daemon=True).start()
    assert left.get(timeout=BOUND_S) == 1
    loop.close()
    assert client.beats.qsize() >= 6
