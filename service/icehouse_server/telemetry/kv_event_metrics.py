"""KV event metrics: what gateways are told of blocks, and what they miss of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from icehouse_server.domain.stats import KvEventStats, Snapshot
from icehouse_server.telemetry.observed import Observed, Value, counter, gauge, one


def _events(read: Callable[[KvEventStats], float]) -> Callable[[Snapshot], Iterable[Value]]:
    return lambda s: one(read(s.kv_events))


KV_EVENT_METRICS: tuple[Observed, ...] = (
    gauge(
        "icehouse.kv_events.blocks",
        "{block}",
        "Whole blocks known of for subscribers, in either tier; `kv_events.block_limit` bounds them.",
        _events(lambda e: e.block_count),
    ),
    gauge(
        "icehouse.kv_events.replay",
        "By",
        "Events kept for subscribers that fall behind or come back; `kv_events.replay_bytes` bounds them.",
        _events(lambda e: e.replay_bytes),
    ),
    counter(
        "icehouse.kv_events.events", "{event}", "KV events that were told.", _events(lambda e: e.event_total)
    ),
    counter(
        "icehouse.kv_events.subscribers.lost",
        "{subscriber}",
        "Times a subscriber fell behind the events that are kept, and had to begin anew.",
        _events(lambda e: e.lost_total),
    ),
    counter(
        "icehouse.kv_events.blocks.untold",
        "{block}",
        "Blocks that no subscriber is told of, for want of room within `kv_events.block_limit`.",
        _events(lambda e: e.untold_total),
    ),
)
