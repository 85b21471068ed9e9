"""One life of a server of several models, as `bootstrap` composes it, but for its threads and its models."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from icehouse_server.bootstrap.composition import OpenedEngine
from icehouse_server.bootstrap.telemetry import KvEventParts, kv_event_source
from icehouse_server.config import Config
from icehouse_server.domain.events import Event, Failed, Finished
from icehouse_server.domain.ids import RequestId
from icehouse_server.domain.model import EngineState, ModelInfo
from icehouse_server.engine.core.block_log import BlockLog
from icehouse_server.engine.core.mailbox import Mailbox, Message
from icehouse_server.engine.core.memory_budget import MemoryBudget
from icehouse_server.engine.engine import Engine, EngineSettings
from icehouse_server.engine.inference_thread import InferenceThread
from icehouse_server.engine.prefix_cache.controller import CacheController
from icehouse_server.engine.prefix_cache.prefix_cache import PrefixCache
from icehouse_server.engine.runner.model_loader import ModelSource
from icehouse_server.errors import IcehouseError, ModelError, Reason
from icehouse_server.pool.model_pool import ModelPool
from icehouse_server.pool.places import ModelNeeds, ModelTerms
from icehouse_server.rpc.engine_client.engine_ports import ServedModel
from icehouse_server.rpc.engine_client.open_requests import OpenRequests
from icehouse_server.rpc.engine_client.router import Router
from icehouse_server.storage.api import Inventory, Outcome, StorageFailed
from icehouse_server.storage.local.model_tiers import ModelTiers
from icehouse_server.storage.local.tier import LocalTier

from tests.fixtures.engine import FakeDecoder
from tests.fixtures.rpc.seats import seat_of
from tests.system.sim.clock import SimClock
from tests.system.sim.disk import SimDisk
from tests.system.sim.ledger import Ledger
from tests.system.sim.model import ModelSpec
from tests.system.sim.pool.device import LoadPlan, PoolDevice, PooledRunner
from tests.system.sim.pool.story_loop import StoryLoop
from tests.system.sim.server import MailboxWithoutWaiting, WatchedStorage
from tests.system.sim.setup import Setup, fingerprint

_STEP_LIMIT = 20_000
FLUSH_S = 1e6
"""No flush is cut off where time leaps: how many seconds one may take is no matter of these stories."""


@dataclasses.dataclass(frozen=True, slots=True)
class PoolMember:
    """A model of the story: how it is served, what it computes, and how large its weights are."""

    number: int
    terms: ModelTerms
    spec: ModelSpec
    size_bytes: int
    told_bytes: int | None = None
    """What its files say, where they lie."""
    is_unknown: bool = False
    """Of a type that nobody can load."""
    is_damaged: bool = False

    @property
    def name(self) -> str:
        return self.terms.name


@dataclasses.dataclass(eq=False, slots=True)
class HousedModel:
    """A model that was opened: everything of one load."""

    member: PoolMember
    opened: OpenedEngine
    runner: PooledRunner
    controller: CacheController | None = None

    @property
    def has_ended(self) -> bool:
        return self.opened.engine.join(timeout_s=0)


@dataclasses.dataclass(frozen=True, slots=True)
class HousedEngine(OpenedEngine):
    """Says when it is ended."""

    on_end: Callable[[OpenedEngine], None] = lambda opened: None

    async def end(self) -> None:
        self.on_end(self)
        await OpenedEngine.end(self)


@dataclasses.dataclass(frozen=True, slots=True)
class _EndCounter:
    """Passes an engine's events on and counts the ends of each request."""

    router: Router
    ends: Counter[RequestId]

    def publish(self, events: Sequence[tuple[RequestId, Event]]) -> None:
        self.ends.update(name for name, event in events if isinstance(event, Finished | Failed))
        self.router.publish(events)

    def model_loaded(self, info: ModelInfo) -> None:
        self.router.model_loaded(ServedModel(info, FakeDecoder()))

    def state_changed(self, state: EngineState, error: IcehouseError | None) -> None:
        self.router.state_changed(state, error)


