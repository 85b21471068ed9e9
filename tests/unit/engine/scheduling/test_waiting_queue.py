"""The waiting room: bounds, urgency, age, and tenants' shares."""

from __future__ import annotations

import dataclasses

from icehouse_server.domain.ids import SequenceId, Tenant
from icehouse_server.engine.core.sequence import Sequence
from icehouse_server.engine.scheduling.waiting_queue import WaitingLimits, WaitingQueue
from icehouse_server.text.detokenizer import TextStream

from tests.fixtures.engine import decode_ascii, request


def sequence(
    number: int, *, tokens: int = 5, priority: int = 0, tenant: str = "", arrival: float = 0.0
) -> Sequence:
    asked = dataclasses.replace(
        request(f"r{number}", [1] * tokens, priority=priority), tenant=Tenant(tenant), arrival_time=arrival
    )
    text = TextStream(decode=decode_ascii, prompt_token_ids=[], stops=())
    return Sequence(SequenceId(number), asked, text, output_token_limit=5)


def first_of(queue: WaitingQueue, *, now: float) -> Sequence | None:
    """Return who is first in rank of those who may run."""
    return next(queue.ranked(now), None)


def test_bounds_by_requests_and_by_tokens() -> None:
    queue = WaitingQueue(WaitingLimits(request_limit=3, token_limit=100))
    assert queue.has_capacity_for(10_000), "an empty room takes any one request"
    queue.add(sequence(0, tokens=90))
    assert queue.has_capacity_for(10) and not queue.has_capacity_for(11)
    queue.add(sequence(1, tokens=5))
    queue.add(sequence(2, tokens=5))
    assert not queue.has_capacity_for(0), "three requests wait"
    queue.discard(sequence(0, tokens=90))
    assert queue.token_count == 10


def test_several_fit_as_a_whole_or_not_at_all() -> None:
    queue = WaitingQueue(WaitingLimits(request_limit=4, token_limit=40))
    assert queue.has_capacity_for(10_000, request_count=4) and not queue.has_capacity_for(1, request_count=5)
    queue.add(sequence(0, tokens=10))
    assert queue.has_capacity_for(10, request_count=3) and not queue.has_capacity_for(11, request_count=3)
    assert not queue.has_capacity_for(1, request_count=4)


def test_age_raises_rank_until_nobody_can_pass() -> None:
    queue = WaitingQueue(WaitingLimits(request_limit=9, aging_s=5.0))
    old = sequence(0, priority=0, arrival=0.0)
    queue.add(old)
    queue.add(sequence(1, priority=2, arrival=4.0))
    best = first_of(queue, now=4.0)
    assert best is not None and best.sequence_id == 1
    queue.add(sequence(2, priority=2, arrival=14.0))
    queue.discard(best)
    assert first_of(queue, now=15.0) is old, "after 15 s it outranks priority 2"


def test_equals_go_in_order_of_arrival() -> None:
    queue = WaitingQueue(WaitingLimits(request_limit=9))
    for number in range(3):
        queue.add(sequence(number))
    best = first_of(queue, now=0.0)
    assert best is not None and best.sequence_id == 0


def test_a_tenant_with_its_share_running_is_passed_over() -> None:
    queue = WaitingQueue(WaitingLimits(request_limit=9, tenant_running_limit=1))
    first, second, other = sequence(0, tenant="a"), sequence(1, tenant="a"), sequence(2, tenant="b")
    for one in (first, second, other):
        queue.add(one)
    queue.discard(first)
    queue.note_running(first)
    assert first_of(queue, now=0.0) is other
    queue.discard(other)
    assert first_of(queue, now=0.0) is None
    queue.note_ended(first)
    assert first_of(queue, now=0.0) is second


def test_what_is_ahead_of_a_newcomer() -> None:
    queue = WaitingQueue(WaitingLimits(request_limit=9))
    queue.add(sequence(0, tokens=10, priority=0))
    queue.add(sequence(1, tokens=20, priority=3))
    assert queue.tokens_ahead_of(0) == (2, 30)
    assert queue.tokens_ahead_of(3) == (1, 20)
    assert queue.tokens_ahead_of(4) == (0, 0)


def ranked(queue: WaitingQueue) -> list[int]:
    return [s.sequence_id for s in queue.ranked(now=0.0)]


def test_tenants_take_turns_whatever_their_priorities_and_numbers() -> None:
    queue = WaitingQueue(WaitingLimits(request_limit=99))
    for number in range(5):
        queue.add(sequence(number, tenant="loud", priority=100))
    queue.add(sequence(5, tenant="loud", priority=101))
    queue.add(sequence(6, tenant="quiet"))
    queue.add(sequence(7, tenant="quiet"))
    assert ranked(queue) == [5, 6, 0, 7, 1, 2, 3, 4]


def test_whose_tenant_runs_least_comes_first() -> None:
    queue = WaitingQueue(WaitingLimits(request_limit=99))
    for number in range(4):
        queue.add(sequence(number, tenant="loud"))
    for number in (0, 1):
        running = sequence(number, tenant="loud")
        queue.discard(running)
        queue.note_running(running)
    queue.add(sequence(4, tenant="quiet"))
    assert queue.greediest == "loud" and queue.running_count(Tenant("loud")) == 2
    assert ranked(queue) == [4, 2, 3]


def test_a_room_that_others_filled_has_an_equal_part_for_each_tenant() -> None:
    queue = WaitingQueue(WaitingLimits(request_limit=4, token_limit=100))
    for number in range(4):
        queue.add(sequence(number, tokens=25, tenant="loud"))
    loud, quiet = Tenant("loud"), Tenant("quiet")
    assert not queue.has_capacity_for(1, tenant=loud)
    assert queue.has_capacity_for(50, tenant=quiet, request_count=2)
    assert not queue.has_capacity_for(1, tenant=quiet, request_count=3)
    queue.add(sequence(4, tokens=30, tenant="quiet"))
    assert queue.has_capacity_for(20, tenant=quiet) and not queue.has_capacity_for(21, tenant=quiet)


def test_of_others_only_those_are_ahead_that_come_first_in_turn() -> None:
    queue = WaitingQueue(WaitingLimits(request_limit=99))
    for number in range(10):
        queue.add(sequence(number, tokens=100, tenant="loud", priority=100))
    quiet = Tenant("quiet")
    assert queue.tokens_ahead_of(0, tenant=quiet) == (1, 100)
    running = sequence(0, tokens=100, tenant="loud")
    queue.discard(running)
    queue.note_running(running)
    assert queue.tokens_ahead_of(0, tenant=quiet) == (0, 0)
    assert queue.tokens_ahead_of(0, tenant=Tenant("loud")) == (9, 900)
