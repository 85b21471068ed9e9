"""One limit for several engines: who gives way, and that the sum is never above it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Generator

import pytest
from icehouse_server.domain.events import Finished
from icehouse_server.domain.model import EngineState, ModelInfo
from icehouse_server.engine.core.mailbox import Mailbox
from icehouse_server.engine.core.memory_budget import BudgetShare, MemoryBudget
from icehouse_server.engine.engine import Engine, EngineSettings
from icehouse_server.engine.inference_thread import InferenceThread
from icehouse_server.engine.scheduling.limits import SchedulerLimits
from icehouse_server.engine.scheduling.waiting_queue import WaitingLimits
from icehouse_server.errors import IcehouseError, Reason

from tests.fixtures.engine import FakeClock, FakeDecoder, FakeRunner, Recorder, model_info, no_prefix, request

_LIMIT_BYTES = 10_000
_SLICE_BYTES = 200


class Tier:
    """Blocks in RAM of one engine."""

    def __init__(self, share: BudgetShare, size_bytes: int, *, is_idle: bool) -> None:
        self.size_bytes = size_bytes
        share.varying_bytes = lambda: self.size_bytes
        share.yield_ram = self.yield_ram
        share.is_idle = lambda: is_idle

    def yield_ram(self, size_bytes: int) -> int:
        freed_bytes = min(size_bytes, self.size_bytes)
        self.size_bytes -= freed_bytes
        return freed_bytes


def test_idle_engines_give_way_first_and_busy_ones_when_asked() -> None:
    budget = MemoryBudget(1000)
    own, busy, idle = budget.enter(), budget.enter(), budget.enter()
    own.fixed_bytes, busy.fixed_bytes = 100, 200
    at_work, at_rest = Tier(busy, 300, is_idle=False), Tier(idle, 250, is_idle=True)
    assert own.limit_bytes == 1000 - 200 - 300 - 250 and own.most_bytes == 800
    used_bytes = 100 + 200 + 300 + 250
    assert own.excess_bytes(used_bytes + 150) == 0 and at_rest.size_bytes == 250, "there is room"
    assert own.excess_bytes(used_bytes + 450) == 50
    assert (at_work.size_bytes, at_rest.size_bytes) == (300, 0)
    assert own.yield_others(50) == 50 and at_work.size_bytes == 250
    budget.leave(busy)
    assert own.limit_bytes == 1000


def test_what_is_still_to_be_loaded_is_nobody_elses() -> None:
    budget = MemoryBudget(1000)
    own, loading = budget.enter(), budget.enter()
    loading.fixed_bytes, loading.reserved_bytes = 100, 500
    assert own.limit_bytes == own.most_bytes == 400
    assert own.excess_bytes(100 + 450) == 50
    assert loading.excess_bytes(100 + 450) == 0


def test_without_a_limit_nothing_is_counted() -> None:
    share = MemoryBudget().enter()
    assert (share.limit_bytes, share.most_bytes, share.excess_bytes(10**15)) == (0, 0, 0)


class LoadedRunner(FakeRunner):
    """Takes memory as it loads, and ten bytes for each token."""

    def __init__(self, weight_bytes: int, used: Callable[[], int]) -> None:
        super().__init__()
        self.weight_bytes = weight_bytes
        self.loaded_bytes = 0
        self.active_bytes = used

    @property
    def held_bytes(self) -> int:
        return self.loaded_bytes + 10 * sum(map(len, self.history.values()))

    def load_steps(self, *, is_hurried: Callable[[], bool]) -> Generator[None, None, ModelInfo]:
        while self.loaded_bytes < self.weight_bytes:
            self.loaded_bytes += min(_SLICE_BYTES, self.weight_bytes - self.loaded_bytes)
            yield
        return dataclasses.replace(model_info(), weight_bytes=self.weight_bytes)

    def close(self) -> None:
        super().close()
        self.loaded_bytes = 0
        self.history.clear()


class House:
    """Engines that share a budget on a thread that is stepped by hand."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.budget = MemoryBudget(_LIMIT_BYTES)
        self.clock = FakeClock()
        self.thread = InferenceThread(self.clock)
        self.recorder = Recorder()
        self.engines: list[tuple[Engine, LoadedRunner]] = []
        self.runners: list[LoadedRunner] = []
        self.request_count = self.loaded_count = self.peak_bytes = 0

    def used_bytes(self) -> int:
        return sum(runner.held_bytes for runner in self.runners)

    def load(self, weight_bytes: int = 0) -> Engine:
        weight_bytes = weight_bytes or self.dice.randrange(100, 8000)
        runner = LoadedRunner(weight_bytes, self.used_bytes)
        engine = Engine(
            settings=EngineSettings(
                limits=SchedulerLimits(running_limit=8, prefilling_limit=4, prefill_chunk_token_count=16),
                waiting=WaitingLimits(request_limit=100),
                expected_bytes=weight_bytes,
            ),
            runner=runner,
            tokenizer=FakeDecoder(),
            mailbox=Mailbox(limit=100, changed=self.thread.changed),
            listener=self.recorder,
            thread=self.thread,
            budget=self.budget,
            make_prefix=lambda: no_prefix(self.clock),
        )
        self.runners.append(runner)
        self.engines.append((engine, runner))
        engine.start()
        return engine

    def ask(self, engine: Engine, name: str, token_count: int, output_count: int = 20) -> None:
        tokens = [1 + i % 100 for i in range(token_count)]
        engine.submit(request(name, tokens, max_output_tokens=output_count))

    def act(self) -> None:
        chance = self.dice.random()
        if chance < 0.04 and len(self.engines) < 3:
            self.load()
        elif self.engines:
            engine, _ = self.dice.choice(self.engines)
            if chance < 0.055:
                engine.drain(grace_s=self.dice.choice((0.0, 1.0)))
            elif chance < 0.4:
                self.submit(engine)
        for _ in range(self.dice.randrange(4)):
            self.step()

    def submit(self, engine: Engine) -> None:
        self.request_count += 1
        token_count = self.dice.randrange(2, 300)
        try:
            engine.submit(
                request(
                    f"r{self.request_count}",
                    [1 + i % 100 for i in range(token_count)],
                    max_output_tokens=self.dice.randrange(1, 300),
                )
            )
        except IcehouseError as error:
            assert error.reason in (Reason.LOADING, Reason.DRAINING), error

    def step_until(self, is_so: Callable[[], bool]) -> None:
        for _ in range(3000):
            if is_so():
                return
            self.step()
        raise AssertionError("it never comes to that")

    def step(self) -> None:
        if not self.engines:
            return
        if not any(member.is_ready(self.clock.now) for member in self.thread._members):
            self.clock.now += 1.0  # nobody is waited for
        member = self.thread._next()
        assert member is not None
        self.clock.now += 0.01  # a turn takes time
        self.thread._take_turn(member)
        self.peak_bytes = max(self.peak_bytes, self.used_bytes())
        assert self.peak_bytes <= _LIMIT_BYTES
        for each in list(self.engines):
            engine, runner = each
            if engine.state is EngineState.FAILED:
                assert engine.error is not None and engine.error.reason is Reason.MEMORY_SHORT
            elif engine.state is not EngineState.STOPPED:
                continue
            else:
                self.loaded_count += 1
            assert runner.held_bytes == 0
            self.engines.remove(each)


