"""Counters of engine, tenants and group, the slowest requests, and a snapshot of all of them.

As in `cache_stats`, the thread that owns an event counts it in place and gives out copies.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping

from icehouse_server.domain.cache_commands import RecentBlock
from icehouse_server.domain.cache_stats import CacheStats
from icehouse_server.domain.ids import Tenant
from icehouse_server.domain.model import EngineState, ModelInfo


@dataclasses.dataclass(slots=True)
class EngineStats:
    """The engine's own counters. `*_count` and bytes are current, `*_total` since start, times in seconds."""

    uptime_s: float = 0.0
    mailbox_count: int = 0
    mailbox_limit: int = 0
    waiting_count: int = 0
    waiting_limit: int = 0
    loading_count: int = 0
    prefilling_count: int = 0
    decoding_count: int = 0
    decoding_limit: int = 0
    step_total: int = 0
    decode_step_p50_s: float = 0.0
    decode_step_p99_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    accepted_total: int = 0
    rejected_total: int = 0
    finished_total: int = 0
    cancelled_total: int = 0
    failed_total: int = 0
    prompt_token_total: int = 0
    cached_token_total: int = 0
    prefilled_token_total: int = 0
    output_token_total: int = 0
    active_memory_bytes: int = 0
    peak_memory_bytes: int = 0
    memory_limit_bytes: int = 0
    parked_total: int = 0
    """How often a sequence was parked because memory was short."""
    kv_used_bytes: int = 0
    """KV of running sequences, including reserved space; without the prefix cache."""
    kv_limit_bytes: int = 0
    """Most bytes of KV besides the model; 0 is unlimited."""
    drafted_token_total: int = 0
    accepted_draft_token_total: int = 0
    encoded_image_total: int = 0
    """Images encoded by the vision tower."""
    reused_image_total: int = 0
    """Images whose vectors were still in memory."""
    image_encode_s: float = 0.0
    image_feature_bytes: int = 0
    image_feature_limit_bytes: int = 0
    pass_p50_s: float = 0.0
    pass_p99_s: float = 0.0

    @property
    def kv_usage_ratio(self) -> float:
        """`kv_used_bytes` divided by `kv_limit_bytes`; 0 without a limit."""
        return min(1.0, self.kv_used_bytes / self.kv_limit_bytes) if self.kv_limit_bytes > 0 else 0.0

    @property
    def running_count(self) -> int:
        """Requests that left the queue and have not ended."""
        return self.loading_count + self.prefilling_count + self.decoding_count


