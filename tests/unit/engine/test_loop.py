"""The step, run by hand with a fake runner and a clock that is set."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence as ReadSequence

import pytest
from icehouse_server.domain.cache_commands import Explain
from icehouse_server.domain.events import Delta, Failed, Finished, FinishReason, PrefillProgress, Started
from icehouse_server.domain.ids import CacheScope, RequestId, Tenant
from icehouse_server.domain.request import LogprobsWanted
from icehouse_server.engine.core.mailbox import (
    Cancel,
    Command,
    DrainEngine,
    Mailbox,
    Message,
    QueryStats,
    Submit,
)
from icehouse_server.engine.core.memory_budget import MemoryBudget
from icehouse_server.engine.core.ports import Chunk, PassResult
from icehouse_server.engine.core.refusals import cancelled_by_client
from icehouse_server.engine.core.sequence import Phase
from icehouse_server.engine.engine_loop import EngineLoop
from icehouse_server.engine.scheduling.limits import SchedulerLimits
from icehouse_server.engine.scheduling.memory_guard import MemoryGuard
from icehouse_server.engine.scheduling.policy import GPU_POLICY, POLICY, PassPolicy
from icehouse_server.engine.scheduling.preemption import SchedulingParts
from icehouse_server.engine.scheduling.scheduler import Scheduler
from icehouse_server.engine.scheduling.waiting_queue import WaitingLimits, WaitingQueue
from icehouse_server.errors import EngineFailed, Overloaded, Reason

from tests.fixtures.engine import (
    EOS,
    FakeClock,
    FakeDecoder,
    FakeRunner,
    Recorder,
    decode_ascii,
    memory_model,
    model_info,
    no_prefix,
    request,
)


class WatchedMailbox(Mailbox[Message]):
    """Notes how long the loop would have waited, and does not wait."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(limit=100)
        self.waits_s: list[float] = []
        self.later: list[Message] = []
        """One of these comes, in half a millisecond, each time somebody waits."""
        self.clock = clock

    def take_all(self, *, timeout_s: float) -> list[Message]:
        if not len(self):
            self.waits_s.append(timeout_s)
            if self.later and timeout_s > 0:
                self.clock.now += 0.0005
                self.post(self.later.pop(0))
        return super().take_all(timeout_s=0.0)


class SteppedLoop:
    """A loop and everything around it."""

    def __init__(
        self,
        *,
        waiting_limit: int = 8,
        running_limit: int = 4,
        context_token_limit: int = 64,
        memory_limit_bytes: int = 0,
        waiting: WaitingLimits | None = None,
        prefill_chunk_s: float = 0.0,
        policy: PassPolicy = POLICY,
    ) -> None:
        self.clock = FakeClock()
        self.runner = FakeRunner()
        self.runner.clock = self.clock
        self.recorder = Recorder()
        self.mailbox = WatchedMailbox(self.clock)
        self.queue = WaitingQueue(waiting or WaitingLimits(request_limit=waiting_limit))
        self.scheduler = Scheduler(
            SchedulerLimits(
                running_limit=running_limit,
                prefilling_limit=2,
                prefill_chunk_token_count=4,
                prefill_chunk_s=prefill_chunk_s,
                policy=policy,
            ),
            self.queue,
        )
        self.prefix = no_prefix(self.clock)
        self.budget = MemoryBudget(memory_limit_bytes)
        self.guard = MemoryGuard(
            memory_model(), share=self.budget.enter(), weight_bytes=100, chunk_token_count=4
        )
        self.loop = EngineLoop(
            runner=self.runner,
            scheduling=SchedulingParts(self.scheduler, self.guard),
            mailbox=self.mailbox,
            listener=self.recorder,
            clock=self.clock,
            tokenizer=FakeDecoder(),
            model=model_info(context_token_limit=context_token_limit),
            prefix=self.prefix,
        )

    def submit(self, request_id: str, *args, **kwargs) -> None:
        assert self.mailbox.offer(Submit(request(request_id, *args, **kwargs)))

    def pressure_limit(self, limit_bytes: int) -> None:
        """Somebody else took memory, or gave it back."""
        self.budget.limit_bytes = limit_bytes

    def run(self, bound: int = 200) -> None:
        self.loop.step()
        for _ in range(bound):
            if not (self.scheduler.waiting_count or self.scheduler.running):
                return
            self.loop.step()
        raise AssertionError("the loop did not come to rest")


