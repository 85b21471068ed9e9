"""Cold tier: the port of whatever stores blocks below RAM, and the tickets of its calls.

Another implementation is a class with the methods of `ColdTier`, made with a clock and a function that posts
an `Outcome`. It belongs to one model. The composition starts and closes it; in between the engine's thread
calls it. No call blocks, and none raises for an error of the medium: each returns a ticket, or None if too
much is queued already. The ticket comes back through the engine's mailbox, done or failed. The tier also
posts unasked: first the inventory, then blocks that left, and last its end. It may post on any thread.

The engine decides what is stored, for whom, and what is removed for it. The tier stores what it was given,
completely or not at all, within its own limits. Only frozen data crosses, never an mx.array. Sizes are bytes,
times are seconds.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from icehouse_server.domain.blocks import BlockDamage, BlockHeader, HostBlock, HostRegion, RegionKind
from icehouse_server.domain.cache_stats import CacheStats, SpillDropCause
from icehouse_server.domain.ids import BlockHash, RequestId
from icehouse_server.pins import NOT_PINNED

Result = TypeVar("Result")

_LEAST_RATE, _MOST_RATE = 1e-3, 1e12
"""Bytes or tokens a second that any machine can have measured."""
_UNTRIED_LIMIT = 1000
"""Prompts; reading is tried again long before that many."""

STALL_LIMIT_S = 5.0
"""A tier that takes longer for one piece of work counts as hung."""

OVERHEAD_BYTES = 64 * 1024
"""The most that a block takes of a tier's space and queue beyond its tensors' bytes."""


class StorageTrouble(enum.StrEnum):
    """Why a call failed, if no block is the cause."""

    UNUSABLE = "unusable"
    """The medium refuses now; the tier retries later."""
    TIMED_OUT = "timed out"
    """The caller stopped waiting."""
    LOST = "lost"
    """The tier is gone for good."""


@dataclasses.dataclass(frozen=True, slots=True)
class StorageFailure:
    """Why a call failed, and which block is the cause, if one is."""

    cause: BlockDamage | SpillDropCause | StorageTrouble
    detail: str = ""
    hash: BlockHash | None = None
    header_checksum: int | None = None
    """Of the file that was read, if known: by now another file may have its name."""


@dataclasses.dataclass(eq=False, slots=True)
class Ticket(Generic[Result]):
    """A call of a cold tier: pending, then done with a result or failed with a reason, once.

    The tier writes the outcome before it posts the ticket; the caller reads it once the ticket has arrived.
    """

    outcome: Result | StorageFailure | None = None

    def finish(self, outcome: Result | StorageFailure) -> None:
        """Write the outcome. The tier only."""
        assert self.outcome is None, f"{self} is finished twice"
        self.outcome = outcome


class StoredBlock(Protocol):
    """What the engine learns about a block in the tier."""

    @property
    def hash(self) -> BlockHash: ...
    @property
    def parent(self) -> BlockHash: ...
    @property
    def start_token_index(self) -> int: ...
    @property
    def token_count(self) -> int: ...
    @property
    def kv_bytes(self) -> int: ...
    @property
    def window_bytes(self) -> int: ...
    @property
    def checkpoint_bytes(self) -> int: ...
    @property
    def file_bytes(self) -> int: ...
    @property
    def hit_count(self) -> int: ...
    @property
    def pin_end_time(self) -> float: ...


@dataclasses.dataclass(frozen=True, slots=True)
class TensorShape:
    """One of a block's tensors, without its bytes."""

    name: str
    """Without its region."""
    dtype: str
    """As safetensors names it."""
    shape: tuple[int, ...]
    size_bytes: int


class LayoutMismatch(Exception):
    """A block's tensors do not fit the `KvTarget`."""


