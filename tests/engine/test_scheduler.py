"""The policy, one decision at a time."""

from __future__ import annotations

from service.engine.ids import SequenceId
from service.engine.scheduler import DecodeStep, Idle, PrefillChunk, Scheduler, SchedulerLimits
from service.engine.sequence import Sequence
from service.engine.text import TextStream
from service.engine.waiting import WaitingLimits, WaitingRoom
from tests.engine.fakes import decode_ascii, request

LIMITS = SchedulerLimits(
    running_limit=4, prefilling_limit=3, prefill_chunk_token_count=8, prefill_slice_s=0.1
)


def sequence(number: int, prompt_token_count: int, *, priority: int = 0) -> Sequence:
    text = TextStream(decode=decode_ascii, prompt_token_ids=[], stops=())
    asked = request(f"r{number}", [1] * prompt_token_count, priority=priority)
    return Sequence(SequenceId(number), asked, text, output_token_limit=5)


class House(Scheduler):
    """A scheduler with a room of its own, and the loop's habit of admitting all it can."""

    def __init__(self) -> None:
        self.room = WaitingRoom(WaitingLimits(request_limit=10))
        super().__init__(LIMITS, self.room)

    def admit_all(self) -> list[Sequence]:
        admitted = []
        while (found := self.candidate(1000.0)) is not None:
            self.admit(found)
            admitted.append(found)
        return admitted


def test_priority_goes_first_then_the_order_of_arrival() -> None:
    scheduler = House()
    for i in range(9):
        scheduler.room.add(sequence(i, 5))
    scheduler.room.add(sequence(9, 5, priority=1))
    admitted = [s.sequence_id for s in scheduler.admit_all()]
    assert admitted == [9, 0, 1], "up to prefilling_limit"


def test_a_parked_sequence_waits_with_its_output_as_input() -> None:
    scheduler = House()
    s = sequence(0, 5)
    scheduler.room.add(s)
    scheduler.admit_all()
    s.processed_token_count = 4
    scheduler.start_decoding(s)
    s.output_token_ids += [7, 8]
    assert s.kv_token_count == 7
    scheduler.park(s)
    assert scheduler.decoding_count == 0 and scheduler.waiting_count == 1
    assert s.input_token_ids == (1, 1, 1, 1, 1, 7, 8) and s.kv_token_count == 0
    assert scheduler.room.token_count == 7
    assert scheduler.admit_all() == [s]


def test_running_limit_counts_decoding_too() -> None:
    scheduler = House()
    for i in range(6):
        scheduler.room.add(sequence(i, 5))
    first = scheduler.admit_all()
    for s in first:
        scheduler.start_decoding(s)
    assert len(scheduler.admit_all()) == 1
    scheduler.remove(first[0])
    assert len(scheduler.admit_all()) == 1


def test_chunks_end_on_the_grid_of_the_sequence() -> None:
    scheduler = House()
    s = sequence(0, 30)
    s.processed_token_count = 5  # as after a prefix hit
    scheduler.room.add(s)
    scheduler.admit_all()
    cuts = []
    while not s.is_prefilled:
        work = scheduler.next_work()
        assert isinstance(work, PrefillChunk)
        cuts.append((work.start, work.stop))
        s.processed_token_count = work.stop
    assert cuts == [(5, 8), (8, 16), (16, 24), (24, 29)], "the last token is left for the first decode"


def test_prefill_and_decode_take_turns_by_time() -> None:
    scheduler = House()
    decoding, long = sequence(0, 2), sequence(1, 1000)
    for s in (decoding, long):
        scheduler.room.add(s)
    scheduler.admit_all()
    scheduler.start_decoding(decoding)
    kinds = []
    for _ in range(9):
        work = scheduler.next_work()
        kinds.append("P" if isinstance(work, PrefillChunk) else "D")
        if isinstance(work, PrefillChunk):
            long.processed_token_count = work.stop
            scheduler.note_prefill(0.06)
        else:
            scheduler.note_decode(0.05)
    assert "".join(kinds) == "PPDPPDPPD", "two chunks of 60 ms fill a slice of 100 ms"


def test_a_short_prompt_overtakes_a_long_one_and_the_long_one_still_moves() -> None:
    scheduler = House()
    long = sequence(0, 10_000)
    short = sequence(1, 9)
    for s in (long, short):
        scheduler.room.add(s)
    scheduler.admit_all()
    scheduler.note_decode(0.01)
    work = scheduler.next_work()
    assert isinstance(work, PrefillChunk) and work.sequence is short
    turns = []
    for _ in range(8):
        scheduler.note_decode(0.01)
        work = scheduler.next_work()
        assert isinstance(work, PrefillChunk)
        turns.append(work.sequence)
    assert long in turns, "the oldest gets a turn now and then"


def test_a_short_prompt_overtakes_a_long_one_also_while_nothing_decodes() -> None:
    for decoded_before in range(5):
        scheduler = House()
        for _ in range(decoded_before):
            scheduler.note_decode(0.01)
        long = sequence(0, 10_000)
        short = sequence(1, 17)
        for s in (long, short):
            scheduler.room.add(s)
        scheduler.admit_all()
        turns = []
        for _ in range(8):
            work = scheduler.next_work()
            assert isinstance(work, PrefillChunk)
            turns.append(work.sequence)
            scheduler.note_prefill(0.06)
        assert long in turns and turns.count(short) >= 5, f"after {decoded_before} decode steps"


def test_idle_when_nothing_runs() -> None:
    scheduler = House()
    assert isinstance(scheduler.next_work(), Idle) and scheduler.is_empty
    s = sequence(0, 2)
    scheduler.room.add(s)
    scheduler.admit_all()
    scheduler.start_decoding(s)
    assert isinstance(scheduler.next_work(), DecodeStep)
    scheduler.remove(s)
    assert scheduler.is_empty
