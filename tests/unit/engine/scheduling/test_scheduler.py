"""The policy, one decision at a time."""

from __future__ import annotations

import dataclasses

import pytest
from icehouse_server.domain.ids import SequenceId
from icehouse_server.engine.core.sequence import Sequence
from icehouse_server.engine.scheduling.scheduler import (
    DecodeStep,
    Idle,
    Join,
    PrefillChunk,
    RestoreSlice,
    Scheduler,
    SchedulerLimits,
)
from icehouse_server.engine.scheduling.waiting_queue import WaitingLimits, WaitingQueue
from icehouse_server.text.detokenizer import TextStream

from tests.fixtures.engine import decode_ascii, request

LIMITS = SchedulerLimits(
    running_limit=4, prefilling_limit=3, prefill_chunk_token_count=8, prefill_slice_s=0.1
)
FINE = SchedulerLimits(
    running_limit=9, prefilling_limit=9, prefill_chunk_token_count=64, prefill_grid_token_count=4
)
"""Chunks of up to 64 tokens, cut at every fourth, and slices that follow the decode step."""
WIDE = dataclasses.replace(
    FINE, prefill_chunk_token_count=1024, prefill_grid_token_count=16, prefill_chunk_s=1.0
)
"""Chunks of up to 1,024 tokens, or about a second while nothing decodes."""


def sequence(number: int, prompt_token_count: int, *, priority: int = 0) -> Sequence:
    text = TextStream(decode=decode_ascii, prompt_token_ids=[], stops=())
    asked = request(f"r{number}", [1] * prompt_token_count, priority=priority)
    return Sequence(SequenceId(number), asked, text, output_token_limit=5)


class WatchedScheduler(Scheduler):
    """A scheduler with a room of its own, and the loop's habit of admitting all it can."""

    def __init__(self, limits: SchedulerLimits = LIMITS) -> None:
        self.queue = WaitingQueue(WaitingLimits(request_limit=10))
        super().__init__(limits, self.queue)

    def admit_all(self) -> list[Sequence]:
        admitted = []
        while (found := self.candidate(1000.0)) is not None:
            self.admit(found)
            admitted.append(found)
        return admitted


def test_priority_goes_first_then_the_order_of_arrival() -> None:
    scheduler = WatchedScheduler()
    for i in range(9):
        scheduler.queue.add(sequence(i, 5))
    scheduler.queue.add(sequence(9, 5, priority=1))
    admitted = [s.sequence_id for s in scheduler.admit_all()]
    assert admitted == [9, 0, 1], "up to prefilling_limit"


def test_a_parked_sequence_waits_with_its_output_as_input() -> None:
    scheduler = WatchedScheduler()
    s = sequence(0, 5)
    scheduler.queue.add(s)
    scheduler.admit_all()
    s.processed_token_count = 4
    scheduler.start_decoding(s)
    s.output_token_ids += [7, 8]
    assert s.kv_token_count == 6
    scheduler.park(s)
    assert scheduler.decoding_count == 0 and scheduler.waiting_count == 1
    assert s.input_token_ids == (1, 1, 1, 1, 1, 7, 8) and s.kv_token_count == 0
    assert scheduler.queue.token_count == 7
    assert scheduler.admit_all() == [s]


def test_running_limit_counts_decoding_too() -> None:
    scheduler = WatchedScheduler()
    for i in range(6):
        scheduler.queue.add(sequence(i, 5))
    first = scheduler.admit_all()
    for s in first:
        scheduler.start_decoding(s)
    assert len(scheduler.admit_all()) == 1
    scheduler.remove(first[0])
    assert len(scheduler.admit_all()) == 1


def test_chunks_end_on_the_grid_of_the_sequence() -> None:
    scheduler = WatchedScheduler()
    s = sequence(0, 30)
    s.processed_token_count = 5  # as after a prefix hit
    scheduler.queue.add(s)
    scheduler.admit_all()
    cuts = []
    while not s.is_prefilled:
        work = scheduler.next_work()
        assert isinstance(work, PrefillChunk)
        cuts.append((work.start, work.stop))
        s.processed_token_count = work.stop
    assert cuts == [(5, 8), (8, 16), (16, 24), (24, 29)], "the last token is left for the first decode"


