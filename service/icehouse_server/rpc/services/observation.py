"""Observation: watchers of one server's calls, its counters, load report and status page."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence

from icehouse.v1 import load_report_pb2, server_service_pb2

from icehouse_server.clock import Clock
from icehouse_server.domain.cache_commands import ListRecent, RecentBlock, RecentBlocks
from icehouse_server.domain.call import CallRecord
from icehouse_server.domain.ids import Tenant
from icehouse_server.domain.model import EngineState
from icehouse_server.domain.stats import (
    EngineStats,
    ModelStats,
    ReplyStats,
    SampleRates,
    ServerStats,
    ServerStatus,
    StatsSnapshot,
)
from icehouse_server.errors import IcehouseError
from icehouse_server.rpc.access.caller import Caller, CallerRole
from icehouse_server.rpc.access.tenants import Tenants
from icehouse_server.rpc.calls import background
from icehouse_server.rpc.calls.call_lifecycle import Trailers
from icehouse_server.rpc.calls.watchers import AccessLog, SlowRequests, Telemetry
from icehouse_server.rpc.calls.wire import EncodedResponse, WireInterceptor
from icehouse_server.rpc.engine_client.seat import PATIENCE_S, Counters, Seat, Seats
from icehouse_server.rpc.messages.proto_map import to_proto
from icehouse_server.rpc.messages.responses import tenant_stats_protos
from icehouse_server.telemetry.call_metrics import CallMetrics

BLOCK_LIMIT = 1024
"""Number of blocks to ask for: a millisecond of the engine's time (2-core x86)."""