def test_one_request_from_started_to_finished() -> None:
    served = SteppedLoop()
    served.submit("a", range(1, 11), max_output_tokens=3)
    served.run()
    events = served.recorder.events["a"]
    assert isinstance(events[0], Started) and events[0].prompt_token_count == 10
    assert [e.processed_token_count for e in events if isinstance(e, PrefillProgress)] == [4, 8, 9]
    assert isinstance(events[-1], Finished) and events[-1].reason is FinishReason.LENGTH
    assert events[-1].usage.output_token_count == 3
    history = list(range(1, 11))
    for _ in range(3):
        history.append(97 + sum(history) % 26)
    assert served.recorder.tokens_of("a") == history[10:]
    assert served.recorder.text_of("a") == decode_ascii(history[10:])
    assert served.runner.history == {}, "nothing is left behind"


def test_a_burst_that_finds_the_engine_idle_is_taken_in_together() -> None:
    served = SteppedLoop()
    served.loop.step()
    served.submit("first", (1, 2), max_output_tokens=5)
    served.mailbox.later += [Submit(request(f"r{n}", (1, 2), max_output_tokens=5)) for n in range(3)]
    served.loop.step()
    assert len(served.scheduler.running) + served.scheduler.waiting_count == 4


@pytest.mark.parametrize("at_once_count", [1, 2, 3])
def test_a_burst_has_its_slots_before_a_short_queue_is_full(at_once_count: int) -> None:
    served = SteppedLoop(running_limit=2, waiting_limit=1)
    served.loop.step()
    names = ("first", "r0", "r1")
    for name in names[:at_once_count]:
        served.submit(name, (1, 2), max_output_tokens=5)
    served.mailbox.later += [
        Submit(request(name, (1, 2), max_output_tokens=5)) for name in names[at_once_count:]
    ]
    served.run()
    ends = [served.recorder.end_of(name) for name in ("first", "r0", "r1")]
    assert all(isinstance(end, Finished) for end in ends), ends


def test_an_idle_engine_waits_for_a_burst_but_a_moment() -> None:
    served = SteppedLoop()
    served.loop.step()
    served.submit("first", (1, 2), max_output_tokens=1)
    served.loop.step()
    assert served.mailbox.waits_s[-1] <= 0.002, "nobody comes behind it"
    endless = SteppedLoop(waiting_limit=100)
    endless.loop.step()
    endless.submit("first", (1, 2), max_output_tokens=1)
    endless.mailbox.later += [Submit(request(f"r{n}", (1, 2), max_output_tokens=1)) for n in range(90)]
    endless.loop.step()
    assert len(endless.mailbox.later) > 40, "the first pass runs while others are still coming"


@pytest.mark.parametrize(("policy", "waits"), [(GPU_POLICY, [1, 1, 0, 0]), (POLICY, [1, 1, 1, 1])])
def test_who_comes_alone_again_and_again_is_begun_at_once_on_a_gpu(
    policy: PassPolicy, waits: list[int]
) -> None:
    served = SteppedLoop(policy=policy)

    def waits_for_others(name: str) -> bool:
        served.run()
        served.loop.step()
        assert served.loop.is_idle
        served.submit(name, (1, 2), max_output_tokens=3)
        before = len(served.mailbox.waits_s)
        served.loop.step()
        return any(wait_s > 0 for wait_s in served.mailbox.waits_s[before:])

    assert [waits_for_others(f"r{n}") for n in range(4)] == waits
    served.submit("beside", (1, 2), max_output_tokens=3)
    assert waits_for_others("later"), "two ran at once"


def test_eos_ends_without_text_and_counts() -> None:
    served = SteppedLoop()
    served.runner.next_token = lambda history: EOS if len(history) > 4 else 120
    served.submit("a", (1, 2, 3), max_output_tokens=50)
    served.run()
    end = served.recorder.end_of("a")
    assert isinstance(end, Finished) and end.reason is FinishReason.STOP_TOKEN
    assert served.recorder.text_of("a") == "xx"
    assert served.recorder.tokens_of("a") == [120, 120, EOS]