class Device:
    """Times of a device on which a chunk of n tokens takes `fixed_s` + n * `token_s`."""

    def __init__(self, *, fixed_s: float, token_s: float, step_s: float) -> None:
        self.fixed_s, self.token_s, self.step_s = fixed_s, token_s, step_s

    def run(self, scheduler: Scheduler, unit_count: int) -> list[tuple[str, float]]:
        """Carry out so many units of work; return what each was and took."""
        done = []
        for _ in range(unit_count):
            work = scheduler.next_work()
            if isinstance(work, PrefillChunk):
                count = work.stop - work.start
                elapsed_s = self.fixed_s + count * self.token_s
                work.sequence.processed_token_count = work.stop
                scheduler.note_chunk(work, elapsed_s)
                done.append(("P", elapsed_s))
            elif isinstance(work, Join):
                scheduler.start_decoding(work.sequence)
                done.append(("J", 0.0))
            else:
                assert isinstance(work, DecodeStep)
                scheduler.note_decode(self.step_s)
                done.append(("D", self.step_s))
        return done


def beside_a_decoding_one(
    limits: SchedulerLimits, *token_counts: int
) -> tuple[WatchedScheduler, list[Sequence]]:
    """Return a scheduler where one sequence decodes and prompts of these lengths are to be prefilled."""
    scheduler = WatchedScheduler(limits)
    decoding = sequence(0, 2)
    prompts = [sequence(1 + i, count) for i, count in enumerate(token_counts)]
    for s in (decoding, *prompts):
        scheduler.queue.add(s)
    scheduler.admit_all()
    scheduler.start_decoding(decoding)
    return scheduler, prompts


def gaps_of(done: list[tuple[str, float]]) -> list[float]:
    """Return the time from each decode step's end to the next one's."""
    gaps, since = [], 0.0
    for kind, elapsed_s in done:
        since += elapsed_s
        if kind == "D":
            gaps.append(since)
            since = 0.0
    return gaps


def test_chunks_are_cut_to_the_slice_and_end_on_the_fine_grid() -> None:
    scheduler, (long,) = beside_a_decoding_one(FINE, 100_000)
    done = Device(fixed_s=0.002, token_s=0.0005, step_s=0.010).run(scheduler, 400)
    settled = done[-100:]
    assert max(gaps_of(settled)) < 0.020, "prefill takes less than a step of its own between two steps"
    spent_s = sum(elapsed_s for kind, elapsed_s in settled if kind == "P")
    assert spent_s > 0.3 * sum(elapsed_s for _, elapsed_s in settled), "and most of what it may have"
    assert long.processed_token_count % 4 == 0


def test_a_slice_that_is_set_is_kept() -> None:
    limits = dataclasses.replace(FINE, prefill_slice_s=0.030)
    scheduler, _ = beside_a_decoding_one(limits, 100_000)
    settled = Device(fixed_s=0.002, token_s=0.0005, step_s=0.010).run(scheduler, 400)[-100:]
    assert 0.025 <= max(elapsed_s for kind, elapsed_s in settled if kind == "P") <= 0.030


@pytest.mark.parametrize("slice_s", [0.0, 0.030])
def test_beside_a_decode_no_size_is_kept_that_only_confirms_itself(slice_s: float) -> None:
    # Chunks of one grid step each would say for ever that a token takes as long as all its weights.
    limits = dataclasses.replace(FINE, prefill_slice_s=slice_s)
    scheduler, (long,) = beside_a_decoding_one(limits, 100_000)
    scheduler.note_decode(0.022)
    for _ in range(3):
        scheduler.note_chunk(PrefillChunk(long, 0, 4), 0.0204)
    done = Device(fixed_s=0.020, token_s=0.0001, step_s=0.022).run(scheduler, 60)
    assert max(elapsed_s for kind, elapsed_s in done if kind == "P") > 0.0255, "it found room for 55 tokens"


