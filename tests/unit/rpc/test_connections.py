"""What one connection may do: ping, wait, trickle, flood, grow old."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hyperframe.frame import DataFrame, GoAwayFrame, SettingsFrame
from icehouse.v1 import inference_service_pb2
from icehouse_server.config import ConnectionConfig
from icehouse_server.domain.events import Delta

from tests.fixtures.patience import BOUND_S
from tests.fixtures.rpc.details import refused
from tests.fixtures.rpc.fake_engine import finished, hanging
from tests.fixtures.rpc.http2 import ENHANCE_YOUR_CALM, framed, peer_of
from tests.unit.rpc.conftest import RunningServer, channel_options, running

GENERATE = inference_service_pb2.GenerateRequest(prompt={"text": "Hi"}, max_output_tokens=1)
MESSAGE = framed(GENERATE.SerializeToString())


async def is_serving(served: RunningServer) -> bool:
    """Whether a well-behaved client on a new connection is served."""
    async with grpc.aio.insecure_channel(served.server.address, options=channel_options()) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=BOUND_S)
    reply = await served.inference.Generate(GENERATE, timeout=BOUND_S)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING and reply.text == " w0")


async def test_a_flood_of_pings_ends_with_too_many_pings(served: RunningServer) -> None:
    async with peer_of(served.server.address) as peer:
        for number in range(1, 10):
            await peer.ping(number)
            # One at a time: the answer to a ping on a closed connection would wipe the good-bye out.
            await peer.answered(number)
            if peer.said_goodbye():
                break
        goodbye = await peer.first(GoAwayFrame)
        assert goodbye.error_code == ENHANCE_YOUR_CALM
        assert goodbye.additional_data == b"too_many_pings"
    assert await is_serving(served)


async def test_pings_without_calls_at_the_allowed_pace_are_answered() -> None:
    async with (
        running(connection=ConnectionConfig(min_ping_interval_s=0.1)) as served,
        peer_of(served.server.address) as peer,
    ):
        for number in range(8):
            await peer.ping(number)
            await peer.quiet(0.15)
        assert peer.answered_ping_count() == 8
        assert not peer.said_goodbye()


@pytest.mark.slow
async def test_a_gateway_that_pings_every_ten_seconds_stays(served: RunningServer) -> None:
    async with peer_of(served.server.address) as peer:
        for number in range(6):
            await peer.ping(number)
            await peer.quiet(10)
        assert peer.answered_ping_count() == 6
        assert not peer.said_goodbye()


async def test_a_message_that_trickles_in_is_given_up() -> None:
    async with running(connection=ConnectionConfig(message_timeout_s=1.0)) as served:
        async with peer_of(served.server.address) as peer:
            streams = [await peer.open_call() for _ in range(10)]
            for stream in streams:
                await peer.send(stream, MESSAGE[:3])
            for stream in streams:
                code, message = await peer.status(stream)
                assert code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
                assert "1 s" in message
            # The connection lives, and so does what comes in time.
            stream = await peer.open_call()
            await peer.send(stream, MESSAGE, end=True)
            assert await peer.status(stream) == (0, "")
        assert len(served.engine.submitted) == 1
        assert await is_serving(served)


async def test_calls_whose_messages_do_not_come_are_bounded() -> None:
    async with (
        running(max_concurrent_calls=4) as served,
        peer_of(served.server.address) as peer,
    ):
        waiting = [await peer.open_call() for _ in range(3)]
        code, message = await peer.status(await peer.open_call())
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        assert "3 calls are in flight, 3 of them yours; the limit is 4" in message
        # The last quarter is for others.
        assert await is_serving(served)
        for stream in waiting:
            await peer.send(stream, MESSAGE, end=True)
            assert await peer.status(stream) == (0, "")


async def test_bytes_that_are_no_message_get_a_status(served: RunningServer) -> None:
    for method in ("Generate", "Stream", "Tokenize"):
        call: Any = served.channel.stream_stream(f"/icehouse.v1.InferenceService/{method}")(
            iter([b"\xff" * 9])
        )
        refusal = await refused(call.read())
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "MESSAGE_MALFORMED")
    call = served.channel.stream_stream("/icehouse.v1.InferenceService/Generate")(iter([]))
    assert (await refused(call.read())).reason == "MESSAGE_MISSING"


async def test_metadata_beyond_the_limit_is_refused() -> None:
    async with running(connection=ConnectionConfig(max_metadata_bytes=4096)) as served:
        await served.inference.Generate(GENERATE, metadata=(("x-note", "a" * 2000),))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.inference.Generate(GENERATE, metadata=(("x-note", "a" * 8000),))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await is_serving(served)


async def test_a_message_beyond_the_limit_is_refused() -> None:
    async with running(max_message_bytes=4096) as served:
        request = inference_service_pb2.TokenizeRequest(prompt={"text": "a" * 3000})
        assert len((await served.inference.Tokenize(request)).tokens) == 3000
        request.prompt.text = "a" * 8000
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.inference.Tokenize(request)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await is_serving(served)


async def test_a_connection_is_told_its_stream_limit() -> None:
    async with (
        running(connection=ConnectionConfig(stream_limit=7)) as served,
        peer_of(served.server.address) as peer,
    ):
        assert (await peer.settings())[SettingsFrame.MAX_CONCURRENT_STREAMS] == 7


async def test_a_connection_beyond_the_limit_is_closed() -> None:
    async with running(connection=ConnectionConfig(connection_limit=1)) as served:
        await served.inference.Generate(GENERATE)
        with pytest.raises(EOFError):
            async with peer_of(served.server.address):
                pass
        await served.inference.Generate(GENERATE)


async def test_a_stream_flood_leaves_the_server_serving(served: RunningServer) -> None:
    async with peer_of(served.server.address) as peer:
        for _ in range(50):
            if peer.is_closed:
                break
            for _ in range(40):
                await peer.reset(await peer.open_call())
    assert await is_serving(served)


async def test_calls_that_come_faster_than_they_are_taken_up_are_answered_each() -> None:
    """Left alone, grpc ends calls as cancelled, anybody's: some from 1,000 waiting on, from 3,000 all."""
    connection = ConnectionConfig(stream_limit=512)
    async with (
        running(max_concurrent_calls=4, connection=connection) as served,
        contextlib.AsyncExitStack() as stack,
    ):
        peers = [await stack.enter_async_context(peer_of(served.server.address)) for _ in range(8)]
        last = {peer: [await peer.open_call() for _ in range(512)][-1] for peer in peers}
        for peer, stream in last.items():
            code, message = await peer.status(stream)
            assert (code, "in flight" in message) == (grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], True)
        codes = {int(found["grpc-status"]) for peer in peers for found in peer.headers.values()}
        assert codes == {grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]}


