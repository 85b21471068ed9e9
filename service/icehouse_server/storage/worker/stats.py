"""Counters of the storage thread, and its part of `CacheStats` for the engine."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter

from icehouse_server.averages import Recount
from icehouse_server.domain.blocks import Damage
from icehouse_server.domain.cache_stats import (
    AgePercentiles,
    CacheStats,
    DiskStats,
    IntegrityStats,
    PromoteStats,
    SpillDropCause,
    SpillDrops,
    SpillStats,
    TierStats,
)
from icehouse_server.storage.directory.store import BlockStore
from icehouse_server.storage.worker.credit import Meter
from icehouse_server.storage.worker.store_state import StoreState


@dataclasses.dataclass(slots=True)
class StorageCounters:
    """Since start, beside what the store counts itself. Accepted = persisted + dropped + what still waits."""

    spill: SpillStats = dataclasses.field(default_factory=SpillStats)
    promote: PromoteStats = dataclasses.field(default_factory=PromoteStats)
    drops: Counter[SpillDropCause] = dataclasses.field(default_factory=Counter)
    """By this thread; blocks refused for want of credit are the engine's to count."""


def note_damage(integrity: IntegrityStats, damage: Damage) -> None:
    """Account for a block that a load or `verify` could not use."""
    match damage:
        case Damage.CHECKSUM:
            integrity.checksum_failure_total += 1
        case Damage.MISMATCH | Damage.HEADER | Damage.LAYOUT | Damage.OTHER_ABI:
            integrity.header_mismatch_total += 1
        case Damage.MISSING | Damage.TRUNCATED | Damage.IO:
            integrity.missing_file_total += 1
        case Damage.AUTH_TAG:
            integrity.seal_failure_total += 1
        case Damage.MEMORY:
            pass  # the file is not at fault


def storage_stats(
    store: BlockStore,
    counters: StorageCounters,
    state: StoreState,
    recount: Recount[BlockCounts],
    *,
    spill_meter: Meter,
    load_meter: Meter,
    spill_queue_count: int,
) -> CacheStats:
    """Return a copy of what this thread knows; the rest is the engine's to fill.

    Nothing is read but the free space; all blocks are looked at now and then.
    """
    counts = recount.value(
        lambda: _counts(store), of=store, item_count=len(store.index), now=store.clock.monotonic()
    )
    return CacheStats(
        ssd=_tier(store, counts),
        spill=dataclasses.replace(
            counters.spill,
            drops=SpillDrops.of(counters.drops),
            queue_count=spill_queue_count,
            queue_bytes=spill_meter.outstanding,
            queue_limit_bytes=spill_meter.limit,
            written_today_bytes=store.space.written_today_bytes,
            daily_limit_bytes=store.space.daily_limit_bytes,
        ),
        promote=dataclasses.replace(
            counters.promote, queue_count=load_meter.outstanding, queue_limit=load_meter.limit
        ),
        integrity=dataclasses.replace(
            store.integrity,
            quarantined_file_count=len(store.quarantined),
            quarantined_bytes=store.space.quarantine_bytes,
        ),
        disk=_disk(store, state, other_model_block_count=counts.other_model_block_count),
        last_reconcile=store.report,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class BlockCounts:
    """What is told of all blocks of the served model together."""

    block_count: int
    other_model_block_count: int
    tail_count: int
    pinned_block_count: int
    token_count: int
    age: AgePercentiles


def _counts(store: BlockStore) -> BlockCounts:
    mine = [record for record in store.index if record.fingerprint == store.settings.fingerprint]
    now_time = store.clock.wall()
    return BlockCounts(
        block_count=len(mine),
        other_model_block_count=len(store.index) - len(mine),
        tail_count=sum(record.token_count < record.block_token_limit for record in mine),
        pinned_block_count=sum(record.pinned for record in mine),
        token_count=sum(record.token_count for record in mine),
        age=AgePercentiles.of(max(now_time - record.last_used_time, 0.0) for record in mine),
    )


def _tier(store: BlockStore, counts: BlockCounts) -> TierStats:
    """The blocks of the served model; their bytes are those of all models, as the limit is."""
    return dataclasses.replace(
        store.tier,
        block_count=counts.block_count,
        tail_count=counts.tail_count,
        pinned_block_count=counts.pinned_block_count,
        token_count=counts.token_count,
        size_bytes=store.index.block_bytes,
        limit_bytes=store.settings.limit_bytes,
        age=counts.age,
    )


def _disk(store: BlockStore, state: StoreState, *, other_model_block_count: int) -> DiskStats:
    free_bytes = 0
    with contextlib.suppress(OSError):
        free_bytes = store.files.free_bytes(store.paths.root)
    return DiskStats(
        used_bytes=store.used_bytes(),
        manifest_bytes=store.space.manifest_bytes,
        limit_bytes=store.settings.limit_bytes,
        free_bytes=free_bytes,
        free_floor_bytes=store.settings.free_floor_bytes,
        other_model_block_count=other_model_block_count,
        writes_off_detail=state.detail,
        is_encrypted=store.cipher is not None,
    )
