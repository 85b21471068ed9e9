"""Counters and answers of the cache to response messages. Pure functions.

Slow requests to their message. Pure functions.

Each tenant's numbers, from the edge's accounts and the cache's, to one message. Pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence

from icehouse.v1 import (
    cache_service_pb2,
    cache_stats_pb2,
    engine_stats_pb2,
    inference_service_pb2,
    slow_request_pb2,
    tenant_stats_pb2,
)

from icehouse_server.domain.cache_commands import BlockMatch, EvictReport, Explanation, Tier, VerifyReport
from icehouse_server.domain.cache_stats import (
    AgePercentiles,
    CacheStats,
    DiskStats,
    IntegrityStats,
    LookupStats,
    PromoteStats,
    ReconcileSummary,
    SpillDropCause,
    SpillStats,
    TenantShare,
    TierStats,
)
from icehouse_server.domain.stats import EngineStats
from icehouse_server.rpc.access.tenants import Account, Tenants
from icehouse_server.rpc.calls.slow_requests import SlowRequest
from icehouse_server.rpc.messages.responses import (
    REUSE_LIMITS,
    cache_report_proto,
    duration_proto,
    timestamp_proto,
)

DAMAGED_HASH_LIMIT = 1000
"""Most names in one VerifyResponse."""

_TIERS = {Tier.RAM: cache_service_pb2.CACHE_TIER_RAM, Tier.SSD: cache_service_pb2.CACHE_TIER_SSD}

_DROP_CAUSES = {
    SpillDropCause.NO_CREDIT: cache_stats_pb2.SPILL_DROP_CAUSE_NO_CREDIT,
    SpillDropCause.DAILY_BUDGET: cache_stats_pb2.SPILL_DROP_CAUSE_DAILY_BUDGET,
    SpillDropCause.DISK_FULL: cache_stats_pb2.SPILL_DROP_CAUSE_DISK_FULL,
    SpillDropCause.WRITE_FAILED: cache_stats_pb2.SPILL_DROP_CAUSE_WRITE_FAILED,
    SpillDropCause.WRITES_OFF: cache_stats_pb2.SPILL_DROP_CAUSE_WRITES_OFF,
    SpillDropCause.PREFIX_SHORT: cache_stats_pb2.SPILL_DROP_CAUSE_PREFIX_SHORT,
    SpillDropCause.DUPLICATE: cache_stats_pb2.SPILL_DROP_CAUSE_DUPLICATE,
    SpillDropCause.SHUTDOWN: cache_stats_pb2.SPILL_DROP_CAUSE_SHUTDOWN,
    SpillDropCause.TENANT_SHARE: cache_stats_pb2.SPILL_DROP_CAUSE_TENANT_SHARE,
}


def stats_response(
    engine: EngineStats,
    cache: CacheStats | None,
    *,
    collect_time: float,
    slowest: Sequence[SlowRequest] = (),
) -> inference_service_pb2.CacheStatsResponse:
    """Return all counters; `collect_time` is `Clock.wall`."""
    return inference_service_pb2.CacheStatsResponse(
        collect_time=timestamp_proto(collect_time),
        engine=engine_stats_proto(engine),
        cache=None if cache is None else cache_stats_proto(cache),
        slowest_requests=[slow_request_proto(slow) for slow in slowest],
    )


def engine_stats_proto(stats: EngineStats) -> engine_stats_pb2.EngineStats:
    """Return the engine's counters."""
    return engine_stats_pb2.EngineStats(
        uptime=duration_proto(stats.uptime_s),
        mailbox_count=stats.mailbox_count,
        mailbox_limit=stats.mailbox_limit,
        waiting_count=stats.waiting_count,
        waiting_limit=stats.waiting_limit,
        loading_count=stats.loading_count,
        prefilling_count=stats.prefilling_count,
        decoding_count=stats.decoding_count,
        decoding_limit=stats.decoding_limit,
        step_total=stats.step_total,
        decode_step_p50=duration_proto(stats.decode_step_p50_s),
        decode_step_p99=duration_proto(stats.decode_step_p99_s),
        prefill_tokens_per_second=stats.prefill_tokens_per_s,
        accepted_total=stats.accepted_total,
        rejected_total=stats.rejected_total,
        finished_total=stats.finished_total,
        cancelled_total=stats.cancelled_total,
        parked_total=stats.parked_total,
        failed_total=stats.failed_total,
        prompt_token_total=stats.prompt_token_total,
        cached_token_total=stats.cached_token_total,
        prefilled_token_total=stats.prefilled_token_total,
        output_token_total=stats.output_token_total,
        active_memory_bytes=stats.active_memory_bytes,
        peak_memory_bytes=stats.peak_memory_bytes,
        memory_limit_bytes=stats.memory_limit_bytes,
    )


