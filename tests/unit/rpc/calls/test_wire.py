"""What watchers are told of calls: every service's on the wire, our own in full."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from icehouse.v1 import (
    embedding_service_pb2,
    inference_service_pb2_grpc,
    load_report_pb2,
    rerank_service_pb2,
)
from icehouse.v1 import inference_service_pb2 as messages
from icehouse_server.domain.cache_stats import CacheStats, LookupStats, MissTokens
from icehouse_server.domain.call import CallRecord, PeerKind, WireRecord
from icehouse_server.domain.events import ReuseLimit
from icehouse_server.domain.model import EngineState
from icehouse_server.domain.stats import EngineStats, SampleRates, StatsSnapshot
from icehouse_server.rpc.access.caller import peer_kind
from icehouse_server.rpc.calls.methods import METHODS
from icehouse_server.rpc.calls.watchers import Telemetry
from icehouse_server.rpc.calls.wire import cancel_code
from icehouse_server.rpc.services.observation import TRAILER_KEY, report_of

from tests.fixtures.patience import BOUND_S
from tests.fixtures.rpc.fake_engine import REPORT, hanging
from tests.fixtures.rpc.http2 import framed, peer_of
from tests.unit.rpc.conftest import RunningServer, running

GENERATE = "icehouse.v1.InferenceService/Generate"
STREAM = "icehouse.v1.InferenceService/Stream"


class Notes:
    """A watcher that writes everything down."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.wire: list[WireRecord] = []
        self.calls: list[CallRecord] = []
        self.changed = asyncio.Event()

    def call_started(self, method: str) -> None:
        self.started.append(method)

    def wire_ended(self, record: WireRecord) -> None:
        self.wire.append(record)
        self.changed.set()

    def call_ended(self, record: CallRecord) -> None:
        self.calls.append(record)

    async def ended(self, count: int) -> None:
        """Return when so many calls have ended."""
        async with asyncio.timeout(BOUND_S):
            while len(self.wire) < count:
                self.changed.clear()
                await self.changed.wait()


@contextlib.asynccontextmanager
async def watched_server(**settings: Any) -> AsyncIterator[tuple[RunningServer, Notes]]:
    notes = Notes()
    telemetry = Telemetry(wire=(notes,), calls=(notes,), **settings)
    async with running(telemetry=telemetry) as served:
        yield served, notes


async def test_a_finished_call_is_told_with_all_it_cost() -> None:
    async with watched_server() as (served, notes):
        request = messages.GenerateRequest(prompt={"text": "Hi"}, max_output_tokens=2, request_id="r")
        request.cache.tenant = "blue"
        metadata = (("traceparent", "00-" + "1" * 32 + "-" + "2" * 16 + "-01"), ("tracestate", "a=b"))
        response = await served.inference.Generate(request, metadata=metadata)
        await notes.ended(1)
    [record], [wire] = notes.calls, notes.wire
    assert (record.method, record.code, record.reason, record.request_id) == (GENERATE, "OK", "", "r")
    assert (record.tenant, record.model_id, record.peer) == ("blue", "tiny", PeerKind.LOOPBACK)
    assert record.prompt_token_count == 2 and record.started.cache == REPORT
    assert record.usage.output_token_count == 2
    assert (record.traceparent[:4], record.tracestate) == ("00-1", "a=b")
    assert notes.started == [GENERATE]
    assert (wire.method, wire.code) == (GENERATE, "OK")
    assert (wire.received_bytes, wire.sent_bytes) == (request.ByteSize(), response.ByteSize())


async def test_a_call_is_told_with_what_it_asks_of_a_model() -> None:
    chat = messages.GenerateRequest(max_output_tokens=1)
    chat.prompt.chat.messages.add(role="ROLE_USER", content="Hi")
    async with watched_server() as (served, notes):
        await served.inference.Generate(chat)
        await served.inference.Generate(messages.GenerateRequest(prompt={"text": "Hi"}, max_output_tokens=1))
        async for _ in served.inference.Stream(chat):
            pass
        # One after the other: a call begins when it is made, not when it is awaited.
        with pytest.raises(grpc.aio.AioRpcError):
            await served.embeddings.Embed(embedding_service_pb2.EmbedRequest())
        with pytest.raises(grpc.aio.AioRpcError):
            await served.reranking.Rerank(rerank_service_pb2.RerankRequest())
        await served.inference.CacheStats(messages.CacheStatsRequest())
        await notes.ended(6)
    told = [(record.operation, record.error_type) for record in notes.calls]
    assert told == [
        ("chat", ""),
        ("text_completion", ""),
        ("chat", ""),
        ("embeddings", "EMBEDDING_UNSUPPORTED"),
        ("rerank", "PARAMETER_OUT_OF_RANGE"),
        (None, ""),
    ]


async def test_a_stream_counts_the_bytes_of_all_its_messages() -> None:
    async with watched_server() as (served, notes):
        stream = served.inference.Stream(messages.GenerateRequest(prompt={"text": "Hi"}, max_output_tokens=3))
        sizes = [response.ByteSize() async for response in stream]
        await notes.ended(1)
    assert len(sizes) == 5 and notes.wire[0].sent_bytes == sum(sizes)


