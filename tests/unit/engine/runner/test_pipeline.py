"""Passes that run one behind the other: what each took, and what is left of those that are in flight."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from icehouse_server.clock import Clock
from icehouse_server.domain.blocks import RegionKind
from icehouse_server.domain.ids import SequenceId
from icehouse_server.domain.request import LogprobsWanted, Pooling, Speculation
from icehouse_server.domain.sampling import SamplingParams
from icehouse_server.engine.core.device_clock import DeviceClock
from icehouse_server.engine.core.ports import Chunk, DecodeRow, PassResult
from icehouse_server.engine.runner import speculation
from icehouse_server.engine.runner.decoding import DispatchedPass
from icehouse_server.engine.runner.forward.forward_pass import ForwardPass
from icehouse_server.engine.runner.forward.splits import Attention
from icehouse_server.engine.runner.runner import ModelRunner
from icehouse_server.engine.runner.speculation import Probe
from icehouse_server.engine.sampling import top_p

from tests.fixtures.models import tiny_model_dir
from tests.unit.engine.runner.test_mixed_rows import runner_of

PROMPT = tuple(3 + j * 7 % 290 for j in range(12))


class SteppedClock:
    """Stands still but for what a test adds."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now


class TickingClock:
    """A second passes with each look at it."""

    def __init__(self) -> None:
        self._seconds = itertools.count()

    def monotonic(self) -> float:
        return float(next(self._seconds))

    def wall(self) -> float:
        return self.monotonic()


def runner_at(path: Path, clock: Clock, *, is_pipelined: bool) -> ModelRunner:
    return runner_of(tiny_model_dir(path, "llama"), is_pipelined=is_pipelined, clock=clock)


def test_a_first_token_is_told_by_its_own_pass_where_that_is_asked_for(tmp_path: Path) -> None:
    runner = runner_at(tmp_path, SteppedClock(), is_pipelined=True)
    drawn: list[list[int]] = []
    for number, reads_at_once in enumerate((False, True)):
        runner.open(SequenceId(number))
        chunk = Chunk(SequenceId(number), PROMPT, row=DecodeRow(SamplingParams(), PROMPT))
        first = runner.run([chunk], reads_at_once=reads_at_once)
        assert len(first.drawn) == int(reads_at_once) and first.is_behind is not reads_at_once
        assert first.leaves_device_idle is reads_at_once
        results = [first, *(runner.run([]) for _ in range(4 - reads_at_once))]
        drawn.append([each.token_id for result in results for each in result.drawn][:3])
        runner.release([SequenceId(number)])
        runner.run([])
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("is_pipelined", [True, False])
def test_nothing_is_kept_of_a_row_that_was_released(tmp_path: Path, is_pipelined: bool) -> None:
    """A pass of it may be in flight, and be looked at only when somebody asks for another one."""
    folder = tiny_model_dir(tmp_path, "llama")
    runner = runner_of(folder, is_pipelined=is_pipelined, attention=Attention.ROWS)
    row = DecodeRow(SamplingParams(), prompt_token_ids=PROMPT)
    runner.open(SequenceId(1))
    runner.run([Chunk(SequenceId(1), PROMPT, row=row)])
    runner.run([])
    caches = [weakref.ref(cache) for cache in runner.caches(SequenceId(1))]
    runner.release([SequenceId(1)])
    gc.collect()
    assert caches and not any(cache() for cache in caches)
    assert runner.run([]).drawn == []


@pytest.mark.parametrize("is_pipelined", [True, False])
def test_the_times_of_passes_never_overlap(tmp_path: Path, is_pipelined: bool) -> None:
    """A chunk behind a pass in flight is not timed from where it was dispatched, which would count that pass
    twice, and the next one not as nothing."""
    clock = TickingClock()
    runner = runner_at(tmp_path, clock, is_pipelined=is_pipelined)
    began = clock.monotonic()
    row = DecodeRow(SamplingParams(), prompt_token_ids=PROMPT)
    runner.open(SequenceId(1))
    told = [runner.run([Chunk(SequenceId(1), PROMPT, row=row)])]
    runner.open(SequenceId(2))
    told += [runner.run([Chunk(SequenceId(2), PROMPT[start : start + 4])]) for start in (0, 4, 8)]
    told += [runner.run([]) for _ in range(4)]
    runner.release([SequenceId(1), SequenceId(2)])
    told.append(runner.run([]))
    passes = [result.elapsed_s for result in told if result.elapsed_s]
    assert [result.is_behind for result in told[1:-1]] == [is_pipelined] * 7
    assert len(passes) == 8, passes
    assert min(passes) >= 1.0 and sum(passes) <= clock.monotonic() - began
    # Each look at the clock is a second: one as a pass is built, one as it is waited for, one as it ends.
    assert max(passes[1:]) <= 3.0, passes


