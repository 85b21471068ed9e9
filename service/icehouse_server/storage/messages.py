"""Messages of the SSD tier to the engine: frozen data only, never an mx.array.

Requests go in through `Storage`'s methods; every outcome is posted to the engine's mailbox.
"""

from __future__ import annotations

import dataclasses
from typing import NewType

from icehouse_server.domain.cache_stats import CacheStats, SpillDropCause
from icehouse_server.domain.ids import BlockHash, RequestId
from icehouse_server.storage.loads import BlockFailure, HeadsRead, Loaded, LoadFailed
from icehouse_server.storage.record import BlockRecord

TaskId = NewType("TaskId", int)


@dataclasses.dataclass(frozen=True, slots=True)
class Inventory:
    """All usable blocks of the served fingerprint. Replaces everything known before, with its last part.

    Posted once at start, and again after the directory had to be opened anew. A large one comes in
    parts, chains from their beginnings, with pauses for whoever takes them in between decode steps.
    """

    records: tuple[BlockRecord, ...]
    is_first: bool = True
    is_last: bool = True


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
    """The accepted block is not on SSD, or was there already."""

    hash: BlockHash
    cause: SpillDropCause
    stored: BlockRecord | None = None
    """Of a duplicate, what is on SSD: whoever sent it did not know."""


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
class PinsChanged:
    """A `pin` or `unpin` is in the rows of what is stored, and will be in those of what waits to be."""

    task_id: TaskId
    missing: tuple[BlockHash, ...]
    """Of the blocks it named, those that are neither: they left meanwhile."""


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
class Listed:
    """The blocks that a `list_stored` names."""

    task_id: TaskId
    hashes: tuple[BlockHash, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class TaskGivenUp:
    """A task was not done, or not to its end: the directory cannot be used."""

    task_id: TaskId
    detail: str


@dataclasses.dataclass(frozen=True, slots=True)
class StatsAnswer:
    """The answer to `request_stats`."""

    task_id: TaskId
    stats: CacheStats
    """As far as the storage thread knows it: the SSD tier, its files, and what goes in and out."""


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
    | PinsChanged
    | Purged
    | Verified
    | Listed
    | TaskGivenUp
    | StatsAnswer
    | StorageFailed
    | StorageClosed
)
