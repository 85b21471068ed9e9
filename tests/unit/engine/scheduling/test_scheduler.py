"""The policy, one decision at a time; then on devices that are arithmetic."""

from __future__ import annotations

import dataclasses
import itertools
import random
import statistics
from collections.abc import Sequence as ReadSequence

import pytest
from icehouse_server.domain.ids import ImageDigest, SequenceId, Tenant
from icehouse_server.domain.request import ImageInput, ImageSpan, Pooling
from icehouse_server.engine.core.sequence import Phase, Sequence
from icehouse_server.engine.scheduling.limits import SchedulerLimits
from icehouse_server.engine.scheduling.pass_cost import PassSize
from icehouse_server.engine.scheduling.pass_plan import PassPlan, PrefillChunk
from icehouse_server.engine.scheduling.scheduler import Scheduler
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


def sequence(number: int, prompt_token_count: int, *, priority: int = 0, tenant: str = "") -> Sequence:
    text = TextStream(decode=decode_ascii, prompt_token_ids=[], stops=())
    asked = request(f"r{number}", [1] * prompt_token_count, priority=priority)
    asked = dataclasses.replace(asked, tenant=Tenant(tenant))
    return Sequence(SequenceId(number), asked, text, output_token_limit=5)


class WatchedScheduler(Scheduler):
    """A scheduler with a room of its own, and the loop's habit of admitting all it can."""

    def __init__(self, limits: SchedulerLimits = LIMITS) -> None:
        self.queue = WaitingQueue(WaitingLimits(request_limit=10))
        super().__init__(limits, self.queue)

    def admit_all(self) -> list[Sequence]:
        admitted = []
        for found in self.candidates(1000.0):
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


def test_a_step_looks_past_a_few_that_have_no_memory_and_not_past_all_that_wait() -> None:
    scheduler, blocked = WatchedScheduler(), [sequence(i, 5) for i in range(8)]
    assert not scheduler.lets_nobody_pass(blocked[:7]) and scheduler.lets_nobody_pass(blocked)


def test_a_tenant_that_runs_nothing_comes_up_although_others_prepare_enough() -> None:
    scheduler = WatchedScheduler()
    for i in range(6):
        scheduler.queue.add(sequence(i, 50, priority=9, tenant="loud"))
    assert [s.sequence_id for s in scheduler.admit_all()] == [0, 1, 2]
    scheduler.queue.add(sequence(6, 5, tenant="quiet"))
    scheduler.queue.add(sequence(7, 5, tenant="quiet"))
    assert [s.sequence_id for s in scheduler.admit_all()] == [6]
    assert scheduler.free_slot_count == 0
    scheduler.queue.add(sequence(8, 5, tenant="third"))
    assert [s.sequence_id for s in scheduler.candidates(1000.0)] == [8], "a slot is to be made for it"


def test_prompts_of_tenants_take_turns_in_a_pass() -> None:
    scheduler = WatchedScheduler()
    long = [sequence(i, 50, priority=9, tenant="loud") for i in range(2)]
    short = sequence(2, 3, tenant="quiet")
    for each in (*long, short):
        scheduler.queue.add(each)
    scheduler.admit_all()
    assert short in [chunk.sequence for chunk in scheduler.plan().chunks]
    for each in long:
        each.overtaken_token_count = 99
    chunks = {chunk.sequence.sequence_id: chunk.stop for chunk in scheduler.plan().chunks}
    assert chunks[short.sequence_id] == 3, "whatever was overtaken before"


def test_a_parked_sequence_waits_with_its_output_as_input() -> None:
    scheduler = WatchedScheduler()
    s = sequence(0, 5)
    scheduler.queue.add(s)
    scheduler.admit_all()
    s.processed_token_count = 4
    scheduler.move(s, Phase.DECODING)
    s.output_token_ids += [7, 8]
    assert s.kv_token_count == 7, "the last one drawn is fed as it is told"
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
        scheduler.move(s, Phase.DECODING)
    assert len(scheduler.admit_all()) == 1
    scheduler.remove(first[0])
    assert len(scheduler.admit_all()) == 1


