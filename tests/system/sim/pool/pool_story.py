"""One seed, one story of a server of several models: what callers, the disk and fate do to it."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from icehouse_server.domain.cache_commands import (
    CacheCommand,
    EndSession,
    Explain,
    ListKnown,
    ListStored,
    Pin,
    Unpin,
    Verify,
)
from icehouse_server.domain.events import Failed, Finished
from icehouse_server.domain.ids import CacheScope, RequestId, Tenant
from icehouse_server.domain.model import ModelState
from icehouse_server.domain.request import CacheUse, GenerationRequest
from icehouse_server.domain.sampling import SamplingParams
from icehouse_server.errors import (
    Cancelled,
    CannotFit,
    DeadlineExceeded,
    EngineFailed,
    IcehouseError,
    NotFound,
    Overloaded,
    Reason,
    StorageError,
    Unavailable,
)
from icehouse_server.pool.model_pool import RETRY_S
from icehouse_server.pool.places import ModelTerms
from icehouse_server.rpc.access.caller import UNPROVED, Caller, CallerRole

from tests.fixtures.storage.faults import Crash
from tests.system.sim.clock import SimClock
from tests.system.sim.disk import SimDisk
from tests.system.sim.ledger import Ledger, Promise
from tests.system.sim.model import ALPHABET, CONTEXT_TOKEN_LIMIT, ModelSpec, reference_reply
from tests.system.sim.pool.callers import Asking, Ordering, PoolCaller, Unloading
from tests.system.sim.pool.device import LoadPlan
from tests.system.sim.pool.house import PoolHouse, PoolMember
from tests.system.sim.pool.pool_checks import check_memory, check_pinned, check_pool_rest
from tests.system.sim.scenario import SimulationFailed
from tests.system.sim.setup import CREDIT_BYTES, make_setup

_LIMITS_BYTES = (8_800, 9_200, 10_500)
"""Room for one and a half of the largest model that fits, and for some of what it computes with."""
POOL_SEED = 9_000_000
"""The first of these stories."""
LONG_SEED = 9_500_000
"""From here on they are long."""
_ACTION_COUNT = 80
_LONG_ACTION_COUNT = 500
_LARGE_DISK_BYTES = 1 << 24
"""Holds whatever a story writes."""
_TENANTS = (Tenant(""), Tenant("other"))
_OWNER = Tenant("other")
_OPERATOR_SHARE = 0.6
_RECOVERY_S = 130.0
_STEP_LIMIT = 20_000


def _members(dice: random.Random, limit_bytes: int) -> list[PoolMember]:
    """Return models of several kinds and sizes, one of them larger than the limit. The first one is the
    default."""
    is_pinned = dice.random() < 0.4
    plain = ModelSpec(1, has_kv=True, window_token_count=0, has_state=False)
    window = ModelSpec(2, has_kv=True, window_token_count=6, has_state=False)
    state = ModelSpec(3, has_kv=False, window_token_count=0, has_state=True)
    mixed = ModelSpec(4, has_kv=True, window_token_count=3, has_state=True)
    return [
        PoolMember(0, ModelTerms("large", aliases=("gpt", "l")), plain, 4_500),
        PoolMember(1, ModelTerms("window", ttl_s=dice.choice((0.0, 5.0, 400.0))), window, 3_000),
        PoolMember(2, ModelTerms("state", is_pinned=is_pinned), state, 1_200),
        PoolMember(3, ModelTerms("owned", tenants=frozenset((_OWNER,)), ttl_s=2.0), mixed, 2_500),
        PoolMember(
            4,
            ModelTerms("twin", aliases=("t",), ttl_s=dice.choice((0.0, 1.0))),
            dataclasses.replace(plain, weights=7),
            4_000,
        ),
        PoolMember(5, ModelTerms("huge"), plain, limit_bytes + 1),
        PoolMember(6, ModelTerms("damaged"), plain, 2_000, is_damaged=True),
        PoolMember(7, ModelTerms("unknown"), plain, 2_000, is_unknown=True),
        PoolMember(8, ModelTerms("liar"), plain, 2_000, told_bytes=1_000),
    ]


_SOUND_NAMES = ("", "large", "gpt", "window", "window", "state", "owned", "twin", "t", "twin")
_NAMES = (*_SOUND_NAMES, *_SOUND_NAMES, "huge", "damaged", "unknown", "liar", "liar")


class PoolStory:
    """The story of one seed below one folder. `play` raises `SimulationFailed`."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.seed = seed
        self.log: list[str] = []
        self.dice = dice = random.Random(seed)
        limit_bytes = dice.choice(_LIMITS_BYTES)
        self.members = _members(dice, limit_bytes)
        setup = make_setup(dice)
        self.setup = dataclasses.replace(
            setup,
            has_storage=True,
            memory_limit_bytes=limit_bytes,
            spill_queue_bytes=dice.choice((CREDIT_BYTES, CREDIT_BYTES, setup.spill_queue_bytes)),
            disk_limit_bytes=_LARGE_DISK_BYTES if dice.random() < 0.7 else setup.disk_limit_bytes,
            waiting=dataclasses.replace(setup.waiting, request_limit=30),
        )
        self.grace_s = dice.choice((0.0, 1e9, 1e9))
        self.ledger = Ledger()
        self.clock = SimClock()
        self._folder = folder
        self._callers: list[PoolCaller] = []
        self._texts: dict[int, list[tuple[int, ...]]] = {}
        self._life = 0
        self._broken: set[str] = set()
        """Models whose engines were made to fail."""
        self._troubled: set[str] = set()
        """Models that could not be loaded once, and are refused for some time."""
        self.house = self._new_house(folder / "life-0", SimDisk(folder / "life-0"))

    @property
    def seen(self) -> Counter[str]:
        return self.ledger.seen

    def play(self) -> None:
        """Play the whole story and check it to the end."""
        try:
            self._open()
            for _ in range(_ACTION_COUNT if self.seed < LONG_SEED else _LONG_ACTION_COUNT):
                self._act()
            self.house.disk.keep_power()
            self._rest()
            self._restart()
            self._rest()
        except (AssertionError, Exception) as error:
            story = "\n".join(self.log[-60:])
            raise SimulationFailed(
                f"seed {self.seed}: {type(error).__name__}: {error}\n"
                f"play it again with ICEHOUSE_SIM_SEED={self.seed}; {self.setup}\n{story}"
            ) from error
        finally:
            self.house.close()
            # One of them failed the story; what others met behind it is no news.
            for caller in self._callers:
                if not caller.task.cancelled():
                    caller.task.exception()

    def _new_house(self, directory: Path, disk: SimDisk) -> PoolHouse:
        directory.mkdir(exist_ok=True)
        return PoolHouse(
            self.setup,
            self.members,
            directory,
            grace_s=self.grace_s,
            clock=self.clock,
            ledger=self.ledger,
            dice=self.dice,
            disk=disk,
            keeps_all=self.setup.disk_limit_bytes == _LARGE_DISK_BYTES and not self.setup.daily_limit_bytes,
        )

    def _say(self, text: str) -> None:
        self.log.append(f"{self.clock.now:9.4f} {text}")

    # What happens.

    def _act(self) -> None:
        action = self.dice.choices(*zip(*self._actions(), strict=True))[0]
        try:
            action()
            self._check()
        except Crash:
            self._die("in the middle of a step")

    def _actions(self) -> list[tuple[Callable[[], None], int]]:
        return [
            (self._go_on, 60),
            (self._ask, 24),
            (self._load, 3),
            (self._unload, 4),
            (self._order, 6),
            (self._leave, 5),
            (self._pass_time, 5),
            (self._spoil_a_load, 3),
            (self._break_engine, 1),
            (self._disturb_disk, 3),
            (self._rest, 3),
            (self._power_cut, 1),
            (self._restart, 1),
        ]

    def _go_on(self) -> None:
        house = self.house
        steps = (house.step_loop, house.step_job, house.step_engine, house.step_engine, house.step_storage)
        for _ in range(self.dice.choice((1, 5, 20, 80))):
            self.dice.choice(steps)()
            check_memory(house)

    def _begin(self, caller: PoolCaller) -> None:
        caller.task = self.house.loop.create_task(caller.run())
        self._callers.append(caller)

    def _caller(self, tenant: Tenant) -> Caller:
        return UNPROVED if self.dice.random() < _OPERATOR_SHARE else Caller(tenant, CallerRole.TENANT)

    def _member_of(self, name: str) -> PoolMember:
        return next(m for m in self.members if (name or "large") in (m.name, *m.terms.aliases))

    def _ask(self) -> None:
        """Have some callers come, of one model or of several in turns."""
        names = self.dice.choices(_NAMES, k=self.dice.choice((1, 1, 2)))
        for index in range(self.dice.choice((1, 1, 2, 5))):
            self._ask_one(names[index % len(names)])

    def _ask_one(self, name: str) -> None:
        member, tenant = self._member_of(name), self.dice.choice(_TENANTS)
        request = GenerationRequest(
            request_id=RequestId(f"r{len(self.ledger.promises)}"),
            prompt_token_ids=self._prompt(member.number),
            max_output_tokens=self.dice.choice((0, 1, 3, 8, 14, 60)),
            sampling=SamplingParams(seed=self.dice.choice((0, 0, 0, 1))),
            stop=self.dice.choice(((), (), ("ab",))),
            arrival_time=self.clock.monotonic(),
            deadline_time=self.clock.now + self.dice.choice((0.01, 0.5))
            if self.dice.random() < 0.1
            else None,
            cache_use=self.dice.choice((CacheUse.READ_WRITE,) * 5 + (CacheUse.OFF,)),
            tenant=tenant,
            priority=self.dice.choice((0, 0, 1)),
            session_id=self.dice.choice(("", "one", "two")),
            ends_session=self.dice.random() < 0.1,
        )
        promise = Promise(request, reference_reply(member.spec, request), member.number)
        self.ledger.promises.append(promise)
        self._texts[member.number].append(promise.history)
        leaves_after = self.dice.choice((None, None, None, 1, 3))
        self._say(f"{request.request_id} asks {name!r} for {bytes(request.prompt_token_ids)!r}")
        pause_s = self.dice.choice((0.0,) * 8 + (2.0, 70.0))
        self._begin(
            Asking(
                self.house,
                name,
                self._caller(tenant),
                promise=promise,
                leaves_after=leaves_after,
                pause_s=pause_s,
            )
        )

    def _prompt(self, number: int) -> tuple[int, ...]:
        """Begin like what this model was asked, or another one: their blocks have nothing in common."""
        texts = self._texts.setdefault(number, [(tuple(self.dice.choices(ALPHABET, k=40)))])
        if self.dice.random() < 0.2:
            texts = self.dice.choice(list(self._texts.values()))
        text = self.dice.choice(texts[-8:])
        kept = text[: self.dice.randint(0, len(text))] if self.dice.random() < 0.5 else text
        more = self.dice.choices(ALPHABET, k=self.dice.choice((0, 1, 5)))
        return (*kept, *more)[: CONTEXT_TOKEN_LIMIT - 30] or (ALPHABET[0],)

    def _load(self) -> None:
        name = self.dice.choice(_NAMES)
        self._say(f"load {name!r}")
        self._begin(PoolCaller(self.house, name, self._caller(_OWNER)))

    def _unload(self) -> None:
        name = self.dice.choice(_NAMES)
        self._say(f"unload {name!r}")
        self.house.told_to_go.add(self._member_of(name).name)
        self._begin(Unloading(self.house, name, self._caller(_OWNER)))

    def _order(self) -> None:
        name = self.dice.choice(_NAMES)
        number = self._member_of(name).number
        text, scope = (
            self.dice.choice(self._texts.get(number) or [(97,)]),
            CacheScope(self.dice.choice(_TENANTS)),
        )
        orders: tuple[CacheCommand, ...] = (
            Explain(text, scope),
            Pin(text[:12], scope),
            Unpin(text, scope),
            ListKnown(text[:8], scope),
            Verify(),
            ListStored(block_limit=2),
            EndSession("one", scope.tenant),
        )
        order = self.dice.choice(orders)
        self._say(f"order to {name!r}: {order!r:.60}")
        self._begin(Ordering(self.house, name, self._caller(_OWNER), order=order))

    def _leave(self) -> None:
        """A caller vanishes, wherever its call is."""
        waiting = [each for each in self._callers if each.task is not None and not each.task.done()]
        if waiting:
            caller = self.dice.choice(waiting)
            self._say(f"a caller of {caller.model!r} leaves")
            self.seen["left while it waited"] += not caller.has_seat
            caller.task.cancel()

    def _pass_time(self) -> None:
        seconds = self.dice.choice((0.005, 1.5, 1.5, RETRY_S + 1, 65.0))
        self._say(f"{seconds} s pass")
        self.clock.now += seconds

    def _spoil_a_load(self) -> None:
        """A file of a model vanishes, or is a lie, while the model is loaded the next time."""
        member = self.dice.choice(self.members[:5])
        self._say(f"the next load of {member.name} fails")
        self._troubled.add(member.name)
        self.house.trouble[member.name] = LoadPlan(
            member.size_bytes, fails_at=self.dice.randint(0, 2), breaks=self.dice.random() < 0.5
        )

    def _break_engine(self) -> None:
        running = [each for each in self.house.living() if each.member.number < 5]
        if running:
            housed = self.dice.choice(running)
            self._say(f"the engine of {housed.member.name} fails with its next pass")
            self._broken.add(housed.member.name)
            housed.runner.is_broken = True

    def _disturb_disk(self) -> None:
        disk, what = self.house.disk, self.dice.choice(("full", "space", "io", "io", "power"))
        self._say(f"disk: {what}")
        self.house.is_disk_disturbed |= what in ("full", "io")
        if what == "full":
            disk.room_bytes = self.dice.choice((0, 500, 3_000))
        elif what == "space":
            disk.room_bytes = None
        elif what == "io":
            disk.fail_in = self.dice.randint(1, 25)
        else:
            disk.crash_in, disk.crashes_before = self.dice.randint(1, 60), self.dice.random() < 0.5

    def _rest(self) -> None:
        """Let everything settle, undisturbed, and look at all accounts."""
        self._say("rest")
        house = self.house
        house.disk.room_bytes = house.disk.fail_in = None
        for _ in range(2):
            self._settle()
            self.clock.now += _RECOVERY_S
        self._settle()
        self._check()
        check_pool_rest(house, is_disk_sound=not self.ledger.io_errors(house))
        assert not self._callers, [(c.model, c.task) for c in self._callers]
        taken = [place.user_count for m in house.pool._models.values() if (place := m.place) is not None]
        assert not any(taken), f"calls that have ended still hold models: {taken}"
        several = [name for name, count in house.ends.items() if count != 1]
        assert not several, f"requests that did not end once: {several}"
        self.seen["rest"] += 1
        self.seen["unloaded"] += len(house.models) - len(house.living())
        self.house.told_to_go.clear()
        self._broken = {each.member.name for each in house.living() if each.runner.is_broken}
        self._troubled = set(house.trouble)

    def _settle(self) -> None:
        """Work until nobody has anything to do."""
        house = self.house
        for _ in range(_STEP_LIMIT):
            is_busy = house.step_all()
            check_memory(house)
            if is_busy:
                continue
            if not (house.pool._tasks or house.loop.jobs or any(not c.task.done() for c in self._callers)):
                return
            self.clock.now += 0.25
        raise AssertionError(f"the house never comes to rest: {house.pool._tasks} {house.loop.jobs}")

    def _power_cut(self) -> None:
        self._die("between two steps")

    def _die(self, where: str) -> None:
        house, ledger = self.house, self.ledger
        is_kill = self.dice.random() < 0.5
        self._say(f"{'the process is killed' if is_kill else 'the power goes'} {where}")
        self.seen["kill" if is_kill else "crash"] += 1
        self._collect()
        if house.store.is_open:
            ledger.may_be_gone |= ledger.committed.keys() - {record.hash for record in house.store.index}
        self._life += 1
        directory = self._folder / f"life-{self._life}"
        house.die(directory, is_kill=is_kill)
        self._collect()
        self._begin_life(
            directory,
            house.disk.heir(directory) if is_kill else SimDisk(directory, mtime_ns=house.disk.mtime_ns),
        )

    def _restart(self) -> None:
        self._say("restart in order")
        house = self.house
        house.disk.room_bytes = house.disk.fail_in = None
        house.disk.keep_power()
        house.stop(grace_s=self.dice.choice((0.0, 5.0)))
        self.seen["restart"] += 1
        self._collect(is_stop=True)
        assert not self._callers, "a stop left somebody waiting"
        self._begin_life(house.directory, house.disk.heir(house.directory))

    def _begin_life(self, directory: Path, disk: SimDisk) -> None:
        self.ledger.io_error_count += self.house.disk.failed_count
        self._callers.clear()
        self.house.told_to_go.clear()
        self._broken.clear()
        self._troubled.clear()
        self.house = self._new_house(directory, disk)
        self._open()

    def _open(self) -> None:
        try:
            self.house.open_directory()
            caller = self.house.loop.create_task(self.house.pool.start())
            for _ in range(_STEP_LIMIT):
                if caller.done():
                    break
                self.house.step_all()
            caller.result()
        except Crash:
            self._die("while opening")

    # What must hold.

    def _check(self) -> None:
        self._collect()
        check_memory(self.house)
        check_pinned(self.house, self.house.told_to_go)
        for each in self.house.pool.listed(UNPROVED):
            is_there = self.house.pool._models[each.name].place is not None
            assert is_there or each.state is not ModelState.READY, f"{each.name} is said to be there"

    def _collect(self, *, is_stop: bool = False) -> None:
        for caller in [each for each in self._callers if each.task is not None and each.task.done()]:
            self._callers.remove(caller)
            assert caller.task is not None
            if not caller.task.cancelled():
                caller.task.result()
            self._check_caller(caller, is_stop=is_stop)

    def _check_caller(self, caller: PoolCaller, *, is_stop: bool) -> None:
        name = self._member_of(caller.model).name
        if caller.error is not None:
            self.seen[f"refused {caller.error.reason}"] += 1
            self._say(f"  a caller of {name} is refused: {caller.error!r:.150}")
            assert is_stop or self._may_refuse(caller, name, caller.error), f"{name}: {caller.error!r}"
        if isinstance(caller, Asking) and caller.events:
            self._check_answer(caller, name, is_stop=is_stop)
        elif caller.error is None and not caller.task.cancelled():
            self.seen[type(caller).__name__] += 1

    def _may_refuse(self, caller: PoolCaller, name: str, error: IcehouseError) -> bool:
        """Whether something happened that explains why this caller is told this."""
        member = self._member_of(name)
        if isinstance(error, NotFound) and error.reason is Reason.MODEL_NOT_FOUND:
            return bool(member.terms.tenants) and caller.caller.tenant not in (*member.terms.tenants, None)
        if isinstance(error, CannotFit):
            return name == "huge"
        if isinstance(error, Unavailable) and error.reason is Reason.MODEL_NOT_LOADED:
            is_flawed = member.is_damaged or member.is_unknown or member.told_bytes is not None
            return is_flawed or name in self._troubled | self._broken
        if isinstance(error, EngineFailed):
            return name in self._broken
        if isinstance(error, Unavailable):
            return self.house.may_cut(name)
        if isinstance(caller, Ordering) and isinstance(error, NotFound | StorageError):
            return True
        return isinstance(error, Overloaded)

    def _check_answer(self, caller: Asking, name: str, *, is_stop: bool) -> None:
        promise, events = caller.promise, caller.events
        end = caller.end
        if end is None:
            tokens = tuple(t for e in events for t in getattr(e, "token_ids", ()))
            assert tokens == promise.reply.token_ids[: len(tokens)], f"{name}: {tokens} of {promise.reply}"
            self.seen["left while it was answered"] += 1
            return
        error = end.error if isinstance(end, Failed) else None
        self._say(f"  {promise.request.request_id} of {name} ends: {end!r:.120}")
        if isinstance(error, EngineFailed):
            assert name in self._broken, f"{name}: {error!r}"
            self.seen["failed with its engine"] += 1
            return
        if isinstance(error, Unavailable):
            assert is_stop or (self.house.may_cut(name)), f"{name} was cut off: {error!r}"
        if isinstance(error, CannotFit):
            self.seen["never fits"] += 1
            return
        assert error is None or isinstance(error, Cancelled | DeadlineExceeded | Overloaded | Unavailable), (
            error
        )
        self.ledger.check_end(promise, events)
        self.seen[f"{name} answered"] += isinstance(end, Finished)