def test_a_pass_is_not_charged_with_the_turns_of_another_model(tmp_path: Path) -> None:
    """The device does what two models give it in turns, so each is timed from the end of the other's."""
    clock, device = SteppedClock(), DeviceClock()
    path = tiny_model_dir(tmp_path, "llama")
    runners = [runner_of(path, is_pipelined=True, clock=clock, device_clock=device) for _ in range(2)]
    clock.now = began = 100.0
    row = DecodeRow(SamplingParams(), prompt_token_ids=PROMPT)
    for runner in runners:
        runner.open(SequenceId(1))
    told: list[list[float]] = [[], []]
    for turn in range(5):
        for runner, own in zip(runners, told, strict=True):
            own.append(runner.run([] if turn else [Chunk(SequenceId(1), PROMPT, row=row)]).elapsed_s)
            clock.now += 1.0
    assert [own[2:] for own in told] == [[1.0] * 3, [1.0] * 3]
    assert sum(map(sum, told)) <= clock.now - began
    # The second one is waited for twice meanwhile: the pass before that ended who knows when.
    runners[1].run([])
    clock.now += 1.0
    assert runners[0].run([]).elapsed_s == 0.0


@pytest.mark.parametrize("is_pipelined", [True, False])
def test_building_a_pass_for_an_idle_device_is_no_time_of_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_pipelined: bool
) -> None:
    """A CPU computes attention while a pass is built, so there it is one time."""
    clock = SteppedClock()
    runner = runner_at(tmp_path, clock, is_pipelined=is_pipelined)
    build = ForwardPass.run

    def built(*args: Any) -> Any:
        clock.now += 100.0
        return build(*args)

    monkeypatch.setattr(ForwardPass, "run", built)
    runner.open(SequenceId(1))
    results = [runner.run([Chunk(SequenceId(1), PROMPT)])]
    clock.now += 5.0
    if is_pipelined:
        results.append(runner.run([]))
    assert [result.elapsed_s for result in results] == ([0.0, 5.0] if is_pipelined else [100.0])


@pytest.mark.parametrize(("waited_s", "is_host_bound"), [(0.0, True), (0.1, True), (1.0, False)])
def test_who_was_waited_for_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waited_s: float, is_host_bound: bool
) -> None:
    """A host that builds for longer than the device computes never waits for it."""
    clock = SteppedClock()
    runner = runner_at(tmp_path, clock, is_pipelined=True)
    wait = DispatchedPass.wait

    def waited(dispatched: DispatchedPass) -> None:
        clock.now += waited_s
        wait(dispatched)

    monkeypatch.setattr(DispatchedPass, "wait", waited)
    runner.open(SequenceId(1))
    results = [runner.run([Chunk(SequenceId(1), PROMPT[:4])])]
    clock.now += 10.0
    results.append(runner.run([Chunk(SequenceId(1), PROMPT[4:])]))
    results.append(runner.run([]))
    assert results[1].elapsed_s == 10.0 + waited_s
    # Behind the last one nothing is built.
    assert [result.is_host_bound for result in results] == [False, is_host_bound, False]


