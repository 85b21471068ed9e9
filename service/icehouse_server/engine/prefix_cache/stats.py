"""CacheStats: what the storage thread knows, completed with what the inference thread counts."""

from __future__ import annotations

import dataclasses

from icehouse_server.averages import Recount
from icehouse_server.domain.cache_stats import (
    AgePercentiles,
    CacheStats,
    MissTokens,
    PromoteStats,
    SpillDrops,
    SpillStats,
    TierStats,
)
from icehouse_server.engine.prefix_cache.planner import Rates
from icehouse_server.engine.prefix_cache.tiers.counters import PrefixCounters
from icehouse_server.engine.prefix_cache.tiers.ports import CacheFacts
from icehouse_server.engine.prefix_cache.tiers.ram_tier import RamTier
from icehouse_server.engine.prefix_cache.tiers.settings import PrefixSettings
from icehouse_server.engine.prefix_cache.tiers.tenant_quota import TenantQuotas


@dataclasses.dataclass(frozen=True, slots=True)
class RamCounts:
    """What is told of all blocks in RAM together."""

    block_count: int
    tail_count: int
    pinned_block_count: int
    token_count: int
    age: AgePercentiles


@dataclasses.dataclass(frozen=True, slots=True)
class CountedParts:
    """The parts of a prefix cache that its statistics are read from."""

    settings: PrefixSettings
    facts: CacheFacts
    ram: RamTier
    quotas: TenantQuotas
    counters: PrefixCounters
    rates: Rates
    recount: Recount[RamCounts]


def cache_stats(cache: CountedParts, storage: CacheStats | None, *, now: float) -> CacheStats:
    """Return all counters; `storage` is None when there is no SSD tier or it did not answer."""
    known = storage or CacheStats()
    return dataclasses.replace(
        known,
        block_token_limit=cache.settings.block_token_count,
        unsupported_detail=cache.facts.unsupported_detail,
        ram=_ram(cache, now),
        lookups=dataclasses.replace(
            cache.counters.lookups, miss_tokens=MissTokens.of(cache.counters.miss_token_totals)
        ),
        spill=_spill(cache, known.spill),
        promote=_promote(cache, known.promote),
        tenants=cache.quotas.snapshot(),
    )


def _ram(cache: CountedParts, now: float) -> TierStats:
    counts = cache.recount.value(
        lambda: _counts(cache, now), of=cache.ram, item_count=len(cache.ram), now=now
    )
    return dataclasses.replace(
        cache.ram.stats,
        block_count=counts.block_count,
        tail_count=counts.tail_count,
        pinned_block_count=counts.pinned_block_count,
        token_count=counts.token_count,
        size_bytes=cache.ram.used_bytes,
        limit_bytes=cache.ram.limit_bytes,
        age=counts.age,
    )


def _counts(cache: CountedParts, now: float) -> RamCounts:
    entries = list(cache.ram)
    limit = cache.settings.block_token_count
    return RamCounts(
        block_count=len(entries),
        tail_count=sum(entry.token_count < limit for entry in entries),
        pinned_block_count=sum(entry.is_pinned for entry in entries),
        token_count=sum(entry.token_count for entry in entries),
        age=AgePercentiles.of(now - entry.last_used_time for entry in entries),
    )


def _spill(cache: CountedParts, theirs: SpillStats) -> SpillStats:
    drops = cache.counters.drop_totals.copy()
    drops.update({drop.cause: drop.block_total for drop in theirs.drops})
    return dataclasses.replace(theirs, policy=cache.settings.spill_policy, drops=SpillDrops.of(drops))


def _promote(cache: CountedParts, theirs: PromoteStats) -> PromoteStats:
    """A load is asked for and taken into use here, and read there: each number is one thread's, 0 with
    the other."""
    ours = dataclasses.replace(
        cache.counters.promote,
        read_bytes_per_s=cache.rates.read_bytes_per_s,
        restore_tokens_per_s=cache.rates.adopt_tokens_per_s,
        recompute_tokens_per_s=cache.rates.prefill_tokens_per_s,
    )
    names = [field.name for field in dataclasses.fields(PromoteStats)]
    return PromoteStats(**{name: getattr(ours, name) + getattr(theirs, name) for name in names})
