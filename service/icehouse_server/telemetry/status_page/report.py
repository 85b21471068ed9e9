"""Report of the status page: its JSON, from counters that operators have elsewhere too.

Never a prompt, but for the beginnings of shared ones where the rules have a way to read them.

`*_count` and `*_bytes` are now, `*_total` since start, times in seconds; what is not known is null.
"""

from __future__ import annotations

import dataclasses
import hashlib
import heapq
from collections.abc import Iterable
from typing import Any

from icehouse_server.domain.cache_stats import CacheStats, TenantShare, TierStats
from icehouse_server.domain.ids import BlockHash
from icehouse_server.domain.stats import EngineStats, ServerStatus, SlowRequest, Snapshot
from icehouse_server.telemetry.metric import HistogramSeries
from icehouse_server.telemetry.status_page.excerpt import Decode, excerpt
from icehouse_server.telemetry.status_page.prefix_tree import PrefixNode, shared_prefixes

TENANT_LIMIT = 20
"""Tenants shown: those that sent and drew most tokens."""

_NAME_BYTES = 5


@dataclasses.dataclass(frozen=True, slots=True)
class ReportRules:
    """What may be told to whoever reaches the port, and how blocks are named to them."""

    version: str
    shows_request_ids: bool
    """Not where callers prove who they are: ids are then a tenant's own."""
    name_key: bytes = dataclasses.field(repr=False)
    """Blocks are named by a keyed hash: a block's own name would prove a guess of its tokens."""
    decode: Decode | None = None
    """Makes text of tokens; None where no text is told."""


def report_of(
    status: ServerStatus, first_token: Iterable[HistogramSeries], *, rules: ReportRules
) -> dict[str, Any]:
    """Return the report, ready for `json.dumps`."""
    snapshot = status.snapshot
    engine, cache, model = snapshot.engine, snapshot.cache, snapshot.model
    blocks = status.recent_blocks
    prefixes = None if blocks is None else [_prefix(n, rules) for n in shared_prefixes(blocks)]
    about = None if model is None else {"id": model.model_id, "device": model.device, "dtype": model.dtype}
    return {
        "version": rules.version,
        "collect_time": status.collect_time,
        "state": snapshot.state.name.lower(),
        "heartbeat_age_s": snapshot.heartbeat_age_s,
        "model": about,
        "engine": None if engine is None else _engine(engine, snapshot),
        "cache": None if cache is None else _cache(cache),
        "first_token": [_first_token(series) for series in first_token],
        "prefixes": prefixes,
        "shows_text": rules.decode is not None,
        "slowest_requests": [_slow(r, shows_id=rules.shows_request_ids) for r in status.slowest_requests],
        "tenants": _tenants(snapshot),
        "tenant_count": len(snapshot.tenants),
    }


def _engine(engine: EngineStats, snapshot: Snapshot) -> dict[str, Any]:
    return {
        **_fields(engine, "uptime_s", "waiting_count", "loading_count", "prefilling_count", "decoding_count"),
        **_fields(engine, "decoding_limit", "finished_total", "failed_total", "memory_limit_bytes"),
        "output_tokens_per_s": snapshot.rates.output_tokens_per_s,
        "memory_bytes": engine.active_memory_bytes,
    }


def _cache(cache: CacheStats) -> dict[str, Any]:
    reused = ("ram_token_total", "ssd_token_total", "miss_token_total")
    return {
        "unsupported_detail": cache.unsupported_detail,
        "ram": _tier(cache.ram),
        "ssd": None if cache.ssd is None else _tier(cache.ssd),
        **_fields(cache.lookups, "lookup_total", "hit_total", *reused),
        "spilled_byte_total": cache.spill.persisted_byte_total,
        "read_byte_total": cache.promote.read_byte_total,
        "damaged_block_total": cache.integrity.damaged_block_total,
    }


def _tier(tier: TierStats) -> dict[str, Any]:
    blocks = ("block_count", "pinned_block_count", "token_count", "evicted_block_total")
    return _fields(tier, "size_bytes", "limit_bytes", *blocks)


def _fields(stats: object, *names: str) -> dict[str, Any]:
    return {name: getattr(stats, name) for name in names}


def _first_token(series: HistogramSeries) -> dict[str, Any]:
    return {
        "reuse": series.labels[0],
        "count": series.cumulative_counts[-1],
        "p50_s": series.quantile(0.5),
        "p90_s": series.quantile(0.9),
        "bounds_s": series.bounds,
        "counts": series.counts,
    }


def _prefix(node: PrefixNode, rules: ReportRules) -> dict[str, Any]:
    return {
        "name": _shown_name(node.hash, rules.name_key),
        **_text(node, rules.decode),
        **_fields(node, "start_token_index", "end_token_index", "block_count", "ram_block_count"),
        **_fields(node, "ssd_block_count", "hit_count", "reused_token_total", "branch_count"),
        "children": [_prefix(child, rules) for child in node.children],
    }


def _text(node: PrefixNode, decode: Decode | None) -> dict[str, str | None]:
    """Return how the node's own text begins, null where its tokens are not known."""
    if decode is None:
        return {}
    return {"text": None if node.head is None else excerpt(node.head, decode, is_whole=node.is_all_head)}


def _shown_name(name: BlockHash, key: bytes) -> str:
    return hashlib.blake2b(name, key=key, digest_size=_NAME_BYTES).hexdigest()


def _slow(request: SlowRequest, *, shows_id: bool) -> dict[str, Any]:
    shown = dataclasses.asdict(request)
    return shown if shows_id else {**shown, "request_id": ""}


def _tenants(snapshot: Snapshot) -> list[dict[str, Any]]:
    shares = {share.tenant: share for share in (snapshot.cache.tenants if snapshot.cache is not None else ())}
    greatest = heapq.nlargest(
        TENANT_LIMIT, snapshot.tenants, key=lambda use: use.prompt_token_total + use.output_token_total
    )
    return [
        {**dataclasses.asdict(use), "ram_bytes": share.ram_bytes, "ssd_bytes": share.ssd_bytes}
        for use in greatest
        for share in (shares.get(use.tenant, TenantShare(use.tenant)),)
    ]
