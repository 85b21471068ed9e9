"""Counters of the engine, of each tenant and of the slowest requests, and all of them at one moment.

As in `cache_stats`: counted in place by the thread that owns them, shown as copies.
"""

from __future__ import annotations

import dataclasses

from icehouse_server.domain.cache_commands import RecentBlock
from icehouse_server.domain.cache_stats import CacheStats
from icehouse_server.domain.ids import Tenant
from icehouse_server.domain.model import EngineState, ModelInfo


@dataclasses.dataclass(slots=True)
class EngineStats:
    """The engine's own counters. `*_count` are now, `*_total` since start; bytes and seconds."""

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
    """Times a sequence gave way to memory pressure and went on later."""
    kv_used_bytes: int = 0
    """What the KV of running sequences takes, with the room it has to grow into; the cache's is not in it."""
    kv_limit_bytes: int = 0
    """What KV may take beside the model; 0 without a limit."""
    drafted_token_total: int = 0
    accepted_draft_token_total: int = 0
    encoded_image_total: int = 0
    """Images that the vision tower made vectors of."""
    reused_image_total: int = 0
    """Images whose vectors were still there when a prompt needed them."""
    image_encode_s: float = 0.0
    image_feature_bytes: int = 0
    image_feature_limit_bytes: int = 0
    pass_p50_s: float = 0.0
    pass_p99_s: float = 0.0

    @property
    def kv_usage_ratio(self) -> float:
        """Of what KV may take, what it takes; 0 without a limit."""
        return min(1.0, self.kv_used_bytes / self.kv_limit_bytes) if self.kv_limit_bytes > 0 else 0.0

    @property
    def running_count(self) -> int:
        """Requests that were let in and have not ended."""
        return self.loading_count + self.prefilling_count + self.decoding_count


@dataclasses.dataclass(frozen=True, slots=True)
class SampleRates:
    """Per second, between the last two samples."""

    finished_per_s: float = 0.0
    failed_per_s: float = 0.0
    output_tokens_per_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class KvEventStats:
    """What subscribers of KV events are told: `*_count` and bytes are now, `*_total` since start."""

    block_count: int = 0
    """Known of, whether or not they may be told yet."""
    replay_bytes: int = 0
    """About what the batches take that are kept for those who come back."""
    event_total: int = 0
    lost_total: int = 0
    """Times a subscriber fell behind what is kept."""
    untold_total: int = 0
    """Blocks that found no room within `kv_events.block_limit`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """One sample. `engine` and `cache` are the last that the engine told, None before the first."""

    state: EngineState
    heartbeat_age_s: float
    """Since the inference loop last turned; grows when it is stuck."""
    sample_time: float
    """`Clock.monotonic` of the engine's last answer."""
    model: ModelInfo | None = None
    engine: EngineStats | None = None
    cache: CacheStats | None = None
    rates: SampleRates = SampleRates()
    tenants: tuple[TenantUse, ...] = ()
    """As the edge counts them, in the order of their latest requests."""
    kv_events: KvEventStats = KvEventStats()


@dataclasses.dataclass(slots=True)
class TenantUse:
    """One tenant's numbers: `*_count` are now, `*_total` since it was first heard of."""

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
    """One of the slowest recent requests. A stage that it did not come to is None."""

    request_id: str
    method: str
    code: str
    """Canonical gRPC status code."""
    age_s: float
    """Since it ended."""
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
    """What a server shows a caller. `engine` is None for a tenant, `cache` also without a prefix cache."""

    collect_time: float
    """`Clock.wall`."""
    engine: EngineStats | None = None
    cache: CacheStats | None = None
    slowest_requests: tuple[SlowRequest, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class ServerStatus:
    """What the status page is made of."""

    collect_time: float
    """`Clock.wall`."""
    snapshot: Snapshot
    slowest_requests: tuple[SlowRequest, ...] = ()
    recent_blocks: tuple[RecentBlock, ...] | None = None
    """Of every tenant; None when the engine did not tell, or keeps no prefixes."""
