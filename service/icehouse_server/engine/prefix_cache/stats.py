"""CacheStats, put together from the index, the RAM tier, the counters and the storage thread's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from icehouse_server.domain.blocks import Damage
from icehouse_server.domain.cache_stats import (
    AgePercentiles,
    CacheStats,
    DiskStats,
    IntegrityStats,
    LookupStats,
    MissTokens,
    PromoteStats,
    ReconcileSummary,
    SpillDropCause,
    SpillDrops,
    SpillStats,
    TierStats,
)
from icehouse_server.domain.events import ReuseLimit
from icehouse_server.engine.prefix_cache.planner import Rates
from icehouse_server.engine.prefix_cache.tiers.counters import PrefixCounters
from icehouse_server.engine.prefix_cache.tiers.ports import CacheFacts
from icehouse_server.engine.prefix_cache.tiers.ram_tier import RamTier
from icehouse_server.engine.prefix_cache.tiers.settings import PrefixSettings
from icehouse_server.engine.prefix_cache.tiers.tenant_quota import TenantQuotas
from icehouse_server.storage.messages import StorageStats

_OTHER_THAN_EXPECTED = (Damage.MISMATCH, Damage.HEADER, Damage.LAYOUT, Damage.OTHER_ABI)
_NOT_ALL_THERE = (Damage.MISSING, Damage.TRUNCATED, Damage.IO)


@dataclasses.dataclass(frozen=True, slots=True)
class CountedParts:
    """The parts of a prefix cache that its statistics are read from."""

    settings: PrefixSettings
    facts: CacheFacts
    ram: RamTier
    quotas: TenantQuotas
    counters: PrefixCounters
    rates: Rates


def cache_stats(cache: CountedParts, storage: StorageStats | None, *, now: float) -> CacheStats:
    """Return all counters; `storage` is None when there is no SSD tier or it did not answer."""
    counters = cache.counters
    return CacheStats(
        block_token_limit=cache.settings.block_token_count,
        unsupported_detail=cache.facts.unsupported_detail,
        ram=_ram(cache, now),
        ssd=_ssd(storage) if storage is not None else None,
        lookups=LookupStats(
            lookup_total=counters.lookup_total,
            hit_total=counters.hit_total,
            ram_token_total=counters.ram_token_total,
            ssd_token_total=counters.ssd_token_total,
            miss_tokens=tuple(
                MissTokens(reason, counters.miss_token_totals[reason])
                for reason in ReuseLimit
                if counters.miss_token_totals[reason]
            ),
        ),
        spill=_spill(cache, storage),
        promote=_promote(cache, storage),
        integrity=_integrity(storage),
        disk=_disk(storage) if storage is not None else None,
        last_reconcile=_reconcile(storage) if storage is not None else None,
        tenants=cache.quotas.snapshot(),
    )


def _ram(cache: CountedParts, now: float) -> TierStats:
    entries = list(cache.ram)
    limit = cache.settings.block_token_count
    return TierStats(
        block_count=len(entries),
        tail_count=sum(entry.token_count < limit for entry in entries),
        pinned_block_count=sum(entry.is_pinned for entry in entries),
        token_count=sum(entry.token_count for entry in entries),
        size_bytes=cache.ram.used_bytes,
        limit_bytes=cache.ram.limit_bytes,
        evicted_block_total=cache.ram.evicted_block_total,
        evicted_byte_total=cache.ram.evicted_byte_total,
        purged_block_total=cache.ram.purged_block_total,
        age=_percentiles([now - entry.last_used_time for entry in entries]),
    )


def _percentiles(ages_s: Sequence[float]) -> AgePercentiles:
    if not ages_s:
        return AgePercentiles()
    ordered = sorted(ages_s)
    p50, p90, p99 = (ordered[min(int(q * len(ordered)), len(ordered) - 1)] for q in (0.5, 0.9, 0.99))
    return AgePercentiles(p50, p90, p99)


def _ssd(storage: StorageStats) -> TierStats:
    ages = dict(storage.age_percentiles_s)
    return TierStats(
        block_count=storage.block_count,
        tail_count=storage.tail_count,
        pinned_block_count=storage.pinned_count,
        token_count=storage.token_count,
        size_bytes=storage.block_bytes,
        limit_bytes=storage.limit_bytes,
        evicted_block_total=storage.evicted_block_total,
        evicted_byte_total=storage.evicted_bytes_total,
        purged_block_total=storage.purged_block_total,
        age=AgePercentiles(ages.get(50, 0.0), ages.get(90, 0.0), ages.get(99, 0.0)),
    )


def _spill(cache: CountedParts, storage: StorageStats | None) -> SpillStats:
    drops = cache.counters.drop_totals.copy()
    if storage is None:
        return SpillStats(policy=cache.settings.spill_policy, drops=_drops(drops))
    drops.update(dict(storage.spill_dropped_totals))
    return SpillStats(
        policy=cache.settings.spill_policy,
        accepted_block_total=storage.spill_accepted_total,
        persisted_block_total=storage.spill_persisted_total,
        persisted_byte_total=storage.written_bytes_total,
        drops=_drops(drops),
        queue_count=storage.spill_queue_count,
        queue_bytes=storage.spill_queue_bytes,
        queue_limit_bytes=storage.spill_queue_limit_bytes,
        written_today_bytes=storage.written_today_bytes,
        daily_limit_bytes=storage.daily_write_limit_bytes,
        write_bytes_per_s=storage.write_bytes_per_s,
    )


def _drops(totals: dict[SpillDropCause, int]) -> tuple[SpillDrops, ...]:
    return tuple(SpillDrops(cause, totals[cause]) for cause in SpillDropCause if totals.get(cause))


def _promote(cache: CountedParts, storage: StorageStats | None) -> PromoteStats:
    counters, rates = cache.counters, cache.rates
    return PromoteStats(
        load_total=counters.load_total,
        failed_load_total=counters.load_failed_total,
        promoted_block_total=counters.promoted_block_total,
        promoted_token_total=counters.promoted_token_total,
        read_byte_total=storage.read_bytes_total if storage is not None else 0,
        queue_count=storage.load_queue_count if storage is not None else 0,
        queue_limit=storage.load_queue_limit if storage is not None else 0,
        read_bytes_per_s=rates.read_bytes_per_s,
        restore_tokens_per_s=rates.adopt_tokens_per_s,
        recompute_tokens_per_s=rates.prefill_tokens_per_s,
        recompute_chosen_total=counters.recompute_chosen_total,
    )


def _integrity(storage: StorageStats | None) -> IntegrityStats:
    if storage is None:
        return IntegrityStats()
    failures = dict(storage.load_failed_totals)
    return IntegrityStats(
        verified_block_total=storage.verified_block_total,
        checksum_failure_total=failures.get(Damage.CHECKSUM, 0),
        header_mismatch_total=sum(failures.get(damage, 0) for damage in _OTHER_THAN_EXPECTED),
        missing_file_total=sum(failures.get(damage, 0) for damage in _NOT_ALL_THERE),
        seal_failure_total=failures.get(Damage.AUTH_TAG, 0),
        quarantined_file_count=storage.quarantined_count,
        quarantined_bytes=storage.quarantined_bytes,
    )


def _disk(storage: StorageStats) -> DiskStats:
    return DiskStats(
        used_bytes=storage.used_bytes,
        manifest_bytes=storage.manifest_bytes,
        limit_bytes=storage.limit_bytes,
        free_bytes=storage.free_bytes,
        free_floor_bytes=storage.free_floor_bytes,
        other_model_block_count=storage.foreign_block_count,
        is_encrypted=storage.is_encrypted,
        writes_off_detail="" if storage.writes_enabled else storage.writes_detail,
    )


def _reconcile(storage: StorageStats) -> ReconcileSummary:
    report = storage.reconcile
    return ReconcileSummary(
        reconcile_time=report.time,
        duration_s=report.manifest_s + report.walk_s,
        clean=report.was_clean,
        manifest_rebuilt=report.manifest_rebuilt,
        file_count=report.file_count,
        row_count=report.row_count,
        partial_deleted_count=report.partials_deleted,
        adopted_count=report.adopted,
        quarantined_count=report.quarantined,
        row_deleted_count=report.rows_without_file,
        other_layout_deleted_count=report.other_abi_deleted,
        unknown_file_count=report.unknown_files,
    )