def test_what_a_chunk_took_too_long_is_paid_by_the_turns_after_it() -> None:
    # Here even four tokens take two slices, so there is a chunk in every other gap.
    scheduler, _ = beside_a_decoding_one(dataclasses.replace(FINE, prefill_slice_s=0.010), 100_000)
    settled = Device(fixed_s=0.0, token_s=0.005, step_s=0.010).run(scheduler, 300)[-99:]
    kinds = "".join(kind for kind, _ in settled)
    assert "PDDPDDPDD" in kinds and "PP" not in kinds


def test_where_a_chunk_mostly_reads_weights_prefill_is_not_starved() -> None:
    # A step of 100 ms that is nearly all weights; a slice of that would hold no token at all.
    scheduler, (long,) = beside_a_decoding_one(FINE, 100_000)
    device = Device(fixed_s=0.100, token_s=0.002, step_s=0.105)
    device.run(scheduler, 60)
    before = long.processed_token_count
    done = device.run(scheduler, 60)
    rate = (long.processed_token_count - before) / sum(elapsed_s for _, elapsed_s in done)
    full_rate = 64 / (0.100 + 64 * 0.002)
    assert rate > 0.2 * full_rate
    assert max(gaps_of(done)) < 0.105 + 2.5 * 0.105


def test_a_crowd_gets_more_than_those_who_decode() -> None:
    device = Device(fixed_s=0.0, token_s=0.0005, step_s=0.010)
    shares = []
    for prompts in ([50_000] * 2, [50_000] * 7):
        scheduler, _ = beside_a_decoding_one(FINE, *prompts)
        device.run(scheduler, 100)
        done = device.run(scheduler, 200)
        shares.append(
            sum(elapsed_s for kind, elapsed_s in done if kind == "P")
            / sum(elapsed_s for _, elapsed_s in done)
        )
    assert shares[1] > shares[0] + 0.15


def restoring_beside_a_decoding_one(waiting_count: int) -> tuple[WatchedScheduler, str]:
    """Return what is done while a sequence is rebuilt and others are to be prefilled."""
    scheduler, (first, *_) = beside_a_decoding_one(FINE, *[400] * (1 + waiting_count))
    scheduler.start_restoring(first)
    kinds = ""
    while len(kinds) < 12:
        work = scheduler.next_work()
        kinds += type(work).__name__[0]
        if isinstance(work, RestoreSlice):
            scheduler.note_restore(0.001)
        elif isinstance(work, PrefillChunk):
            work.sequence.processed_token_count = work.stop
            scheduler.note_chunk(work, 0.004)
        else:
            assert isinstance(work, DecodeStep)
            scheduler.note_decode(0.010)
    return scheduler, kinds


def test_one_slice_of_a_restore_goes_between_two_decode_steps() -> None:
    scheduler, kinds = restoring_beside_a_decoding_one(0)
    assert kinds == "DR" * 6, "however short the slices are"
    for s in list(scheduler.decoding):
        scheduler.remove(s)
    for _ in range(5):
        assert isinstance(scheduler.next_work(), RestoreSlice), "nobody's tokens wait"
        scheduler.note_restore(0.001)


def test_prefill_goes_on_beside_a_restore() -> None:
    _, kinds = restoring_beside_a_decoding_one(1)
    assert "RP" in kinds and "RR" not in kinds and kinds.count("D") >= 4, kinds


def test_a_join_has_a_gap_of_its_own() -> None:
    scheduler, _ = beside_a_decoding_one(FINE, 40, 100_000)
    kinds = "".join(k for k, _ in Device(fixed_s=0.001, token_s=0.0005, step_s=0.010).run(scheduler, 80))
    at = kinds.index("J")
    assert kinds[at - 1 : at + 2] == "DJD", kinds


def test_prefill_while_nothing_decodes_is_owed_to_nobody() -> None:
    scheduler = WatchedScheduler(FINE)
    first, second = sequence(0, 400), sequence(1, 4000)
    for s in (first, second):
        scheduler.queue.add(s)
    scheduler.admit_all()
    device = Device(fixed_s=0.001, token_s=0.0005, step_s=0.010)
    kinds = "".join(k for k, _ in device.run(scheduler, 40))
    assert "JDPD" in kinds, "a turn follows the first step, whatever was prefilled before it"