def cuts_of(scheduler: Scheduler, s: Sequence) -> list[tuple[int, int]]:
    """Run a sequence's input to its end, nothing measured, and return its chunks."""
    cuts = []
    while s.remaining_token_count:
        (chunk,) = scheduler.plan().chunks
        assert chunk.sequence is s
        cuts.append((chunk.start, chunk.stop))
        s.processed_token_count = chunk.stop
        assert chunk.is_last is (chunk.stop == len(s.input_token_ids))
    return cuts


def one_admitted(limits: SchedulerLimits, s: Sequence) -> WatchedScheduler:
    scheduler = WatchedScheduler(limits)
    scheduler.queue.add(s)
    scheduler.admit_all()
    return scheduler


def test_chunks_end_on_the_grid_of_the_sequence_and_the_last_one_draws() -> None:
    s = sequence(0, 30)
    s.processed_token_count = 5  # as after a prefix hit
    assert cuts_of(one_admitted(LIMITS, s), s) == [(5, 8), (8, 16), (16, 24), (24, 30)]


def test_where_only_what_passes_can_be_kept_a_chunk_ends_before_the_last_token() -> None:
    s = sequence(0, 30)
    limits = dataclasses.replace(LIMITS, cuts_before_last_token=True, chunk_ends_at_last_block=9)
    cuts = cuts_of(one_admitted(limits, s), s)
    assert cuts == [(0, 8), (8, 16), (16, 24), (24, 27), (27, 29), (29, 30)]


def test_one_token_is_not_left_for_a_chunk_of_its_own() -> None:
    s = sequence(0, 9)
    assert cuts_of(one_admitted(LIMITS, s), s) == [(0, 9)]


@pytest.mark.parametrize("done", [0, 12])
def test_no_chunk_ends_inside_an_image_that_is_seen_whole(done: int) -> None:
    s = sequence(0, 30)
    image = ImageInput(ImageDigest(bytes(32)), (), feature_count=12, is_seen_whole=True)
    s.request = dataclasses.replace(s.request, images=(ImageSpan(10, 22, image),))
    s.processed_token_count, s.encoded_token_count = done, 22
    cuts = cuts_of(one_admitted(LIMITS, s), s)
    assert (
        cuts == [(0, 8), (8, 10), (10, 22), (22, 24), (24, 30)]
        if not done
        else [(12, 22), (22, 24), (24, 30)]
    )


def test_a_sequence_without_output_ends_before_its_last_token() -> None:
    s = sequence(0, 9)
    s.output_token_limit = 0
    (chunk,) = one_admitted(LIMITS, s).plan().chunks
    assert (chunk.start, chunk.stop, chunk.is_last) == (0, 8, False)


def test_loads_leave_others_the_preparation_and_small_prompts_fill_a_pass() -> None:
    scheduler = WatchedScheduler(dataclasses.replace(LIMITS, running_limit=9, prefilling_limit=2))
    for i in range(9):
        scheduler.queue.add(sequence(i, 3))
    first = scheduler.admit_all()
    assert len(first) == 3, "two, or as many as one pass of eight tokens holds"
    for s in first:
        scheduler.move(s, Phase.LOADING)
    assert len(scheduler.admit_all()) == 3


def test_several_prompts_share_a_pass_by_priority_and_shortest_first() -> None:
    scheduler = WatchedScheduler(dataclasses.replace(LIMITS, prefill_chunk_token_count=64, running_limit=9))
    for i, (count, priority) in enumerate([(40, 0), (20, 0), (30, 1)]):
        scheduler.queue.add(sequence(i, count, priority=priority))
    scheduler.admit_all()
    chunks = [(c.sequence.sequence_id, c.stop - c.start) for c in scheduler.plan().chunks]
    assert chunks == [(2, 30), (1, 18), (0, 16)], "and the oldest has its quarter"


