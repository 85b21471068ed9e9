"""Counters of the storage thread, and its part of `CacheStats` for the engine."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter

from icehouse_server.domain.blocks import Damage
from icehouse_server.domain.cache_stats import (
    CacheStats,
    DiskStats,
    IntegrityStats,
    PromoteStats,
    SpillDropCause,
    SpillDrops,
    SpillStats,
    TierStats,
)
from icehouse_server.storage.api import Failure
from icehouse_server.storage.local.credit import Meters
from icehouse_server.storage.local.directory.store import BlockStore
from icehouse_server.storage.local.store_state import StoreState


@dataclasses.dataclass(slots=True)
class StorageCounters:
    """Since start, beside what the store counts itself. Accepted = persisted + dropped + what still waits."""

    spill: SpillStats = dataclasses.field(default_factory=SpillStats)
    promote: PromoteStats = dataclasses.field(default_factory=PromoteStats)
    drops: Counter[SpillDropCause] = dataclasses.field(default_factory=Counter)
    """By this thread; blocks refused for want of credit are the engine's to count."""


def note_damage(integrity: IntegrityStats, failure: Failure) -> None:
    """Account for a block that a load or `verify` could not use."""
    match failure.cause:
        case Damage.CHECKSUM:
            integrity.checksum_failure_total += 1
        case Damage.MISMATCH | Damage.HEADER | Damage.LAYOUT | Damage.OTHER_ABI:
            integrity.header_mismatch_total += 1
        case Damage.MISSING | Damage.TRUNCATED | Damage.IO:
            integrity.missing_file_total += 1
        case Damage.AUTH_TAG:
            integrity.seal_failure_total += 1
        case _:
            pass  # the file is not at fault


def storage_stats(
    store: BlockStore,
    counters: StorageCounters,
    state: StoreState,
    *,
    meters: Meters,
    spill_queue_count: int,
) -> CacheStats:
    """Return a copy of what this thread knows; the rest is the engine's to fill.

    Nothing is read but the free space, and no more than some thousands of blocks are looked at.
    """
    tier = _tier(store)
    return CacheStats(
        ssd=tier,
        spill=dataclasses.replace(
            counters.spill,
            drops=SpillDrops.of(counters.drops),
            queue_count=spill_queue_count,
            queue_bytes=meters.spills.outstanding,
            queue_limit_bytes=meters.spills.limit,
            written_today_bytes=store.space.written_today_bytes,
            daily_limit_bytes=store.space.daily_limit_bytes,
        ),
        promote=dataclasses.replace(
            counters.promote, queue_count=meters.reads.outstanding, queue_limit=meters.reads.limit
        ),
        integrity=dataclasses.replace(
            store.integrity,
            quarantined_file_count=len(store.quarantined),
            quarantined_bytes=store.space.quarantine_bytes,
        ),
        disk=_disk(store, state, other_model_block_count=len(store.index) - tier.block_count),
        last_reconcile=store.report,
    )


def _tier(store: BlockStore) -> TierStats:
    """The blocks of the served model; their bytes are those of all models, as the limit is."""
    index = store.index
    known = dataclasses.replace(
        store.tier, size_bytes=index.block_bytes, limit_bytes=store.settings.limit_bytes
    )
    return index.counts(store.settings.fingerprint).fill(
        known, used_time=index.used_time, now=store.clock.wall()
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
