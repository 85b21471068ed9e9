"""A long prompt beside decoding rows goes through the layers a few in each pass: when, and how far."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from icehouse_server.domain.request import Drafting, LogprobsWanted, Pooling, Speculation
from icehouse_server.engine.core.ports import LayerSpan
from icehouse_server.engine.core.sequence import Sequence
from icehouse_server.engine.scheduling.pass_cost import PassSize
from icehouse_server.engine.scheduling.scheduler import PrefillChunk, Scheduler, SchedulerLimits

from tests.unit.engine.scheduling.test_scheduler import WIDE, WatchedScheduler, beside_decoding_ones, sequence

LAYERS = 16
LAYERED = dataclasses.replace(
    WIDE, prefill_chunk_token_count=256, prefill_grid_token_count=8, layer_count=LAYERS
)


class ReadingDevice:
    """A device on which rows and chunks read all that they hold, which takes as long as some tokens do."""

    fixed_s, row_s, token_s, read_s = 0.010, 0.002, 0.001, 0.00002

    def seconds(self, scheduler: Scheduler, chunks: list[PrefillChunk]) -> float:
        size = scheduler.size_of(chunks)
        seconds = self.fixed_s + self.row_s * size.draw_count
        for part in (size, *(chunk.size for chunk in chunks if chunk.layers is not None)):
            seconds += self.token_s * part.token_count + self.read_s * part.read_count
        return seconds

    def run_one(self, scheduler: Scheduler) -> tuple[float, list[PrefillChunk]]:
        chunks = [self._in_time(scheduler, chunk) for chunk in scheduler.plan()]
        size = scheduler.size_of(chunks)
        layered = [chunk.size for chunk in chunks if chunk.layers is not None]
        elapsed_s = self.seconds(scheduler, chunks)
        scheduler.note_chunks(chunks)
        scheduler.note_pass(size, elapsed_s, layered=sum(layered, PassSize(0, 0)))
        for row in scheduler.decoding:
            row.output_token_ids.append(1)
        for chunk in chunks:
            chunk.sequence.processed_token_count += chunk.kept_count
            if chunk.is_last:
                chunk.sequence.processed_token_count = chunk.stop
                scheduler.start_decoding(chunk.sequence)
        return elapsed_s, chunks

    def _in_time(self, scheduler: Scheduler, chunk: PrefillChunk) -> PrefillChunk:
        """Return as much of a chunk as the runner's time lasts for."""
        while chunk.layers is not None and chunk.layers.last > chunk.layers.first + 1:
            fewer = dataclasses.replace(chunk.layers, last=chunk.layers.last - 1)
            shorter = chunk.as_far_as({chunk.sequence.sequence_id: fewer})
            if self.seconds(scheduler, [chunk]) <= chunk.layers.within_s:
                break
            chunk = shorter
        return chunk

    def rows_s(self, scheduler: Scheduler) -> float:
        return self.seconds(scheduler, [])


def taught(*token_counts: int, limits: SchedulerLimits = LAYERED) -> tuple[WatchedScheduler, list[Sequence]]:
    """Return a scheduler of which 8 rows decode that knows what passes cost, and prompts of these lengths."""
    scheduler, prompts = beside_decoding_ones(limits, *token_counts, row_count=8)
    rows, device = scheduler.size_of([]), ReadingDevice()
    for start, count in ((0, 0), (0, 64), (500, 32), (1000, 8), (2000, 200)):
        chunk = PassSize.of_chunk(start, count) if count else PassSize(0, 0)
        read_s = (start + count) * device.read_s if count else 0.0
        scheduler.note_pass(rows + chunk, device.rows_s(scheduler) + count * device.token_s + read_s)
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
    assert max(ratios[:-1]) <= 1.75, "less than a pass may take, until its last token is drawn from"
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
    assert [chunk.layers for chunk in scheduler.plan()] == [None]


def test_short_prompts_and_those_alone_go_through_all_layers() -> None:
    scheduler, _ = taught(100)
    assert [chunk.layers for chunk in scheduler.plan()] == [None]
    scheduler, _ = taught(3000)
    for row in scheduler.decoding:
        scheduler.remove(row)
    assert [chunk.layers for chunk in scheduler.plan()] == [None]


