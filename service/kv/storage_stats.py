"""The SSD tier in numbers: its counters, and what its last start found."""

from __future__ import annotations

import dataclasses

from service.domain.cache_stats import SpillDropCause
from service.kv.damage import Damage


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
    unencrypted: int = 0
    """Blocks in the clear, of whatever model, in a directory that is served with a key."""
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
