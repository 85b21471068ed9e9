"""How calls end early: cancel, deadline, a stalled reader, a dead engine, a stopped server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2, health_pb2_grpc
from icehouse.v1 import inference_service_pb2 as messages
from icehouse.v1.server_service_pb2 import WatchStatsRequest
from icehouse_server.domain.events import Delta, Event, Failed, Finished
from icehouse_server.domain.model import EngineState
from icehouse_server.domain.request import GenerationRequest
from icehouse_server.errors import Cancelled, EngineFailed, Reason

from tests.fixtures.patience import BOUND_S
from tests.fixtures.rpc.details import refusal_of, refused
from tests.fixtures.rpc.fake_engine import finished, hanging, started
from tests.unit.rpc.conftest import RunningServer, running

REQUEST = messages.GenerateRequest(request_id="r", prompt={"text": "Hi"})


async def read_to_error(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while await call.read() is not grpc.aio.EOF:
            pass
    return caught.value


async def read_to_end(call: Any) -> list[messages.StreamResponse]:
    responses = []
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response)
    return responses


async def test_cancel_reaches_the_engine(served: RunningServer) -> None:
    served.engine.script = hanging
    stream = served.inference.Stream(REQUEST)
    assert (await stream.read()).WhichOneof("event") == "started"
    stream.cancel()
    assert await served.cancelled() == "r"


async def test_vanished_caller_reaches_the_engine(served: RunningServer) -> None:
    served.engine.script = hanging
    stream = served.inference.Stream(REQUEST)
    await stream.read()
    await served.channel.close()
    assert await served.cancelled() == "r"


async def test_cancelled_unary_reaches_the_engine(served: RunningServer) -> None:
    served.engine.script = hanging
    call = served.inference.Generate(REQUEST)
    while not served.engine.submitted:
        await served.settle()
    call.cancel()
    assert await served.cancelled() == "r"


async def test_passed_deadline_reaches_the_engine(served: RunningServer) -> None:
    served.engine.script = hanging
    stream = served.inference.Stream(REQUEST, timeout=1.0)
    error = await read_to_error(stream)
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert await served.cancelled() == "r"


async def test_id_is_free_again_after_the_engine_ended_the_request(served: RunningServer) -> None:
    served.engine.script = hanging
    stream = served.inference.Stream(REQUEST)
    await stream.read()
    stream.cancel()
    await served.cancelled()
    await served.settle()
    served.engine.script = lambda request: [started(request), finished(request)]
    assert (await served.inference.Generate(REQUEST)).request_id == "r"


async def test_finished_request_is_not_cancelled(served: RunningServer) -> None:
    await served.inference.Generate(messages.GenerateRequest(prompt={"text": "Hi"}, max_output_tokens=1))
    await served.settle()
    assert served.engine.cancelled.empty()


FLOOD = [Delta("x" * 10_000, (1,))] * 400
"""Far more than the connection's window holds."""


async def test_reader_with_too_much_unread_is_cut_off() -> None:
    async with running(outbox_byte_limit=100_000, outbox_event_limit=4) as served:
        served.engine.script = hanging
        stream = served.inference.Stream(REQUEST)
        assert (await stream.read()).WhichOneof("event") == "started"
        served.engine.publish(served.engine.submitted[0], *FLOOD)
        assert await served.cancelled() == "r"
        error = await read_to_error(stream)
        assert refusal_of(error).reason == "READER_STALLED"
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_reader_who_takes_nothing_in_time_is_cut_off() -> None:
    async with running(outbox_byte_limit=1 << 30, stall_timeout_s=0.2) as served:
        served.engine.script = hanging
        stream = served.inference.Stream(REQUEST)
        assert (await stream.read()).WhichOneof("event") == "started"
        served.engine.publish(served.engine.submitted[0], *FLOOD)
        assert await served.cancelled() == "r"
        assert refusal_of(await read_to_error(stream)).reason == "READER_STALLED"


async def test_a_call_whose_reader_left_too_much_unread_ends_without_being_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="icehouse.access")
    options = {"outbox_byte_limit": 100_000, "outbox_event_limit": 4, "stall_timeout_s": 600.0}
    async with running(**options) as served:
        served.engine.script = hanging
        stream = served.inference.Stream(REQUEST)
        assert (await stream.read()).WhichOneof("event") == "started"
        # In pieces, so that the call waits for its connection before too much is left unread.
        for _ in range(len(FLOOD)):
            served.engine.publish(served.engine.submitted[0], FLOOD[0])
            await served.settle()
            if not served.engine.cancelled.empty():
                break
        assert await served.cancelled() == "r"
        # Nobody reads on, and nobody waits for the stall's own time.
        for _ in range(100):
            await served.settle()
            if reasons := [r.reason for r in caplog.records if hasattr(r, "reason")]:
                break
        assert reasons == ["READER_STALLED"]
        # gRPC sends the status behind what the reader left, so the call's place is his till he reads or goes.
        assert refusal_of(await read_to_error(stream)).reason == "READER_STALLED"