class Device:
    """A device on which a pass of n tokens takes `fixed_s` + n * `token_s`, and `row_s` for each draw."""

    def __init__(self, *, fixed_s: float, token_s: float, row_s: float = 0.0) -> None:
        self.fixed_s, self.token_s, self.row_s = fixed_s, token_s, row_s
        self.now = 0.0

    def seconds(self, size: PassSize) -> float:
        return self.fixed_s + size.token_count * self.token_s + size.draw_count * self.row_s

    def decode_s(self, row_count: int = 1) -> float:
        """Return what a pass of rows alone takes."""
        return self.seconds(PassSize.of_rows([0] * row_count))

    def run_one(self, scheduler: Scheduler) -> tuple[float, ReadSequence[PrefillChunk]]:
        """Run one pass; return what it took and its chunks."""
        plan = scheduler.plan()
        assert plan.size.token_count, "nothing to run"
        elapsed_s = self.seconds(plan.size)
        self.now += elapsed_s
        scheduler.note_run(plan)
        scheduler.note_time(plan, elapsed_s)
        for row in scheduler.decoding:
            row.output_token_ids.append(1)
        for chunk in plan.chunks:
            chunk.sequence.processed_token_count = chunk.stop
            if chunk.is_last:
                scheduler.move(chunk.sequence, Phase.DECODING)
                chunk.sequence.output_token_ids.append(1)
        return elapsed_s, plan.chunks

    def run(self, scheduler: Scheduler, pass_count: int) -> list[float]:
        """Run so many passes; return what each took."""
        return [self.run_one(scheduler)[0] for _ in range(pass_count)]


def beside_decoding_ones(
    limits: SchedulerLimits, *token_counts: int, row_count: int = 1
) -> tuple[WatchedScheduler, list[Sequence]]:
    """Return a scheduler where rows decode and prompts of these lengths are to be prefilled."""
    scheduler = WatchedScheduler(dataclasses.replace(limits, running_limit=99, prefilling_limit=99))
    rows = [sequence(i, 2) for i in range(row_count)]
    prompts = [sequence(row_count + i, count) for i, count in enumerate(token_counts)]
    for s in (*rows, *prompts):
        scheduler.queue.add(s)
    scheduler.admit_all()
    for s in rows:
        s.processed_token_count = 2
        scheduler.move(s, Phase.DECODING)
    return scheduler, prompts


def alone(*token_counts: int, limits: SchedulerLimits = WIDE) -> WatchedScheduler:
    """Return a scheduler where nothing decodes and prompts of these lengths are to be prefilled."""
    scheduler = WatchedScheduler(limits)
    for number, token_count in enumerate(token_counts):
        scheduler.queue.add(without_output(number, token_count))
    scheduler.admit_all()
    return scheduler


def without_output(number: int, token_count: int) -> Sequence:
    s = sequence(number, token_count)
    s.output_token_limit = 0
    return s


@pytest.mark.parametrize("row_count", [1, 8, 32])
@pytest.mark.parametrize(
    "device",
    [
        Device(fixed_s=0.010, token_s=0.00005),
        Device(fixed_s=0.002, token_s=0.0005, row_s=0.001),
        Device(fixed_s=0.100, token_s=0.002),
        Device(fixed_s=0.0, token_s=0.001),
    ],
    ids=["weights", "rows", "slow", "tokens"],
)
def test_beside_decoding_rows_a_pass_takes_at_most_twice_as_long(device: Device, row_count: int) -> None:
    scheduler, (long,) = beside_decoding_ones(WIDE, 100_000, row_count=row_count)
    device.run(scheduler, 60)
    before = long.processed_token_count
    settled = device.run(scheduler, 100)
    assert max(settled) <= 2.05 * device.decode_s(row_count)
    rate = (long.processed_token_count - before) / sum(settled)
    assert rate >= 0.3 / device.token_s * min(1.0, 1024 * device.token_s / max(settled)), (
        "most of what it may"
    )


class BusyMachine(Device):
    """A device on a machine with other work: passes are delayed by chance, alone and several in a row."""

    def __init__(self, *, seed: int, **costs: float) -> None:
        super().__init__(**costs)
        self._dice = random.Random(seed)
        self._busy_count, self._busy_factor = 0, 1.0

    def seconds(self, size: PassSize) -> float:
        """Return what such a pass takes undisturbed, and remember what this one does."""
        dice = self._dice
        if self._busy_count:
            self._busy_count -= 1
        elif dice.random() < 0.04:
            self._busy_count, self._busy_factor = dice.randint(3, 12), dice.uniform(1.5, 4.0)
        self.delay = dice.uniform(0.8, 1.25) * (self._busy_factor if self._busy_count else 1.0)
        self.delay *= dice.uniform(2.0, 5.0) if dice.random() < 0.1 else 1.0
        return super().seconds(size)