def alone(*token_counts: int, limits: SchedulerLimits = WIDE) -> WatchedScheduler:
    """Return a scheduler where nothing decodes and prompts of these lengths are to be prefilled."""
    scheduler = WatchedScheduler(limits)
    for number, token_count in enumerate(token_counts):
        scheduler.queue.add(sequence(number, token_count))
    scheduler.admit_all()
    return scheduler


def prefilled(scheduler: WatchedScheduler, device: Device, *, number: int, token_count: int) -> list[float]:
    """Prefill one more prompt alone, and return what its chunks took."""
    last = sequence(number, token_count)
    scheduler.queue.add(last)
    scheduler.admit_all()
    seconds = []
    while not last.is_prefilled:
        seconds += [elapsed_s for _, elapsed_s in device.run(scheduler, 1)]
    scheduler.remove(last)
    return seconds


def test_a_chunk_is_cut_to_the_limit_where_that_is_set() -> None:
    scheduler = alone(10_000, limits=dataclasses.replace(FINE, prefill_chunk_s=0.2))
    Device(fixed_s=0.0, token_s=0.001, step_s=0.1).run(scheduler, 20)
    slow = Device(fixed_s=0.0, token_s=0.01, step_s=0.1).run(scheduler, 60)[-20:]
    assert all(elapsed_s <= 0.25 for _, elapsed_s in slow)


@pytest.mark.parametrize("fixed_s", [0.0, 0.03, 0.09, 0.28])
@pytest.mark.parametrize("token_s", [0.00005, 0.001, 0.005])
@pytest.mark.parametrize("first_token_count", [2, 5, 14, 700])
def test_alone_a_prompt_is_prefilled_at_nearly_the_best_rate_whatever_ran_first(
    fixed_s: float, token_s: float, first_token_count: int
) -> None:
    scheduler, device = alone(), Device(fixed_s=fixed_s, token_s=token_s, step_s=0.1)
    prefilled(scheduler, device, number=1, token_count=first_token_count)
    first = prefilled(scheduler, device, number=2, token_count=6001)
    # The best there is: chunks as long as allowed, or as fit into the limit.
    length = min(1024.0, (1.0 - fixed_s) / token_s)
    best_s = 6000 * token_s + 6000 / length * fixed_s
    assert sum(first) < 1.1 * best_s + 5 * fixed_s, "some chunks are spent on learning"
    second = prefilled(scheduler, device, number=3, token_count=6001)
    assert sum(second) < 1.1 * best_s
    assert max(second) < max(1.34, 4.5 * fixed_s), "a newcomer is seen soon"


def test_alone_chunks_are_no_longer_than_the_best_rate_needs() -> None:
    scheduler, device = alone(), Device(fixed_s=0.010, token_s=0.002, step_s=0.1)
    prefilled(scheduler, device, number=1, token_count=6001)
    settled = prefilled(scheduler, device, number=2, token_count=6001)
    assert max(settled) < 0.35, "of 2 s that a whole chunk takes"


@pytest.mark.parametrize("factor", [8.0, 1 / 8.0], ids=["slower", "faster"])
def test_a_device_whose_speed_changes_is_followed(factor: float) -> None:
    scheduler, device = alone(), Device(fixed_s=0.1, token_s=0.002, step_s=0.1)
    prefilled(scheduler, device, number=1, token_count=6001)
    device = Device(fixed_s=0.1 * factor, token_s=0.002 * factor, step_s=0.1)
    prefilled(scheduler, device, number=2, token_count=3001)
    settled = prefilled(scheduler, device, number=3, token_count=6001)
    length = min(1024.0, max(1.0, 3.2 * factor * 0.1) / (0.002 * factor))
    assert sum(settled) < 1.1 * (6000 * device.token_s + 6000 / length * device.fixed_s)
    assert max(settled) < max(1.2, 4.5 * device.fixed_s)