class KvTarget(Protocol):
    """The caller's memory for the KV of the blocks of one load. Any thread; the tier releases it before
    the ticket arrives, or, after `abandon`, when the system returns from the read.

    Its content is valid only for blocks that the result names: others may be half read, or wrong.
    """

    def segments(
        self, tensors: Sequence[TensorShape], *, start_token_index: int, token_count: int
    ) -> list[memoryview]:
        """Return writable memory for all bytes of a block's kv region, in the order of its tensors, each a
        C-contiguous array. Raises `LayoutMismatch` if the memory does not fit these tensors."""


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedBlock:
    """One block to read, and the wanted regions."""

    header: BlockHeader
    """The stored header must equal it, token ids included."""
    regions: frozenset[RegionKind]


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedBlock:
    """The wanted regions of one loaded block, without KV that was read into a `KvTarget`."""

    header: BlockHeader
    regions: tuple[HostRegion, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class BlocksLoaded:
    """The verified beginning of a load: its first blocks, all of them unless `failure` is set."""

    blocks: tuple[LoadedBlock, ...]
    read_bytes: int
    read_bytes_per_s: float
    """Moving average over the recent loads."""
    failure: StorageFailure | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class BlockPersisted:
    """The block is in the tier."""

    record: StoredBlock
    request_id: RequestId | None = None
    """The request that made the block leave RAM; None at shutdown, or if it was stored already."""
    start_time: float = 0.0
    """`Clock.wall` when writing began."""
    duration_s: float = 0.0


class BlocksPurged(NamedTuple):
    """What a `delete` removed."""

    block_count: int
    size_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Verified:
    """The result of a `verify`; damaged blocks are gone, and were named by `BlocksEvicted`."""

    checked_count: int
    checked_bytes: int
    damaged: tuple[StorageFailure, ...]


class WriteBudget(NamedTuple):
    """How many bytes may be written today, and how many of them remain."""

    limit_bytes: int
    left_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class ChainFound:
    """How much of a chain is in a store that other servers share with this one."""

    block_count: int
    """From the chain's beginning."""
    size_bytes: int
    """Estimate for these blocks together."""
    fetch_bytes_per_s: float
    """Moving average over the recent fetches; 0 before the first few."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fetched:
    """What a `fetch` brought in."""

    block_count: int
    """From the beginning of the requested blocks; the inventory has them by now."""
    size_bytes: int


Names = tuple[BlockHash, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class LearnedRates:
    """How fast a model's blocks are read and its tokens computed, as an engine measured it."""

    measured_on: str
    """The machine, the device and the block encoding; on others the rates mean nothing."""
    read_bytes_per_s: float
    adopt_tokens_per_s: float
    """Rebuilding caches from the bytes read."""
    prefill_tokens_per_s: float
    untried_count: int = 0
    """Prompts since the last load that were computed because of these rates alone."""

    @property
    def is_plausible(self) -> bool:
        """Whether an engine can have measured this; it may come from a file that contains anything."""
        rates = (self.read_bytes_per_s, self.adopt_tokens_per_s, self.prefill_tokens_per_s)
        return (
            all(isinstance(rate, float) and _LEAST_RATE <= rate <= _MOST_RATE for rate in rates)
            and isinstance(self.untried_count, int)
            and 0 <= self.untried_count <= _UNTRIED_LIMIT
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Inventory:
    """All usable blocks of the served model. The last part replaces everything known before.

    Posted once at start, and again after the medium had to be reopened. A large one comes in parts, chains
    from their beginnings, with pauses so that the engine can take them in between decode steps. Blocks that a
    `fetch` brought in come as a part that is neither the first nor the last.
    """

    records: tuple[StoredBlock, ...]
    is_first: bool = True
    is_last: bool = True
    rates: LearnedRates | None = None
    """The last value given to `keep_rates`, perhaps before this start."""


@dataclasses.dataclass(frozen=True, slots=True)
class BlocksEvicted:
    """These blocks are gone: evicted for the tier's limits, deleted on request, or damaged."""

    hashes: Names


@dataclasses.dataclass(frozen=True, slots=True)
class StorageFailed:
    """The tier is dead: an invariant was broken. Posted once, nothing follows."""

    error: str


@dataclasses.dataclass(frozen=True, slots=True)
class StorageClosed:
    """The tier was closed normally. Nothing follows."""

    was_clean: bool


AnyTicket = Ticket[Any]
Outcome = AnyTicket | Inventory | BlocksEvicted | StorageFailed | StorageClosed
"""What a tier posts to the mailbox."""


class ColdTier(Protocol):
    """Started and closed once. A block that was put before another call names it is written before that call
    is done."""

    def start(self) -> None:
        """Begin; the inventory is posted when it is known.

        A tier that needs its medium exclusively claims it for this process, and raises `StartError` if
        another process has it. A medium that fails, or does not answer within seconds, does not stop the
        start: the tier begins when it can.
        """

    def close(self, *, deadline_time: float) -> None:
        """Write the blocks put so far until the deadline (`Clock.monotonic`), then end; returns at once."""

    def join(self, *, timeout_s: float) -> bool:
        """Wait for the end after `close`; False when the tier hangs or takes longer."""

    @property
    def queue_space_bytes(self) -> int:
        """Bytes of blocks, with `OVERHEAD_BYTES` for each, that `put` accepts now, on the engine's thread.
        Only `put` lowers it, by this tier or by those of other models."""

    @property
    def block_limit_bytes(self) -> int:
        """Bytes of the largest block, `OVERHEAD_BYTES` included, that `put` ever accepts."""

    @property
    def write_budget(self) -> WriteBudget | None:
        """Today's write budget, perhaps slightly out of date; None without a limit. Queued blocks are not
        subtracted yet."""

    def put(
        self, block: HostBlock, *, pin_end_time: float = NOT_PINNED, request_id: RequestId | None = None
    ) -> Ticket[BlockPersisted]:
        """Store a block, for this request; the caller has checked that the queue has space. Done without a
        write if all its regions are stored. Fails with a `SpillDropCause`, also if other models have filled
        the queue since the check."""

    def get_into(self, blocks: Sequence[PlannedBlock], into: KvTarget | None) -> Ticket[BlocksLoaded] | None:
        """Read and verify blocks of one chain, in its order, their KV into this memory; without it the tier
        allocates some. Fails with the `BlockDamage` of the first block; if a later one is damaged, those
        before it are returned."""

    def heads(self, blocks: Names) -> Ticket[tuple[BlockHeader, ...]] | None:
        """Read the headers of blocks, token ids included; damaged ones are left out."""

    def find(self, blocks: Names, *, limit_s: float) -> Ticket[ChainFound] | None:
        """Ask how much of a chain other servers have stored; within `limit_s` the answer is what is known by
        then. None if there is no store, or if it was asked for this chain just now or does not answer."""

    def fetch(self, blocks: Names) -> Ticket[Fetched] | None:
        """Bring blocks that `find` found into this tier, verified, in the order of their chain. The first
        unavailable one ends it, which is no failure. None if there is no store, or too much is in flight."""

    def touch(self, blocks: Names) -> bool:
        """Note that blocks were used, a chain from its end to its beginning. False: too much is queued."""

    def demote(self, blocks: Names) -> bool:
        """Make these blocks the first to be evicted until they are used, the last of them first. A restart
        forgets this. False: too much is queued."""

    def pin(self, blocks: Names, end_time: float) -> Ticket[Names] | None:
        """Protect blocks, queued ones too, from eviction until then (`Clock.wall`); NOT_PINNED ends the
        protection. A pin that ends later stays. The result names blocks that are neither stored nor
        queued."""

    def delete(self, blocks: Names, *, is_final: bool = False) -> Ticket[BlocksPurged] | None:
        """Remove blocks, pinned ones too; `BlocksEvicted` names them before the ticket arrives. Without names
        it is done when everything put before is written or dropped. `is_final`: nobody may use them again, so
        they are also deleted from the store that servers share, as soon as it answers."""

    def verify(self, blocks: Names | None = None) -> Ticket[Verified] | None:
        """Read and check every byte of these blocks; None means all blocks."""

    def names(self, *, block_limit: int) -> Ticket[Names] | None:
        """Name the blocks, least recently verified first; a limit of 0 means all."""

    def keep_rates(self, rates: LearnedRates) -> bool:
        """Keep the learned rates for the model's next start; a crash may lose those of the last seconds.
        False: too much is queued."""

    def stats(self) -> Ticket[CacheStats] | None:
        """Return the counters, as far as the tier knows them."""

    def abandon(self, ticket: AnyTicket) -> None:
        """Stop waiting for a read or a fetch. Its ticket may still arrive."""

    def silence_s(self, ticket: AnyTicket) -> float:
        """Return how long a read has made no progress; 0 once answered."""

    @property
    def hung_read_count(self) -> int:
        """Reads that were abandoned, but from which the medium has not returned."""

    @property
    def stall_s(self) -> float:
        """How long the tier has been at one piece of work; 0 while it waits for work."""

    def leave_cores(self, *, to_decode: bool) -> None:
        """Read at a small share of a core from now on, or at full speed; reads in progress too."""


def hang_detail(tier: ColdTier) -> str:
    """Say which part of a tier does not answer, and what follows; empty if all is well."""
    parts = []
    if tier.hung_read_count:
        parts.append(f"{tier.hung_read_count} reads hang; prompts are computed until they return")
    if tier.stall_s >= STALL_LIMIT_S:
        parts.append(f"the storage thread hangs for {tier.stall_s:.0f} s; nothing is written meanwhile")
    return f"The disk does not answer: {'; '.join(parts)}" if parts else ""
