"""A long prompt beside decoding rows goes through the layers a few in each pass: when, and how far."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence as ReadSequence

import pytest
from icehouse_server.domain.request import Drafting, LogprobsWanted, Pooling, Speculation
from icehouse_server.engine.core.ports import LayerSpan, PassResult
from icehouse_server.engine.core.sequence import Phase, Sequence
from icehouse_server.engine.scheduling.limits import SchedulerLimits
from icehouse_server.engine.scheduling.pass_cost import PassSize
from icehouse_server.engine.scheduling.pass_plan import PassPlan, PrefillChunk
from icehouse_server.engine.scheduling.scheduler import Scheduler

from tests.unit.engine.scheduling.test_scheduler import WIDE, WatchedScheduler, beside_decoding_ones, sequence

LAYERS = 16
LAYERED = dataclasses.replace(
    WIDE, prefill_chunk_token_count=256, prefill_grid_token_count=8, layer_count=LAYERS
)


class ReadingDevice:
    """A device on which rows and chunks read all that they hold, which takes as long as some tokens do; a
    chunk's layers run behind all else until its time is over."""

    fixed_s, row_s, token_s, read_s = 0.010, 0.002, 0.001, 0.00002

    def seconds(self, size: PassSize) -> float:
        """Return what something takes beside what is fixed."""
        return self.row_s * size.draw_count + self.token_s * size.token_count + self.read_s * size.read_count

    def rows_s(self, scheduler: Scheduler) -> float:
        rows = PassSize.of_rows(s.kv_token_count for s in scheduler.decoding)
        return self.fixed_s + self.seconds(rows)

    def run_one(self, scheduler: Scheduler) -> tuple[float, ReadSequence[PrefillChunk]]:
        plan = scheduler.plan()
        began_s = elapsed_s = self.fixed_s + self.seconds(plan.size)
        ran = []
        for chunk in plan.chunks:
            if (asked := chunk.layers) is not None:
                layer_s, last = self.seconds(chunk.size) / asked.count, asked.first
                while last < asked.last and (last == asked.first or elapsed_s + layer_s <= asked.within_s):
                    last, elapsed_s = last + 1, elapsed_s + layer_s
                chunk = dataclasses.replace(chunk, layers=dataclasses.replace(asked, last=last))
            ran.append(chunk)
        plan = scheduler.planned(ran)
        scheduler.note_run(plan)
        scheduler.note_time(plan, PassResult(elapsed_s=elapsed_s, layers_began_s=began_s))
        for row in scheduler.decoding:
            row.output_token_ids.append(1)
        for chunk in plan.chunks:
            chunk.sequence.processed_token_count += chunk.stored_count
            if chunk.is_last:
                chunk.sequence.processed_token_count = chunk.stop
                scheduler.move(chunk.sequence, Phase.DECODING)
        return elapsed_s, plan.chunks


def taught(*token_counts: int, limits: SchedulerLimits = LAYERED) -> tuple[WatchedScheduler, list[Sequence]]:
    """Return a scheduler of which 8 rows decode that knows what passes cost, and prompts of these lengths."""
    scheduler, prompts = beside_decoding_ones(limits, *token_counts, row_count=8)
    device = ReadingDevice()
    rows = PassSize.of_rows(s.kv_token_count for s in scheduler.decoding)
    for start, count in ((0, 0), (0, 64), (500, 32), (1000, 8), (2000, 200)):
        plan = PassPlan(rows + PassSize.of_chunk(start, count))
        scheduler.note_time(plan, PassResult(elapsed_s=device.fixed_s + device.seconds(plan.size)))
    return scheduler, prompts


def run_through(scheduler: WatchedScheduler, prompt: Sequence) -> tuple[list[float], list[PrefillChunk]]:
    """Run until a prompt decodes; return what the passes took of the rows' own, and its chunks."""
    device, ratios, chunks = ReadingDevice(), [], []
    while prompt not in scheduler.decoding:
        rows_s = device.rows_s(scheduler)
        elapsed_s, found = device.run_one(scheduler)
        ratios.append(elapsed_s / rows_s)
        chunks += [chunk for chunk in found if chunk.sequence is prompt]
    return ratios, chunks


