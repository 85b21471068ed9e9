"""Callers of a server of several models, as its services are to the pool: each in a task of its own."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

from icehouse_server.domain.cache_commands import CacheCommand, EvictBlocks, KnownBlocks
from icehouse_server.domain.events import Event, Failed, Finished, Started
from icehouse_server.errors import IcehouseError
from icehouse_server.rpc.access.caller import Caller, CallerRole
from icehouse_server.rpc.engine_client.outbox import Outboxes
from icehouse_server.rpc.engine_client.seat import Seat

from tests.system.sim.ledger import Promise
from tests.system.sim.pool.house import PoolHouse

_EVENT_LIMIT, _BYTE_LIMIT = 64, 1 << 20


@dataclasses.dataclass(eq=False)
class PoolCaller:
    """A call that names a model; `run` is the whole of it. It may be cancelled at any time."""

    house: PoolHouse
    model: str
    """A name or an alias."""
    caller: Caller
    holds: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)
    load_s: float = 0.0
    error: IcehouseError | None = None
    """What refused it before the engine had it."""
    has_seat: bool = False
    task: asyncio.Task[None] | None = None

    @property
    def member_name(self) -> str:
        """The name of the model that is meant."""
        return self.house.pool._by_name[self.model or self.house.pool.default_name].terms.name

    async def run(self) -> None:
        try:
            seat = await self.house.pool.use(self.model, self)
            self.house.users[id(seat)] += 1
            try:
                self._check_seat(seat)
                await self._go_on(seat)
            finally:
                self.house.users[id(seat)] -= 1
        except IcehouseError as error:
            self.error = error
        finally:
            self.holds.close()

    async def _go_on(self, seat: Seat) -> None:
        """Do what the model was wanted for; nothing, for one that only loads it."""

    def _check_seat(self, seat: Seat) -> None:
        """Whoever is given a model has the newest load of the one that it named, and may use it."""
        self.has_seat = True
        housed = self.house.newest(self.member_name)
        owners = housed.member.terms.tenants
        is_let_in = not owners or self.caller.role is CallerRole.OPERATOR or self.caller.tenant in owners
        assert is_let_in, f"{self.model} is not for {self.caller}"
        assert seat is housed.opened.seat, f"{self.model} was given a seat that is not its model's"


@dataclasses.dataclass(eq=False)
class Asking(PoolCaller):
    """A request whose reader may leave after some events."""

    promise: Promise = None  # type: ignore[assignment]
    leaves_after: int | None = None
    pause_s: float = 0.0
    """How long it does not read behind the first event."""
    events: list[Event] = dataclasses.field(default_factory=list)

    async def _go_on(self, seat: Seat) -> None:
        seat.router.require_model()
        request = self.promise.request
        outboxes = Outboxes(
            count=1, event_limit=_EVENT_LIMIT, byte_limit=_BYTE_LIMIT, on_stall=lambda index: None
        )
        with self.house.requests.opened(seat, "Stream", (request,), outboxes.all):
            while not outboxes.ended:
                _, event = await outboxes.take()
                self.events.append(event)
                if len(self.events) == 1 and self.pause_s:
                    await asyncio.sleep(self.pause_s)
                if self.leaves_after is not None and len(self.events) >= self.leaves_after:
                    return

    @property
    def end(self) -> Finished | Failed | None:
        last = self.events[-1] if self.events else None
        return last if isinstance(last, Finished | Failed) else None

    @property
    def was_started(self) -> bool:
        return any(isinstance(event, Started) for event in self.events)


@dataclasses.dataclass(eq=False)
class Ordering(PoolCaller):
    """A command to a model's prefix cache; what it says is known is evicted."""

    order: CacheCommand = None  # type: ignore[assignment]
    answer: object = None

    async def _go_on(self, seat: Seat) -> None:
        self.answer = await seat.commands.ask(self.order, object)
        if isinstance(self.answer, KnownBlocks):
            self.answer = await seat.commands.ask(EvictBlocks(self.answer.block_hashes), object)


@dataclasses.dataclass(eq=False)
class Unloading(PoolCaller):
    """An order to unload a model."""

    async def run(self) -> None:
        try:
            await self.house.pool.unload(self.model, self.caller)
        except IcehouseError as error:
            self.error = error
