"""The door between the threads: one wake-up per hand-over, ids, questions, endings."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from icehouse_server.domain.events import CacheReport, Delta, Event, Failed, Started
from icehouse_server.domain.ids import RequestId
from icehouse_server.domain.model import EngineState
from icehouse_server.errors import AlreadyExists, Cancelled, EngineFailed, Reason, Unavailable
from icehouse_server.rpc.engine_client.outbox import Outbox
from icehouse_server.rpc.engine_client.router import Router

A, B = RequestId("a"), RequestId("b")
STARTED = Started(prompt_token_count=1, cache=CacheReport(), queue_s=0)
CANCELLED = Failed(Cancelled(Reason.CANCELLED, "cancelled"))


def outbox() -> Outbox:
    return Outbox(event_limit=100, byte_limit=10_000, on_stall=lambda: None)


def from_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


async def test_a_hand_over_wakes_the_loop_once_and_keeps_order(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    router, first, second = Router(loop), outbox(), outbox()
    router.open(A, first)
    router.open(B, second)
    wake_ups = []
    original = loop.call_soon_threadsafe

    def counted(*arguments: Any) -> Any:
        wake_ups.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    events: list[tuple[RequestId, Event]] = [(A, STARTED), (B, STARTED), (A, Delta("x", (1,)))]

    def publish() -> None:
        router.publish(events)
        events.clear()  # what was handed over is the router's own

    from_thread(publish)
    assert len(wake_ups) == 1
    assert [await first.take(), await first.take()] == [STARTED, Delta("x", (1,))]
    assert await second.take() == STARTED and second.waiting_count == 0


async def test_a_released_id_stays_in_use_until_its_last_event() -> None:
    router, old, new = Router(asyncio.get_running_loop()), outbox(), outbox()
    router.open(A, old)
    assert router.release(A, old)
    with pytest.raises(AlreadyExists):
        router.open(A, new)
    router.publish([(A, Delta("late", ())), (A, CANCELLED)])
    await asyncio.sleep(0)
    router.open(A, new)
    router.publish([(A, STARTED)])
    assert await new.take() == STARTED
    assert old.waiting_count == 0


async def test_a_reader_who_leaves_late_takes_nothing_from_the_next_one_of_its_name() -> None:
    """The old one's last event is delivered, so its id is free, but its reader has not gone yet."""
    router, old, new = Router(asyncio.get_running_loop()), outbox(), outbox()
    router.open(A, old)
    router.publish([(A, CANCELLED)])
    await asyncio.sleep(0)
    router.open(A, new)
    assert not router.release(A, old)
    router.publish([(A, STARTED)])
    assert await new.take() == STARTED
    assert router.release(A, new)


async def test_a_forgotten_id_is_free_at_once() -> None:
    router = Router(asyncio.get_running_loop())
    router.open(A, outbox())
    router.forget(A)
    router.open(A, outbox())


async def test_failure_reaches_outboxes_questions_and_newcomers() -> None:
    router, box = Router(asyncio.get_running_loop()), outbox()
    router.open(A, box)
    asked: asyncio.Task[object] = asyncio.create_task(router.ask(lambda reply: None))
    await asyncio.sleep(0)
    error = EngineFailed(Reason.ENGINE_FAILED, "died")
    from_thread(lambda: router.state_changed(EngineState.FAILED, error))
    assert await box.take() == Failed(error)
    with pytest.raises(EngineFailed):
        await asked
    with pytest.raises(EngineFailed):
        router.require_model()
    assert router.left_ready.is_set()


@pytest.mark.parametrize("state", [EngineState.READY, EngineState.DRAINING, EngineState.STOPPED])
async def test_a_failure_that_the_engine_does_not_know_of_stays(state: EngineState) -> None:
    router = Router(asyncio.get_running_loop())
    router.state_changed(EngineState.FAILED, Unavailable(Reason.RANK_LOST, "rank 1"))
    router.state_changed(state, None)
    await asyncio.sleep(0)
    with pytest.raises(Unavailable) as refused:
        router.require_model()
    assert router.state is EngineState.FAILED and refused.value.reason is Reason.RANK_LOST


async def test_a_stopped_engine_leaves_nobody_waiting() -> None:
    router, box = Router(asyncio.get_running_loop()), outbox()
    router.open(A, box)
    # A verify, say, that the storage thread has not ended.
    asked: asyncio.Task[object] = asyncio.create_task(router.ask(lambda reply: None))
    await asyncio.sleep(0)
    router.state_changed(EngineState.STOPPED, None)
    event = await box.take()
    assert isinstance(event, Failed) and isinstance(event.error, Unavailable)
    with pytest.raises(Unavailable):
        await asked


async def test_an_answer_comes_back_from_another_thread() -> None:
    router = Router(asyncio.get_running_loop())

    def send(reply: Callable[[int], None]) -> None:
        from_thread(lambda: reply(42))

    assert await router.ask(send) == 42


async def test_an_answer_nobody_waits_for_is_dropped() -> None:
    router = Router(asyncio.get_running_loop())
    replies: list[Callable[[int], None]] = []
    asked: asyncio.Task[int] = asyncio.create_task(router.ask(replies.append))
    await asyncio.sleep(0)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    replies[0](1)
    await asyncio.sleep(0)
    assert asked.cancelled()


def test_events_after_the_loop_has_ended_go_nowhere() -> None:
    loop = asyncio.new_event_loop()
    router = Router(loop)
    loop.close()
    router.publish([(A, STARTED)])
    assert router.state is EngineState.LOADING


async def test_ready_needs_a_model() -> None:
    router = Router(asyncio.get_running_loop())
    router.state_changed(EngineState.READY, None)
    await asyncio.sleep(0)
    with pytest.raises(Unavailable):
        router.require_model()