async def test_an_old_connection_says_goodbye_and_its_stream_ends_well() -> None:
    connection = ConnectionConfig(max_age_s=0.3, max_age_grace_s=20)
    async with running(connection=connection) as served, peer_of(served.server.address) as peer:
        served.engine.script = hanging
        stream = await peer.open_call("/icehouse.v1.InferenceService/Stream")
        await peer.send(stream, MESSAGE, end=True)
        await peer.first(DataFrame)
        assert (await peer.first(GoAwayFrame)).error_code == 0
        [request] = served.engine.submitted
        served.engine.publish(request, Delta(" late", (2,)), finished(request))
        assert await peer.status(stream) == (0, "")


async def test_the_grace_of_an_old_connection_ends() -> None:
    connection = ConnectionConfig(max_age_s=0.2, max_age_grace_s=0.2)
    async with running(connection=connection) as served:
        served.engine.script = hanging
        async with peer_of(served.server.address) as peer:
            stream = await peer.open_call("/icehouse.v1.InferenceService/Stream")
            await peer.send(stream, MESSAGE, end=True)
            await peer.hung_up()
        assert await served.cancelled() == served.engine.submitted[0].request_id


async def test_an_idle_connection_is_closed() -> None:
    async with (
        running(connection=ConnectionConfig(idle_s=0.3)) as served,
        peer_of(served.server.address) as peer,
    ):
        assert (await peer.first(GoAwayFrame)).additional_data == b"connection idle"


async def test_a_peer_that_does_not_speak_is_cut_off() -> None:
    async with running(connection=ConnectionConfig(handshake_timeout_s=0.3)) as served:
        host, _, port = served.server.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(BOUND_S):
            await reader.read()
            while await reader.read(1 << 10):
                pass
        writer.close()
        assert await is_serving(served)


@pytest.mark.parametrize("enabled", [True, False])
async def test_channelz_is_there_only_when_wanted(enabled: bool) -> None:
    async with running(channelz_enabled=enabled) as served:
        call: Any = served.channel.unary_unary("/grpc.channelz.v1.Channelz/GetServers")(b"")
        if enabled:
            assert await call
        else:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