@pytest.mark.parametrize("seed", range(6))
def test_what_a_busy_machine_delayed_makes_no_passes_longer(seed: int) -> None:
    costs = {"fixed_s": 0.018, "token_s": 0.00075, "row_s": 0.0018}
    limits = dataclasses.replace(WIDE, prefill_grid_token_count=4)
    scheduler, (first, second) = beside_decoding_ones(limits, 2000, 3000, row_count=8)
    while first not in scheduler.decoding:
        Device(**costs).run(scheduler, 1)
    scheduler.remove(first)
    device, rows = (
        BusyMachine(seed=seed, **costs),
        PassPlan(PassSize.of_rows(s.kv_token_count for s in scheduler.decoding)),
    )
    undisturbed: list[float] = []
    while second not in scheduler.decoding:
        for _ in range(3):
            scheduler.note_time(rows, device.seconds(rows.size) * device.delay)
        plan = scheduler.plan()
        undisturbed.append(device.seconds(plan.size))
        scheduler.note_run(plan)
        scheduler.note_time(plan, undisturbed[-1] * device.delay)
        for chunk in plan.chunks:
            chunk.sequence.processed_token_count = chunk.stop
            if chunk.is_last:
                scheduler.move(second, Phase.DECODING)
    undisturbed.sort()
    assert undisturbed[int(0.9 * len(undisturbed))] <= 2.2 * device.decode_s(8)
    assert undisturbed[-1] <= 3.5 * device.decode_s(8)


def test_a_slice_that_is_set_is_kept() -> None:
    limits = dataclasses.replace(WIDE, prefill_slice_s=0.030)
    scheduler, _ = beside_decoding_ones(limits, 100_000)
    settled = Device(fixed_s=0.010, token_s=0.0005).run(scheduler, 200)[-100:]
    assert 0.025 <= max(settled) <= 0.0105 + 0.031


def test_a_crowd_gets_passes_of_four_times_the_rows() -> None:
    device = Device(fixed_s=0.010, token_s=0.0001)
    longest = []
    for waiting_count in (1, 2):
        scheduler, _ = beside_decoding_ones(WIDE, *[50_000] * waiting_count)
        longest.append(max(device.run(scheduler, 100)[50:]) / device.decode_s())
    assert longest[0] <= 2.05 and 3.0 < longest[1] <= 4.1


@pytest.mark.parametrize("slice_s", [0.0, 0.030])
def test_beside_a_decode_no_size_is_kept_that_only_confirms_itself(slice_s: float) -> None:
    # Passes of a few tokens each would say for ever that a token takes as long as all the weights.
    limits = dataclasses.replace(WIDE, prefill_slice_s=slice_s)
    scheduler, _ = beside_decoding_ones(limits, 100_000)
    for _ in range(3):
        scheduler.note_time(PassPlan(PassSize(4, 16, 1)), 0.0204)
    device = Device(fixed_s=0.020, token_s=0.0001)
    assert max(device.run(scheduler, 60)) > 0.0335, "it found room for 130 tokens"


def test_behind_a_slow_pass_the_next_ones_hold_less_until_the_machine_is_itself_again() -> None:
    fine = dataclasses.replace(WIDE, prefill_grid_token_count=1)
    scheduler, (prompt,) = beside_decoding_ones(fine, 100_000)
    device, slow = Device(fixed_s=0.020, token_s=0.0005), Device(fixed_s=0.030, token_s=0.00075)
    usual = device.run(scheduler, 90)[-1]  # the 101st would be what is left of 1,024 tokens
    first, *others = slow.run(scheduler, 5)
    assert first > 1.4 * usual, "nobody could know"
    assert statistics.mean(others) < 0.9 * first
    before = prompt.processed_token_count
    slow.run(scheduler, 5)
    assert prompt.processed_token_count >= before + 5 * 6, "the prompt goes on"
    assert device.run(scheduler, 100)[-1] > 0.95 * usual


def prefilled(scheduler: WatchedScheduler, device: Device, *, number: int, token_count: int) -> list[float]:
    """Prefill one more prompt alone, and return what its passes took."""
    last = without_output(number, token_count)
    scheduler.queue.add(last)
    scheduler.admit_all()
    seconds = []
    while last.remaining_token_count:
        seconds += device.run(scheduler, 1)
    scheduler.remove(last)
    return seconds