def cache_stats_proto(stats: CacheStats) -> cache_stats_pb2.CacheStats:
    """Return the cache's counters; what is None stays absent."""
    return cache_stats_pb2.CacheStats(
        block_tokens=stats.block_token_limit,
        unsupported_detail=stats.unsupported_detail,
        ram=_tier(stats.ram),
        ssd=None if stats.ssd is None else _tier(stats.ssd),
        lookups=_lookups(stats.lookups),
        spill=_spill(stats.spill),
        promote=_promote(stats.promote),
        integrity=_integrity(stats.integrity),
        disk=None if stats.disk is None else _disk(stats.disk),
        last_reconcile=None if stats.last_reconcile is None else _reconcile(stats.last_reconcile),
    )


def explain_response(
    explanation: Explanation, *, prompt_token_count: int
) -> cache_service_pb2.ExplainResponse:
    """Return what would be reused."""
    warm_s, cold_s = explanation.predicted_ttft_s, explanation.predicted_cold_ttft_s
    return cache_service_pb2.ExplainResponse(
        prompt_tokens=prompt_token_count,
        cache=cache_report_proto(explanation.cache),
        blocks=[_block_match(block) for block in explanation.blocks],
        predicted_time_to_first_token=None if warm_s is None else duration_proto(warm_s),
        predicted_time_to_first_token_cold=None if cold_s is None else duration_proto(cold_s),
    )


def evict_response(report: EvictReport) -> cache_service_pb2.EvictResponse:
    """Return what was removed."""
    return cache_service_pb2.EvictResponse(
        ram_block_count=report.ram_block_count,
        ram_bytes=report.ram_bytes,
        ssd_block_count=report.ssd_block_count,
        ssd_bytes=report.ssd_bytes,
    )


def verify_response(report: VerifyReport) -> cache_service_pb2.VerifyResponse:
    """Return what a check found; the list of names is cut, their number is not."""
    return cache_service_pb2.VerifyResponse(
        verified_block_count=report.verified_block_count,
        verified_bytes=report.verified_bytes,
        damaged_hashes=[name.hex() for name in report.damaged_hashes[:DAMAGED_HASH_LIMIT]],
        damaged_block_count=len(report.damaged_hashes),
        duration=duration_proto(report.duration_s),
    )


def _block_match(block: BlockMatch) -> cache_service_pb2.BlockMatch:
    return cache_service_pb2.BlockMatch(
        hash=block.hash.hex(),
        start_token=block.start_token_index,
        token_count=block.token_count,
        size_bytes=block.size_bytes,
        tier=_TIERS[block.tier],
        has_checkpoint=block.has_checkpoint,
        pinned=block.pinned,
    )


def _tier(stats: TierStats) -> cache_stats_pb2.CacheTierStats:
    return cache_stats_pb2.CacheTierStats(
        block_count=stats.block_count,
        tail_count=stats.tail_count,
        pinned_block_count=stats.pinned_block_count,
        token_count=stats.token_count,
        size_bytes=stats.size_bytes,
        limit_bytes=stats.limit_bytes,
        evicted_block_total=stats.evicted_block_total,
        evicted_byte_total=stats.evicted_byte_total,
        purged_block_total=stats.purged_block_total,
        age=_age(stats.age),
    )


def _age(age: AgePercentiles) -> cache_stats_pb2.AgePercentiles:
    return cache_stats_pb2.AgePercentiles(
        p50=duration_proto(age.p50_s), p90=duration_proto(age.p90_s), p99=duration_proto(age.p99_s)
    )


def _lookups(stats: LookupStats) -> cache_stats_pb2.CacheLookupStats:
    misses = [
        cache_stats_pb2.CacheMissTokens(reason=REUSE_LIMITS[miss.reason], token_total=miss.token_total)
        for miss in stats.miss_tokens
        if miss.token_total
    ]
    return cache_stats_pb2.CacheLookupStats(
        lookup_total=stats.lookup_total,
        hit_total=stats.hit_total,
        ram_token_total=stats.ram_token_total,
        ssd_token_total=stats.ssd_token_total,
        miss_token_total=stats.miss_token_total,
        miss_tokens=misses,
    )


def _spill(stats: SpillStats) -> cache_stats_pb2.CacheSpillStats:
    drops = [
        cache_stats_pb2.SpillDrops(cause=_DROP_CAUSES[drop.cause], block_total=drop.block_total)
        for drop in stats.drops
        if drop.block_total
    ]
    return cache_stats_pb2.CacheSpillStats(
        policy=stats.policy,
        accepted_block_total=stats.accepted_block_total,
        persisted_block_total=stats.persisted_block_total,
        persisted_byte_total=stats.persisted_byte_total,
        drops=drops,
        queue_count=stats.queue_count,
        queue_bytes=stats.queue_bytes,
        queue_limit_bytes=stats.queue_limit_bytes,
        written_today_bytes=stats.written_today_bytes,
        daily_limit_bytes=stats.daily_limit_bytes,
        write_bytes_per_second=stats.write_bytes_per_s,
    )