def test_a_stop_string_ends_in_the_step_that_completed_it() -> None:
    served = SteppedLoop()
    text = iter("one END two")
    served.runner.next_token = lambda history: ord(next(text))
    served.submit("a", stop=("END",), max_output_tokens=50)
    served.run()
    end = served.recorder.end_of("a")
    assert isinstance(end, Finished)
    assert (end.reason, end.stop_string) == (FinishReason.STOP_STRING, "END")
    assert served.recorder.text_of("a") == "one "
    assert end.usage.output_token_count == len("one END")


def test_the_context_ends_an_output_early_and_says_so() -> None:
    served = SteppedLoop(context_token_limit=12)
    served.submit("a", range(1, 11), max_output_tokens=50)
    served.run()
    end = served.recorder.end_of("a")
    assert isinstance(end, Finished) and end.reason is FinishReason.CONTEXT_LENGTH
    assert end.usage.output_token_count == 2


def test_cancel_frees_the_slot_before_the_next_forward_pass() -> None:
    served = SteppedLoop(running_limit=1)
    served.submit("a", max_output_tokens=50)
    served.submit("b", max_output_tokens=1)
    for _ in range(3):
        served.loop.step()
    steps = []
    served.runner.on_decode = lambda: steps.append(len(served.runner.decoding))
    served.mailbox.post(Cancel(RequestId("a"), cancelled_by_client()))
    served.loop.step()
    assert steps in ([], [1]), "the cancelled one is in no further pass"
    assert 0 in served.runner.released
    end = served.recorder.end_of("a")
    assert isinstance(end, Failed) and end.error.reason is Reason.CANCELLED
    served.run()
    assert isinstance(served.recorder.end_of("b"), Finished)


def test_cancel_of_a_waiting_and_of_an_unknown_request() -> None:
    served = SteppedLoop(running_limit=1)
    served.submit("a", max_output_tokens=3)
    served.submit("b")
    served.mailbox.post(Cancel(RequestId("b"), cancelled_by_client()))
    served.mailbox.post(Cancel(RequestId("nobody"), cancelled_by_client()))
    served.run()
    assert isinstance(served.recorder.end_of("a"), Finished)
    assert len(served.recorder.events["b"]) == 1, "it never started"


def test_a_full_queue_refuses_with_numbers() -> None:
    served = SteppedLoop(waiting_limit=2, running_limit=1)
    for name in "abcde":
        served.submit(name)
    served.loop.step()
    refused = [n for n in "abcde" if isinstance(served.recorder.end_of(n), Failed)]
    assert refused == ["d", "e"], "one runs and two wait"
    end = served.recorder.end_of("d")
    assert isinstance(end, Failed) and end.error.reason is Reason.QUEUE_FULL
    assert end.error.metadata["waiting_limit"] == "2" and end.error.retry_after_s


def test_deadlines_end_waiting_and_running_requests() -> None:
    served = SteppedLoop(running_limit=1)
    served.submit("running", max_output_tokens=50, deadline_time=1005.0)
    served.submit("waiting", deadline_time=1004.0)
    served.loop.step()
    served.clock.now = 1004.5
    served.loop.step()
    assert served.recorder.end_of("running") is None
    served.clock.now = 1006.0
    served.loop.step()
    for name in ("running", "waiting"):
        end = served.recorder.end_of(name)
        assert isinstance(end, Failed) and end.error.reason is Reason.DEADLINE_EXCEEDED
    assert served.runner.decoding == []


def test_drain_finishes_what_runs_and_refuses_what_comes() -> None:
    served = SteppedLoop()
    served.submit("running", max_output_tokens=5)
    served.loop.step()
    served.mailbox.post(DrainEngine(deadline_time=2000.0))
    served.submit("late")
    served.run()
    assert isinstance(served.recorder.end_of("running"), Finished)
    late = served.recorder.end_of("late")
    assert isinstance(late, Failed) and late.error.reason is Reason.DRAINING
    assert served.loop.is_done


def test_drain_gives_up_at_its_own_deadline() -> None:
    served = SteppedLoop()
    served.submit("endless", max_output_tokens=50)
    served.loop.step()
    served.mailbox.post(DrainEngine(deadline_time=1010.0))
    served.loop.step()
    assert served.recorder.end_of("endless") is None
    served.clock.now = 1011.0
    served.loop.step()
    end = served.recorder.end_of("endless")
    assert isinstance(end, Failed) and end.error.reason is Reason.DRAINING
    assert served.loop.is_done


