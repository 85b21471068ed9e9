"""A pool's house: models that a test loads by hand, with room for one and a half."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from typing import Any

from icehouse_server.domain.model import EngineState, ModelState
from icehouse_server.errors import IcehouseError
from icehouse_server.pool.model_pool import ModelPool
from icehouse_server.pool.places import ModelNeeds, ModelTerms
from icehouse_server.rpc.access.caller import UNPROVED, Caller
from icehouse_server.rpc.engine_client.engine_ports import ServedModel
from icehouse_server.rpc.engine_client.router import Router
from icehouse_server.rpc.engine_client.seat import Seat

from tests.fixtures.patience import BOUND_S
from tests.fixtures.rpc.fake_engine import MODEL_INFO, FakeEngine, FakeTokenizer
from tests.fixtures.rpc.seats import seat_of
from tests.unit.rpc.conftest import FakeClock

SIZE = 60


@dataclasses.dataclass
class FakeCall:
    """A call that uses a model."""

    caller: Caller = UNPROVED
    holds: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)
    load_s: float = 0.0


class FakeModel:
    """A model that becomes ready when a test says so."""

    def __init__(self, house: House, name: str) -> None:
        self._house, self.name = house, name
        self.router = Router(house.loop)
        self.engine = FakeEngine(self.router)
        self.seat: Seat = seat_of(self.engine, self.router)
        self.error: IcehouseError | None = None
        self.has_ended = False

    def start(self) -> None:
        if self.name in self._house.unstartable:
            raise RuntimeError("can't start new thread")
        self._house.started.append(self.name)
        if self.name not in self._house.held:
            self.succeed()

    def succeed(self) -> None:
        info = dataclasses.replace(MODEL_INFO, model_id=self.name, weight_bytes=SIZE)
        self.router.model_loaded(ServedModel(info, FakeTokenizer()))
        self.router.state_changed(EngineState.READY, None)

    def fail(self, error: IcehouseError) -> None:
        self.error = error
        self.router.state_changed(EngineState.FAILED, error)

    async def end(self) -> None:
        await self._house.may_end.wait()
        self.has_ended = True
        self.engine.close()


class House:
    """A pool with room for one and a half models, and what it did. Made in a running loop."""

    def __init__(self, *terms: ModelTerms) -> None:
        self.loop = asyncio.get_running_loop()
        self.held: set[str] = set()
        """Models that do not become ready by themselves."""
        self.broken: dict[str, Exception] = {}
        """Why models cannot be found."""
        self.unstartable: set[str] = set()
        """Models whose engines cannot be started."""
        self.may_end = asyncio.Event()
        """Not set: engines take long to end."""
        self.may_end.set()
        self.needs: dict[str, ModelNeeds] = {}
        """Of models that take something else than the others."""
        self.started: list[str] = []
        self.models: dict[str, FakeModel] = {}
        self.located: list[str] = []
        self.absent: dict[str, threading.Event] = {}
        """Models whose files are not here before these are set."""
        self.clock = FakeClock()
        self.pool: ModelPool[FakeModel] = ModelPool(
            terms, opener=self, clock=self.clock, limit_bytes=SIZE * 3 // 2, grace_s=BOUND_S
        )

    def locate(self, name: str) -> ModelNeeds:
        self.located.append(name)
        if name in self.absent:
            assert self.absent[name].wait(BOUND_S), "it was never fetched"
        if name in self.broken:
            raise self.broken[name]
        return self.needs.get(name, ModelNeeds(SIZE))

    def open(self, name: str) -> FakeModel:
        self.models[name] = FakeModel(self, name)
        return self.models[name]

    def states(self) -> dict[str, ModelState]:
        return {model.name: model.state for model in self.pool.listed(UNPROVED)}

    async def until(self, name: str, state: ModelState) -> None:
        async with asyncio.timeout(BOUND_S):
            while self.states()[name] is not state:
                await asyncio.sleep(0)

    async def until_started(self, *names: str) -> None:
        async with asyncio.timeout(BOUND_S):
            while self.started != list(names):
                await asyncio.sleep(0)

    async def until_waiting_for_room(self, name: str) -> None:
        async with asyncio.timeout(BOUND_S):
            while name not in self.located or not self.pool._turn.locked():
                await asyncio.sleep(0)
        await settled()

    async def until_located(self, *names: str) -> None:
        async with asyncio.timeout(BOUND_S):
            while sorted(self.located) != sorted(names):
                await asyncio.sleep(0)

    async def use(self, name: str, call: FakeCall | None = None) -> FakeCall:
        call = call or FakeCall()
        async with asyncio.timeout(BOUND_S):
            seat = await self.pool.use(name, call)
        assert seat is self.models[name or "a"].seat
        return call

    def end(self) -> None:
        for fetched in self.absent.values():
            fetched.set()
        for model in self.pool.begin_stop():
            model.engine.close()


A, B, C = (ModelTerms(name) for name in "abc")


@contextlib.asynccontextmanager
async def house_of(*terms: ModelTerms) -> Any:
    made = House(*terms)
    try:
        yield made
    finally:
        made.end()


async def settled() -> None:
    """Let all that can go on now do so."""
    for _ in range(20):
        await asyncio.sleep(0)
