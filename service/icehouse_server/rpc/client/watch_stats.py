"""Stats client of the command line, over CacheService.WatchStats. Blocking."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from types import TracebackType
from typing import Self

import grpc
from google.protobuf.duration_pb2 import Duration
from icehouse.v1 import cache_service_pb2, cache_service_pb2_grpc, inference_service_pb2
from icehouse.v1.cache_stats_pb2 import CacheTierStats
from icehouse.v1.slow_request_pb2 import SlowRequest

from icehouse_server.rpc.client.generate import failure_of


@dataclasses.dataclass(frozen=True, slots=True)
class Access:
    """What a secured server asks of its callers. Empty for one without credentials."""

    root_certificates: bytes | None = None
    """PEM; None: no TLS."""
    token: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class EngineGlance:
    """The engine now, and its totals since start."""

    uptime_s: float
    waiting_count: int
    waiting_limit: int
    loading_count: int
    prefilling_count: int
    decoding_count: int
    decoding_limit: int
    finished_total: int
    refused_total: int
    """Rejected and failed."""
    prefilled_token_total: int
    cached_token_total: int
    output_token_total: int
    decode_step_p50_s: float
    decode_step_p99_s: float
    active_memory_bytes: int
    memory_limit_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class TierGlance:
    """One tier of the prefix cache."""

    name: str
    block_count: int
    size_bytes: int
    limit_bytes: int
    evicted_block_total: int
    median_age_s: float
    reused_token_total: int


@dataclasses.dataclass(frozen=True, slots=True)
class CacheGlance:
    """The prefix cache now, and its totals since start."""

    tiers: tuple[TierGlance, ...]
    miss_token_total: int
    written_byte_total: int
    read_byte_total: int
    write_queue_bytes: int
    write_queue_limit_bytes: int
    dropped_block_total: int
    damaged_block_total: int
    writes_off_detail: str


@dataclasses.dataclass(frozen=True, slots=True)
class SlowGlance:
    """One of the slowest recent requests. A stage that it did not come to is None."""

    request_id: str
    code: str
    age_s: float
    total_s: float
    queue_s: float
    restore_s: float
    prefill_s: float | None
    decode_s: float | None
    prompt_token_count: int
    cached_token_count: int
    output_token_count: int


@dataclasses.dataclass(frozen=True, slots=True)
class Glance:
    """One answer. `engine` is None for a tenant, `cache` also on a server without a prefix cache."""

    collect_time: float
    """Seconds since the epoch, by the server's clock."""
    engine: EngineGlance | None
    cache: CacheGlance | None
    slowest: tuple[SlowGlance, ...]


class StatsWatch:
    """One channel to one server."""

    def __init__(self, address: str, access: Access) -> None:
        self.address = address
        self._metadata = (("authorization", f"Bearer {access.token}"),) if access.token else ()
        self._channel = (
            grpc.insecure_channel(address)
            if access.root_certificates is None
            else grpc.secure_channel(address, grpc.ssl_channel_credentials(access.root_certificates))
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._channel.close()

    def glances(self, *, interval_s: float, wait: bool) -> Generator[Glance, None, None]:
        """Yield counters at every interval until the server ends it. Raises CallFailed.

        With `wait` a server that is not there is waited for.
        """
        stub = cache_service_pb2_grpc.CacheServiceStub(self._channel)
        request = cache_service_pb2.WatchStatsRequest()
        request.interval.FromNanoseconds(round(interval_s * 1e9))
        try:
            answers = stub.WatchStats(request, metadata=self._metadata, wait_for_ready=wait)
            yield from (glance_of(answer.stats) for answer in answers)
        except grpc.RpcError as error:
            raise failure_of(error, self.address) from error


def glance_of(stats: inference_service_pb2.CacheStatsResponse) -> Glance:
    """Return what is shown of one answer."""
    return Glance(
        collect_time=stats.collect_time.ToNanoseconds() / 1e9,
        engine=_engine(stats) if stats.HasField("engine") else None,
        cache=_cache(stats) if stats.HasField("cache") else None,
        slowest=tuple(map(_slow, stats.slowest_requests)),
    )


def _engine(stats: inference_service_pb2.CacheStatsResponse) -> EngineGlance:
    engine = stats.engine
    return EngineGlance(
        uptime_s=_seconds(engine.uptime),
        waiting_count=engine.waiting_count,
        waiting_limit=engine.waiting_limit,
        loading_count=engine.loading_count,
        prefilling_count=engine.prefilling_count,
        decoding_count=engine.decoding_count,
        decoding_limit=engine.decoding_limit,
        finished_total=engine.finished_total,
        refused_total=engine.rejected_total + engine.failed_total,
        prefilled_token_total=engine.prefilled_token_total,
        cached_token_total=engine.cached_token_total,
        output_token_total=engine.output_token_total,
        decode_step_p50_s=_seconds(engine.decode_step_p50),
        decode_step_p99_s=_seconds(engine.decode_step_p99),
        active_memory_bytes=engine.active_memory_bytes,
        memory_limit_bytes=engine.memory_limit_bytes,
    )


def _cache(stats: inference_service_pb2.CacheStatsResponse) -> CacheGlance:
    cache, found = stats.cache, stats.cache.integrity
    tiers = [_tier("RAM", cache.ram, cache.lookups.ram_token_total)]
    if cache.HasField("ssd"):
        tiers.append(_tier("SSD", cache.ssd, cache.lookups.ssd_token_total))
    return CacheGlance(
        tiers=tuple(tiers),
        miss_token_total=cache.lookups.miss_token_total,
        written_byte_total=cache.spill.persisted_byte_total,
        read_byte_total=cache.promote.read_byte_total,
        write_queue_bytes=cache.spill.queue_bytes,
        write_queue_limit_bytes=cache.spill.queue_limit_bytes,
        dropped_block_total=sum(drop.block_total for drop in cache.spill.drops),
        damaged_block_total=found.checksum_failure_total
        + found.header_mismatch_total
        + found.missing_file_total
        + found.seal_failure_total,
        writes_off_detail=cache.disk.writes_off_detail,
    )


def _tier(name: str, tier: CacheTierStats, reused_token_total: int) -> TierGlance:
    return TierGlance(
        name=name,
        block_count=tier.block_count,
        size_bytes=tier.size_bytes,
        limit_bytes=tier.limit_bytes,
        evicted_block_total=tier.evicted_block_total,
        median_age_s=_seconds(tier.age.p50),
        reused_token_total=reused_token_total,
    )


def _slow(request: SlowRequest) -> SlowGlance:
    return SlowGlance(
        request_id=request.request_id,
        code=request.code,
        age_s=_seconds(request.age),
        total_s=_seconds(request.total_duration),
        queue_s=_seconds(request.queue_duration),
        restore_s=_seconds(request.restore_duration),
        prefill_s=_seconds(request.prefill_duration) if request.HasField("prefill_duration") else None,
        decode_s=_seconds(request.decode_duration) if request.HasField("decode_duration") else None,
        prompt_token_count=request.prompt_tokens,
        cached_token_count=request.cached_tokens,
        output_token_count=request.output_tokens,
    )


def _seconds(duration: Duration) -> float:
    return duration.ToNanoseconds() / 1e9
