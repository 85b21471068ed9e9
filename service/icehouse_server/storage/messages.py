"""Messages of the SSD tier to the engine: frozen data only, never an mx.array.

Requests go in through `Storage`'s methods; every outcome is posted to the engine's mailbox.
"""

from __future__ import annotations

import dataclasses
from typing import NewType

from icehouse_server.domain.blocks import Damage
from icehouse_server.domain.cache_stats import ReconcileReport, SpillDropCause
from icehouse_server.domain.ids import BlockHash, RequestId
from icehouse_server.storage.loads import BlockFailure, HeadsRead, Loaded, LoadFailed
from icehouse_server.storage.record import BlockRecord

TaskId = NewType("TaskId", int)


@dataclasses.dataclass(frozen=True, slots=True)
class Inventory:
    """All usable blocks of the served fingerprint, oldest use first. Replaces everything known before.

    Posted once at start, and again after the directory had to be opened anew.
    """

    records: tuple[BlockRecord, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Persisted:
    """The block's row is committed."""

    record: BlockRecord
    request_id: RequestId | None = None
    """Whose work made the block leave RAM; None at the stop, which is nobody's."""
    start_time: float = 0.0
    """`Clock.wall` when writing began."""
    duration_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class SpillDropped:
    """The accepted block is not on SSD (or was there already)."""

    hash: BlockHash
    cause: SpillDropCause


@dataclasses.dataclass(frozen=True, slots=True)
class Evicted:
    """These blocks are gone from SSD, by policy, by order or for damage."""

    hashes: tuple[BlockHash, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Health:
    """Whether spills are written now; `detail` says what is wrong and what would help."""

    writes_enabled: bool
    detail: str


@dataclasses.dataclass(frozen=True, slots=True)
class Purged:
    """An `evict` or `purge` has finished."""

    task_id: TaskId
    block_count: int
    size_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Verified:
    """A `verify` has finished; damaged blocks are quarantined and were named by `Evicted`."""

    task_id: TaskId
    checked_count: int
    checked_bytes: int
    damaged: tuple[BlockFailure, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class TaskGivenUp:
    """An `evict`, `purge` or `verify` was not done, or not to its end: the directory cannot be used."""

    task_id: TaskId
    detail: str


@dataclasses.dataclass(frozen=True, slots=True)
class Flushed:
    """Every spill accepted before the `flush` is persisted or dropped."""

    task_id: TaskId
    persisted_count: int
    dropped_count: int


@dataclasses.dataclass(frozen=True, slots=True)
class StatsAnswer:
    """The answer to `request_stats`."""

    task_id: TaskId
    stats: StorageStats


@dataclasses.dataclass(frozen=True, slots=True)
class StorageFailed:
    """The storage thread is dead: a broken invariant. Posted once, nothing follows."""

    error: str


@dataclasses.dataclass(frozen=True, slots=True)
class StorageClosed:
    """The directory is closed and unlocked. The last outcome of an orderly end."""

    was_clean: bool


Outcome = (
    Inventory
    | Persisted
    | SpillDropped
    | Evicted
    | Loaded
    | LoadFailed
    | HeadsRead
    | Health
    | Purged
    | Verified
    | TaskGivenUp
    | Flushed
    | StatsAnswer
    | StorageFailed
    | StorageClosed
)


@dataclasses.dataclass(frozen=True, slots=True)
class StorageStats:
    """The SSD tier's counters. `*_count` and `*_bytes` are now, `*_total` since start."""

    block_count: int
    """Of the served fingerprint, as are tokens, tails, pins and ages."""
    tail_count: int
    token_count: int
    block_bytes: int
    """Of all fingerprints."""
    pinned_count: int
    foreign_block_count: int
    """Blocks of other fingerprints, which age out within the same limit."""
    quarantined_count: int
    quarantined_bytes: int
    manifest_bytes: int
    used_bytes: int
    """All of the directory's bytes that the limit counts."""
    limit_bytes: int
    free_bytes: int
    free_floor_bytes: int
    is_encrypted: bool
    """Whether blocks are encrypted on their way to the disk."""
    writes_enabled: bool
    writes_detail: str
    spill_accepted_total: int
    spill_persisted_total: int
    spill_dropped_totals: tuple[tuple[SpillDropCause, int], ...]
    """By this thread; blocks refused for want of credit are the engine's to count."""
    spill_queue_count: int
    spill_queue_bytes: int
    spill_queue_limit_bytes: int
    written_bytes_total: int
    written_today_bytes: int
    daily_write_limit_bytes: int
    load_total: int
    load_failed_totals: tuple[tuple[Damage, int], ...]
    """Blocks that a load or `verify` could not use, by cause."""
    load_queue_count: int
    load_queue_limit: int
    read_bytes_total: int
    read_bytes_per_s: float
    write_bytes_per_s: float
    verified_block_total: int
    """Blocks whose regions were read and hashed, by loads and by `verify`."""
    quarantined_total: int
    evicted_block_total: int
    evicted_bytes_total: int
    purged_block_total: int
    age_percentiles_s: tuple[tuple[int, float], ...]
    """(percent, seconds since last use) for 10, 50, 90 and 99 percent of the blocks."""
    reconcile: ReconcileReport