def test_beside_a_decode_prefill_leaves_a_wrong_first_sample_too() -> None:
    # Five tokens take nearly as long as fifty, and nobody knows.
    device = Device(fixed_s=0.100, token_s=0.0005, step_s=0.102)
    rates = []
    for first_token_counts in ([16, 512, 16, 512], [4]):
        scheduler, (long,) = beside_a_decoding_one(WIDE, 100_000)
        scheduler.note_decode(device.step_s)
        for count in first_token_counts:
            scheduler.note_chunk(PrefillChunk(long, 0, count), device.fixed_s + count * device.token_s)
        gaps = gaps_of(device.run(scheduler, 40))
        before = long.processed_token_count
        done = device.run(scheduler, 100)
        gaps += gaps_of(done)
        rates.append((long.processed_token_count - before) / sum(elapsed_s for _, elapsed_s in done))
        assert max(gaps[8:]) < 3.5 * device.step_s, "what was noted by hand is paid for first"
    assert rates[1] > 0.9 * rates[0]


def test_a_chunk_after_a_long_restored_context_is_tried_small_first() -> None:
    scheduler = alone(100, 20_100)
    short, long = scheduler.running
    while not short.is_prefilled:
        Device(fixed_s=0.01, token_s=0.001, step_s=0.1).run(scheduler, 1)
    scheduler.remove(short)
    long.processed_token_count = 20_000
    work = scheduler.next_work()
    assert isinstance(work, PrefillChunk) and work.stop - work.start <= 16, "nobody knows what context costs"


@pytest.mark.parametrize("is_decoding", [True, False], ids=["beside a decode", "nothing decodes"])
def test_a_short_prompt_overtakes_a_long_one_whatever_ran_before(is_decoding: bool) -> None:
    device = Device(fixed_s=0.001, token_s=0.001, step_s=0.020)
    for chunk_count in range(1, 9):
        scheduler = WatchedScheduler(FINE)
        long, short = sequence(1, 10_000), sequence(2, 40)
        if is_decoding:
            scheduler.queue.add(first := sequence(0, 2))
            scheduler.admit_all()
            scheduler.start_decoding(first)
        scheduler.queue.add(long)
        scheduler.admit_all()
        device.run(scheduler, chunk_count)
        scheduler.queue.add(short)
        scheduler.admit_all()
        before = long.processed_token_count
        while not short.is_prefilled:
            device.run(scheduler, 1)
        assert long.processed_token_count == before, f"after {chunk_count} units of work"


@pytest.mark.parametrize("is_decoding", [True, False], ids=["beside a decode", "nothing decodes"])
def test_shorter_prompts_without_end_leave_the_oldest_its_share_of_time(is_decoding: bool) -> None:
    # A token on top of a long context costs five of the others'.
    scheduler = WatchedScheduler(dataclasses.replace(FINE, prefill_chunk_s=0.1))
    long = sequence(0, 100_000)
    long.processed_token_count = 50_000
    scheduler.queue.add(long)
    if is_decoding:
        scheduler.queue.add(first := sequence(1, 2))
    scheduler.admit_all()
    if is_decoding:
        scheduler.start_decoding(first)
    spent_s = {True: 0.0, False: 0.0}
    for number in range(2, 2000):
        if scheduler.prefilling_count < 2:
            scheduler.queue.add(sequence(number, 300))
            scheduler.admit_all()
        work = scheduler.next_work()
        if isinstance(work, Join):
            scheduler.remove(work.sequence)
        elif isinstance(work, DecodeStep):
            scheduler.note_decode(0.02)
        else:
            assert isinstance(work, PrefillChunk)
            is_long = work.sequence is long
            elapsed_s = (work.stop - work.start) * (0.005 if is_long else 0.001)
            work.sequence.processed_token_count = work.stop
            scheduler.note_chunk(work, elapsed_s)
            if number > 500:
                spent_s[is_long] += elapsed_s
    share = spent_s[True] / (spent_s[True] + spent_s[False])
    assert 0.2 < share < 0.3, "a quarter of the time, not of the turns"


def test_idle_when_nothing_runs() -> None:
    scheduler = WatchedScheduler()
    assert isinstance(scheduler.next_work(), Idle) and scheduler.is_empty
    s = sequence(0, 2)
    scheduler.queue.add(s)
    scheduler.admit_all()
    scheduler.start_decoding(s)
    assert isinstance(scheduler.next_work(), DecodeStep)
    scheduler.remove(s)
    assert scheduler.is_empty
