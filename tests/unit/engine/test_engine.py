"""The thread: states, death, drain, refusals; a fake runner behind real threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator

import pytest
from icehouse_server.clock import SystemClock
from icehouse_server.domain.cache_commands import Unpin
from icehouse_server.domain.events import Failed, Finished
from icehouse_server.domain.ids import RequestId
from icehouse_server.domain.model import EngineState, ModelInfo
from icehouse_server.domain.stats import EngineStats
from icehouse_server.engine.core.mailbox import Mailbox
from icehouse_server.engine.core.memory_budget import MemoryBudget
from icehouse_server.engine.core.ports import LoadCalledOff
from icehouse_server.engine.core.steps import Steps
from icehouse_server.engine.engine import Engine, EngineSettings
from icehouse_server.engine.inference_thread import InferenceThread
from icehouse_server.engine.scheduling.limits import SchedulerLimits
from icehouse_server.engine.scheduling.waiting_queue import WaitingLimits
from icehouse_server.errors import EngineFailed, ModelError, Overloaded, Reason, Unavailable

from tests.fixtures.engine import FakeClock, FakeDecoder, FakeRunner, Recorder, no_prefix, request
from tests.fixtures.patience import BOUND_S

LIMITS = SchedulerLimits(running_limit=8, prefilling_limit=4, prefill_chunk_token_count=4)


@pytest.fixture
def thread() -> Iterator[InferenceThread]:
    started = InferenceThread(SystemClock())
    started.start()
    yield started
    started.end()
    assert started.join(timeout_s=BOUND_S)


def make(
    runner: FakeRunner,
    thread: InferenceThread,
    *,
    mailbox_limit: int = 100,
    expected_bytes: int = 0,
    budget: MemoryBudget | None = None,
) -> tuple[Engine, Recorder]:
    recorder = Recorder()
    engine = Engine(
        settings=EngineSettings(
            limits=LIMITS, waiting=WaitingLimits(request_limit=100), expected_bytes=expected_bytes
        ),
        runner=runner,
        tokenizer=FakeDecoder(),
        mailbox=Mailbox(limit=mailbox_limit, changed=thread.changed),
        listener=recorder,
        thread=thread,
        budget=budget or MemoryBudget(),
        make_prefix=lambda: no_prefix(SystemClock()),
    )
    return engine, recorder


def test_life_from_loading_to_stopped(thread: InferenceThread) -> None:
    runner = FakeRunner()
    engine, recorder = make(runner, thread)
    with pytest.raises(Unavailable) as refused:
        engine.submit(request("early"))
    assert refused.value.reason is Reason.LOADING
    engine.start()
    recorder.wait_for_state(EngineState.READY)
    engine.submit(request("a"))
    assert isinstance(recorder.wait_for_end("a"), Finished)
    engine.drain(grace_s=BOUND_S)
    assert engine.join(timeout_s=BOUND_S)
    assert runner.closed, "arrays are dropped on the inference thread"
    assert recorder.states == [EngineState.READY, EngineState.DRAINING, EngineState.STOPPED]
    with pytest.raises(Unavailable) as late:
        engine.submit(request("late"))
    assert late.value.reason is Reason.DRAINING


def test_a_model_that_is_loaded_gets_a_third_of_the_time_of_one_that_has_requests() -> None:
    clock, parts = FakeClock(), list[str]()
    thread = InferenceThread(clock)

    def turns(name: str) -> Iterator[None]:
        for _ in range(100):
            parts.append(name)
            clock.now += 1.0
            yield

    class Slow(FakeRunner):
        def load_steps(self, *, is_hurried: Callable[[], bool]) -> Generator[None, None, ModelInfo]:
            yield from turns("loading")
            raise AssertionError("it is still loading when the test ends")

    make(Slow(), thread)[0].start()
    thread.add(turns("busy"), Mailbox(limit=1, changed=thread.changed))
    for _ in range(90):
        member = thread._next()
        assert member is not None
        thread._take_turn(member)
    assert abs(parts.count("busy") - 3 * parts.count("loading")) <= 2


def test_a_load_that_waits_for_its_disk_takes_no_time_from_others() -> None:
    clock, parts = FakeClock(), list[str]()
    thread = InferenceThread(clock)

    class FromSlowDisk(FakeRunner):
        def load_steps(self, *, is_hurried: Callable[[], bool]) -> Steps[ModelInfo]:
            for _ in range(100):
                parts.append("loading")
                yield 2.5
            raise AssertionError("it is still loading when the test ends")

    def passes() -> Iterator[None]:
        while True:
            parts.append("busy")
            clock.now += 1.0
            yield

    make(FromSlowDisk(), thread)[0].start()
    thread.add(passes(), Mailbox(limit=1, changed=thread.changed))
    for _ in range(41):
        member = thread._next()
        assert member is not None
        thread._take_turn(member)
    assert parts.count("loading") in (10, 11), "it asks again once its time has come, between two passes"


def test_an_exception_in_the_loop_fails_every_open_call_and_the_engine(thread: InferenceThread) -> None:
    runner = FakeRunner()
    engine, recorder = make(runner, thread)
    engine.start()
    recorder.wait_for_state(EngineState.READY)
    both_in = threading.Event()

    def explode_when_both_run() -> None:
        if len(runner.decoding) == 2:
            both_in.set()
            raise RuntimeError("injected")

    runner.on_decode = explode_when_both_run
    engine.submit(request("a", max_output_tokens=10**6))
    engine.submit(request("b", max_output_tokens=10**6))
    for name in "ab":
        end = recorder.wait_for_end(name)
        assert isinstance(end, Failed) and isinstance(end.error, EngineFailed)
        assert "injected" not in end.error.message, "no inner message leaks to callers"
    recorder.wait_for_state(EngineState.FAILED)
    assert both_in.is_set() and engine.join(timeout_s=BOUND_S)
    assert engine.state is EngineState.FAILED
    with pytest.raises(EngineFailed):
        engine.submit(request("after"))


@pytest.mark.parametrize("has_others", [False, True])
def test_an_engine_that_fails_frees_its_memory_where_other_models_are_or_come(
    thread: InferenceThread, has_others: bool
) -> None:
    """Also if it is the only one just then. A server of one model ends, and its device may be gone."""
    runner, budget = FakeRunner(), MemoryBudget(1000)
    engine, recorder = make(runner, thread, expected_bytes=4 if has_others else 0, budget=budget)
    engine.start()
    recorder.wait_for_state(EngineState.READY)

    def explode() -> None:
        raise RuntimeError("injected")

    runner.on_decode = explode
    engine.submit(request("a"))
    assert isinstance(recorder.wait_for_end("a"), Failed)
    assert engine.join(timeout_s=BOUND_S)
    assert engine.state is EngineState.FAILED and runner.closed is has_others and not budget._shares


def test_a_load_that_takes_more_than_was_said_is_given_up_where_there_is_no_more(
    thread: InferenceThread,
) -> None:
    loaded_bytes = 0

    class Lying(FakeRunner):
        def load_steps(self, *, is_hurried: Callable[[], bool]) -> Generator[None, None, ModelInfo]:
            nonlocal loaded_bytes
            for _ in range(10):
                loaded_bytes += 50
                yield
            raise AssertionError("it went on beyond the limit")

        def close(self) -> None:
            nonlocal loaded_bytes
            loaded_bytes = 0
            super().close()

    runner, budget = Lying(), MemoryBudget(300)
    budget.enter().fixed_bytes = 100
    runner.active_bytes = lambda: 100 + loaded_bytes
    engine, recorder = make(runner, thread, expected_bytes=80, budget=budget)
    engine.start()
    recorder.wait_for_state(EngineState.FAILED)
    assert engine.join(timeout_s=BOUND_S)
    assert isinstance(engine.error, Overloaded) and engine.error.reason is Reason.MEMORY_SHORT
    assert engine.error.metadata == {"needed_bytes": "250", "limit_bytes": "300"}
    assert loaded_bytes == 0 and len(budget._shares) == 1


def test_a_model_that_does_not_load_tells_its_starter_why_and_callers_only_that(
    thread: InferenceThread,
) -> None:
    class Broken(FakeRunner):
        def load_steps(self, *, is_hurried: Callable[[], bool]) -> Generator[None, None, ModelInfo]:
            yield
            raise ModelError(Reason.MODEL_INVALID, "no folder /secret/place")

    engine, recorder = make(Broken(), thread)
    engine.start()
    recorder.wait_for_state(EngineState.FAILED)
    assert isinstance(engine.error, ModelError) and engine.error.message == "no folder /secret/place"
    assert isinstance(recorder.error, EngineFailed) and "/secret" not in recorder.error.message
    with pytest.raises(EngineFailed) as refused:
        engine.submit(request("after"))
    assert "/secret" not in refused.value.message


def test_a_load_that_is_called_off_is_an_end_in_order(thread: InferenceThread) -> None:
    class Waiting(FakeRunner):
        def load_steps(self, *, is_hurried: Callable[[], bool]) -> Generator[None, None, ModelInfo]:
            yield
            raise LoadCalledOff

    runner = Waiting()
    engine, recorder = make(runner, thread)
    answers: list[object] = []
    engine.submit_command(Unpin((1, 2)), answers.append)
    engine.start()
    assert engine.join(timeout_s=BOUND_S)
    assert recorder.states == [EngineState.STOPPED] and engine.error is None and runner.closed
    assert isinstance(answers[0], Unavailable) and answers[0].reason is Reason.DRAINING


def test_what_was_asked_while_a_model_did_not_load_is_answered(thread: InferenceThread) -> None:
    is_asked = threading.Event()

    class Broken(FakeRunner):
        def load_steps(self, *, is_hurried: Callable[[], bool]) -> Generator[None, None, ModelInfo]:
            yield
            assert is_asked.wait(BOUND_S)
            raise ModelError(Reason.MODEL_INVALID, "no such folder")

    engine, recorder = make(Broken(), thread)
    engine.start()
    answers: list[object] = []
    engine.request_stats(lambda stats, cache: answers.append(stats))
    engine.submit_command(Unpin((1, 2)), answers.append)
    assert answers == []
    is_asked.set()
    recorder.wait_for_state(EngineState.FAILED)
    assert isinstance(answers[0], EngineStats) and isinstance(answers[1], EngineFailed)


def test_a_full_mailbox_refuses_at_once_and_cancels_still_get_in(thread: InferenceThread) -> None:
    runner = FakeRunner()
    engine, recorder = make(runner, thread, mailbox_limit=3)
    engine.start()
    recorder.wait_for_state(EngineState.READY)
    in_step, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        in_step.set()
        assert go_on.wait(BOUND_S)

    runner.on_decode = hold
    engine.submit(request("first", max_output_tokens=10**6))
    assert in_step.wait(BOUND_S)
    for name in "abc":
        engine.submit(request(name, max_output_tokens=1))
    with pytest.raises(Overloaded) as refused:
        engine.submit(request("d"))
    assert refused.value.metadata == {"mailbox_limit": "3"}
    engine.cancel(RequestId("first"))
    go_on.set()
    end = recorder.wait_for_end("first")
    assert isinstance(end, Failed) and end.error.reason is Reason.CANCELLED
    for name in "abc":
        assert isinstance(recorder.wait_for_end(name), Finished)
    engine.drain(grace_s=1)
    assert engine.join(timeout_s=BOUND_S)
