"""Counters of the prefix cache.

`*_count` and `*_bytes` are current, `*_total` since start, times in seconds, rates per second. Each event is
counted by the thread that owns it, in a dataclass of that thread, which gives out copies
(`dataclasses.replace`). The fields are those of `CacheStats` in the API; a test fails if they differ.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping

from icehouse_server.averages import quantile
from icehouse_server.domain.events import ReuseLimit
from icehouse_server.domain.ids import Tenant


@dataclasses.dataclass(frozen=True, slots=True)
class AgePercentiles:
    """Time since a block was last used; zeros while there are no blocks."""

    p50_s: float = 0.0
    p90_s: float = 0.0
    p99_s: float = 0.0

    @classmethod
    def of(cls, ages_s: Iterable[float]) -> AgePercentiles:
        ordered = sorted(ages_s)
        return cls(*(quantile(ordered, share) for share in (0.5, 0.9, 0.99)))


@dataclasses.dataclass(slots=True)
class TierStats:
    """The blocks of one tier, tails included."""

    block_count: int = 0
    tail_count: int = 0
    pinned_block_count: int = 0
    token_count: int = 0
    size_bytes: int = 0
    limit_bytes: int = 0
    evicted_block_total: int = 0
    """Removed by the eviction policy."""
    evicted_byte_total: int = 0
    purged_block_total: int = 0
    """Removed by a command."""
    age: AgePercentiles = AgePercentiles()


@dataclasses.dataclass(frozen=True, slots=True)
class MissTokens:
    """Prompt tokens that were not reused for one reason. NONE is for the last token, which always runs."""

    reason: ReuseLimit
    token_total: int

    @staticmethod
    def of(totals: Mapping[ReuseLimit, int]) -> tuple[MissTokens, ...]:
        """Return the reasons that occurred, in enum order."""
        return tuple(MissTokens(reason, totals[reason]) for reason in ReuseLimit if totals.get(reason))


@dataclasses.dataclass(slots=True)
class LookupStats:
    """Results of looking up prompts."""

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
    """The write queue was full."""
    DAILY_BUDGET = enum.auto()
    DISK_FULL = enum.auto()
    """No space within the limits, even after evicting."""
    WRITE_FAILED = enum.auto()
    WRITES_OFF = enum.auto()
    """Writing was switched off after earlier failures."""
    PREFIX_SHORT = enum.auto()
    DUPLICATE = enum.auto()
    """It was already on SSD."""
    SHUTDOWN = enum.auto()
    """The flush deadline passed."""
    TENANT_SHARE = enum.auto()
    """The tenant's share of the SSD is full of blocks that must not be evicted."""


@dataclasses.dataclass(frozen=True, slots=True)
class SpillDrops:
    """Blocks that were dropped on the way to SSD for one cause."""

    cause: SpillDropCause
    block_total: int

    @staticmethod
    def of(totals: Mapping[SpillDropCause, int]) -> tuple[SpillDrops, ...]:
        """Return the causes that occurred, in enum order."""
        return tuple(SpillDrops(cause, totals[cause]) for cause in SpillDropCause if totals.get(cause))


@dataclasses.dataclass(slots=True)
class SpillStats:
    """From RAM to SSD. An accepted block is persisted only once its row in the manifest is committed."""

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
    behind_block_total: int = 0
    """Blocks written while the disk was idle, before RAM needed their space."""
    behind_byte_total: int = 0
    behind_waiting_count: int = 0
    """Blocks that are waiting for this or being written."""


@dataclasses.dataclass(slots=True)
class PromoteStats:
    """From SSD into use."""

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
    failed_restore_total: int = 0
    """Blocks that were read but could not be restored: the request was prefilled instead."""


@dataclasses.dataclass(slots=True)
class IntegrityStats:
    """Damage that was found. It is a miss, never an error for a request."""

    verified_block_total: int = 0
    checksum_failure_total: int = 0
    header_mismatch_total: int = 0
    missing_file_total: int = 0
    quarantined_file_count: int = 0
    quarantined_bytes: int = 0
    seal_failure_total: int = 0
    """Encrypted blocks whose authentication tag did not match."""
    quarantined_block_total: int = 0
    """Blocks put into quarantine. This only grows, while files are removed if space is needed."""

    @property
    def damaged_block_total(self) -> int:
        """All damaged blocks, whatever was wrong with them."""
        return (
            self.checksum_failure_total
            + self.header_mismatch_total
            + self.missing_file_total
            + self.seal_failure_total
        )


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
    """Why nothing is being written; empty while writing works."""
    is_encrypted: bool = False
    hang_detail: str = ""
    """What hangs because the disk does not answer; empty while it answers."""
    block_bytes: int = 0
    """Size of all block files."""
    raw_block_bytes: int = 0
    """Size of the same blocks' tensors in memory."""
    decompress_bytes_per_s: float = 0.0
    """Decompressed bytes per second of all readers together; 0 before the first block."""
    is_compressing: bool = False
    """Whether blocks are currently compressed when they are written."""


UNRECORDED_CODE = "unrecorded"


