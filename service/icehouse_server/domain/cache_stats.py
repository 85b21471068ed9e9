"""Counters of the prefix cache: frozen snapshots, taken between steps.

`*_count` and `*_bytes` are now, `*_total` since start, times in seconds, rates per second.
Field by field what `CacheStats` of the API shows.
"""

from __future__ import annotations

import dataclasses
import enum

from icehouse_server.domain.events import ReuseLimit
from icehouse_server.domain.ids import Tenant


@dataclasses.dataclass(frozen=True, slots=True)
class AgePercentiles:
    """Time since a block was last used; zeros while there are no blocks."""

    p50_s: float = 0.0
    p90_s: float = 0.0
    p99_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class TierStats:
    """The blocks of one tier, tails included."""

    block_count: int = 0
    tail_count: int = 0
    pinned_block_count: int = 0
    token_count: int = 0
    size_bytes: int = 0
    limit_bytes: int = 0
    evicted_block_total: int = 0
    """Removed by policy."""
    evicted_byte_total: int = 0
    purged_block_total: int = 0
    """Removed by order."""
    age: AgePercentiles = AgePercentiles()


@dataclasses.dataclass(frozen=True, slots=True)
class MissTokens:
    """Prompt tokens not reused for one reason; NONE stands for the last token, which always runs."""

    reason: ReuseLimit
    token_total: int


@dataclasses.dataclass(frozen=True, slots=True)
class LookupStats:
    """How prompts fared when they were looked up."""

    lookup_total: int = 0
    hit_total: int = 0
    """Lookups that reused at least one token."""
    ram_token_total: int = 0
    ssd_token_total: int = 0
    miss_tokens: tuple[MissTokens, ...] = ()

    @property
    def miss_token_total(self) -> int:
        return sum(miss.token_total for miss in self.miss_tokens)


class SpillDropCause(enum.Enum):
    """Why a block did not reach the SSD."""

    NO_CREDIT = enum.auto()
    """The write queue had no room."""
    DAILY_BUDGET = enum.auto()
    DISK_FULL = enum.auto()
    """No room within the limits, even after evicting."""
    WRITE_FAILED = enum.auto()
    WRITES_OFF = enum.auto()
    """After earlier failures."""
    PREFIX_SHORT = enum.auto()
    DUPLICATE = enum.auto()
    """On SSD already."""
    SHUTDOWN = enum.auto()
    """The flush deadline passed."""
    TENANT_SHARE = enum.auto()
    """The tenant's share of the SSD is full of blocks that may not go."""


@dataclasses.dataclass(frozen=True, slots=True)
class SpillDrops:
    """Blocks dropped on the way to SSD for one cause."""

    cause: SpillDropCause
    block_total: int


@dataclasses.dataclass(frozen=True, slots=True)
class SpillStats:
    """From RAM to SSD. Accepted is not persisted: the row is the commit."""

    policy: str = "off"
    accepted_block_total: int = 0
    persisted_block_total: int = 0
    persisted_byte_total: int = 0
    drops: tuple[SpillDrops, ...] = ()
    queue_count: int = 0
    queue_bytes: int = 0
    queue_limit_bytes: int = 0
    written_today_bytes: int = 0
    daily_limit_bytes: int = 0
    """0: no limit."""
    write_bytes_per_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class PromoteStats:
    """From SSD to use."""

    load_total: int = 0
    failed_load_total: int = 0
    promoted_block_total: int = 0
    promoted_token_total: int = 0
    read_byte_total: int = 0
    queue_count: int = 0
    queue_limit: int = 0
    read_bytes_per_s: float = 0.0
    restore_tokens_per_s: float = 0.0
    recompute_tokens_per_s: float = 0.0
    recompute_chosen_total: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class IntegrityStats:
    """What was found damaged. Damage is a miss, never an error of the request."""

    verified_block_total: int = 0
    checksum_failure_total: int = 0
    header_mismatch_total: int = 0
    missing_file_total: int = 0
    quarantined_file_count: int = 0
    quarantined_bytes: int = 0
    seal_failure_total: int = 0
    """Encrypted blocks whose tag did not prove them."""


@dataclasses.dataclass(frozen=True, slots=True)
class DiskStats:
    """The SSD tier's directory."""

    used_bytes: int = 0
    """All files: blocks, partial files, quarantine and manifest."""
    manifest_bytes: int = 0
    limit_bytes: int = 0
    free_bytes: int = 0
    free_floor_bytes: int = 0
    other_model_block_count: int = 0
    writes_off_detail: str = ""
    """Why nothing is written at present; empty while writing works."""
    is_encrypted: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class ReconcileSummary:
    """What was found and repaired when the directory was opened."""

    reconcile_time: float
    """`Clock.wall`."""
    duration_s: float
    clean: bool = False
    """The last stop was clean: files were not walked one by one."""
    manifest_rebuilt: bool = False
    file_count: int = 0
    row_count: int = 0
    partial_deleted_count: int = 0
    adopted_count: int = 0
    quarantined_count: int = 0
    row_deleted_count: int = 0
    other_layout_deleted_count: int = 0
    unknown_file_count: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class TenantShare:
    """What one tenant's blocks take of the tiers."""

    tenant: Tenant
    ram_bytes: int = 0
    ssd_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class CacheStats:
    """The prefix cache's counters. `ssd`, `disk` and `last_reconcile` are None without an SSD tier."""

    block_token_limit: int = 256
    unsupported_detail: str = ""
    """Why this model's prompts cannot be kept; empty when they can."""
    ram: TierStats = TierStats()
    ssd: TierStats | None = None
    lookups: LookupStats = LookupStats()
    spill: SpillStats = SpillStats()
    promote: PromoteStats = PromoteStats()
    integrity: IntegrityStats = IntegrityStats()
    disk: DiskStats | None = None
    last_reconcile: ReconcileSummary | None = None
    tenants: tuple[TenantShare, ...] = ()


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
