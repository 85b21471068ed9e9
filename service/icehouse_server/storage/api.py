"""Cold tier: the port of whatever keeps blocks below RAM, and the ticket of what was asked of it.

The engine's thread calls the verbs. None of them blocks and none fails for what the medium does: each returns
a ticket, or None where too much waits already. The ticket comes back through the engine's mailbox, done or
failed, with what nobody asked for: the inventory at the start, blocks that left, the end. Policy is the
engine's, what is kept, for whom and what goes for it; the tier keeps what it was given, whole or not at all,
within its own limits. Frozen data only crosses, never an mx.array. Sizes are bytes, times are seconds.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from icehouse_server.domain.blocks import BlockHeader, Damage, HostBlock, HostRegion, RegionKind
from icehouse_server.domain.cache_stats import CacheStats, SpillDropCause
from icehouse_server.domain.ids import BlockHash, RequestId

Result = TypeVar("Result")

STALL_LIMIT_S = 5.0
"""A tier that is at one piece of work for so long hangs, as far as others are concerned."""

OVERHEAD_BYTES = 64 * 1024
"""What a block takes at most of a tier's space and of its queue beside its tensors' bytes."""


class Trouble(enum.StrEnum):
    """Why something was not done of which no block is the cause."""

    UNUSABLE = "unusable"
    """The medium refuses now; it is tried again."""
    TIMED_OUT = "timed out"
    """Whoever asked stopped waiting."""
    LOST = "lost"
    """The tier is gone for good."""


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """Why something was not done, and of which block if it is one's fault or fate."""

    cause: Damage | SpillDropCause | Trouble
    detail: str = ""
    hash: BlockHash | None = None
    header_checksum: int | None = None
    """Of the file that was read, if it came so far: another one may have its name by now."""


@dataclasses.dataclass(eq=False, slots=True)
class Ticket(Generic[Result]):
    """Something asked of a cold tier: pending, then done with a result or failed with a reason, once.

    The tier writes the outcome and then posts the ticket; whoever asked looks at it when it has come.
    """

    outcome: Result | Failure | None = None

    @property
    def is_pending(self) -> bool:
        return self.outcome is None

    def finish(self, outcome: Result | Failure) -> None:
        """Write the outcome. The tier only."""
        assert self.outcome is None, f"{self} is finished twice"
        self.outcome = outcome


class StoredBlock(Protocol):
    """What the engine is told of a block in the tier."""

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
    def file_bytes(self) -> int:
        """What it takes of the tier's space."""
        ...

    @property
    def hit_count(self) -> int: ...
    @property
    def pinned(self) -> bool: ...


@dataclasses.dataclass(frozen=True, slots=True)
class TensorShape:
    """One of a block's tensors, without its bytes."""

    name: str
    """Without its region."""
    dtype: str
    """As safetensors names it."""
    shape: tuple[int, ...]
    size_bytes: int


class UnfitLayout(Exception):
    """A block's tensors are not those that a `KvPlace` is for."""


class KvPlace(Protocol):
    """Memory of whoever asks, for the kv of the blocks of one load. Any thread; the tier lets go of it before
    the ticket comes, and of what is abandoned when the system returns from the read.

    What is in it counts only for blocks that the result names: others may be half there, or wrong.
    """

    def segments(
        self, tensors: Sequence[TensorShape], *, start_token_index: int, token_count: int
    ) -> list[memoryview]:
        """Return writable memory for all bytes of a block's kv region, in the order of its tensors, each a
        C-contiguous array. Raises `UnfitLayout` where these are not the tensors it is for."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedBlock:
    """One block to read: what it must say it is, and what of it is wanted."""

    header: BlockHeader
    """Compared whole with the stored one, token ids included."""
    regions: frozenset[RegionKind]


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedBlock:
    """The regions of one loaded block that were asked for, but for kv that was read into a `KvPlace`."""

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
    """Whose work made the block leave RAM; None at the stop, which is nobody's, or when it was there."""
    start_time: float = 0.0
    """`Clock.wall` when writing began."""
    duration_s: float = 0.0