@dataclasses.dataclass(frozen=True, slots=True)
class ReconcileReport:
    """What was found and repaired when the directory was opened."""

    reconcile_time: float = 0.0
    """`Clock.wall`."""
    duration_s: float = 0.0
    """Time to read the manifest and walk the files, including repairs."""
    clean: bool = False
    """Whether the directory was exactly as the last clean stop left it, so that the files were not walked."""
    manifest_rebuilt: bool = False
    file_count: int = 0
    row_count: int = 0
    partial_deleted_count: int = 0
    adopted_count: int = 0
    quarantined_count: int = 0
    """Invalid files without a row, and files that do not match their row."""
    row_deleted_count: int = 0
    """Rows without a file."""
    other_layout_deleted_count: int = 0
    unknown_file_count: int = 0
    restamped_count: int = 0
    """Files of which only the modification time had changed."""
    unencrypted_block_count: int = 0
    """Unencrypted blocks of any model, in a directory that is used with a key."""
    changed_code: tuple[str, ...] = ()
    """If the model has no block yet: the modules whose changed code is the only reason that its earlier
    blocks are unusable; `UNRECORDED_CODE` if a version that recorded no digests of code wrote those."""

    @property
    def repairs(self) -> Mapping[str, int]:
        """How many findings had to be repaired, by kind; none means the directory was consistent."""
        counts = {
            "manifests_rebuilt": int(self.manifest_rebuilt),
            "partials_deleted": self.partial_deleted_count,
            "adopted": self.adopted_count,
            "quarantined": self.quarantined_count,
            "rows_deleted": self.row_deleted_count,
            "other_layouts_deleted": self.other_layout_deleted_count,
        }
        return {kind: count for kind, count in counts.items() if count}

    @property
    def repair_count(self) -> int:
        return sum(self.repairs.values())


@dataclasses.dataclass(slots=True)
class SessionStats:
    """The sessions that requests named."""

    session_count: int = 0
    """Sessions that are remembered now."""
    ended_count: int = 0
    """Those of them that have ended."""
    ended_total: int = 0
    released_block_total: int = 0
    """Blocks that became first in line for eviction when their session ended."""
    forgotten_total: int = 0
    """Sessions forgotten because there were too many."""
    dropped_checkpoint_total: int = 0
    """Checkpoints dropped because their session had too many."""
    child_count: int = 0
    """Remembered sessions that another session started."""


@dataclasses.dataclass(slots=True)
class PrefetchStats:
    """Prefixes of sessions' next turns, computed while nothing else ran."""

    done_total: int = 0
    given_up_total: int = 0
    """Prefetches that a request or the end of the session interrupted; what they computed stays."""
    computed_token_total: int = 0
    used_token_total: int = 0
    """Those of the computed tokens that a later request began with."""


@dataclasses.dataclass(frozen=True, slots=True)
class TenantShare:
    """The bytes of one tenant's blocks in each tier."""

    tenant: Tenant
    ram_bytes: int = 0
    ssd_bytes: int = 0

    def joined(self, other: TenantShare) -> TenantShare:
        """Return the sum of two caches' shares."""
        return TenantShare(self.tenant, self.ram_bytes + other.ram_bytes, self.ssd_bytes + other.ssd_bytes)


@dataclasses.dataclass(slots=True)
class SharedStats:
    """Traffic with the object store that servers share."""

    lookup_total: int = 0
    hit_total: int = 0
    """Lookups that found at least one block."""
    late_lookup_total: int = 0
    """Lookups that did not get the whole answer in time."""
    fetched_block_total: int = 0
    fetched_byte_total: int = 0
    fetch_bytes_per_s: float = 0.0
    refused_block_total: int = 0
    """Objects that were not exactly the block that their name says: none of their bytes was used."""
    stored_block_total: int = 0
    stored_byte_total: int = 0
    known_block_total: int = 0
    """Blocks that the store already had when they were to be stored."""
    dropped_block_total: int = 0
    """Blocks that were not stored, because too many were waiting or they had left this server by then."""
    deleted_block_total: int = 0
    queue_count: int = 0
    """Blocks that wait to be stored."""
    failure_total: int = 0
    """Requests that the store refused or did not answer."""
    read_pause_detail: str = ""
    """Why lookups are paused; empty while the store answers."""
    write_pause_detail: str = ""
    """Why storing is paused; empty while it works."""


@dataclasses.dataclass(frozen=True, slots=True)
class CacheStats:
    """The prefix cache's counters. `ssd`, `disk` and `last_reconcile` are None without an SSD tier, `shared`
    without an object store."""

    block_token_limit: int = 256
    unsupported_detail: str = ""
    """Why this model's prompts cannot be cached; empty if they can."""
    ram: TierStats = dataclasses.field(default_factory=TierStats)
    ssd: TierStats | None = None
    lookups: LookupStats = dataclasses.field(default_factory=LookupStats)
    spill: SpillStats = dataclasses.field(default_factory=SpillStats)
    promote: PromoteStats = dataclasses.field(default_factory=PromoteStats)
    integrity: IntegrityStats = dataclasses.field(default_factory=IntegrityStats)
    disk: DiskStats | None = None
    last_reconcile: ReconcileReport | None = None
    sessions: SessionStats = dataclasses.field(default_factory=SessionStats)
    shared: SharedStats | None = None
    prefetch: PrefetchStats = dataclasses.field(default_factory=PrefetchStats)
    tenants: tuple[TenantShare, ...] = ()
