"""Cold tier: the port of whatever stores blocks below RAM, and the tickets of its calls.

Another implementation is a class with the methods of `ColdTier`, made with the clock and with a function that
posts an `Outcome`. It is one model's. The composition starts and closes it; in between the engine's thread
calls it. None of the calls blocks, and none raises for an error of the medium: each returns a ticket, or None
where too much is queued already. The ticket comes back through the engine's mailbox, done or failed. The tier
also posts what nobody asked for: the inventory first, blocks that left, the end last. It may post on any
thread.

The engine decides what is stored, for whom, and what is removed for it. The tier stores what it was given,
completely or not at all, within its own limits. Only frozen data crosses, never an mx.array. Sizes are bytes,
times are seconds.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from icehouse_server.domain.blocks import BlockHeader, Damage, HostBlock, HostRegion, RegionKind
from icehouse_server.domain.cache_stats import CacheStats, SpillDropCause
from icehouse_server.domain.ids import BlockHash, RequestId
from icehouse_server.pins import NOT_PINNED

Result = TypeVar("Result")

_LEAST_RATE, _MOST_RATE = 1e-3, 1e12
"""Bytes or tokens a second that anybody can have measured."""
_UNTRIED_LIMIT = 1000
"""Prompts; reading is tried again long before."""

STALL_LIMIT_S = 5.0
"""A tier that takes longer for one piece of work counts as hung."""

OVERHEAD_BYTES = 64 * 1024
"""The most that a block takes of a tier's space and of its queue beside its tensors' bytes."""


class Trouble(enum.StrEnum):
    """Why a call failed, where no block is the cause."""

    UNUSABLE = "unusable"
    """The medium refuses now; the tier retries later."""
    TIMED_OUT = "timed out"
    """The caller stopped waiting."""
    LOST = "lost"
    """The tier is gone for good."""


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """Why a call failed, and which block is the cause, if one is."""

    cause: Damage | SpillDropCause | Trouble
    detail: str = ""
    hash: BlockHash | None = None
    header_checksum: int | None = None
    """Of the file that was read, if known: another file may have its name by now."""


@dataclasses.dataclass(eq=False, slots=True)
class Ticket(Generic[Result]):
    """A call of a cold tier: pending, then done with a result or failed with a reason, once.

    The tier writes the outcome before it posts the ticket; the caller reads it when the ticket has come.
    """

    outcome: Result | Failure | None = None

    def finish(self, outcome: Result | Failure) -> None:
        """Write the outcome. The tier only."""
        assert self.outcome is None, f"{self} is finished twice"
        self.outcome = outcome


class StoredBlock(Protocol):
    """What the engine learns of a block in the tier."""

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
    """A block's tensors are not those that a `KvTarget` is for."""