class PoolHouse:
    """Also the pool's `ModelOpener`. Each thread of a server goes on by its own kind of step."""

    def __init__(
        self,
        setup: Setup,
        members: Sequence[PoolMember],
        directory: Path,
        *,
        grace_s: float,
        clock: SimClock,
        ledger: Ledger,
        dice: random.Random,
        disk: SimDisk,
        keeps_all: bool,
    ) -> None:
        """With `keeps_all` the disk has space for whatever is written while it works."""
        self.setup, self.clock, self.ledger, self.disk = setup, clock, ledger, disk
        self.members = {member.name: member for member in members}
        self.directory = directory
        self.loop = StoryLoop(clock)
        self.device = PoolDevice(setup.memory_limit_bytes)
        self.budget = MemoryBudget(setup.memory_limit_bytes)
        self.inference = InferenceThread(clock)
        self.publishing = KvEventParts(Config(), clock)
        self.tiers = ModelTiers(
            setup.storage_settings(str(directory)), files=disk, clock=clock, cipher=setup.cipher
        )
        self.store.take_gone = self._noting(self.store.take_gone)
        self.models: list[HousedModel] = []
        """All that were ever opened, the last ones last."""
        self.ends: Counter[RequestId] = Counter()
        self.trouble: dict[str, LoadPlan] = {}
        """How the next load of a model goes, where it does not go well."""
        self.users: Counter[int] = Counter()
        """Calls that have a seat, by its identity."""
        self.told_to_go: set[str] = set()
        """Models that somebody unloads by order."""
        self._grace_s = grace_s
        self.is_disk_disturbed = False
        """Whether the disk was full, or refused something, in this life."""
        self._keeps_all = keeps_all
        self._dice = dice
        self._noted_report: object = None
        self.pool: ModelPool[OpenedEngine] = self.within(
            ModelPool[OpenedEngine],
            [member.terms for member in members],
            opener=self,
            clock=clock,
            limit_bytes=setup.memory_limit_bytes,
            grace_s=grace_s,
        )
        self.requests = OpenRequests(self.pool)

    def within(self, function: Any, *args: Any, **how: Any) -> Any:
        """Call something as the event loop would."""
        asyncio._set_running_loop(self.loop)
        try:
            return function(*args, **how)
        finally:
            asyncio._set_running_loop(None)

    @property
    def store(self) -> Any:
        return self.tiers._store

    @property
    def is_storage_dead(self) -> bool:
        return False

    # What the pool asks of its opener.

    def locate(self, name: str) -> ModelNeeds:
        member = self.members[name]
        if member.is_unknown:
            raise ModelError(Reason.MODEL_INVALID, "injected: nobody knows this type")
        return ModelNeeds(member.size_bytes if member.told_bytes is None else member.told_bytes)

    def open(self, name: str) -> OpenedEngine:
        member, router = self.members[name], Router(self.loop)
        plan = self.trouble.pop(name, None) or LoadPlan(
            member.size_bytes,
            slice_count=self._dice.choice((3, 40)),
            fails_at=2 if member.is_damaged else None,
        )
        runner = PooledRunner(name, member.spec, device=self.device, plan=plan, dice=self._dice)
        mailbox = MailboxWithoutWaiting(changed=self.inference.changed)
        storage = self.tiers.open(
            fingerprint(member.number), {"model": name}, functools.partial(self._post, mailbox)
        )
        housed: HousedModel | None = None

        def make_prefix() -> CacheController:
            assert housed is not None
            housed.controller = self._controller(housed, storage)
            return housed.controller

        engine = Engine(
            settings=EngineSettings(
                limits=self.setup.limits,
                waiting=self.setup.waiting,
                flush_timeout_s=FLUSH_S,
                expected_bytes=self.locate(name).weight_bytes,
            ),
            runner=runner,
            make_prefix=make_prefix,
            tokenizer=FakeDecoder(),
            mailbox=mailbox,
            listener=_EndCounter(router, self.ends),
            thread=self.inference,
            budget=self.budget,
        )
        opened = HousedEngine(
            engine,
            self.within(seat_of, engine, router),
            storage,
            kv_event_source(Config(), BlockLog(), engine=engine, router=router, clock=self.clock),
            self.publishing,
            ModelSource(self.directory, model_id=name),
            self.setup.limits.running_limit,
            self.clock,
            on_end=self._check_unused,
        )
        housed = HousedModel(member, opened, runner)
        self.models.append(housed)
        return opened

    def _controller(self, housed: HousedModel, storage: LocalTier) -> CacheController:
        cache = PrefixCache(
            settings=self.setup.prefix_settings(housed.member.number),
            facts=housed.runner.facts(),
            runner=housed.runner,
            storage=WatchedStorage(storage, self.ledger),
            clock=self.clock,
        )
        cache.sessions.session_limit = self.setup.session_limit
        cache.rates.load_count = 2
        housed.runner.cache = cache
        close = cache.close
        vars(cache).update(close=lambda: (self._check_flushed(housed), close()))
        return CacheController(cache=cache, runner=housed.runner, clock=self.clock, adopt_budget_s=0.001)

    def _check_unused(self, opened: OpenedEngine) -> None:
        """Nobody uses a model that is ended, unless its engine failed or an order's grace is over."""
        name, count = opened.source.model_id, self.users[id(opened.seat)]
        is_excused = opened.engine.state is EngineState.FAILED or self.may_cut(name)
        if count and not is_excused and self.pool.state is not EngineState.DRAINING:
            self.device.complaints.append(f"{name} is ended while {count} calls use it")

    def may_cut(self, name: str) -> bool:
        """Whether calls of a model may be cut off by somebody who unloads it."""
        return name in self.told_to_go and self._grace_s == 0.0

    def _check_flushed(self, housed: HousedModel) -> None:
        """A model that ends in order leaves on SSD what RAM has of it."""
        engine, cache = housed.opened.engine, housed.runner.cache
        if engine.state is EngineState.FAILED or self.is_disk_disturbed or not self._keeps_all:
            return
        nodes = list(cache.tree.in_ram())
        longer = [other for node in nodes if node.ssd for other in cache.tree.superseded(node)]
        left = [node for node in nodes if cache.spills.wants(node) and node not in longer]
        if left:
            self.device.complaints.append(f"{housed.member.name} went with {len(left)} blocks that SSD lacks")
        self.ledger.seen["left with all its blocks on SSD"] += 1

    # Who is there.

    def newest(self, name: str) -> HousedModel:
        """Return the last load of a model."""
        return next(each for each in reversed(self.models) if each.member.name == name)

    def living(self) -> list[HousedModel]:
        """Return the models whose engines were started and have not ended."""
        return [each for each in self.models if not each.has_ended]

    # The threads.

    def open_directory(self) -> None:
        self.tiers.lock()
        self.tiers.open_directory()

    def step_loop(self) -> bool:
        has_work = self.loop.has_work
        if has_work:
            self.loop.step()
        return has_work

    def step_job(self) -> bool:
        due = self.loop.due_jobs()
        if due:
            self.loop.do(self._dice.choice(due))
        return bool(due)

    def step_engine(self) -> bool:
        """Give the engine whose turn it is its turn, as the thread does."""
        thread = self.inference
        is_ready = any(member.is_ready(self.clock.now) for member in thread._members)
        if is_ready:
            thread._take_turn(thread._next())
        return is_ready

    def step_storage(self) -> bool:
        return self.tiers.step()

    def step_all(self) -> bool:
        """Let every thread do a piece of work; whether any had some."""
        steps = (self.step_loop, self.step_job, self.step_engine, self.step_storage)
        worked = [step() for step in steps]
        return any(worked)

    def stop(self, *, grace_s: float) -> None:
        """End in order, as `cli.serve` does."""
        opened = self.within(self.pool.begin_stop)
        for each in opened:
            each.engine.drain(grace_s=grace_s)
        self.inference.end()
        self._step_until(lambda: not self.inference.engine_count, "the engines do not end")
        for each in opened:
            each.storage.close(deadline_time=self.clock.monotonic() + FLUSH_S)
        self.tiers.close(deadline_time=self.clock.monotonic() + FLUSH_S)
        self._step_until(lambda: self.tiers._loop.is_closed, "the directory is never closed")
        self.end_loop()
        self.disk.release()

    def die(self, copy: Path, *, is_kill: bool) -> None:
        """The process is gone, and the power with it unless `is_kill`; `copy` is what it leaves there."""
        if is_kill:
            self.disk.kill(copy)
        else:
            self.disk.crash(copy)
        if self.store._manifest is not None:
            self.store._manifest._database.conn.close()
        self.end_loop()
        self.disk.release()

    def end_loop(self) -> None:
        """Have everything that still waits on the event loop end: its process does."""
        for _ in range(_STEP_LIMIT):
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            if not tasks and not self.loop._ready:
                break
            self.loop.step()
        self.loop.close()

    def _step_until(self, is_done: Any, complaint: str) -> None:
        for _ in range(_STEP_LIMIT):
            if is_done():
                return
            if not self.step_all():
                self.clock.now += 0.05
        raise AssertionError(complaint)

    # What the SSD tier tells.

    def _post(self, mailbox: Mailbox[Message], outcome: Outcome) -> None:
        # Each model gets an inventory; what one must have in it is a matter of how the directory was opened.
        is_first = isinstance(outcome, Inventory) and self.store.report is not self._noted_report
        if is_first and self.store.is_open:
            self._noted_report = self.store.report
        if is_first or not isinstance(outcome, Inventory | StorageFailed):
            self.ledger.note_outcome(outcome, self)
        mailbox.post(outcome)

    def _noting(self, take: Any) -> Any:
        """Have the ledger told of blocks that leave, whoever has them open."""

        def take_gone() -> Any:
            gone = take()
            for hashes in gone.values():
                for name in hashes:
                    self.ledger.committed.pop(name, None)
                self.ledger.removed.update(hashes)
            return gone

        return take_gone

    def close(self) -> None:
        """After a story that failed: nothing more is done here."""
        self.disk.has_crashed = True
        with contextlib.suppress(RuntimeError):
            self.end_loop()
        self.disk.release()
