"""Statistics of the storage thread: its counters, and its part of `CacheStats` for the engine."""

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
)
from icehouse_server.storage.api import Failure
from icehouse_server.storage.local.directory.store import BlockStore
from icehouse_server.storage.local.queue_limit import QueueLimits
from icehouse_server.storage.local.store_state import StoreState


@dataclasses.dataclass(slots=True)
class StorageCounters:
    """Since start, beside what the store counts itself. Accepted = persisted + dropped + still queued."""

    spill: SpillStats = dataclasses.field(default_factory=SpillStats)
    promote: PromoteStats = dataclasses.field(default_factory=PromoteStats)
    drops: Counter[SpillDropCause] = dataclasses.field(default_factory=Counter)
    """By this thread; the engine counts blocks refused because the queue was full."""


def note_damage(integrity: IntegrityStats, failure: Failure) -> None:
    """Count a block that a load or `verify` could not use."""
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
    limits: QueueLimits,
    spill_queue_count: int,
) -> CacheStats:
    """Return a copy of what this thread knows; the engine fills in the rest.

    Reads nothing but the free space, and looks at no more than some thousands of blocks.
    """
    settings, space, now = store.settings, store.space, store.clock.wall()
    # The blocks are those of the served model; the bytes are those of all models, as is the limit.
    tier = store.index.fill(store.tier, settings.fingerprint, now=now)
    free_bytes = 0
    with contextlib.suppress(OSError):
        free_bytes = store.files.free_bytes(store.paths.root)
    return CacheStats(
        ssd=dataclasses.replace(tier, size_bytes=store.index.block_bytes, limit_bytes=settings.limit_bytes),
        spill=dataclasses.replace(
            counters.spill,
            drops=SpillDrops.of(counters.drops),
            queue_count=spill_queue_count,
            queue_bytes=limits.spills.used,
            queue_limit_bytes=limits.spills.limit,
            written_today_bytes=space.written_bytes(now),
            daily_limit_bytes=settings.daily_write_limit_bytes,
        ),
        promote=dataclasses.replace(
            counters.promote, queue_count=limits.reads.used, queue_limit=limits.reads.limit
        ),
        integrity=dataclasses.replace(
            store.integrity,
            quarantined_file_count=len(store.extras.quarantined),
            quarantined_bytes=sum(store.extras.quarantined.values()),
        ),
        disk=DiskStats(
            used_bytes=store.used_bytes(),
            manifest_bytes=space.manifest_bytes,
            limit_bytes=settings.limit_bytes,
            free_bytes=free_bytes,
            free_floor_bytes=settings.free_floor_bytes,
            other_model_block_count=len(store.index) - tier.block_count,
            writes_off_detail=state.detail,
            is_encrypted=store.cipher is not None,
        ),
        last_reconcile=store.report,
    )