async def test_one_stalled_reader_does_not_delay_another() -> None:
    async with running(outbox_byte_limit=1 << 30, stall_timeout_s=30.0) as served:
        served.engine.script = hanging
        stalled = served.inference.Stream(REQUEST)
        await stalled.read()
        served.engine.publish(served.engine.submitted[0], *FLOOD)
        served.engine.script = lambda request: [started(request), Delta("quick", (1,)), finished(request)]
        assert (
            await served.inference.Generate(messages.GenerateRequest(prompt={"text": "Hi"}))
        ).text == "quick"
        stalled.cancel()
        assert await served.cancelled() == "r"


async def test_slow_reader_gets_every_word(served: RunningServer) -> None:
    words = [f"{index:05d} " for index in range(5000)]

    def talkative(request: GenerationRequest) -> Iterable[Event]:
        yield started(request)
        yield from (Delta(word, (index,)) for index, word in enumerate(words))
        yield finished(request)

    served.engine.script = talkative
    stream = served.inference.Stream(REQUEST)
    await stream.read()
    await served.settle()
    deltas = [r.delta for r in await read_to_end(stream) if r.WhichOneof("event") == "delta"]
    assert "".join(delta.text for delta in deltas) == "".join(words)
    assert [i for delta in deltas for i in delta.token_ids] == list(range(5000))
    assert len(deltas) < 5000, "deltas above the event limit are merged"


async def test_who_leaves_late_takes_nothing_from_the_next_request_of_the_same_name(
    served: RunningServer,
) -> None:
    """The first one has ended for the engine, and its reader has yet to take what was said."""
    word = "w" * 1000

    def talkative(request: GenerationRequest) -> Iterable[Event]:
        yield started(request)
        yield from (Delta(word, (index,)) for index in range(500))
        yield finished(request)

    served.engine.script = talkative
    first = served.inference.Stream(REQUEST)
    await first.read()
    await served.settle()
    served.engine.script = hanging
    second = served.inference.Stream(REQUEST)
    await second.read()
    first.cancel()
    while served.server._calls._running_count > 1:
        await served.settle()
    served.engine.publish(served.engine.submitted[1], finished(served.engine.submitted[1]))
    assert (await read_to_end(second))[-1].WhichOneof("event") == "finished"
    assert served.engine.cancelled.empty()


async def test_dead_engine_fails_every_open_call(served: RunningServer) -> None:
    served.engine.script = hanging
    served.engine.answers_stats = False
    stream = served.inference.Stream(REQUEST)
    await stream.read()
    stats = served.inference.CacheStats(messages.CacheStatsRequest())
    error = EngineFailed(Reason.ENGINE_FAILED, "the loop died of KeyError")
    while not served.router._questions:
        await served.settle()
    served.router.state_changed(EngineState.FAILED, error)
    failed = await read_to_error(stream)
    assert (failed.code(), failed.details()) == (grpc.StatusCode.INTERNAL, "the loop died of KeyError")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stats
    assert caught.value.code() is grpc.StatusCode.INTERNAL


async def test_stopping_lets_running_calls_end() -> None:
    async with running() as served:
        served.engine.script = hanging
        stream = served.inference.Stream(REQUEST)
        await stream.read()
        stopping = asyncio.create_task(served.server.stop(grace_s=10))
        [request] = served.engine.submitted
        served.engine.publish(request, Delta(" world", (2,)), finished(request))
        rest = [response.WhichOneof("event") for response in await read_to_end(stream)]
        assert rest[-1] == "finished"
        await stopping


async def test_stopping_does_not_wait_for_watchers() -> None:
    async with running() as served:
        health: Any = health_pb2_grpc.HealthStub(served.channel)
        watching_health = health.Watch(health_pb2.HealthCheckRequest(service=""))
        await watching_health.read()
        watching_stats = served.serving.WatchStats(WatchStatsRequest(interval=Duration(seconds=3600)))
        await watching_stats.read()
        served.router.state_changed(EngineState.DRAINING, None)
        async with asyncio.timeout(BOUND_S):
            await served.server.stop(grace_s=3600)
        assert refusal_of(await read_to_error(watching_stats)).reason == "DRAINING"


async def test_new_calls_are_refused_while_old_ones_end() -> None:
    async with running() as served:
        served.engine.script = hanging
        stream = served.inference.Stream(REQUEST)
        await stream.read()
        stopping = asyncio.create_task(served.server.stop(grace_s=3600))
        await served.settle()
        answer = await refused(served.inference.Generate(messages.GenerateRequest(prompt={"text": "Hi"})))
        assert (answer.code, answer.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        served.engine.publish(served.engine.submitted[0], finished(served.engine.submitted[0]))
        await stopping
        assert (await read_to_end(stream))[-1].WhichOneof("event") == "finished"


async def test_late_events_of_an_ended_request_are_ignored(served: RunningServer) -> None:
    await served.inference.Generate(REQUEST)
    [request] = served.engine.submitted
    last: Finished = finished(request)
    served.engine.publish(request, Delta("late", ()), last, Failed(Cancelled(Reason.CANCELLED, "late")))
    await served.settle()
    assert (await served.inference.Generate(REQUEST)).text.startswith(" w0")