def test_a_warm_up_computes_the_prompt_only() -> None:
    served = SteppedLoop()
    served.submit("warm", range(1, 11), max_output_tokens=0)
    served.run()
    end = served.recorder.end_of("warm")
    assert isinstance(end, Finished) and end.usage.output_token_count == 0
    assert sum(count for _, count in served.runner.chunks) == 9
    assert not any(isinstance(e, Delta) for e in served.recorder.events["warm"])


def test_stats_count_what_happened() -> None:
    served = SteppedLoop()
    served.submit("a", (1, 2, 3), max_output_tokens=4)
    served.run()
    answers = []
    served.mailbox.post(QueryStats(lambda engine, cache: answers.append(engine)))
    served.submit("b")
    served.loop.step()
    (stats,) = answers
    assert (stats.accepted_total, stats.finished_total) == (1, 1)
    assert (stats.prompt_token_total, stats.prefilled_token_total, stats.output_token_total) == (3, 2, 4)


def test_what_callers_end_counts_as_cancelled_and_what_the_server_ends_as_failed() -> None:
    served = SteppedLoop(running_limit=8, waiting_limit=8)
    served.submit("finished", max_output_tokens=1)
    served.submit("left", max_output_tokens=50)
    served.submit("late", max_output_tokens=50, deadline_time=1001.0)
    served.submit("drained", max_output_tokens=50)
    for _ in range(8):
        served.loop.step()
    served.mailbox.post(Cancel(RequestId("left"), cancelled_by_client()))
    served.loop.step()
    served.clock.now = 1002.0
    served.loop.step()
    assert totals(served) == (1, 2, 0)
    served.mailbox.post(DrainEngine(deadline_time=1003.0))
    served.clock.now = 1004.0
    served.loop.step()
    assert totals(served) == (1, 2, 1)


def test_requests_of_a_loop_that_broke_count_as_failed() -> None:
    served = SteppedLoop()
    for name in "ab":
        served.submit(name, max_output_tokens=50)
    served.loop.step()
    served.loop.fail_all(EngineFailed(Reason.ENGINE_FAILED, "injected"))
    assert totals(served) == (0, 0, 2)
    for name in "ab":
        end = served.recorder.end_of(name)
        assert isinstance(end, Failed) and end.error.reason is Reason.ENGINE_FAILED


def totals(served: SteppedLoop) -> tuple[int, int, int]:
    counters = served.loop.counters.stats
    return counters.finished_total, counters.cancelled_total, counters.failed_total


def test_progress_is_told_once_a_full_chunk_however_small_the_pieces() -> None:
    served = SteppedLoop(prefill_chunk_s=1e-9)
    chunks = served.runner.chunks

    def take_time() -> None:
        _, token_count = chunks[-1]
        served.clock.now += 0.01 * token_count

    served.runner.on_prefill = take_time
    for name, token_count in (("one", 2), ("two", 3)):  # after these it is known that nothing is fixed
        served.submit(name, range(1, 1 + token_count), max_output_tokens=1)
        served.run()
    chunks.clear()
    served.submit("a", range(1, 12), max_output_tokens=1)
    served.run()
    assert {count for _, count in chunks} <= {1, 2} and sum(count for _, count in chunks) == 11
    progress = [
        e.processed_token_count for e in served.recorder.events["a"] if isinstance(e, PrefillProgress)
    ]
    assert progress == [4, 8, 10]


def test_log_probabilities_of_a_prompt_are_told_once_though_it_is_parked_within() -> None:
    served = SteppedLoop()
    prompt = list(range(1, 15))
    served.submit("a", prompt, logprobs=LogprobsWanted(of_prompt=True))
    served.loop.step()
    served.loop.step()
    (sequence,) = served.scheduler.running
    assert sequence.processed_token_count == 8 and sequence.measures_prompt
    served.loop._park(sequence)
    served.run()
    progress = [e for e in served.recorder.events["a"] if isinstance(e, PrefillProgress)]
    told = [entry for event in progress for entry in event.logprobs]
    assert [entry.token_id for entry in told] == prompt[1:]
    assert [entry.logprob for entry in told] == [-position for position in range(len(prompt) - 1)]
    assert not sequence.measures_prompt
    assert isinstance(served.recorder.end_of("a"), Finished)