def test_a_pass_has_ended_by_its_number_only_once_it_was_waited_for(tmp_path: Path) -> None:
    """Memory that a pass in flight may read is given to others by these numbers."""
    runner = runner_at(tmp_path, TickingClock(), is_pipelined=True)
    passes = runner._pass_clock
    assert passes.dispatched == passes.ended > 0, "the warm-up left a pass in flight"
    first = passes.dispatched + 1
    runner.open(SequenceId(1))
    row = DecodeRow(SamplingParams(frequency_penalty=0.5), prompt_token_ids=PROMPT)
    numbers = []
    for chunks in ([Chunk(SequenceId(1), PROMPT[:4])], [Chunk(SequenceId(1), PROMPT[4:], row=row)], [], []):
        runner.run(chunks)
        numbers.append((passes.dispatched - first, passes.ended - first))
    assert numbers == [(0, -1), (1, 0), (2, 1), (3, 2)]
    runner.release([SequenceId(1)])
    runner.run([])
    assert passes.dispatched == passes.ended == first + 3
    runner.run([])
    assert passes.dispatched == first + 3, "nothing was fed"


class Order:
    """Notes when passes are dispatched, and when anything waits for the device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self._numbers: dict[int, int] = {}
        self._kept: list[DispatchedPass] = []
        self._is_waiting = False
        monkeypatch.setattr(DispatchedPass, "dispatch", self._noting(DispatchedPass.dispatch, "dispatch"))
        monkeypatch.setattr(DispatchedPass, "wait", self._noting(DispatchedPass.wait, "wait"))
        monkeypatch.setattr(DispatchedPass, "read", self._noting(DispatchedPass.read, "read"))
        for name in ("item", "tolist", "__int__", "__float__", "__bool__"):
            monkeypatch.setattr(mx.array, name, self._looking(getattr(mx.array, name), name))
        monkeypatch.setattr(mx, "eval", self._looking(mx.eval, "eval"))

    def _noting(self, really: Callable[..., Any], name: str) -> Callable[..., Any]:
        def noted(current: DispatchedPass, **options: Any) -> Any:
            if id(current) not in self._numbers:
                self._numbers[id(current)] = len(self._numbers)
                self._kept.append(current)
            self.events.append(f"{name} {self._numbers[id(current)]}")
            self._is_waiting = name != "dispatch"
            try:
                return really(current, **options)
            finally:
                self._is_waiting = False

        return noted

    def _looking(self, really: Callable[..., Any], name: str) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            if not self._is_waiting:
                self.events.append(name)
            return really(*args)

        return noted


@pytest.mark.parametrize(
    ("sampling", "calls"),
    [
        (SamplingParams(), ["dispatch {n}", "wait {p}", "read {p}"]),
        (SamplingParams(temperature=0.8, top_p=0.9), ["dispatch {n}", "wait {p}", "read {p}"]),
        # A draw that needs the token before it: the forward goes ahead of that, the draw behind it.
        (SamplingParams(frequency_penalty=0.5), ["dispatch {n}", "wait {p}", "read {p}", "dispatch {n}"]),
    ],
    ids=["greedy", "random", "penalized"],
)
def test_the_next_pass_is_dispatched_before_the_last_one_s_tokens_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampling: SamplingParams, calls: list[str]
) -> None:
    """On a device that runs ahead; nothing else waits for it between two dispatches."""
    runner = runner_at(tmp_path, TickingClock(), is_pipelined=True)
    for number in (1, 2):
        runner.open(SequenceId(number))
    order = Order(monkeypatch)
    row = DecodeRow(sampling, prompt_token_ids=PROMPT)
    runner.run([Chunk(SequenceId(1), PROMPT, row=row)])
    assert order.events == ["dispatch 0"]
    for number in range(1, 5):
        order.events.clear()
        # The second of these has a prompt's chunk beside the row.
        runner.run([Chunk(SequenceId(2), PROMPT[:4])] if number == 2 else [])
        assert order.events == [call.format(n=number, p=number - 1) for call in calls], number


@pytest.mark.parametrize("speculation", [None, Speculation(4, ngram_token_limit=2)], ids=["plain", "guesses"])
@pytest.mark.parametrize("is_pipelined", [True, False])
def test_where_a_pass_is_waited_for_top_p_is_found_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_pipelined: bool, speculation: Speculation | None
) -> None:
    """Guesses are waited for on any device; their draws used to go the way of those that are not."""
    runner = runner_at(tmp_path, TickingClock(), is_pipelined=is_pipelined)
    searches: list[int] = []
    search = top_p._searched_reach

    def watched(distances: mx.array, logits: mx.array, **how: Any) -> mx.array:
        searches.append(distances.shape[0])
        return search(distances, logits, **how)

    monkeypatch.setattr(top_p, "_searched_reach", watched)
    prompt = tuple(range(3, 290)) * 2  # whatever is drawn, something followed it before
    row = DecodeRow(
        SamplingParams(temperature=0.01, top_p=0.9), prompt_token_ids=prompt, speculation=speculation
    )
    runner.open(SequenceId(1))
    runner.run([Chunk(SequenceId(1), prompt, row=row, speculation=speculation)])
    searches.clear()  # the prompt's own pass had no guesses
    guess_count = sum(runner.run([]).drafted_count for _ in range(3))
    assert (guess_count > 0) is (speculation is not None)
    assert bool(searches) is (is_pipelined and speculation is None)


REPETITIVE = tuple(range(3, 23)) * 4
"""Whatever is drawn behind it, something followed it before."""


def drawn_beside_a_guesser(
    runner: ModelRunner, speculation: Speculation | None
) -> tuple[dict[int, list[int]], list[PassResult]]:
    """Let a row that may guess and one that does not decode together; return the tokens of each, and what
    each pass came to."""
    chunks = []
    for number, asked in ((1, speculation), (2, None)):
        runner.open(SequenceId(number))
        row = DecodeRow(SamplingParams(), prompt_token_ids=REPETITIVE, speculation=asked)
        chunks.append(Chunk(SequenceId(number), REPETITIVE, row=row, speculation=asked))
    results = [runner.run(chunks), *(runner.run([]) for _ in range(40))]
    tokens: dict[int, list[int]] = {1: [], 2: []}
    for drawn in (drawn for result in results for drawn in result.drawn):
        tokens[drawn.sequence_id].append(drawn.token_id)
    return tokens, results


def always_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "_LOOKUP_PROBE", Probe(step_count=1, least_accepted_count=-9))


ASKED = Speculation(8, ngram_token_limit=2)


@pytest.mark.parametrize(
    ("architecture", "attention", "guesses"),
    [
        ("llama", Attention.ROWS, True),
        ("llama", Attention.AUTO, True),
        ("gemma3_text", Attention.AUTO, True),
        # Caches with windows or states cannot be cut while guesses lie behind what is known.
        ("gemma3_text", Attention.ROWS, False),
        ("lfm2", Attention.ROWS, False),
    ],
)
def test_a_row_that_guesses_keeps_no_other_from_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, attention: Attention, guesses: bool
) -> None:
    """It waits by itself: in the pass that is dispatched behind its guesses only others are fed."""
    always_guess(monkeypatch)
    folder = tiny_model_dir(tmp_path, architecture)
    plain, _ = drawn_beside_a_guesser(runner_of(folder, is_pipelined=True, attention=attention), None)
    order = Order(monkeypatch)
    tokens, results = drawn_beside_a_guesser(runner_of(folder, is_pipelined=True, attention=attention), ASKED)
    place = {event: number for number, event in enumerate(order.events)}
    last = sum(event.startswith("dispatch") for event in place) - 1
    assert all(place[f"dispatch {n + 1}"] < place[f"read {n}"] for n in range(last - 40, last))
    assert all(result.is_behind for result in results)
    told = [{drawn.sequence_id for drawn in result.drawn} for result in results[1:]]
    assert all(2 in each for each in told), "the other one draws in each pass"
    count = min(len(tokens[1]), len(plain[1]))
    assert tokens[1][:count] == plain[1][:count] and count > 15
    assert tokens[2] == plain[2]
    assert bool(sum(result.drafted_count for result in results)) is guesses
    assert (told.count({1, 2}) <= 21) is guesses


@pytest.mark.parametrize("attention", Attention)
def test_a_block_is_cut_where_guesses_are_in_flight_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attention: Attention
) -> None:
    """A request may end, or be parked, before it is known which of them are right."""
    always_guess(monkeypatch)
    architecture = "llama" if attention is Attention.ROWS else "gemma3_text"
    kinds = [RegionKind.KV, *([RegionKind.WINDOW] if architecture == "gemma3_text" else [])]
    folder, found = tiny_model_dir(tmp_path, architecture), []
    prompt = tuple(range(3, 291)) * 2  # whatever is drawn, something followed it before
    for asked in (None, ASKED):
        runner = runner_of(folder, is_pipelined=True, attention=attention)
        for number in (1, 2):
            runner.open(SequenceId(number))
        runner.run([Chunk(SequenceId(1), prompt[:512])])
        plain = DecodeRow(SamplingParams(), prompt_token_ids=PROMPT)
        row = DecodeRow(SamplingParams(), prompt_token_ids=prompt, speculation=asked)
        runner.run([Chunk(SequenceId(2), PROMPT, row=plain)])
        runner.run([Chunk(SequenceId(1), prompt[512:], row=row, speculation=asked)])
        for _ in range(2):
            runner.run([])
        in_flight = runner._pipeline._in_flight
        assert in_flight is not None and bool(in_flight.drafted_count) is (asked is not None)
        cut = runner.blocks.cut(SequenceId(1), start=512, stop=576, kinds=kinds)
        found.append(runner.blocks.begin_to_host([cut[kind] for kind in kinds]).take())
    for one, other in zip(*found, strict=True):
        assert [bytes(tensor.data) for tensor in one.tensors] == [bytes(t.data) for t in other.tensors]


def test_a_row_that_guesses_alone_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody would run ahead meanwhile."""
    always_guess(monkeypatch)
    runner = runner_of(tiny_model_dir(tmp_path, "gemma3_text"), is_pipelined=True, attention=Attention.ROWS)
    asked = ASKED
    prompt = tuple(range(3, 290)) * 2
    row = DecodeRow(SamplingParams(), prompt_token_ids=prompt, speculation=asked)
    runner.open(SequenceId(1))
    runner.run([Chunk(SequenceId(1), prompt, row=row, speculation=asked)])
    results = [runner.run([]) for _ in range(8)]
    assert not any(result.is_behind for result in results) and all(result.drawn for result in results)
    assert sum(result.drafted_count for result in results) > 0