async def test_a_refusal_is_told_with_its_reason_and_a_request_id() -> None:
    async with watched_server() as (served, notes):
        with pytest.raises(grpc.aio.AioRpcError):
            await served.inference.Generate(messages.GenerateRequest())
        await notes.ended(1)
    [record] = notes.calls
    assert (record.code, record.reason) == ("INVALID_ARGUMENT", "PROMPT_MISSING")
    assert record.started is None and len(record.request_id) == 32
    assert notes.wire[0].code == "INVALID_ARGUMENT"


@pytest.mark.parametrize(("timeout_s", "code"), [(None, "CANCELLED"), (0.3, "DEADLINE_EXCEEDED")])
async def test_who_ended_a_call_is_told_apart(timeout_s: float | None, code: str) -> None:
    async with watched_server() as (served, notes):
        served.engine.script = hanging
        stream = served.inference.Stream(messages.GenerateRequest(prompt={"text": "Hi"}), timeout=timeout_s)
        await stream.read()
        if timeout_s is None:
            stream.cancel()
        await notes.ended(1)
        assert notes.wire[0].code == notes.calls[0].code == code
        assert notes.calls[0].started is not None and notes.calls[0].usage is None


async def test_the_end_by_a_methods_own_deadline_is_told_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    row = dataclasses.replace(METHODS[STREAM], own_deadline_s=0.3)
    monkeypatch.setitem(METHODS, STREAM, row)  # type: ignore[arg-type]
    async with watched_server() as (served, notes):
        served.engine.script = hanging
        stream = served.inference.Stream(messages.GenerateRequest(prompt={"text": "Hi"}))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stream:
                pass
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await notes.ended(1)
        assert notes.wire[0].code == notes.calls[0].code == "DEADLINE_EXCEEDED"


async def test_a_caller_who_leaves_shortly_before_a_methods_own_deadline_has_left() -> None:
    deadline_s = METHODS[STREAM].deadline_s
    assert deadline_s is not None
    async with watched_server() as (served, notes):
        served.engine.script = hanging
        stream = served.inference.Stream(messages.GenerateRequest(prompt={"text": "Hi"}))
        await stream.read()
        served.clock.now += deadline_s
        stream.cancel()
        await notes.ended(1)
        assert notes.wire[0].code == notes.calls[0].code == "CANCELLED"


def test_what_was_told_of_a_cancelled_call_is_told_again_when_less_time_is_left() -> None:
    class Context:
        remaining_s = 0.06

        def time_remaining(self) -> float:
            return self.remaining_s

    context: Any = Context()

    def ask() -> list[grpc.StatusCode]:
        first = cancel_code(context)
        context.remaining_s = 0.04
        return [first, cancel_code(context)]

    assert contextvars.copy_context().run(ask) == [grpc.StatusCode.CANCELLED] * 2
    assert contextvars.copy_context().run(ask) == [grpc.StatusCode.DEADLINE_EXCEEDED] * 2