def test_a_prompt_that_is_measured_runs_in_shorter_pieces() -> None:
    served = SteppedLoop()
    served.scheduler.limits = dataclasses.replace(served.scheduler.limits, measured_chunk_token_count=3)
    served.submit("measured", range(1, 10), logprobs=LogprobsWanted(of_prompt=True))
    served.submit("plain", range(1, 10), logprobs=LogprobsWanted())
    served.run()
    by_sequence: dict[int, list[int]] = {}
    for sequence_id, count in served.runner.chunks:
        by_sequence.setdefault(sequence_id, []).append(count)
    measured, plain = by_sequence[0], by_sequence[1]
    assert max(measured) == 3 and max(plain) <= 4 and sum(measured) == sum(plain) == 9


def test_several_prompts_and_all_rows_run_in_one_pass_and_the_last_chunk_gives_the_first_token() -> None:
    served = SteppedLoop(running_limit=8)
    for name in ("a", "b"):
        served.submit(name, (1, 2), max_output_tokens=4)
    served.loop.step()
    assert served.runner.pass_count == 1 and served.runner.chunks == [(0, 2), (1, 2)]
    served.submit("c", (1, 2, 3), max_output_tokens=1)
    served.loop.step()
    assert served.runner.pass_count == 2, "two rows and a chunk"
    assert [len(served.recorder.tokens_of(name)) for name in "ab"] == [1, 1]
    served.loop.step()
    assert [len(served.recorder.tokens_of(name)) for name in "abc"] == [2, 2, 1]


def test_tokens_are_published_when_the_next_pass_is_built_and_before_anything_else_takes_time() -> None:
    served = SteppedLoop(running_limit=8)
    seen: list[int] = []
    run = served.runner.run

    def waits(
        chunks: ReadSequence[Chunk],
        *,
        before_wait: Callable[[], None] | None = None,
        reads_at_once: bool = False,
    ) -> PassResult:
        seen.append(len(served.recorder.tokens_of("a")))
        result = run(chunks, before_wait=before_wait)
        seen.append(len(served.recorder.tokens_of("a")))
        return result

    served.runner.run = waits  # type: ignore[method-assign]
    served.submit("a", (1, 2), max_output_tokens=3)
    for _ in range(3):
        served.loop.step()
    assert seen == [0, 0, 0, 1, 1, 2]
    assert isinstance(served.recorder.end_of("a"), Finished), "no pass follows the last"


def test_beside_a_load_a_token_does_not_wait_for_the_next_pass_to_be_built() -> None:
    served = SteppedLoop(running_limit=2)
    served.submit("decodes", (1, 2), max_output_tokens=9)
    served.loop.step()
    assert not served.recorder.tokens_of("decodes"), "it is published when the next pass is built"
    served.submit("loads", (3, 4), max_output_tokens=3)
    served.loop._take_in()
    served.loop._admit()
    (loading,) = (s for s in served.scheduler.running if s.request.request_id == "loads")
    served.scheduler.move(loading, Phase.LOADING)
    counts = []
    for _ in range(3):
        served.loop.step()
        counts.append(len(served.recorder.tokens_of("decodes")))
    assert counts == [2, 3, 4]


def test_a_token_is_told_before_the_pass_beside_which_readers_begin() -> None:
    served = SteppedLoop(running_limit=2)
    served.submit("decodes", (1, 2), max_output_tokens=9)
    served.loop.step()
    told: list[int] = []
    run = served.runner.run

    def counts(
        chunks: ReadSequence[Chunk],
        *,
        before_wait: Callable[[], None] | None = None,
        reads_at_once: bool = False,
    ) -> PassResult:
        told.append(len(served.recorder.tokens_of("decodes")))
        return run(chunks, before_wait=before_wait)

    served.runner.run = counts  # type: ignore[method-assign]
    # Its blocks are found in the step that asks the readers for them.
    served.loop._begin = lambda sequence: served.scheduler.move(sequence, Phase.RESTORING)  # type: ignore[method-assign]
    served.loop._continue_restore = (  # type: ignore[method-assign]
        lambda sequence, *, budget_s: served.scheduler.move(sequence, Phase.LOADING)
    )
    served.submit("loads", (3, 4), max_output_tokens=3)
    served.loop.step()
    assert told == [1]