@pytest.mark.parametrize(
    ("chunk", "kind"),
    [
        (
            Chunk(
                SequenceId(2),
                PROMPT[:6],
                next_token_ids=PROMPT[1:7],
                wanted=LogprobsWanted(top_count=2, of_prompt=True),
            ),
            "measured",
        ),
        (Chunk(SequenceId(2), PROMPT[:6], pooling=Pooling.MEAN), "pooled"),
    ],
    ids=["measured", "pooled"],
)
def test_what_is_measured_and_pooled_is_read_with_its_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: Chunk, kind: str
) -> None:
    """It was waited for, by all that decode beside it."""
    told: list[list[Any]] = []
    for is_pipelined in (True, False):
        runner = runner_at(tmp_path / str(is_pipelined), TickingClock(), is_pipelined=is_pipelined)
        for number in (1, 2):
            runner.open(SequenceId(number))
        row = DecodeRow(SamplingParams(), prompt_token_ids=PROMPT)
        runner.run([Chunk(SequenceId(1), PROMPT, row=row)])
        with monkeypatch.context() as patched:
            order = Order(patched)
            results = [runner.run([chunk]), runner.run([]), runner.run([])]
        told.append([getattr(result, kind) for result in results])
        if is_pipelined:
            order.events = [event for event in order.events if "tolist" not in event]
            assert order.events[:5] == ["dispatch 0", "wait 1", "read 1", "dispatch 2", "wait 0"]
    (ahead, at_once) = told
    assert [bool(each) for each in ahead] == [False, True, False]
    assert [bool(each) for each in at_once] == [True, False, False]
    one, other = ahead[1][SequenceId(2)], at_once[0][SequenceId(2)]
    assert list(one) == list(other) and len(one) > 1


def test_nothing_is_told_of_a_chunk_whose_sequence_was_released(tmp_path: Path) -> None:
    """Its name may be another one's, or its own anew, when its pass is read."""
    runner = runner_at(tmp_path, TickingClock(), is_pipelined=True)
    runner.open(SequenceId(1))
    runner.run([Chunk(SequenceId(1), PROMPT, pooling=Pooling.MEAN)])
    runner.release([SequenceId(1)])
    runner.open(SequenceId(1))
    assert not runner.run([Chunk(SequenceId(1), PROMPT[:3])]).pooled