@dataclasses.dataclass(frozen=True, slots=True)
class SampleRates:
    """Rates per second between the last two samples."""

    finished_per_s: float = 0.0
    failed_per_s: float = 0.0
    output_tokens_per_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class KvEventStats:
    """Counters of KV events for subscribers: `*_count` and bytes are current, `*_total` since start."""

    block_count: int = 0
    """Known blocks, including those that may not be reported yet."""
    replay_bytes: int = 0
    """Approximate size of the batches kept for subscribers that reconnect."""
    event_total: int = 0
    lost_total: int = 0
    """How often a subscriber needed a batch that was no longer stored."""
    untold_total: int = 0
    """Blocks not reported because of `kv_events.block_limit`."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReplyStats:
    """Earlier replies that are remembered for stable prompts."""

    reply_count: int = 0
    size_bytes: int = 0
    found_total: int = 0
    """Prompts in which an earlier reply was found."""


class RankState(enum.Enum):
    """The state of a rank."""

    MISSING = enum.auto()
    LOADING = enum.auto()
    """Also while it waits for the other ranks."""
    READY = enum.auto()
    GONE = enum.auto()
    """It ended or was lost, so the group ends too."""


@dataclasses.dataclass(frozen=True, slots=True)
class RankTierStats:
    """A rank's SSD tier, which holds its parts of the group's blocks."""

    block_count: int = 0
    size_bytes: int = 0
    limit_bytes: int = 0
    written_block_total: int = 0
    written_byte_total: int = 0
    dropped_block_total: int = 0
    """Blocks that should have been written but were not."""
    read_byte_total: int = 0
    evicted_block_total: int = 0
    damaged_block_total: int = 0

    @classmethod
    def of(cls, cache: CacheStats) -> RankTierStats | None:
        """Return the counters of a cache's SSD tier; None if it has none."""
        if cache.ssd is None:
            return None
        return cls(
            block_count=cache.ssd.block_count,
            size_bytes=cache.ssd.size_bytes,
            limit_bytes=cache.ssd.limit_bytes,
            written_block_total=cache.spill.persisted_block_total,
            written_byte_total=cache.spill.persisted_byte_total,
            dropped_block_total=sum(drop.block_total for drop in cache.spill.drops),
            read_byte_total=cache.promote.read_byte_total,
            evicted_block_total=cache.ssd.evicted_block_total,
            damaged_block_total=cache.integrity.damaged_block_total,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class RankStats:
    """One machine of a group. Its own numbers are 0 until its first report."""

    rank: int
    host: str
    state: RankState
    report_age_s: float | None = None
    """None before the first report, and on rank 0."""
    order_total: int = 0
    """Orders that it carried out; on rank 0, orders that it gave."""
    behind_order_count: int = 0
    """Orders that it had been given but not carried out when it reported."""
    active_memory_bytes: int = 0
    memory_limit_bytes: int = 0
    ssd: RankTierStats | None = None
    ssd_trouble: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class GroupStats:
    """The machines that serve one model together."""

    rank_count: int
    ranks: tuple[RankStats, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class StatsSnapshot:
    """One sample. `engine` and `cache` are the engine's latest ones, None before the first."""

    state: EngineState
    heartbeat_age_s: float
    """Time since the inference loop last turned; grows while a step is stuck."""
    sample_time: float
    """`Clock.monotonic` of the engine's last answer."""
    model: ModelInfo | None = None
    engine: EngineStats | None = None
    cache: CacheStats | None = None
    rates: SampleRates = SampleRates()
    tenants: tuple[TenantUse, ...] = ()
    """As `rpc` counts them, in the order of their latest requests."""
    kv_events: KvEventStats = KvEventStats()
    replies: ReplyStats = ReplyStats()
    group: GroupStats | None = None
    """None if one machine serves alone."""
    models: Mapping[str, StatsSnapshot] | None = None
    """The loaded models by name, None if there can only be one. The other fields are the default model's."""


@dataclasses.dataclass(slots=True)
class TenantUse:
    """One tenant's numbers: `*_count` are current, `*_total` since its first request."""

    tenant: Tenant
    waiting_count: int = 0
    running_count: int = 0
    accepted_total: int = 0
    refused_total: int = 0
    prompt_token_total: int = 0
    cached_token_total: int = 0
    output_token_total: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class SlowRequest:
    """One of the slowest recent requests. A stage that it did not reach is None."""

    request_id: str
    method: str
    code: str
    """Canonical gRPC status code."""
    age_s: float
    """Time since it ended."""
    total_duration_s: float
    queue_duration_s: float
    restore_duration_s: float
    prefill_duration_s: float | None
    decode_duration_s: float | None
    prompt_token_count: int
    cached_token_count: int
    output_token_count: int


@dataclasses.dataclass(frozen=True, slots=True)
class ServerStats:
    """What a caller may see. `engine` is None for a tenant, `cache` also without a prefix cache."""

    collect_time: float
    """`Clock.wall`."""
    engine: EngineStats | None = None
    cache: CacheStats | None = None
    slowest_requests: tuple[SlowRequest, ...] = ()
    models: tuple[ModelStats, ...] = ()
    """Counters of each loaded model, if the server may have several."""
    group: GroupStats | None = None
    """None if one machine serves alone, and for a tenant."""


@dataclasses.dataclass(frozen=True, slots=True)
class ModelStats:
    """The counters of one model among several."""

    model: str
    engine: EngineStats
    cache: CacheStats | None


@dataclasses.dataclass(frozen=True, slots=True)
class ServerStatus:
    """The data that the status page shows."""

    collect_time: float
    """`Clock.wall`."""
    snapshot: StatsSnapshot
    slowest_requests: tuple[SlowRequest, ...] = ()
    recent_blocks: tuple[RecentBlock, ...] | None = None
    """Blocks of all tenants; None if the engine did not answer or has no prefix cache."""