def test_those_that_end_in_one_pass_are_released_together() -> None:
    served = SteppedLoop(running_limit=8)
    for name in ("a", "b"):
        served.submit(name, (1, 2), max_output_tokens=3)
    served.run()
    assert served.runner.releases == [2]


def test_a_loop_that_found_nothing_to_do_waits_though_somebody_is_in_the_queue() -> None:
    served = SteppedLoop(running_limit=1)
    for name in ("loads", "waits"):
        served.submit(name, (1, 2), max_output_tokens=3)
    served.loop._take_in()
    served.loop._admit()
    served.scheduler.move(served.scheduler.running[0], Phase.LOADING)
    for _ in range(5):
        served.loop.step()
        assert served.loop.wait_s == 0.5 and served.loop.is_idle


def test_an_engine_warms_up_further_only_when_nobody_has_asked_for_anything_in_a_while() -> None:
    served = SteppedLoop()

    def step_for(seconds: float) -> None:
        for _ in range(int(seconds / 0.5)):
            served.clock.now += 0.5
            served.loop.step()

    step_for(5.0)
    assert served.runner.warm_up_count == 0
    served.submit("a", (1, 2))
    served.run()
    step_for(9.0)
    assert served.runner.warm_up_count == 0
    step_for(5.0)
    assert served.runner.warm_up_count > 0


def test_a_wait_ends_with_the_nearest_deadline() -> None:
    served = SteppedLoop(running_limit=1)
    served.submit("loads", (1, 2), deadline_time=served.clock.now + 0.2)
    served.loop._take_in()
    served.loop._admit()
    served.scheduler.move(served.scheduler.running[0], Phase.LOADING)
    served.loop.step()
    assert served.loop.wait_s is not None and abs(served.loop.wait_s - 0.2) < 1e-6
    served.clock.now += 0.3
    served.loop.step()
    assert isinstance(served.recorder.end_of("loads"), Failed)


def test_a_token_of_a_device_that_is_idle_is_published_before_the_next_pass_is_built() -> None:
    served = SteppedLoop()
    run = served.runner.run
    served.runner.run = lambda *args, **options: dataclasses.replace(  # type: ignore[method-assign]
        run(*args, **options), leaves_device_idle=True
    )
    served.submit("a", range(1, 4), max_output_tokens=3)
    served.loop.step()
    assert served.recorder.tokens_of("a")


def test_a_device_that_runs_ahead_is_asked_for_its_last_tokens() -> None:
    served = SteppedLoop()
    behind: list[PassResult] = [PassResult(is_behind=True)]
    run = served.runner.run

    def run_ahead(
        chunks: ReadSequence[Chunk],
        *,
        before_wait: Callable[[], None] | None = None,
        reads_at_once: bool = False,
    ) -> PassResult:
        assert before_wait is not None
        before_wait()
        behind.append(dataclasses.replace(run(chunks), elapsed_s=0.1, is_behind=True))
        return behind[-2]

    served.runner.run = run_ahead  # type: ignore[method-assign]
    served.submit("a", range(1, 7), max_output_tokens=3)
    served.run()
    alone = SteppedLoop()
    alone.submit("a", range(1, 7), max_output_tokens=3)
    alone.run()
    assert served.recorder.tokens_of("a") == alone.recorder.tokens_of("a")
    assert served.loop.counters.stats.prefill_tokens_per_s == 40 + 0.2 * (10 - 40), "four tokens, then one"


def costly_commands(stepped: SteppedLoop, answers: list[float], *, cost_s: float) -> None:
    """Post three commands that take so long each; note when each one is answered."""

    def reply(_: object) -> None:
        stepped.clock.now += cost_s
        answers.append(stepped.clock.now)

    for _ in range(3):
        stepped.mailbox.post(Command(Explain((1, 2, 3), CacheScope(Tenant(""))), reply))


