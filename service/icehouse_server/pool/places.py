"""Places: the models of a pool, how each is served, which of them are in memory, and which give way to
others. Event loop."""

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
    """How a model is served. Without `tenants` everybody may use it."""

    name: str
    aliases: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    tenants: frozenset[Tenant] = frozenset()
    is_pinned: bool = False
    """Whether it is loaded at the start and never gives way."""
    ttl_s: float = 0.0
    """How long it stays loaded without a call; 0 keeps it loaded."""


@dataclasses.dataclass(frozen=True, slots=True)
class ModelNeeds:
    """The memory that a model needs."""

    weight_bytes: int
    """Needed as long as it is loaded."""
    run_bytes: int = 0
    """What a small request needs as well. Idle models give back what they keep, so all models share this."""


class OpenedModel(Protocol):
    """A model with an engine."""

    @property
    def seat(self) -> Seat: ...
    @property
    def error(self) -> IcehouseError | None:
        """Why its engine failed; only for the log, since it may name folders."""

    def start(self) -> None:
        """Begin to load it; the seat's router then becomes READY or FAILED."""

    async def end(self) -> None:
        """End running calls, write the RAM tier's blocks to SSD, and give the memory back."""


_Opened_co = TypeVar("_Opened_co", bound=OpenedModel, covariant=True)


class ModelOpener(Protocol[_Opened_co]):
    """Finds and opens models, by the names of their terms. Any thread."""

    def locate(self, name: str) -> ModelNeeds:
        """Fetch the model's files if they are not here, which may take an hour; return what memory it needs.
        Several models may be located at a time. Raises IcehouseError."""

    def open(self, name: str) -> _Opened_co:
        """Return the model with its tokenizer read, but not started. One at a time. Raises IcehouseError."""


@dataclasses.dataclass(slots=True, eq=False)
class LoadedPlace:
    """A model in memory. Times are `Clock.monotonic` readings."""

    terms: ModelTerms
    opened: OpenedModel
    needs: ModelNeeds
    use_time: float
    """When it was last used."""
    user_count: int = 0
    """How many calls use it."""
    idle: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    """Set while nobody uses it."""
    released: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    """Set when a call stops using it."""
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
        """Return how much longer it does not give way, unless a call changes that; 0 if it does now.

        It stays as long as its loading took, so that no more time goes into loading than into serving. But if
        no call has come for a tenth of that time, its callers seem to have left.
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
    place: LoadedPlace | None = None
    loading: asyncio.Task[None] | None = None
    ending: asyncio.Task[None] | None = None
    """Of an engine that failed."""
    fetching: asyncio.Task[None] | None = None
    """Fetches its files."""
    found: ModelNeeds | IcehouseError | None = None
    """The result of the last fetch: what memory it needs, or why its files are not here."""
    waiters: list[asyncio.Future[LoadedPlace]] = dataclasses.field(default_factory=list)
    error: IcehouseError | None = None
    failed_time: float = 0.0
    info: ModelInfo | None = None
    """Its facts, known once it has been loaded."""

    @property
    def listed(self) -> ListedModel:
        """What callers see of it."""
        detail = "" if self.error is None or self.state is not ModelState.FAILED else shown(self.error)
        terms = self.terms
        return ListedModel(terms.name, self.state, terms.aliases, detail, self.info, terms.adapters)


def shown(error: IcehouseError) -> str:
    """Return why a model failed, in words for callers, since the error itself may name folders."""
    return f"{error.reason}; the server's log says more"


def taken_bytes(needs: ModelNeeds, staying: Iterable[LoadedPlace]) -> int:
    """Return the bytes that a model needs together with others: all weights, and that any of them can run."""
    together = [needs, *(each.needs for each in staying)]
    return sum(each.weight_bytes for each in together) + max(each.run_bytes for each in together)


def yielding(
    name: str, needs: ModelNeeds, occupants: Sequence[LoadedPlace], *, limit_bytes: int
) -> tuple[LoadedPlace, ...]:
    """Return the models that give way to another, in order; none if it fits beside all of them.

    Idle models give way before running ones, which must be drained first, and among both the least recently
    used ones come first. Pinned ones never do. Raises CannotFit if even that is not enough.
    """
    pinned = [each for each in occupants if each.terms.is_pinned]
    if taken_bytes(needs, pinned) > limit_bytes:
        raise _never_fits(name, needs, pinned, limit_bytes=limit_bytes)
    staying, chosen = list(occupants), list[LoadedPlace]()
    movable = (each for each in occupants if not each.terms.is_pinned)
    for each in sorted(movable, key=lambda each: (each.user_count > 0, each.use_time)):
        if taken_bytes(needs, staying) <= limit_bytes:
            break
        chosen.append(each)
        staying.remove(each)
    # An idle model may stay if the memory of larger ones turns out to be enough.
    for each in tuple(chosen):
        if taken_bytes(needs, [*staying, each]) <= limit_bytes:
            chosen.remove(each)
            staying.append(each)
    return tuple(chosen)


def _never_fits(
    name: str, needs: ModelNeeds, pinned: Sequence[LoadedPlace], *, limit_bytes: int
) -> CannotFit:
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