class Purged(NamedTuple):
    """What a `delete` removed."""

    block_count: int
    size_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Verified:
    """What a `verify` found; damaged blocks are gone, and were named by `Evicted`."""

    checked_count: int
    checked_bytes: int
    damaged: tuple[Failure, ...]


Names = tuple[BlockHash, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Inventory:
    """All usable blocks of the served model. Replaces everything known before, with its last part.

    Posted once at start, and again after the medium had to be opened anew. A large one comes in parts, chains
    from their beginnings, with pauses for whoever takes them in between decode steps.
    """

    records: tuple[StoredBlock, ...]
    is_first: bool = True
    is_last: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Evicted:
    """These blocks are gone, by the tier's limits, by order or for damage."""

    hashes: Names


@dataclasses.dataclass(frozen=True, slots=True)
class StorageFailed:
    """The tier is dead: a broken invariant. Posted once, nothing follows."""

    error: str


@dataclasses.dataclass(frozen=True, slots=True)
class StorageClosed:
    """The tier is closed in order. The last that is posted."""

    was_clean: bool


AnyTicket = Ticket[Any]
Outcome = AnyTicket | Inventory | Evicted | StorageFailed | StorageClosed
"""What comes through the mailbox."""


class ColdTier(Protocol):
    """The verbs. What was put before a block is named in another one is carried out before that one."""

    @property
    def room_bytes(self) -> int:
        """Bytes of blocks, with `OVERHEAD_BYTES` for each, that `put` takes now; only `put` makes it less."""
        ...

    def put(
        self, block: HostBlock, *, pinned: bool = False, request_id: RequestId | None = None
    ) -> Ticket[Persisted]:
        """Keep a block, for this request; there must be room for it. Done without a write where all its
        regions are there. Fails for a `SpillDropCause`."""
        ...

    def get_into(self, blocks: Sequence[PlannedBlock], into: KvPlace | None) -> Ticket[Loaded] | None:
        """Read and verify blocks of one chain, in its order, their kv into this memory; without it the tier
        makes some. Fails for the `Damage` of the first; where another is damaged, those before are there."""
        ...

    def heads(self, blocks: Names) -> Ticket[tuple[BlockHeader, ...]] | None:
        """Read the headers of blocks, token ids included; those that are not sound are left out."""
        ...

    def touch(self, blocks: Names) -> bool:
        """Note that blocks were used, a chain from its end to its beginning. False: too much waits."""
        ...

    def pin(self, blocks: Names, *, pinned: bool = True) -> Ticket[Names] | None:
        """Keep blocks from going for the tier's limits, those that wait to be written too, or stop to. The
        result names those that are neither there nor waiting."""
        ...

    def delete(self, blocks: Names) -> Ticket[Purged] | None:
        """Remove blocks, pinned ones too; `Evicted` names them before the ticket comes."""
        ...

    def verify(self, blocks: Names | None = None) -> Ticket[Verified] | None:
        """Read and prove every byte of blocks, None for all."""
        ...

    def names(self, *, block_limit: int) -> Ticket[Names] | None:
        """Name the blocks, least recently verified first; 0 is all."""
        ...

    def stats(self) -> Ticket[CacheStats] | None:
        """Return the counters, as far as the tier knows them."""
        ...

    def abandon(self, ticket: AnyTicket) -> None:
        """Stop waiting for what is read. The ticket may come all the same."""
        ...

    def silence_s(self, ticket: AnyTicket) -> float:
        """Return for how long nothing has come on with what is read; 0 once answered."""
        ...

    @property
    def hung_read_count(self) -> int:
        """Reads that were abandoned and that the medium has not come back from."""
        ...

    @property
    def stall_s(self) -> float:
        """For how long the tier has been at one piece of work; 0 while it waits for some."""
        ...

    def leave_cores(self, *, to_decode: bool) -> None:
        """Read at a small share of a core from now on, or at full speed; what is under way too."""
        ...