def test_one_costly_command_is_carried_out_in_a_step_and_decoding_goes_on_between() -> None:
    stepped = SteppedLoop()
    stepped.submit("one", range(1, 4), max_output_tokens=50)
    stepped.loop.step()
    answers: list[float] = []
    costly_commands(stepped, answers, cost_s=0.27)
    tokens = []
    for count in (1, 2, 3):
        stepped.loop.step()
        assert len(answers) == count
        tokens.append(sum(isinstance(event, Delta) for event in stepped.recorder.events["one"]))
    assert tokens[0] < tokens[1] < tokens[2]


def test_commands_that_cost_little_are_carried_out_together() -> None:
    stepped = SteppedLoop()
    answers: list[float] = []
    costly_commands(stepped, answers, cost_s=0.001)
    stepped.loop.step()
    assert len(answers) == 3


def test_an_idle_loop_does_not_wait_while_a_command_does() -> None:
    stepped = SteppedLoop()
    answers: list[float] = []
    costly_commands(stepped, answers, cost_s=0.27)
    stepped.loop.step()
    waits_s = [stepped.loop.wait_s]
    stepped.loop.step()
    waits_s.append(stepped.loop.wait_s)
    stepped.loop.step()
    # With the last one done there is nothing left to hurry for.
    assert len(answers) == 3 and waits_s == [None, None] and stepped.loop.wait_s == 0.5


def test_commands_that_wait_are_carried_out_before_an_orderly_end() -> None:
    stepped = SteppedLoop()
    answers: list[float] = []
    costly_commands(stepped, answers, cost_s=0.27)
    stepped.mailbox.post(DrainEngine(stepped.clock.now + 10))
    while not stepped.loop.is_done:
        stepped.loop.step()
    assert len(answers) == 3


def test_commands_that_wait_are_answered_when_the_loop_fails() -> None:
    stepped = SteppedLoop()
    answers: list[float] = []
    costly_commands(stepped, answers, cost_s=0.27)
    stepped.loop.step()
    stepped.loop.fail_all(EngineFailed(Reason.ENGINE_FAILED, "it failed"))
    assert len(answers) == 3


def test_callers_that_leave_cannot_make_commands_pile_up() -> None:
    stepped = SteppedLoop()
    refused: list[Overloaded] = []

    def reply(answer: object) -> None:
        if isinstance(answer, Overloaded):
            refused.append(answer)
        stepped.clock.now += 0.27

    for _ in range(10):
        for _ in range(100):
            stepped.mailbox.post(Command(Explain((1, 2, 3), CacheScope(Tenant(""))), reply))
        stepped.loop.step()
    assert len(stepped.loop._waiting_commands) == 256
    assert len(refused) == 1000 - 256 - 10 and refused[0].retry_after_s, "one was carried out in each step"


def of_tenant(tenant: str, request_id: str, *args, **kwargs) -> Submit:
    return Submit(dataclasses.replace(request(request_id, *args, **kwargs), tenant=Tenant(tenant)))


def test_a_tenant_that_runs_nothing_is_given_a_slot_of_the_one_that_runs_most() -> None:
    served = SteppedLoop(running_limit=3, waiting_limit=4)
    for number in range(6):
        served.mailbox.offer(of_tenant("loud", f"loud-{number}", (1, 2), max_output_tokens=30, priority=9))
    for _ in range(4):
        served.loop.step()
    assert served.scheduler.decoding_count == 3
    served.mailbox.offer(of_tenant("quiet", "quiet", (3, 4), max_output_tokens=2))
    for _ in range(4):
        served.loop.step()
    assert isinstance(served.recorder.end_of("quiet"), Finished)
    assert served.loop.counters.stats.parked_total == 1
    served.run()
    for number in range(4):
        end = served.recorder.end_of(f"loud-{number}")
        assert isinstance(end, Finished) and end.usage.output_token_count == 30, "the parked one goes on"


def test_nobody_is_parked_for_one_who_runs_something_already() -> None:
    served = SteppedLoop(running_limit=2)
    served.mailbox.offer(of_tenant("a", "a-0", (1, 2), max_output_tokens=9))
    for number in range(3):
        served.mailbox.offer(of_tenant("b", f"b-{number}", (1, 2), max_output_tokens=9))
    served.run()
    assert served.loop.counters.stats.parked_total == 0