class CallObservation:
    """Reports ended calls to all watchers and samples the engine's counters, so that metrics and load reports
    need not ask the engine. Owned by the event loop; any thread may read `latest`."""

    def __init__(
        self,
        telemetry: Telemetry,
        *,
        seats: Seats,
        tenants: Tenants,
        replies: Callable[[], ReplyStats],
        clock: Clock,
    ) -> None:
        self._telemetry = telemetry
        self._seats = seats
        self._replies = replies
        self._clock = clock
        self._slow = SlowRequests(clock)
        self.tenants = tenants
        self._counters: Mapping[str, Counters] = {}
        """The last ones that a caller asked for."""
        self._encoded: dict[Tenant | None, EncodedResponse] = {}
        """The encoded answers with these counters, by tenant; None for callers who see everything."""
        self.interval_s = telemetry.sample_interval_s or 1.0
        """Also how long the engine may take to answer. Without an interval in settings nothing is sampled."""
        self.latest = StatsSnapshot(EngineState.LOADING, heartbeat_age_s=0.0, sample_time=clock.monotonic())
        """The last sample, a frozen value: other threads can read it without a lock."""
        self._task: asyncio.Task[None] | None = None
        self._reported: StatsSnapshot | None = None
        self._load_report = b""
        """The report of that snapshot, encoded once for all calls."""
        self._watchers: tuple[SlowRequests | CallMetrics, ...] = (self._slow, *telemetry.calls)
        self._access_log = AccessLog(clock) if telemetry.has_access_log else None
        self.interceptor = WireInterceptor(telemetry.wire, clock)

    def start(self) -> None:
        if self._telemetry.sample_interval_s is not None:
            self._task = background.start(self.run(), name="sampler")

    async def stop(self) -> None:
        if self._task is not None:
            await background.end(self._task)
            self._task = None

    def call_ended(self, record: CallRecord) -> Trailers:
        """Report an ended call to all watchers; return the trailing metadata for its caller."""
        trailers: list[tuple[str, str | bytes]] = []
        tracer = self._telemetry.tracer
        names = tracer.trace(record) if tracer is not None else None
        if names is not None:
            trailers.append(("traceresponse", names.traceresponse))
        if self._telemetry.has_load_report and (trailer := self._load_trailer()) is not None:
            trailers.append(trailer)
        if self._access_log is not None:
            self._access_log.write(record, trace_id=names.trace_id if names is not None else "")
        for watcher in self._watchers:
            watcher.call_ended(record)
        return tuple(trailers)

    def _load_trailer(self) -> tuple[str, bytes] | None:
        """Return the load report as a trailer; None before the first counters of the engine."""
        snapshot = self.latest
        if snapshot.engine is None:
            return None
        if snapshot is not self._reported:
            self._reported = snapshot
            self._load_report = report_of(snapshot).SerializeToString(deterministic=True)
        return TRAILER_KEY, self._load_report

    async def run(self) -> None:
        while True:
            await self.sample()
            await asyncio.sleep(self.interval_s)

    async def sample(self) -> None:
        """Take one sample; if the engine does not answer in time, keep the last counters."""
        answers: Mapping[str, Counters] = {}
        if self._seats.state is EngineState.READY:
            with contextlib.suppress(TimeoutError, IcehouseError):
                async with asyncio.timeout(self.interval_s):
                    answers = await self.ask()
        self.latest = self._snapshot(answers)

    def _snapshot(self, answers: Mapping[str, Counters]) -> StatsSnapshot:
        now, default = self._clock.monotonic(), self._seats.default_name
        last = {default: self.latest} if self.latest.models is None else self.latest.models
        models = {
            name: _snapshot_of(seat, last.get(name), answers.get(name), now)
            for name, seat in self._seats.loaded().items()
        }
        found = models.get(default) or StatsSnapshot(self._seats.state, heartbeat_age_s=0.0, sample_time=now)
        return dataclasses.replace(
            found,
            state=self._seats.state,
            tenants=self.tenants.uses(),
            kv_events=self._telemetry.kv_events(),
            replies=self._replies(),
            group=None if self._telemetry.group is None else self._telemetry.group(found.engine, found.cache),
            models=models if self._seats.are_several else None,
        )

    async def answer(self, caller: Caller) -> EncodedResponse:
        """Return the encoded counters, one message for all callers who see the same; raises as `ask`.

        Only operators see those of the whole server: they would show one tenant what others do. The bytes are
        a GetStatsResponse and a WatchStatsResponse alike: each has a single field, with the same number.
        """
        counters = await self.ask()
        if [*map(id, counters.values())] != [*map(id, self._counters.values())]:
            self._counters, self._encoded = counters, {}
        encoded = self._encoded.get(caller.scope)
        if encoded is None:
            message = server_service_pb2.WatchStatsResponse(stats=self._stats_of(counters, caller))
            encoded = self._encoded[caller.scope] = EncodedResponse(message.SerializeToString())
        return encoded

    def _stats_of(self, counters: Mapping[str, Counters], caller: Caller) -> server_service_pb2.ServerStats:
        engine, cache = counters.get(self._seats.default_name) or (None, None)
        is_operator = caller.role is CallerRole.OPERATOR
        stats = ServerStats(
            collect_time=self._clock.wall(),
            engine=engine if is_operator else None,
            cache=cache if is_operator else None,
            slowest_requests=self._slow.slowest(tenant=None if is_operator else caller.tenant),
            models=tuple(ModelStats(name, *each) for name, each in counters.items())
            if is_operator and self._seats.are_several
            else (),
            group=self._telemetry.group(engine, cache)
            if is_operator and self._telemetry.group is not None
            else None,
        )
        proto = to_proto(stats, server_service_pb2.ServerStats)
        accounts = [each for each in self.tenants if is_operator or each.use.tenant == caller.tenant]
        caches = [cache for _, cache in counters.values() if cache is not None]
        proto.tenants.extend(tenant_stats_protos(self.tenants, accounts, caches))
        return proto

    async def ask(self) -> Mapping[str, Counters]:
        """Return the next counters of each loaded model; raises Unavailable or EngineFailed if none runs."""
        seats = self._seats.loaded()
        answers = await asyncio.gather(
            *(seat.counters.ask() for seat in seats.values()), return_exceptions=self._seats.are_several
        )
        return {name: found for name, found in zip(seats, answers, strict=True) if isinstance(found, tuple)}

    async def read_status(self, *, with_tokens: bool = False) -> ServerStatus:
        """Return the status for the status page, without blocks if the engine does not answer in time.

        `with_tokens` adds the tokens of the blocks that the engine has in memory. Each read is a command to
        the engine, so callers limit how often they read.
        """
        blocks: tuple[RecentBlock, ...] | None = None
        with contextlib.suppress(TimeoutError, IcehouseError):
            async with asyncio.timeout(PATIENCE_S):
                command = ListRecent(BLOCK_LIMIT, with_tokens)
                if (seat := self._default_seat()) is not None:
                    blocks = (await seat.commands.ask(command, RecentBlocks)).blocks
        return ServerStatus(
            collect_time=self._clock.wall(),
            snapshot=self.latest,
            slowest_requests=self._slow.slowest(tenant=None),
            recent_blocks=blocks,
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of a status's tokens; "" if their model is no longer loaded. Any thread."""
        seat = self._default_seat()
        model = None if seat is None else seat.router.model
        return "" if model is None else model.tokenizer.decode(token_ids)

    def _default_seat(self) -> Seat | None:
        return self._seats.loaded().get(self._seats.default_name)


def _snapshot_of(
    seat: Seat, last: StatsSnapshot | None, answer: Counters | None, now: float
) -> StatsSnapshot:
    """Return a model's sample; counters stay those of its `last` one if the engine did not answer."""
    last = last or StatsSnapshot(EngineState.LOADING, heartbeat_age_s=0.0, sample_time=now)
    engine, cache = answer or (last.engine, last.cache)
    return StatsSnapshot(
        state=seat.router.state,
        heartbeat_age_s=max(0.0, now - seat.engine.heartbeat_time),
        sample_time=now if answer is not None else last.sample_time,
        model=seat.router.model.info if seat.router.model is not None else None,
        engine=engine,
        cache=cache,
        rates=_rates(last, engine, now) if answer is not None else last.rates,
    )


def _rates(last: StatsSnapshot, engine: EngineStats | None, now: float) -> SampleRates:
    elapsed_s = now - last.sample_time
    if last.engine is None or engine is None or elapsed_s <= 0:
        return SampleRates()
    return SampleRates(
        finished_per_s=(engine.finished_total - last.engine.finished_total) / elapsed_s,
        failed_per_s=(engine.failed_total - last.engine.failed_total) / elapsed_s,
        output_tokens_per_s=(engine.output_token_total - last.engine.output_token_total) / elapsed_s,
    )


TRAILER_KEY = "endpoint-load-metrics-bin"


def report_of(snapshot: StatsSnapshot) -> load_report_pb2.LoadReport:
    """Return the report of a snapshot with counters."""
    engine, cache = snapshot.engine, snapshot.cache
    assert engine is not None, "no counters yet"
    running_count = engine.running_count
    memory_limit_bytes = engine.memory_limit_bytes
    named = {
        "icehouse.waiting": float(engine.waiting_count),
        "icehouse.decoding": float(engine.decoding_count),
    }
    if cache is not None:
        lookups = cache.lookups
        reused = lookups.ram_token_total + lookups.ssd_token_total
        named["icehouse.hit_ratio"] = reused / max(1, reused + lookups.miss_token_total)
    return load_report_pb2.LoadReport(
        mem_utilization=engine.active_memory_bytes / memory_limit_bytes if memory_limit_bytes else 0.0,
        rps_fractional=snapshot.rates.finished_per_s,
        eps=snapshot.rates.failed_per_s,
        named_metrics=named,
        application_utilization=(running_count + engine.waiting_count) / max(1, engine.decoding_limit),
    )