@pytest.mark.parametrize(
    ("method", "request_bytes"),
    [
        (STREAM, messages.GenerateRequest(prompt={"text": "Hi"}).SerializeToString()),
        ("icehouse.v1.ServerService/WatchStats", b""),
        ("grpc.health.v1.Health/Watch", b""),
        ("grpc.reflection.v1.ServerReflection/ServerReflectionInfo", b"\x3a\x00"),
    ],
)
async def test_a_connection_that_goes_away_in_a_blocked_write_is_its_callers_end(
    method: str, request_bytes: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with watched_server() as (served, notes):
        served.engine.script = hanging
        async with peer_of(served.server.address, window_bytes=0) as peer:
            stream = await peer.open_call(f"/{method}")
            await peer.send(stream, framed(request_bytes))
            await peer.until(lambda: stream in peer.headers)
            await served.settle()
        await notes.ended(1)
        assert [record.code for record in notes.wire] == ["CANCELLED"]
        assert {record.code for record in notes.calls} <= {"CANCELLED"}
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


async def test_health_is_watched_and_unknown_names_are_other() -> None:
    async with watched_server() as (served, notes):
        health: Any = health_pb2_grpc.HealthStub(served.channel)
        await health.Check(health_pb2.HealthCheckRequest())
        with pytest.raises(grpc.aio.AioRpcError):
            await served.channel.unary_unary("/made.Up/Name")(b"")
        await notes.ended(2)
    assert notes.started == ["grpc.health.v1.Health/Check", "other"]
    assert [record.code for record in notes.wire] == ["OK", "UNIMPLEMENTED"]
    assert notes.calls == []


async def test_bytes_that_are_no_message_end_as_what_grpc_answers() -> None:
    async with watched_server() as (served, notes):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.channel.unary_unary(f"/{GENERATE}")(b"\xff\xff\xff")
        await notes.ended(1)
    assert notes.wire[0].code == caught.value.code().name == "INVALID_ARGUMENT"
    assert notes.calls[0].reason == "MESSAGE_MALFORMED"


@pytest.mark.parametrize(
    ("peer", "kind"),
    [
        ("unix:", PeerKind.UNIX),
        ("ipv4:127.0.0.1:5000", PeerKind.LOOPBACK),
        ("ipv4:10.1.2.3:5000", PeerKind.NETWORK),
        ("ipv6:%5B::1%5D:5000", PeerKind.LOOPBACK),
        ("ipv6:[::ffff:127.0.0.1]:5000", PeerKind.LOOPBACK),
        ("ipv6:%5Bfe80::1%25eth0%5D:5000", PeerKind.NETWORK),
        ("", PeerKind.UNKNOWN),
        (None, PeerKind.UNKNOWN),
        ("ipv4:nowhere", PeerKind.UNKNOWN),
    ],
)
def test_peers_are_told_by_kind_only(peer: str | None, kind: PeerKind) -> None:
    assert peer_kind(peer) is kind


class Tap:
    """A proxy that keeps what the server sends: gRPC's own clients hide the load report from programs."""

    def __init__(self, address: str) -> None:
        self._host, _, self._port = address.rpartition(":")
        self._writers: list[asyncio.StreamWriter] = []
        self.data = bytearray()

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        """Give the proxy's address until the block ends; then hang up on both sides."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        async with server:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for writer in self._writers:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, forth = await asyncio.open_connection(self._host, int(self._port))
        self._writers += [writer, forth]
        await asyncio.gather(self._pump(reader, forth), self._pump(back, writer, kept=self.data))

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, kept: bytearray | None = None
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                if kept is not None:
                    kept += data
                writer.write(data)


async def test_every_call_carries_the_load_report_once_the_engine_has_told() -> None:
    request = messages.GenerateRequest(prompt={"text": "Hi"}, max_output_tokens=1)
    async with running(telemetry=Telemetry(has_load_report=True)) as served:
        tap = Tap(served.server.address)
        async with tap.open() as address, grpc.aio.insecure_channel(address) as channel:
            stub: Any = inference_service_pb2_grpc.InferenceServiceStub(channel)
            await stub.Generate(request)
            assert TRAILER_KEY.encode() not in tap.data
            await served.server.observation.sample()
            await stub.Generate(request)
            sent = report_of(served.server.observation.latest).SerializeToString(deterministic=True)
            assert TRAILER_KEY.encode() in tap.data and tap.data.count(sent) == 1
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Generate(messages.GenerateRequest())
            assert tap.data.count(sent) == 2
            assert "grpc-status-details-bin" in dict(refused.value.trailing_metadata())


def test_the_load_report_is_orcas_on_the_wire() -> None:
    """The bytes are what xds.data.orca.v3.OrcaLoadReport of xds-protos 1.85.0 serializes to."""
    report = load_report_pb2.LoadReport(
        mem_utilization=0.25, rps_fractional=2, eps=1, application_utilization=1.5, named_metrics={"a": 1.0}
    )
    assert report.SerializeToString(deterministic=True).hex() == (
        "11000000000000d03f31000000000000004039000000000000f03f420c0a016111000000000000f03f49000000000000f83f"
    )


def test_a_busy_server_reports_more_than_one() -> None:
    engine = EngineStats(
        waiting_count=6,
        prefilling_count=1,
        decoding_count=8,
        decoding_limit=10,
        active_memory_bytes=3,
        memory_limit_bytes=4,
    )
    lookups = LookupStats(
        ram_token_total=20, ssd_token_total=10, miss_tokens=(MissTokens(ReuseLimit.NO_MATCH, 10),)
    )
    snapshot = StatsSnapshot(
        EngineState.READY,
        heartbeat_age_s=0,
        sample_time=0,
        engine=engine,
        cache=CacheStats(lookups=lookups),
        rates=SampleRates(finished_per_s=2.5, failed_per_s=0.5),
    )
    report = report_of(snapshot)
    assert (report.application_utilization, report.mem_utilization) == (1.5, 0.75)
    assert (report.rps_fractional, report.eps) == (2.5, 0.5)
    assert dict(report.named_metrics) == {
        "icehouse.waiting": 6,
        "icehouse.decoding": 8,
        "icehouse.hit_ratio": 0.75,
    }


async def test_rates_are_of_the_last_interval() -> None:
    async with running(telemetry=Telemetry(has_load_report=True)) as served:
        served.engine.stats = EngineStats(finished_total=10, failed_total=1)
        await served.server.observation.sample()
        served.clock.now += 2
        served.engine.stats = EngineStats(finished_total=15, failed_total=2)
        await served.server.observation.sample()
        assert served.server.observation.latest.rates == SampleRates(2.5, 0.5)


async def test_a_silent_engine_leaves_the_last_counters_and_an_old_heartbeat() -> None:
    async with running() as served:
        sampler = served.server.observation
        await sampler.sample()
        assert sampler.latest.engine == served.engine.stats and sampler.latest.heartbeat_age_s == 0
        served.engine.answers_stats = False
        sampler.interval_s = 0.01
        served.clock.now += 60
        await sampler.sample()
        assert sampler.latest.engine == served.engine.stats
        assert (sampler.latest.state, sampler.latest.heartbeat_age_s) == (EngineState.READY, 60)
