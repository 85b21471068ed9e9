"""What the engine and the SSD tier say to each other: frozen data only, never an mx.array.

Requests go in through `Storage`'s methods; every outcome below is posted to the engine's
mailbox. Sizes are file or memory bytes, times are seconds.
"""

from __future__ import annotations

import dataclasses
from typing import NewType

from service.domain.blocks import BlockHeader, HostRegion, HostTensor, RegionKind
from service.domain.cache_stats import SpillDropCause
from service.domain.ids import BlockHash, Fingerprint
from service.kv.block_head import Damage
from service.kv.records import BlockRecord

LoadId = NewType("LoadId", int)
TaskId = NewType("TaskId", int)


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedBlock:
    """One block of a load: what the file must say it is, and what of it is wanted."""

    header: BlockHeader
    """Compared whole with the file's, token ids included."""
    regions: frozenset[RegionKind]
    token_count: int
    """Leading tokens of the kv region that are wanted; fewer than the block's only in the last one."""


@dataclasses.dataclass(frozen=True, slots=True)
class LoadRequest:
    """Consecutive blocks of one chain to read, verify and assemble."""

    load_id: LoadId
    blocks: tuple[PlannedBlock, ...]
    origin_token_index: int
    """Sequence position of row 0 of the assembled buffers; the first block's start, or earlier."""
    capacity_token_count: int
    """Rows of each assembled buffer along the token axis."""


@dataclasses.dataclass(frozen=True, slots=True)
class HeadRequest:
    """Blocks whose token ids are wanted, so that a prompt may match inside one of them."""

    load_id: LoadId
    hashes: tuple[BlockHash, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class HeadsRead:
    """The headers that could be read and are what their names say; the others are left out."""

    load_id: LoadId
    headers: tuple[BlockHeader, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedBlock:
    """The window and checkpoint regions of one loaded block, those that were asked for."""

    header: BlockHeader
    regions: tuple[HostRegion, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class BlockFailure:
    """One block could not be used; it has been dropped or quarantined."""

    hash: BlockHash
    cause: Damage
    detail: str


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
class Loaded:
    """The verified beginning of a load: its first blocks, all of them unless `failure` is set."""

    load_id: LoadId
    tensors: tuple[HostTensor, ...]
    """The kv tensors of all loaded blocks together, each [..., capacity, width].

    Rows before the first block and from `end_token_index` on are not initialised.
    """
    blocks: tuple[LoadedBlock, ...]
    end_token_index: int
    """Sequence position behind the last wanted token that was read."""
    failure: BlockFailure | None
    read_bytes: int
    read_s: float
    read_bytes_per_s: float
    """Moving average over the recent loads."""


@dataclasses.dataclass(frozen=True, slots=True)
class LoadFailed:
    """Not even the first block of a load could be used."""

    load_id: LoadId
    failure: BlockFailure


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
class Flushed:
    """Every spill accepted before the `flush` is persisted or dropped."""

    task_id: TaskId
    persisted_count: int
    dropped_count: int


@dataclasses.dataclass(frozen=True, slots=True)
class ReconcileReport:
    """What the last start found in the directory and how long it took."""

    time: float = 0.0
    """Wall clock, seconds since the epoch."""
    was_clean: bool = False
    """The directory was exactly as the last clean shutdown left it; files were not walked."""
    manifest_rebuilt: bool = False
    row_count: int = 0
    file_count: int = 0
    partials_deleted: int = 0
    adopted: int = 0
    quarantined: int = 0
    """Files without a row that are not valid, and files that are not what their row says."""
    rows_without_file: int = 0
    other_abi_deleted: int = 0
    unknown_files: int = 0
    restamped: int = 0
    """Files whose modification time had changed but nothing else."""
    manifest_s: float = 0.0
    walk_s: float = 0.0
    """Walking the files, repairs included."""

    @property
    def repair_count(self) -> int:
        """Findings that had to be repaired; 0 means the directory was consistent."""
        return (
            self.partials_deleted
            + self.adopted
            + self.quarantined
            + self.rows_without_file
            + self.other_abi_deleted
            + int(self.manifest_rebuilt)
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
    | Flushed
    | StatsAnswer
    | StorageFailed
    | StorageClosed
)


@dataclasses.dataclass(frozen=True, slots=True)
class StorageSettings:
    """What the SSD tier is allowed. All limits are enforced before the disk is touched."""

    directory: str
    fingerprint: Fingerprint
    fingerprint_details: tuple[tuple[str, str], ...]
    limit_bytes: int
    free_floor_bytes: int
    daily_write_limit_bytes: int
    """0 means unlimited."""
    spill_queue_limit_bytes: int
    load_queue_limit_count: int
    task_queue_limit_count: int
    reader_thread_count: int
