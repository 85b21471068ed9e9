"""Counters of the prefix cache.

`*_count` and `*_bytes` are current, `*_total` since start, times in seconds, rates per second. The thread
that owns an event counts it in its own dataclass and gives out copies (`dataclasses.replace`). The fields are
those of `CacheStats` in the API; a test fails where they differ.
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

    @staticmethod
    def of(totals: Mapping[ReuseLimit, int]) -> tuple[MissTokens, ...]:
        """Return the reasons that occurred, in their order."""
        return tuple(MissTokens(reason, totals[reason]) for reason in ReuseLimit if totals.get(reason))


@dataclasses.dataclass(slots=True)
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
    """The write queue was full."""
    DAILY_BUDGET = enum.auto()
    DISK_FULL = enum.auto()
    """No space within the limits, even after evicting."""
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

    @staticmethod
    def of(totals: Mapping[SpillDropCause, int]) -> tuple[SpillDrops, ...]:
        """Return the causes that occurred, in their order."""
        return tuple(SpillDrops(cause, totals[cause]) for cause in SpillDropCause if totals.get(cause))


@dataclasses.dataclass(slots=True)
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
    behind_block_total: int = 0
    """Written while the disk was idle, before RAM needed their space."""
    behind_byte_total: int = 0
    behind_waiting_count: int = 0
    """Blocks that wait for that or are under way."""


@dataclasses.dataclass(slots=True)
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
    failed_restore_total: int = 0
    """Blocks that were read and did not make a cache: the request was prefilled instead."""


@dataclasses.dataclass(slots=True)
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
    quarantined_block_total: int = 0
    """Blocks put into quarantine; files leave it when space is needed, this only grows."""

    @property
    def damaged_block_total(self) -> int:
        """Whatever was wrong with them."""
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
    """Why nothing is written at present; empty while writing works."""
    is_encrypted: bool = False
    hang_detail: str = ""
    """What the disk does not answer at present; empty while it answers."""
    block_bytes: int = 0
    """Files of all blocks."""
    raw_block_bytes: int = 0
    """The same blocks' tensors, as they are in memory."""
    decompress_bytes_per_s: float = 0.0
    """Of tensors' bytes, by all readers together; 0 before the first."""
    is_compressing: bool = False
    """Whether blocks are compressed on their way to the disk now."""


UNRECORDED_CODE = "unrecorded"


@dataclasses.dataclass(frozen=True, slots=True)
class ReconcileReport:
    """What was found and repaired when the directory was opened."""

    reconcile_time: float = 0.0
    """`Clock.wall`."""
    duration_s: float = 0.0
    """Reading the manifest and walking the files, repairs included."""
    clean: bool = False
    """The directory was exactly as the last clean stop left it: files were not walked one by one."""
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
    """Files whose modification time had changed but nothing else."""
    unencrypted_block_count: int = 0
    """Blocks in the clear, of whatever model, in a directory that is served with a key."""
    changed_code: tuple[str, ...] = ()
    """If the model has no block yet: the modules whose changed code alone makes its earlier blocks unusable;
    `UNRECORDED_CODE` if those are of a version that recorded no digests of code."""

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
    """Remembered now."""
    ended_count: int = 0
    """Of these, sessions that have ended."""
    ended_total: int = 0
    released_block_total: int = 0
    """Blocks that became the first to be evicted when their session ended."""
    forgotten_total: int = 0
    """Sessions forgotten because there were too many."""
    dropped_checkpoint_total: int = 0
    """Checkpoints dropped because their session had too many."""
    child_count: int = 0
    """Sessions remembered that another one started."""


@dataclasses.dataclass(slots=True)
class PrefetchStats:
    """What was computed for the next turns of sessions while nothing else ran."""

    done_total: int = 0
    given_up_total: int = 0
    """Those that a request, or the end of their session, interrupted; what they had computed stays."""
    computed_token_total: int = 0
    used_token_total: int = 0
    """Of these, tokens that a later request began with."""


@dataclasses.dataclass(frozen=True, slots=True)
class TenantShare:
    """What one tenant's blocks take of the tiers."""

    tenant: Tenant
    ram_bytes: int = 0
    ssd_bytes: int = 0

    def joined(self, other: TenantShare) -> TenantShare:
        """Return both, of two caches, together."""
        return TenantShare(self.tenant, self.ram_bytes + other.ram_bytes, self.ssd_bytes + other.ssd_bytes)


@dataclasses.dataclass(slots=True)
class SharedStats:
    """Traffic with the object store that servers share."""

    lookup_total: int = 0
    hit_total: int = 0
    """Lookups that found at least one block."""
    late_lookup_total: int = 0
    """Lookups that were not fully answered in time."""
    fetched_block_total: int = 0
    fetched_byte_total: int = 0
    fetch_bytes_per_s: float = 0.0
    refused_block_total: int = 0
    """Objects that were not the block of their name, whole and sound: none of their bytes was used."""
    stored_block_total: int = 0
    stored_byte_total: int = 0
    known_block_total: int = 0
    """Blocks that were there already when they were to be stored."""
    dropped_block_total: int = 0
    """Blocks that were not stored: too many waited, or they had left this server by then."""
    deleted_block_total: int = 0
    queue_count: int = 0
    """Blocks that wait to be stored."""
    failure_total: int = 0
    """Requests that the store did not answer, or refused."""
    read_pause_detail: str = ""
    """Why nothing is looked up at present; empty while the store answers."""
    write_pause_detail: str = ""
    """Why nothing is stored at present; empty while that works."""


@dataclasses.dataclass(frozen=True, slots=True)
class CacheStats:
    """The prefix cache's counters. `ssd`, `disk` and `last_reconcile` are None without an SSD tier, `shared`
    without an object store."""

    block_token_limit: int = 256
    unsupported_detail: str = ""
    """Why this model's prompts cannot be cached; empty when they can."""
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