def _promote(stats: PromoteStats) -> cache_stats_pb2.CachePromoteStats:
    return cache_stats_pb2.CachePromoteStats(
        load_total=stats.load_total,
        failed_load_total=stats.failed_load_total,
        promoted_block_total=stats.promoted_block_total,
        promoted_token_total=stats.promoted_token_total,
        read_byte_total=stats.read_byte_total,
        queue_count=stats.queue_count,
        queue_limit=stats.queue_limit,
        read_bytes_per_second=stats.read_bytes_per_s,
        restore_tokens_per_second=stats.restore_tokens_per_s,
        recompute_tokens_per_second=stats.recompute_tokens_per_s,
        recompute_chosen_total=stats.recompute_chosen_total,
    )


def _integrity(stats: IntegrityStats) -> cache_stats_pb2.CacheIntegrityStats:
    return cache_stats_pb2.CacheIntegrityStats(
        verified_block_total=stats.verified_block_total,
        checksum_failure_total=stats.checksum_failure_total,
        header_mismatch_total=stats.header_mismatch_total,
        missing_file_total=stats.missing_file_total,
        quarantined_file_count=stats.quarantined_file_count,
        quarantined_bytes=stats.quarantined_bytes,
        seal_failure_total=stats.seal_failure_total,
    )


def _disk(stats: DiskStats) -> cache_stats_pb2.CacheDiskStats:
    return cache_stats_pb2.CacheDiskStats(
        used_bytes=stats.used_bytes,
        manifest_bytes=stats.manifest_bytes,
        limit_bytes=stats.limit_bytes,
        free_bytes=stats.free_bytes,
        free_floor_bytes=stats.free_floor_bytes,
        other_model_block_count=stats.other_model_block_count,
        writes_off_detail=stats.writes_off_detail,
        encrypted=stats.is_encrypted,
    )


def _reconcile(summary: ReconcileSummary) -> cache_stats_pb2.CacheReconcileReport:
    return cache_stats_pb2.CacheReconcileReport(
        reconcile_time=timestamp_proto(summary.reconcile_time),
        duration=duration_proto(summary.duration_s),
        clean=summary.clean,
        manifest_rebuilt=summary.manifest_rebuilt,
        file_count=summary.file_count,
        row_count=summary.row_count,
        partial_deleted_count=summary.partial_deleted_count,
        adopted_count=summary.adopted_count,
        quarantined_count=summary.quarantined_count,
        row_deleted_count=summary.row_deleted_count,
        other_layout_deleted_count=summary.other_layout_deleted_count,
        unknown_file_count=summary.unknown_file_count,
    )


def slow_request_proto(slow: SlowRequest) -> slow_request_pb2.SlowRequest:
    """Return one slow request; what it never came to is absent."""
    record, started, usage = slow.record, slow.record.started, slow.record.usage
    message = slow_request_pb2.SlowRequest(
        request_id=record.request_id,
        method=record.method,
        code=record.code,
        age=duration_proto(slow.age_s),
        total_duration=duration_proto(record.duration_s),
        prompt_tokens=record.prompt_token_count,
    )
    if started is not None:
        message.queue_duration.CopyFrom(duration_proto(started.queue_s))
        message.restore_duration.CopyFrom(duration_proto(started.cache.restore_s))
        message.cached_tokens = started.cache.cached_token_count
    if usage is not None:
        message.prefill_duration.CopyFrom(duration_proto(usage.prefill_s))
        message.decode_duration.CopyFrom(duration_proto(usage.decode_s))
        message.output_tokens = usage.output_token_count
    return message


def tenant_stats_protos(tenants: Tenants, cache: CacheStats | None) -> Sequence[tenant_stats_pb2.TenantStats]:
    """Return one message for each account."""
    shares = {} if cache is None else {share.tenant: share for share in cache.tenants}
    messages = []
    for account in tenants:
        message = _account_proto(account)
        message.waiting_limit = tenants.limits.waiting_limit
        message.running_limit = tenants.running_limit
        message.ram_limit_bytes = tenants.limits.ram_bytes
        message.ssd_limit_bytes = tenants.limits.ssd_bytes
        share = shares.get(account.tenant, TenantShare(account.tenant))
        message.ram_bytes = share.ram_bytes
        message.ssd_bytes = share.ssd_bytes
        messages.append(message)
    return messages


def _account_proto(account: Account) -> tenant_stats_pb2.TenantStats:
    return tenant_stats_pb2.TenantStats(
        tenant=account.tenant,
        waiting_count=account.waiting_count,
        running_count=account.running_count,
        accepted_total=account.accepted_total,
        refused_total=account.refused_total,
        prompt_token_total=account.prompt_token_total,
        cached_token_total=account.cached_token_total,
        output_token_total=account.output_token_total,
        tokens_per_minute=0 if account.budget is None else account.budget.limit,
        tokens_left=0 if account.budget is None else account.budget.level,
    )