def test_a_long_prompt_goes_through_all_layers_without_a_gap_and_comes_on_sooner() -> None:
    scheduler, (prompt,) = taught(3000)
    ratios, chunks = run_through(scheduler, prompt)
    at, layer = 0, 0
    for chunk in chunks:
        assert chunk.start == at
        if chunk.layers is None:
            assert layer == 0
            at = chunk.stop
            continue
        assert chunk.layers.first == layer and chunk.layers.count == LAYERS
        layer = 0 if chunk.layers.is_last else chunk.layers.last
        at = chunk.stop if chunk.layers.is_last else at
    assert at == 3000 and sum(1 for chunk in chunks if chunk.layers is not None) > 0.9 * len(chunks)
    assert max(ratios[:-1]) <= 1.8, "less than a pass may take, until its last token is drawn from"
    whole, (other,) = taught(3000, limits=dataclasses.replace(LAYERED, layer_count=0))
    assert len(ratios) < len(run_through(whole, other)[0]), "and in fewer passes as well"


@pytest.mark.parametrize(
    "asked",
    [
        {"logprobs": LogprobsWanted(of_prompt=True)},
        {"pooling": Pooling.MEAN},
        {"speculation": Speculation(4, drafting=Drafting.DRAFT_MODEL)},
    ],
    ids=["measured", "pooled", "drafted"],
)
def test_what_is_asked_of_its_chunks_besides_needs_all_layers(asked: dict[str, object]) -> None:
    scheduler, (prompt,) = taught(3000)
    prompt.request = dataclasses.replace(prompt.request, **asked)  # type: ignore[arg-type]
    assert [chunk.layers for chunk in scheduler.plan().chunks] == [None]


def test_short_prompts_and_those_alone_go_through_all_layers() -> None:
    scheduler, _ = taught(100)
    assert [chunk.layers for chunk in scheduler.plan().chunks] == [None]
    scheduler, _ = taught(3000)
    for row in scheduler.decoding:
        scheduler.remove(row)
    assert [chunk.layers for chunk in scheduler.plan().chunks] == [None]


def test_a_crowd_goes_through_all_layers_and_what_is_on_its_way_goes_on() -> None:
    scheduler, _ = taught(3000, 3000, 3000)
    assert all(chunk.layers is None for chunk in scheduler.plan().chunks)
    scheduler, (prompt,) = taught(3000)
    ReadingDevice().run_one(scheduler)
    for number in range(20, 24):
        scheduler.queue.add(sequence(number, 2000))
    scheduler.admit_all()
    chunks = scheduler.plan().chunks
    (own,) = [chunk for chunk in chunks if chunk.sequence is prompt]
    assert own.layers is not None and own.layers.first > 0
    assert [chunk for chunk in chunks if chunk.sequence is not prompt], "and others beside it"


def test_a_shorter_prompt_goes_first_and_the_oldest_still_comes_on() -> None:
    scheduler, (prompt,) = taught(3000)
    _, chunks = ReadingDevice().run_one(scheduler)
    assert chunks[0].layers is not None
    newcomer = sequence(30, 60)
    scheduler.queue.add(newcomer)
    scheduler.admit_all()
    before = chunks[0].layers.last
    while newcomer not in scheduler.decoding:
        elapsed_s, chunks = ReadingDevice().run_one(scheduler)
        (own,) = [chunk for chunk in chunks if chunk.sequence is prompt]
        assert own.layers is not None and own.layers.first == before
        assert any(chunk.sequence is newcomer for chunk in chunks)
        assert elapsed_s < 4.2 * ReadingDevice().rows_s(scheduler)
        before = 0 if own.layers.is_last else own.layers.last


