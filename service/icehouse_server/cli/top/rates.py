"""Rates: what happened per second between two looks at a server."""

from __future__ import annotations

import dataclasses

from icehouse_server.domain.cache_stats import CacheStats
from icehouse_server.domain.stats import EngineStats, ServerStats


@dataclasses.dataclass(frozen=True, slots=True)
class Rates:
    """Per second. `hit_ratio` is of prompt tokens, None when no prompt was looked up meanwhile."""

    finished_per_s: float = 0.0
    refused_per_s: float = 0.0
    output_tokens_per_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    reused_tokens_per_s: float = 0.0
    written_bytes_per_s: float = 0.0
    read_bytes_per_s: float = 0.0
    hit_ratio: float | None = None


def rates_between(earlier: ServerStats | None, later: ServerStats) -> Rates:
    """Return the rates from `earlier` to `later`; since the engine's start where there is no earlier one.

    A server that was restarted in between has smaller totals: its rates are since its start too.
    """
    if later.engine is None:
        return Rates()
    if earlier is None or earlier.engine is None or earlier.engine.uptime_s > later.engine.uptime_s:
        return _rates(EngineStats(), None, later.engine, later.cache, later.engine.uptime_s)
    elapsed_s = later.collect_time - earlier.collect_time
    return _rates(earlier.engine, earlier.cache, later.engine, later.cache, elapsed_s)


def _rates(
    engine: EngineStats,
    cache: CacheStats | None,
    engine_now: EngineStats,
    cache_now: CacheStats | None,
    elapsed_s: float,
) -> Rates:
    cache_now = cache_now or CacheStats()
    cache = cache or CacheStats()

    def per_s(before: int, now: int) -> float:
        return (now - before) / elapsed_s if elapsed_s > 0 else 0.0

    return Rates(
        finished_per_s=per_s(engine.finished_total, engine_now.finished_total),
        refused_per_s=per_s(_refused(engine), _refused(engine_now)),
        output_tokens_per_s=per_s(engine.output_token_total, engine_now.output_token_total),
        prefill_tokens_per_s=per_s(engine.prefilled_token_total, engine_now.prefilled_token_total),
        reused_tokens_per_s=per_s(engine.cached_token_total, engine_now.cached_token_total),
        written_bytes_per_s=per_s(cache.spill.persisted_byte_total, cache_now.spill.persisted_byte_total),
        read_bytes_per_s=per_s(cache.promote.read_byte_total, cache_now.promote.read_byte_total),
        hit_ratio=_hit_ratio(cache, cache_now),
    )


def _refused(engine: EngineStats) -> int:
    return engine.rejected_total + engine.failed_total


def _hit_ratio(earlier: CacheStats, later: CacheStats) -> float | None:
    reused = _reused(later) - _reused(earlier)
    missed = later.lookups.miss_token_total - earlier.lookups.miss_token_total
    return reused / (reused + missed) if reused + missed > 0 else None


def _reused(cache: CacheStats) -> int:
    return cache.lookups.ram_token_total + cache.lookups.ssd_token_total