class KvTarget(Protocol):
    """The caller's memory for the kv of the blocks of one load. Any thread; the tier releases it before
    the ticket comes, or, after `abandon`, when the system returns from the read.

    Its content counts only for blocks that the result names: others may be half read, or wrong.
    """

    def segments(
        self, tensors: Sequence[TensorShape], *, start_token_index: int, token_count: int
    ) -> list[memoryview]:
        """Return writable memory for all bytes of a block's kv region, in the order of its tensors, each a
        C-contiguous array. Raises `LayoutMismatch` where it is not for these tensors."""


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedBlock:
    """One block to read, and the wanted regions."""

    header: BlockHeader
    """The stored one must equal it, token ids included."""
    regions: frozenset[RegionKind]


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedBlock:
    """The wanted regions of one loaded block, without kv that was read into a `KvTarget`."""

    header: BlockHeader
    regions: tuple[HostRegion, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Loaded:
    """The verified beginning of a load: its first blocks, all of them unless `failure` is set."""

    blocks: tuple[LoadedBlock, ...]
    read_bytes: int
    read_bytes_per_s: float
    """Moving average over the recent loads."""
    failure: Failure | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Persisted:
    """The block is in the tier."""

    record: StoredBlock
    request_id: RequestId | None = None
    """Whose work made the block leave RAM; None at shutdown, or when it was stored already."""
    start_time: float = 0.0
    """`Clock.wall` when writing began."""
    duration_s: float = 0.0


class Purged(NamedTuple):
    """What a `delete` removed."""

    block_count: int
    size_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Verified:
    """The result of a `verify`; damaged blocks are gone, and were named by `Evicted`."""

    checked_count: int
    checked_bytes: int
    damaged: tuple[Failure, ...]


class WriteBudget(NamedTuple):
    """How many bytes may be written today, and how many of them are left."""

    limit_bytes: int
    left_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """How much of a chain other servers have stored where this one can fetch it."""

    block_count: int
    """From its beginning."""
    size_bytes: int
    """About, of these together."""
    fetch_bytes_per_s: float
    """Moving average over the recent fetches; 0 before the first few."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fetched:
    """What a `fetch` brought."""

    block_count: int
    """From the beginning of what was asked for; the inventory has them by now."""
    size_bytes: int


Names = tuple[BlockHash, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class LearnedRates:
    """How fast a model's blocks are read and its tokens computed, as an engine measured it."""

    measured_on: str
    """The machine, the device and how blocks are written: elsewhere the rest says nothing."""
    read_bytes_per_s: float
    adopt_tokens_per_s: float
    """Rebuilding caches of what was read."""
    prefill_tokens_per_s: float
    untried_count: int = 0
    """Prompts since the last load that were computed on the word of these rates alone."""

    @property
    def is_plausible(self) -> bool:
        """Whether an engine can have measured this; it may come from a file that says anything."""
        rates = (self.read_bytes_per_s, self.adopt_tokens_per_s, self.prefill_tokens_per_s)
        return (
            all(isinstance(rate, float) and _LEAST_RATE <= rate <= _MOST_RATE for rate in rates)
            and isinstance(self.untried_count, int)
            and 0 <= self.untried_count <= _UNTRIED_LIMIT
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Inventory:
    """All usable blocks of the served model. The last part replaces everything known before.

    Posted once at start, and again after the medium had to be opened anew. A large one comes in parts, chains
    from their beginnings, with pauses so that the engine can take them in between decode steps. Blocks that a
    `fetch` brought come as a part that is neither the first nor the last.
    """

    records: tuple[StoredBlock, ...]
    is_first: bool = True
    is_last: bool = True
    rates: LearnedRates | None = None
    """What `keep_rates` was told last, perhaps before this start."""


@dataclasses.dataclass(frozen=True, slots=True)
class Evicted:
    """These blocks are gone, because of the tier's limits, by order or for damage."""

    hashes: Names


@dataclasses.dataclass(frozen=True, slots=True)
class StorageFailed:
    """The tier is dead: a broken invariant. Posted once, nothing follows."""

    error: str


@dataclasses.dataclass(frozen=True, slots=True)
class StorageClosed:
    """The tier was closed in order. Nothing follows."""

    was_clean: bool


AnyTicket = Ticket[Any]
Outcome = AnyTicket | Inventory | Evicted | StorageFailed | StorageClosed
"""What comes through the mailbox."""


class ColdTier(Protocol):
    """Started and closed once. A block that was put before another call names it is written before that call
    is done."""

    def start(self) -> None:
        """Begin; the inventory is posted when it is known.

        A tier that has its medium to itself takes it for this process and raises `StartError` where another
        one has it. A medium that fails, or does not answer in some seconds, does not stop the start: the tier
        begins when it can.
        """

    def close(self, *, deadline_time: float) -> None:
        """Write what was put until the deadline (`Clock.monotonic`), then end; returns at once."""

    def join(self, *, timeout_s: float) -> bool:
        """Wait for the end after `close`; False when the tier hangs or takes longer."""

    @property
    def queue_space_bytes(self) -> int:
        """Bytes of blocks, with `OVERHEAD_BYTES` for each, that `put` takes now, on the engine's thread; only
        `put` lowers that, this tier's and those of other models."""

    @property
    def block_limit_bytes(self) -> int:
        """Bytes of the largest block, with `OVERHEAD_BYTES`, that `put` ever takes."""

    @property
    def write_budget(self) -> WriteBudget | None:
        """Today's budget of writes, perhaps a moment old; None without a limit. Blocks that are queued are
        not taken off yet."""

    def put(
        self, block: HostBlock, *, pin_end_time: float = NOT_PINNED, request_id: RequestId | None = None
    ) -> Ticket[Persisted]:
        """Store a block, for this request; there must have been queue space for it. Done without a write
        where all its regions are stored. Fails for a `SpillDropCause`, also where other models have filled
        the queue since."""

    def get_into(self, blocks: Sequence[PlannedBlock], into: KvTarget | None) -> Ticket[Loaded] | None:
        """Read and verify blocks of one chain, in its order, their kv into this memory; without it the tier
        makes some. Fails for the `Damage` of the first; where another is damaged, those before are there."""

    def heads(self, blocks: Names) -> Ticket[tuple[BlockHeader, ...]] | None:
        """Read the headers of blocks, token ids included; those that are not sound are left out."""

    def find(self, blocks: Names, *, limit_s: float) -> Ticket[Found] | None:
        """Ask how much of a chain other servers have stored, answered within `limit_s` as far as it is known
        by then. None where there is nobody to ask, who was asked for it just now or does not answer."""

    def fetch(self, blocks: Names) -> Ticket[Fetched] | None:
        """Bring blocks that were found into this tier, verified, in the order of their chain. What cannot be
        had ends it: that is no failure. None where there is nobody to ask, or too much is under way."""

    def touch(self, blocks: Names) -> bool:
        """Note that blocks were used, a chain from its end to its beginning. False: too much is queued."""

    def demote(self, blocks: Names) -> bool:
        """Have blocks go before all others until they are used, the last of these first. A restart forgets
        this. False: too much is queued."""

    def pin(self, blocks: Names, end_time: float) -> Ticket[Names] | None:
        """Protect blocks, queued ones too, from removal for the tier's limits until then (`Clock.wall`), or
        with NOT_PINNED no longer; a pin that ends later stays. The result names those that are neither
        stored nor queued."""

    def delete(self, blocks: Names, *, is_final: bool = False) -> Ticket[Purged] | None:
        """Remove blocks, pinned ones too; `Evicted` names them before the ticket comes. With none named it is
        done when everything put before is written or dropped. `is_final`: nobody is to use them again, so
        they also go from where other servers could fetch them, as soon as that answers."""

    def verify(self, blocks: Names | None = None) -> Ticket[Verified] | None:
        """Read and check every byte of blocks, None for all."""

    def names(self, *, block_limit: int) -> Ticket[Names] | None:
        """Name the blocks, least recently verified first; 0 is all."""

    def keep_rates(self, rates: LearnedRates) -> bool:
        """Keep what was learned of speed for the model's next start; a crash may lose the last seconds'.
        False: too much is queued."""

    def stats(self) -> Ticket[CacheStats] | None:
        """Return the counters, as far as the tier knows them."""

    def abandon(self, ticket: AnyTicket) -> None:
        """Stop waiting for a read or a fetch. The ticket may come all the same."""

    def silence_s(self, ticket: AnyTicket) -> float:
        """Return for how long a read has made no progress; 0 once answered."""

    @property
    def hung_read_count(self) -> int:
        """Reads that were abandoned and from which the medium has not returned."""

    @property
    def stall_s(self) -> float:
        """For how long the tier has been at one piece of work; 0 while it waits for some."""

    def leave_cores(self, *, to_decode: bool) -> None:
        """Read at a small share of a core from now on, or at full speed; reads under way too."""


def hang_detail(tier: ColdTier) -> str:
    """Say which part of a tier does not answer, and what follows; empty where all is well."""
    parts = []
    if tier.hung_read_count:
        parts.append(f"{tier.hung_read_count} reads hang; prompts are computed until they return")
    if tier.stall_s >= STALL_LIMIT_S:
        parts.append(f"the storage thread hangs for {tier.stall_s:.0f} s; nothing is written meanwhile")
    return f"The disk does not answer: {'; '.join(parts)}" if parts else ""