def on_the_way() -> tuple[WatchedScheduler, Sequence, PrefillChunk]:
    """Return a scheduler that has taken a prompt's chunk through some layers."""
    scheduler, (prompt,) = taught(3000)
    _, (chunk,) = ReadingDevice().run_one(scheduler)
    assert chunk.layers is not None and not chunk.layers.is_last and chunk.stored_count == 0
    assert prompt.processed_token_count == 0
    return scheduler, prompt, chunk


def test_who_waits_for_a_tail_inside_a_chunk_has_it_begin_anew_and_end_there() -> None:
    scheduler, prompt, chunk = on_the_way()
    prompt.capture_points.append(chunk.stop)
    assert scheduler.plan().chunks[0].layers.first > 0, "it ends there anyway"  # type: ignore[union-attr]
    prompt.capture_points.append(chunk.stop - 20)
    (again,) = scheduler.plan().chunks
    assert again.start == 0 and again.stop <= chunk.stop - 20
    assert again.layers is None or again.layers.first == 0


def test_one_that_was_parked_begins_anew() -> None:
    scheduler, prompt, _ = on_the_way()
    scheduler.park(prompt)
    scheduler.admit_all()
    (again,) = scheduler.plan().chunks
    assert again.sequence is prompt and again.layers is not None and again.layers.first == 0
    assert again.start == 0


def test_one_that_ended_makes_way_for_another() -> None:
    scheduler, prompt, _ = on_the_way()
    scheduler.remove(prompt)
    other = sequence(40, 2000)
    scheduler.queue.add(other)
    scheduler.admit_all()
    (chunk,) = scheduler.plan().chunks
    assert chunk.sequence is other and chunk.layers is not None and chunk.layers.first == 0


def test_a_pass_that_did_not_run_takes_no_chunk_on() -> None:
    scheduler, _, chunk = on_the_way()
    assert chunk.layers is not None
    first, second = scheduler.plan().chunks, scheduler.plan().chunks
    assert [c.layers for c in first] == [c.layers for c in second]
    assert first[0].layers is not None and first[0].layers.first == chunk.layers.last


def test_once_nothing_decodes_the_rest_of_the_layers_runs_at_once() -> None:
    scheduler, _, chunk = on_the_way()
    assert chunk.layers is not None
    for row in scheduler.decoding:
        scheduler.remove(row)
    (rest,) = scheduler.plan().chunks
    assert rest.layers == LayerSpan(chunk.layers.last, LAYERS, LAYERS) and rest.stored_count == rest.stop


def test_the_pace_stays_that_of_before_however_slow_rows_become() -> None:
    """All layers that are left are asked for, and for how long: twice the pass of rows before the prompt."""
    scheduler, (prompt,) = taught(1000)
    device = ReadingDevice()
    pace_s = device.rows_s(scheduler)
    device.fixed_s *= 1.5
    (chunk,) = scheduler.plan().chunks
    assert chunk.layers is not None and chunk.layers.is_last and chunk.layers.within_s < 2.0 * pace_s
    taken, layers = [], []
    while prompt.remaining_token_count > 100:
        elapsed_s, chunks = device.run_one(scheduler)
        taken.append(elapsed_s / pace_s)
        layers += [chunk.layers for chunk in chunks if chunk.layers is not None]
    assert max(taken) <= 2.05 and len(layers) > 0.9 * len(taken)
    assert device.rows_s(scheduler) > 1.4 * pace_s, "rows that grew that much besides"
    assert all(b.first == (0 if a.is_last else a.last) for a, b in itertools.pairwise(layers))


def test_rows_that_became_slower_than_known_do_not_keep_a_prompt_at_one_layer_a_pass() -> None:
    scheduler, (prompt,) = taught(3000)
    device = ReadingDevice()
    device.row_s *= 2.0
    layer_counts = []
    while prompt.remaining_token_count > 1000:
        _, chunks = device.run_one(scheduler)
        layer_counts += [c.layers.last - c.layers.first for c in chunks if c.layers is not None]
    assert sum(layer_counts[-64:]) / 64 > 1.5