def test_a_pass_alone_is_cut_to_the_limit_where_that_is_set() -> None:
    scheduler = alone(10_000, limits=dataclasses.replace(FINE, prefill_chunk_s=0.2))
    Device(fixed_s=0.0, token_s=0.001).run(scheduler, 20)
    slow = Device(fixed_s=0.0, token_s=0.01).run(scheduler, 60)[-20:]
    assert all(elapsed_s <= 0.25 for elapsed_s in slow)


@pytest.mark.parametrize("fixed_s", [0.0, 0.03, 0.09, 0.28])
@pytest.mark.parametrize("token_s", [0.00005, 0.001, 0.005])
@pytest.mark.parametrize("first_token_count", [2, 5, 14, 700])
def test_alone_a_prompt_is_prefilled_at_nearly_the_best_rate_whatever_ran_first(
    fixed_s: float, token_s: float, first_token_count: int
) -> None:
    scheduler, device = alone(), Device(fixed_s=fixed_s, token_s=token_s)
    prefilled(scheduler, device, number=1, token_count=first_token_count)
    first = prefilled(scheduler, device, number=2, token_count=6001)
    # The best there is: passes as long as allowed, or as fit into the limit.
    length = min(1024.0, (1.0 - fixed_s) / token_s)
    best_s = 6000 * token_s + 6000 / length * fixed_s
    assert sum(first) < 1.1 * best_s + 6 * fixed_s, "some passes are spent on learning"
    second = prefilled(scheduler, device, number=3, token_count=6001)
    assert sum(second) < 1.1 * best_s
    assert max(second) < max(1.34, 4.5 * fixed_s), "a newcomer is seen soon"


def test_alone_passes_are_no_longer_than_the_best_rate_needs() -> None:
    scheduler, device = alone(), Device(fixed_s=0.010, token_s=0.002)
    prefilled(scheduler, device, number=1, token_count=6001)
    settled = prefilled(scheduler, device, number=2, token_count=6001)
    assert max(settled) < 0.35, "of 2 s that a whole chunk takes"


def test_several_prompts_fill_a_pass_alone_together() -> None:
    scheduler, device = alone(), Device(fixed_s=0.050, token_s=0.001)
    prefilled(scheduler, device, number=1, token_count=3001)
    began = device.now
    for number in range(2, 42):
        scheduler.queue.add(without_output(number, 40))
    while any(s.remaining_token_count for s in scheduler.admit_all() + scheduler.running):
        device.run(scheduler, 1)
        for s in scheduler.running:
            if not s.remaining_token_count:
                scheduler.remove(s)
    assert device.now - began < 1.15 * (40 * 39 * device.token_s + 2 * device.fixed_s)


def test_a_burst_that_finds_nobody_decoding_is_one_pass() -> None:
    # Ended sooner, it would let the first of them decode, and the passes of the others be short.
    limits = dataclasses.replace(WIDE, running_limit=16, prefilling_limit=16)
    scheduler, device = alone(limits=limits), Device(fixed_s=0.010, token_s=0.0005)
    prefilled(scheduler, device, number=1, token_count=3001)
    for number in range(2, 18):
        scheduler.queue.add(without_output(number, 40))
    scheduler.admit_all()
    assert sum(chunk.stop - chunk.start for chunk in scheduler.plan().chunks) >= 15 * 40


@pytest.mark.parametrize("factor", [8.0, 1 / 8.0], ids=["slower", "faster"])
def test_a_device_whose_speed_changes_is_followed(factor: float) -> None:
    scheduler, device = alone(), Device(fixed_s=0.1, token_s=0.002)
    prefilled(scheduler, device, number=1, token_count=6001)
    device = Device(fixed_s=0.1 * factor, token_s=0.002 * factor)
    prefilled(scheduler, device, number=2, token_count=3001)
    settled = prefilled(scheduler, device, number=3, token_count=6001)
    length = min(1024.0, max(1.0, 3.2 * factor * 0.1) / (0.002 * factor))
    assert sum(settled) < 1.1 * (6000 * device.token_s + 6000 / length * device.fixed_s)
    assert max(settled) < max(1.2, 4.5 * device.fixed_s)


