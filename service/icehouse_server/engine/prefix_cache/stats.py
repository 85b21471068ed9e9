"""CacheStats: what the storage thread knows, completed with what the inference thread counts."""

from __future__ import annotations

import dataclasses

from icehouse_server.domain.cache_stats import (
    CacheStats,
    DiskStats,
    MissTokens,
    PromoteStats,
    SpillDrops,
    SpillStats,
)
from icehouse_server.engine.prefix_cache.planner import Rates
from icehouse_server.engine.prefix_cache.tiers.counters import PrefixCounters
from icehouse_server.engine.prefix_cache.tiers.ports import CacheFacts
from icehouse_server.engine.prefix_cache.tiers.ram_tier import RamTier
from icehouse_server.engine.prefix_cache.tiers.settings import PrefixSettings
from icehouse_server.engine.prefix_cache.tiers.tenant_quota import TenantQuotas


@dataclasses.dataclass(frozen=True, slots=True)
class CountedParts:
    """The parts of a prefix cache that its statistics are read from."""

    settings: PrefixSettings
    facts: CacheFacts
    ram: RamTier
    quotas: TenantQuotas
    counters: PrefixCounters
    rates: Rates


def cache_stats(
    cache: CountedParts, storage: CacheStats | None, *, now: float, hang_detail: str = ""
) -> CacheStats:
    """Return all counters; `storage` is None when there is no SSD tier or it did not answer."""
    known = storage or CacheStats()
    if hang_detail:
        disk = dataclasses.replace(known.disk or DiskStats(), hang_detail=hang_detail)
        known = dataclasses.replace(known, disk=disk)
    return dataclasses.replace(
        known,
        block_token_limit=cache.settings.block_token_count,
        unsupported_detail=cache.facts.unsupported_detail,
        ram=cache.ram.snapshot(now=now),
        lookups=dataclasses.replace(
            cache.counters.lookups, miss_tokens=MissTokens.of(cache.counters.miss_token_totals)
        ),
        spill=_spill(cache, known.spill),
        promote=_promote(cache, known.promote),
        tenants=cache.quotas.snapshot(),
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
