"""Rates: what happened per second between two looks at a server."""

from __future__ import annotations

import dataclasses

from icehouse_server.rpc.client.watch_stats import CacheGlance, EngineGlance, Glance


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


def rates_between(earlier: Glance | None, later: Glance) -> Rates:
    """Return the rates from `earlier` to `later`; since the engine's start where there is no earlier one.

    A server that was restarted in between has smaller totals: its rates are since its start too.
    """
    if later.engine is None:
        return Rates()
    if earlier is None or earlier.engine is None or earlier.engine.uptime_s > later.engine.uptime_s:
        return _rates(None, None, later.engine, later.cache, later.engine.uptime_s)
    elapsed_s = later.collect_time - earlier.collect_time
    return _rates(earlier.engine, earlier.cache, later.engine, later.cache, elapsed_s)


def _rates(
    engine: EngineGlance | None,
    cache: CacheGlance | None,
    engine_now: EngineGlance,
    cache_now: CacheGlance | None,
    elapsed_s: float,
) -> Rates:
    def per_s(name: str) -> float:
        before = 0 if engine is None else getattr(engine, name)
        return float(getattr(engine_now, name) - before) / elapsed_s if elapsed_s > 0 else 0.0

    def bytes_per_s(name: str) -> float:
        if cache_now is None or elapsed_s <= 0:
            return 0.0
        before = 0 if cache is None else getattr(cache, name)
        return float(getattr(cache_now, name) - before) / elapsed_s

    return Rates(
        finished_per_s=per_s("finished_total"),
        refused_per_s=per_s("refused_total"),
        output_tokens_per_s=per_s("output_token_total"),
        prefill_tokens_per_s=per_s("prefilled_token_total"),
        reused_tokens_per_s=per_s("cached_token_total"),
        written_bytes_per_s=bytes_per_s("written_byte_total"),
        read_bytes_per_s=bytes_per_s("read_byte_total"),
        hit_ratio=_hit_ratio(cache, cache_now),
    )


def _hit_ratio(earlier: CacheGlance | None, later: CacheGlance | None) -> float | None:
    if later is None:
        return None
    reused = _reused(later) - (_reused(earlier) if earlier is not None else 0)
    missed = later.miss_token_total - (earlier.miss_token_total if earlier is not None else 0)
    return reused / (reused + missed) if reused + missed > 0 else None


def _reused(cache: CacheGlance) -> int:
    return sum(tier.reused_token_total for tier in cache.tiers)