def test_a_chunk_after_a_long_restored_context_is_tried_small_first() -> None:
    scheduler = alone()
    prefilled(scheduler, Device(fixed_s=0.01, token_s=0.001), number=1, token_count=100)
    long = without_output(2, 20_100)
    scheduler.queue.add(long)
    scheduler.admit_all()
    long.processed_token_count = 20_000
    (chunk,) = scheduler.plan().chunks
    assert chunk.stop - chunk.start <= 48, "nobody knows what context costs"


def test_a_first_token_waits_for_no_long_prompt_of_another_tenant() -> None:
    device = Device(fixed_s=0.010, token_s=0.001)
    scheduler = WatchedScheduler(dataclasses.replace(WIDE, running_limit=99, prefilling_limit=99))
    for i in range(9):
        scheduler.queue.add(sequence(i, 9_000, priority=9, tenant="loud"))
    scheduler.admit_all()
    assert device.run(scheduler, 12)[-1] > 0.5, "alone they fill their passes"
    short = sequence(9, 5, tenant="quiet")
    scheduler.queue.add(short)
    scheduler.admit_all()
    elapsed_s, chunks = device.run_one(scheduler)
    assert short in scheduler.decoding and len(chunks) > 1
    assert elapsed_s < 2.5 * device.decode_s(5)


def test_first_tokens_of_many_tenants_come_in_one_pass() -> None:
    device = Device(fixed_s=0.010, token_s=0.001)
    scheduler = WatchedScheduler(dataclasses.replace(WIDE, running_limit=99, prefilling_limit=99))
    scheduler.queue.add(sequence(0, 9_000, tenant="loud"))
    scheduler.admit_all()
    device.run(scheduler, 30)
    short = [sequence(i, 20 + 4 * i, tenant=f"quiet {i}") for i in range(1, 9)]
    for each in short:
        scheduler.queue.add(each)
    scheduler.admit_all()
    device.run_one(scheduler)
    assert all(each in scheduler.decoding for each in short)


def test_a_long_prompt_goes_on_beside_first_tokens_of_others_without_end() -> None:
    device = Device(fixed_s=0.010, token_s=0.001)
    scheduler = alone()
    prefilled(scheduler, device, number=1, token_count=2_000)
    long = without_output(2, 9_000)
    scheduler.queue.add(long)
    begin = device.now
    for number in range(3, 103):
        short = sequence(number, 50, tenant="quiet")
        scheduler.queue.add(short)
        scheduler.admit_all()
        device.run_one(scheduler)
        scheduler.remove(short)
    assert long.processed_token_count * device.token_s > 0.4 * (device.now - begin)


@pytest.mark.parametrize("is_decoding", [True, False], ids=["beside a decode", "nothing decodes"])
def test_shorter_prompts_without_end_leave_the_oldest_its_share(is_decoding: bool) -> None:
    device = Device(fixed_s=0.010, token_s=0.001)
    scheduler, _ = beside_decoding_ones(WIDE, row_count=int(is_decoding))
    long = without_output(1, 100_000)
    scheduler.queue.add(long)
    others, numbers = 0, itertools.count(2)
    for _ in range(200):  # in more it would be overtaken as far as it is long
        while scheduler.prefilling_count + scheduler.waiting_count < 5:  # more than one pass holds
            scheduler.queue.add(without_output(next(numbers), 300))
            scheduler.admit_all()
        _, chunks = device.run_one(scheduler)
        others += sum(c.stop - c.start for c in chunks if c.sequence is not long)
        for s in scheduler.running:
            if not s.remaining_token_count and s not in scheduler.decoding:
                scheduler.remove(s)
    assert 0.2 < long.processed_token_count / (long.processed_token_count + others) < 0.4


def closed_loop(device: Device, *, client_count: int, request_count: int) -> list[float]:
    """Let clients ask for four tokens after prompts of 20 to 80, one after the other; return each time to
    first token."""
    dice = random.Random(7)
    scheduler = WatchedScheduler(dataclasses.replace(WIDE, running_limit=24, prefilling_limit=8))
    asked_times: dict[int, float] = {}
    waits: list[float] = []

    def ask() -> None:
        s = sequence(len(asked_times), dice.randint(20, 80))
        asked_times[s.sequence_id] = device.now
        scheduler.queue.add(s)

    for _ in range(client_count):
        ask()
    while len(waits) < request_count:
        scheduler.admit_all()
        _, chunks = device.run_one(scheduler)
        waits += [device.now - asked_times[c.sequence.sequence_id] for c in chunks if c.is_last]
        for s in scheduler.decoding:
            if len(s.output_token_ids) >= 4:
                scheduler.remove(s)
                ask()
    return sorted(waits[client_count:])


