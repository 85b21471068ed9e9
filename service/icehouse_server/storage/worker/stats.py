"""Counters of the SSD tier, and what its last start found.

What the storage thread has counted, and its snapshot for the engine.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter

from icehouse_server.domain.blocks import Damage
from icehouse_server.domain.cache_stats import SpillDropCause
from icehouse_server.storage.directory.store import BlockStore
from icehouse_server.storage.messages import StorageStats
from icehouse_server.storage.record import BlockRecord
from icehouse_server.storage.worker.credit import Meter
from icehouse_server.storage.worker.write_breaker import WriteBreaker

_PERCENTS = (10, 50, 90, 99)


@dataclasses.dataclass(slots=True)
class StorageCounters:
    """Since start. `spill_accepted` = persisted + dropped + what still waits."""

    spill_accepted: int = 0
    spill_persisted: int = 0
    spill_dropped: Counter[SpillDropCause] = dataclasses.field(default_factory=Counter)
    load: int = 0
    load_failed: Counter[Damage] = dataclasses.field(default_factory=Counter)
    verified_block: int = 0
    read_bytes: int = 0
    read_bytes_per_s: float = 0.0
    write_bytes_per_s: float = 0.0


def stats_of(
    store: BlockStore,
    counters: StorageCounters,
    breaker: WriteBreaker,
    *,
    spill_meter: Meter,
    load_meter: Meter,
    spill_queue_count: int,
) -> StorageStats:
    """Return a snapshot. Cost grows with the number of blocks; nothing is read but the free space."""
    mine = [record for record in store.index if record.fingerprint == store.settings.fingerprint]
    free_bytes = 0
    with contextlib.suppress(OSError):
        free_bytes = store.files.free_bytes(store.paths.root)
    return StorageStats(
        block_count=len(mine),
        tail_count=sum(record.token_count < record.block_token_limit for record in mine),
        token_count=sum(record.token_count for record in mine),
        block_bytes=store.index.block_bytes,
        pinned_count=sum(record.pinned for record in mine),
        foreign_block_count=len(store.index) - len(mine),
        quarantined_count=len(store.quarantined),
        quarantined_bytes=store.space.quarantine_bytes,
        manifest_bytes=store.space.manifest_bytes,
        used_bytes=store.used_bytes(),
        limit_bytes=store.settings.limit_bytes,
        free_bytes=free_bytes,
        free_floor_bytes=store.settings.free_floor_bytes,
        is_encrypted=store.cipher is not None,
        writes_enabled=breaker.is_open,
        writes_detail=breaker.detail,
        spill_accepted_total=counters.spill_accepted,
        spill_persisted_total=counters.spill_persisted,
        spill_dropped_totals=tuple(counters.spill_dropped.items()),
        spill_queue_count=spill_queue_count,
        spill_queue_bytes=spill_meter.outstanding,
        spill_queue_limit_bytes=spill_meter.limit,
        written_bytes_total=store.counters.written_bytes,
        written_today_bytes=store.space.written_today_bytes,
        daily_write_limit_bytes=store.space.daily_limit_bytes,
        load_total=counters.load,
        load_failed_totals=tuple(counters.load_failed.items()),
        load_queue_count=load_meter.outstanding,
        load_queue_limit=load_meter.limit,
        read_bytes_total=counters.read_bytes,
        read_bytes_per_s=counters.read_bytes_per_s,
        write_bytes_per_s=counters.write_bytes_per_s,
        verified_block_total=counters.verified_block,
        quarantined_total=store.counters.quarantined_count,
        evicted_block_total=store.counters.evicted_count,
        evicted_bytes_total=store.counters.evicted_bytes,
        purged_block_total=store.counters.purged_count,
        age_percentiles_s=_age_percentiles(mine, now_time=store.clock.wall()),
        reconcile=store.report,
    )


def _age_percentiles(records: list[BlockRecord], *, now_time: float) -> tuple[tuple[int, float], ...]:
    ages = sorted(now_time - record.last_used_time for record in records)
    return tuple((percent, ages[(len(ages) - 1) * percent // 100]) for percent in _PERCENTS) if ages else ()