def test_a_crowd_goes_through_all_layers_and_what_is_on_its_way_goes_on() -> None:
    scheduler, _ = taught(3000, 3000, 3000)
    assert all(chunk.layers is None for chunk in scheduler.plan())
    scheduler, (prompt,) = taught(3000)
    ReadingDevice().run_one(scheduler)
    for number in range(20, 24):
        scheduler.queue.add(sequence(number, 2000))
    scheduler.admit_all()
    chunks = scheduler.plan()
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
    assert chunk.layers is not None and not chunk.layers.is_last and chunk.kept_count == 0
    assert prompt.processed_token_count == 0
    return scheduler, prompt, chunk


def test_who_waits_for_a_tail_inside_a_chunk_has_it_begin_anew_and_end_there() -> None:
    scheduler, prompt, chunk = on_the_way()
    prompt.capture_points.append(chunk.stop)
    assert scheduler.plan()[0].layers.first > 0, "it ends there anyway"  # type: ignore[union-attr]
    prompt.capture_points.append(chunk.stop - 20)
    (again,) = scheduler.plan()
    assert again.start == 0 and again.stop <= chunk.stop - 20
    assert again.layers is None or again.layers.first == 0


def test_one_that_was_parked_begins_anew() -> None:
    scheduler, prompt, _ = on_the_way()
    scheduler.park(prompt)
    scheduler.admit_all()
    (again,) = scheduler.plan()
    assert again.sequence is prompt and again.layers is not None and again.layers.first == 0
    assert again.start == 0


def test_one_that_ended_makes_way_for_another() -> None:
    scheduler, prompt, _ = on_the_way()
    scheduler.remove(prompt)
    other = sequence(40, 2000)
    scheduler.queue.add(other)
    scheduler.admit_all()
    (chunk,) = scheduler.plan()
    assert chunk.sequence is other and chunk.layers is not None and chunk.layers.first == 0


def test_a_pass_that_did_not_run_takes_no_chunk_on() -> None:
    scheduler, _, chunk = on_the_way()
    assert chunk.layers is not None
    first, second = scheduler.plan(), scheduler.plan()
    assert [c.layers for c in first] == [c.layers for c in second]
    assert first[0].layers is not None and first[0].layers.first == chunk.layers.last


def test_once_nothing_decodes_the_rest_of_the_layers_runs_at_once() -> None:
    scheduler, _, chunk = on_the_way()
    assert chunk.layers is not None
    for row in scheduler.decoding:
        scheduler.remove(row)
    (rest,) = scheduler.plan()
    assert rest.layers == LayerSpan(chunk.layers.last, LAYERS, LAYERS) and rest.kept_count == rest.stop


def test_layers_that_take_longer_than_was_thought_are_fewer_soon() -> None:
    scheduler, _, _ = on_the_way()
    device = ReadingDevice()
    device.token_s *= 4.0
    taken = [device.run_one(scheduler)[0] for _ in range(30)]
    assert max(taken[15:]) < 1.75 * device.rows_s(scheduler) < max(taken)


def test_where_layers_end_in_time_the_pace_stays_that_of_before_however_slow_rows_become() -> None:
    """All that are left are asked for, and for how long: twice the pass of rows before the prompt came."""
    scheduler, (prompt,) = taught(1000, limits=dataclasses.replace(LAYERED, ends_layers_in_time=True))
    device = ReadingDevice()
    pace_s = device.rows_s(scheduler)
    device.fixed_s *= 1.5
    (chunk,) = scheduler.plan()
    assert chunk.layers is not None and chunk.layers.is_last and chunk.layers.within_s < 2.0 * pace_s
    taken, layers = [], []
    while prompt.remaining_token_count > 100:
        elapsed_s, chunks = device.run_one(scheduler)
        taken.append(elapsed_s / pace_s)
        layers += [chunk.layers for chunk in chunks if chunk.layers is not None]
    assert max(taken) <= 2.0 and len(layers) > 0.9 * len(taken)
    assert device.rows_s(scheduler) > 1.4 * pace_s, "rows that grew that much besides"
    assert all(b.first == (0 if a.is_last else a.last) for a, b in itertools.pairwise(layers))