@pytest.mark.parametrize(
    "device",
    [
        Device(fixed_s=0.010, token_s=0.00005),
        Device(fixed_s=0.020, token_s=0.001, row_s=0.001),
        Device(fixed_s=0.010, token_s=0.002),
    ],
    ids=["gpu", "cpu", "slow cpu"],
)
@pytest.mark.parametrize("client_count", [4, 16, 64])
def test_in_a_closed_loop_of_short_prompts_nobody_waits_much_longer_than_most(
    device: Device, client_count: int
) -> None:
    waits = closed_loop(device, client_count=client_count, request_count=1000)
    assert waits[int(0.99 * len(waits))] <= 4.0 * waits[len(waits) // 2]


def test_restores_take_half_of_what_a_pass_may_while_prompts_wait_and_pay_back_what_they_overran() -> None:
    device = Device(fixed_s=0.020, token_s=0.0001)
    scheduler, _ = beside_decoding_ones(WIDE, 100_000)
    device.run(scheduler, 20)
    allowed_s = scheduler.restore_s(least_s=0.001)
    assert 0.3 * device.decode_s() < allowed_s <= 0.5 * device.decode_s()
    left = sum(c.stop - c.start for c in scheduler.plan(spent_s=allowed_s).chunks)
    assert left < 0.7 * sum(c.stop - c.start for c in scheduler.plan().chunks), "they share a step"
    scheduler.note_restore(3.5 * allowed_s, allowed_s=allowed_s)
    budgets = [scheduler.restore_s(least_s=0.001) for _ in range(4)]
    assert budgets[:2] == [0.0, 0.0] and 0.0 < budgets[2] < allowed_s and budgets[3] == allowed_s


def test_nobody_runs_when_nothing_is_there() -> None:
    scheduler = WatchedScheduler()
    assert not (scheduler.plan().chunks or scheduler.waiting_count or scheduler.running)
    s = sequence(0, 2)
    scheduler.queue.add(s)
    scheduler.admit_all()
    scheduler.move(s, Phase.DECODING)
    assert not scheduler.plan().chunks and scheduler.decoding_count
    scheduler.remove(s)
    assert not (scheduler.waiting_count or scheduler.running)


def to_embed(number: int, token_count: int) -> Sequence:
    s = without_output(number, token_count)
    s.request = dataclasses.replace(s.request, pooling=Pooling.OWN)
    return s


@pytest.mark.parametrize("token_s", [0.00001, 0.001, 0.1])
def test_where_prompts_run_whole_none_is_cut_and_no_pass_holds_more_than_it_may(token_s: float) -> None:
    device, limits = Device(fixed_s=0.01, token_s=token_s), WIDE.whole(600)
    lengths = [600, 3, 3, 41, 599, 600, 7]
    scheduler = WatchedScheduler(limits)
    for number, length in enumerate(lengths):
        scheduler.queue.add(to_embed(number, length))
    scheduler.admit_all()
    ran: list[PrefillChunk] = []
    while any(s.remaining_token_count for s in scheduler.running):
        _, chunks = device.run_one(scheduler)
        assert sum(chunk.token_count for chunk in chunks) <= limits.most_pass_token_count
        ran += chunks
    assert sorted(chunk.token_count for chunk in ran) == sorted(lengths)
    assert all(chunk.start == 0 for chunk in ran)


def test_where_prompts_run_whole_shorter_ones_without_end_do_not_keep_the_oldest_waiting() -> None:
    long, device = to_embed(0, 600), Device(fixed_s=0.01, token_s=0.1)
    scheduler = one_admitted(WIDE.whole(600), long)
    for number in range(1, 20):
        scheduler.queue.add(to_embed(number, 5))
        scheduler.admit_all()
        for chunk in device.run_one(scheduler)[1]:
            if not chunk.sequence.remaining_token_count:
                scheduler.remove(chunk.sequence)
        if not long.remaining_token_count:
            break
    assert long.phase is Phase.ENDED and number < 3