@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_loaded_asked_and_drained_the_sum_is_never_above_the_limit(seed: int) -> None:
    house = House(random.Random(seed))
    for _ in range(800):
        house.act()
    for engine, _ in house.engines:
        engine.drain(grace_s=0)
    while house.engines:
        house.step()
    assert house.used_bytes() == 0 and not house.budget._shares
    assert house.loaded_count > 3 and house.peak_bytes > 0.6 * _LIMIT_BYTES, "the story has nothing to tell"


def test_who_finds_another_engine_at_work_waits_for_its_memory() -> None:
    house = House(random.Random(0))
    first, second = (house.load(weight_bytes=500) for _ in range(2))
    house.step_until(lambda: first.state is second.state is EngineState.READY)
    house.ask(first, "holds", 500, 200)
    house.step_until(lambda: bool(house.recorder.tokens_of("holds")))
    house.ask(second, "waits", 700)
    house.step_until(lambda: house.recorder.end_of("waits") is not None)
    for name in ("holds", "waits"):
        assert isinstance(house.recorder.end_of(name), Finished), house.recorder.end_of(name)


def test_who_is_always_at_work_does_not_keep_another_from_memory() -> None:
    house = House(random.Random(0))
    busy, waiting = (house.load(weight_bytes=500) for _ in range(2))
    house.step_until(lambda: busy.state is waiting.state is EngineState.READY)
    for number in range(40):
        house.ask(busy, f"{number}", 300)
    house.step_until(lambda: bool(house.recorder.tokens_of("1")))
    house.ask(waiting, "waits", 700)
    house.step_until(lambda: house.recorder.end_of("waits") is not None)
    ended = [number for number in range(40) if house.recorder.end_of(f"{number}") is not None]
    assert isinstance(house.recorder.end_of("waits"), Finished)
    assert len(ended) < 10, "it came behind all that others had to do"
    house.step_until(lambda: all(house.recorder.end_of(f"{number}") is not None for number in range(40)))
    assert all(isinstance(house.recorder.end_of(f"{number}"), Finished) for number in range(40))


def test_what_cannot_be_had_although_nobody_is_at_work_is_refused() -> None:
    """Two wait for each other's memory in vain where neither gives any: who waited first is told."""
    budget = MemoryBudget(1000)
    first, second = budget.enter(), budget.enter()
    for share in (first, second):
        share.is_idle = lambda: True
    first.waits_since, second.waits_since = 1.0, 2.0
    assert not first.must_wait and second.must_wait
    assert not (first.others_work or second.others_work)
    second.is_idle = lambda: False
    assert first.others_work and not first.must_wait
