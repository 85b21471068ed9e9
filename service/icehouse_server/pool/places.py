"""Places: the models of a pool, how each is served, which of them are in memory, and who gives way to whom.
Event loop."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from icehouse_server.domain.ids import Tenant
from icehouse_server.domain.model import ListedModel, ModelInfo, ModelState
from icehouse_server.errors import CannotFit, IcehouseError, Reason, size_text
from icehouse_server.rpc.engine_client.seat import Seat

LONGEST_STAY_S = 10.0
_IDLE_SHARE = 0.1


@dataclasses.dataclass(frozen=True, slots=True)
class ModelTerms:
    """How a model is served. Without `tenants` everybody may use it; a `ttl_s` of 0 keeps it loaded."""

    name: str
    aliases: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    tenants: frozenset[Tenant] = frozenset()
    is_pinned: bool = False
    """Loaded at the start, and gives way to none."""
    ttl_s: float = 0.0
    """It is unloaded after so long without a call."""


@dataclasses.dataclass(frozen=True, slots=True)
class ModelNeeds:
    """What a model takes of the memory."""

    weight_bytes: int
    """As long as it is loaded."""
    run_bytes: int = 0
    """What a small request takes besides. Idle models give back what they keep, so it must be there once."""


class OpenedModel(Protocol):
    """A model with an engine."""

    @property
    def seat(self) -> Seat: ...
    @property
    def error(self) -> IcehouseError | None:
        """Why its engine failed; for the log, since it may name folders."""

    def start(self) -> None:
        """Begin to load it; the seat's router hears of READY or FAILED."""

    async def end(self) -> None:
        """End what runs, write RAM's blocks to SSD, and give the memory back."""


_Opened_co = TypeVar("_Opened_co", bound=OpenedModel, covariant=True)


class ModelOpener(Protocol[_Opened_co]):
    """Finds and opens models, by the names of their terms. Any thread."""

    def locate(self, name: str) -> ModelNeeds:
        """Have the model's files here, which may take an hour; return what it takes. Several models may be
        located at a time. Raises IcehouseError."""

    def open(self, name: str) -> _Opened_co:
        """Return the model with its tokenizer read, not started; one at a time. Raises IcehouseError."""


@dataclasses.dataclass(slots=True, eq=False)
class Place:
    """A model in memory. Times are `Clock.monotonic` readings."""

    terms: ModelTerms
    opened: OpenedModel
    needs: ModelNeeds
    use_time: float
    """When it was last used."""
    user_count: int = 0
    """Calls that use it."""
    idle: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    """Set while nobody uses it."""
    released: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    """Set by whoever stops using it."""
    expiry: asyncio.TimerHandle | None = None
    ready_time: float = 0.0
    load_s: float = 0.0
    """How long loading it took."""

    def keep(self) -> None:
        """Cancel its expiry."""
        if self.expiry is not None:
            self.expiry.cancel()
            self.expiry = None

    def stay_s(self, now: float) -> float:
        """Return for how long it gives way to none yet, unless a call changes that; 0 where it does now.

        It stays for as long as its loading took, so that no more time goes into loading than into serving;
        but where nobody has asked it for a tenth of that, its callers seem to have left.
        """
        left_s = self.ready_time + min(self.load_s, LONGEST_STAY_S) - now
        if not self.user_count:
            left_s = min(left_s, self.use_time + _IDLE_SHARE * self.load_s - now)
        return max(0.0, left_s)


@dataclasses.dataclass(slots=True, eq=False)
class PooledModel:
    """A model of the pool."""

    terms: ModelTerms
    state: ModelState = ModelState.ABSENT
    place: Place | None = None
    loading: asyncio.Task[None] | None = None
    ending: asyncio.Task[None] | None = None
    """Of an engine that failed."""
    fetching: asyncio.Task[None] | None = None
    """Of its files."""
    found: ModelNeeds | IcehouseError | None = None
    """What came of that last time: what it takes, or why it is not here."""
    waiters: list[asyncio.Future[Place]] = dataclasses.field(default_factory=list)
    error: IcehouseError | None = None
    failed_time: float = 0.0
    info: ModelInfo | None = None
    """What is known of it since it was loaded once."""

    @property
    def listed(self) -> ListedModel:
        """What callers see of it."""
        detail = "" if self.error is None or self.state is not ModelState.FAILED else shown(self.error)
        terms = self.terms
        return ListedModel(terms.name, self.state, terms.aliases, detail, self.info, terms.adapters)


def shown(error: IcehouseError) -> str:
    """Return why a model failed, for callers. The error itself may name folders."""
    return f"{error.reason}; the server's log says more"


def taken_bytes(needs: ModelNeeds, staying: Iterable[Place]) -> int:
    """Return what a model needs beside others: all weights, and that any of them can run."""
    together = [needs, *(each.needs for each in staying)]
    return sum(each.weight_bytes for each in together) + max(each.run_bytes for each in together)


def yielding(
    name: str, needs: ModelNeeds, occupants: Sequence[Place], *, limit_bytes: int
) -> tuple[Place, ...]:
    """Return who gives way to a model, the first one first; nobody where it fits beside all.

    Idle models come before running ones, which must be drained first, and among either the least
    recently used one; pinned ones never. Raises CannotFit if even that is not enough.
    """
    pinned = [each for each in occupants if each.terms.is_pinned]
    if taken_bytes(needs, pinned) > limit_bytes:
        raise _never_fits(name, needs, pinned, limit_bytes=limit_bytes)
    staying, chosen = list(occupants), list[Place]()
    movable = (each for each in occupants if not each.terms.is_pinned)
    for each in sorted(movable, key=lambda each: (each.user_count > 0, each.use_time)):
        if taken_bytes(needs, staying) <= limit_bytes:
            break
        chosen.append(each)
        staying.remove(each)
    # An idle one that is not needed any more, now that larger ones go, stays.
    for each in tuple(chosen):
        if taken_bytes(needs, [*staying, each]) <= limit_bytes:
            chosen.remove(each)
            staying.append(each)
    return tuple(chosen)


def _never_fits(name: str, needs: ModelNeeds, pinned: Sequence[Place], *, limit_bytes: int) -> CannotFit:
    pinned_bytes = sum(each.needs.weight_bytes for each in pinned)
    run_bytes = taken_bytes(needs, pinned) - needs.weight_bytes - pinned_bytes
    beside, advice = "", ""
    if pinned:
        beside, advice = f", pinned models take {size_text(pinned_bytes)}", "pin fewer models, or "
    return CannotFit(
        Reason.MEMORY_NEVER_FITS,
        f"model {name!r} takes {size_text(needs.weight_bytes)} of memory, a small request takes about "
        f"{size_text(run_bytes)}{beside}, and the server may use {size_text(limit_bytes)}; {advice}raise "
        "engine.memory_limit_bytes if there is more",
        metadata={
            "model": name,
            "weight_bytes": needs.weight_bytes,
            "pinned_bytes": pinned_bytes,
            "run_bytes": run_bytes,
            "limit_bytes": limit_bytes,
        },
    )
