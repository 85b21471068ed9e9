"""What readers take of the cores that decode runs on."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from pathlib import Path
from typing import Any

import pytest
from icehouse_server.storage.api import BlocksLoaded, Ticket
from icehouse_server.storage.files import Files
from icehouse_server.storage.local.block_format.region_input import GROUP_BYTES
from icehouse_server.storage.local.open_model import OpenModel
from icehouse_server.storage.local.reader_pool import ReaderPool, ReadLimiter, ReadSchedule

from tests.fixtures.patience import BOUND_S
from tests.fixtures.storage.blocks import FINGERPRINT, make_chain
from tests.fixtures.storage.loading import assert_holds, plan
from tests.fixtures.storage.storage_thread import ManualClock, StorageThread


class Reader:
    """One reader's work by a clock that stands still otherwise."""

    def __init__(self, clock: ManualClock, schedule: ReadSchedule, *, share: float = 0.1) -> None:
        self.pauses: list[float] = []
        self._clock = clock
        self._schedule = schedule
        self.share = share
        self.limiter = self.next_block()

    def next_block(self) -> ReadLimiter:
        self.limiter = ReadLimiter(self._clock, self._schedule, share=lambda: self.share, pause=self._pause)
        return self.limiter

    def read(self, work_s: float) -> None:
        self.limiter.wait()
        self._clock.advance(work_s)

    def _pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self._clock.advance(seconds)


def test_a_reader_works_its_share_of_the_time() -> None:
    clock = ManualClock()
    reader = Reader(clock, ReadSchedule())
    began = clock.now_s
    for _ in range(100):
        reader.read(0.001)
    assert 0.1 / (clock.now_s - began) == pytest.approx(0.1, rel=0.05)
    assert max(reader.pauses) < 0.05, "pieces are short"
    assert len(reader.pauses) < 40, "but not so short that waking up is most of the work"
    assert reader.limiter.paused_s == pytest.approx(sum(reader.pauses))


def test_readers_take_turns() -> None:
    """Two pieces in one pass made it longer by both."""
    schedule, piece_s = ReadSchedule(), 0.003
    at, begun = [0.0, 0.0], []
    for _ in range(40):
        reader = at.index(min(at))
        begun.append(at[reader] + schedule.reserve(at[reader], share=0.1))
        schedule.correct(piece_s, share=0.1)
        at[reader] = begun[-1] + piece_s
    gaps = [b - a for a, b in itertools.pairwise(begun)]
    assert gaps == pytest.approx([piece_s / 0.1] * 39), "together they work a tenth of the time"


def test_a_share_holds_for_blocks_that_are_read_in_no_time_as_well() -> None:
    clock = ManualClock()
    reader = Reader(clock, ReadSchedule())
    began = clock.now_s
    for _ in range(100):
        reader.next_block()
        reader.read(0.001)
        reader.limiter.end()
    assert 0.1 / (clock.now_s - began) == pytest.approx(0.1, rel=0.05)


def test_nobody_waits_for_what_is_read_to_be_told() -> None:
    clock = ManualClock()
    reader = Reader(clock, ReadSchedule())
    reader.read(0.02)
    reader.limiter.end()
    assert reader.pauses == []


def test_with_all_the_time_there_is_no_pause() -> None:
    clock, schedule = ManualClock(), ReadSchedule()
    reader = Reader(clock, schedule, share=1e-6)
    reader.read(1.0)
    reader.limiter.end()
    reader.share = 1.0
    for _ in range(10):
        reader.read(1.0)
    assert reader.pauses == []
    reader.share = 0.1
    reader.next_block().wait()
    assert reader.pauses == [], "nor afterwards one for what was read before"


class SlowFiles(Files):
    """Every read takes 10 ms of a clock that stands still otherwise."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self._clock = clock

    def read_into(self, descriptor, buffers, *, offset):
        self._clock.advance(0.010)
        return super().read_into(descriptor, buffers, offset=offset)


def pool_of(
    served: StorageThread, clock: ManualClock, answers: list[object], *, files: SlowFiles | None = None, **how
) -> tuple[ReaderPool, OpenModel]:
    """Return a pool of one reader that leaves three quarters of the time to others, when it is to, and the
    model that it reads for."""
    changes = {"reader_thread_count": 1, "share_beside_decode": 0.25, **how.pop("settings", {})}
    settings = dataclasses.replace(served.settings, **changes)
    model = OpenModel(FINGERPRINT, {}, settings=settings, post=lambda ticket: answers.append(ticket.outcome))
    pool = ReaderPool(
        settings,
        files=files or SlowFiles(clock),
        clock=clock,
        report=lambda model, report: None,
        cipher=None,
        **how,
    )
    return pool, model


@pytest.mark.parametrize("beside_decode", [True, False])
def test_loads_are_paced_while_others_decode_and_only_then(tmp_path: Path, beside_decode: bool) -> None:
    blocks = make_chain(3)
    with StorageThread(tmp_path) as served:
        for block in blocks:
            served.spill(block)
        clock = ManualClock()
        answers: list[object] = []
        pauses: list[float] = []
        pool, model = pool_of(served, clock, answers, pause=pauses.append)
        pool.leave_cores(model, to_decode=beside_decode)
        pool.submit(model, *plan(blocks))
        while pool.step():
            pass
    (loaded,) = answers
    assert isinstance(loaded, BlocksLoaded)
    assert_holds(loaded, blocks)
    assert blocks[0].size_bytes < GROUP_BYTES, "one read a region"
    assert bool(pauses) == beside_decode and all(seconds >= 0.03 for seconds in pauses)


def test_a_pause_for_others_is_no_silence_of_the_disk(tmp_path: Path) -> None:
    blocks = make_chain(3)
    with StorageThread(tmp_path) as served:
        for block in blocks:
            served.spill(block)
        clock = ManualClock()
        silences: list[float] = []
        ticket: Ticket[BlocksLoaded] = Ticket()

        def pause(seconds: float) -> None:
            clock.advance(seconds)
            silences.append(pool.silence_s(ticket))

        pool, model = pool_of(served, clock, [], pause=pause)
        pool.leave_cores(model, to_decode=True)
        ticket = pool.submit(model, *plan(blocks))
        clock.advance(2.0)
        assert pool.silence_s(ticket) == 2.0, "nobody has begun"
        while pool.step():
            pass
    assert silences and set(silences) == {0.0}
    assert pool.silence_s(ticket) == 0.0, "it was answered"


def test_a_load_goes_on_at_full_speed_when_the_cores_are_free(tmp_path: Path) -> None:
    """Who asked for it beside the last tokens of others waited for it at a small share of an idle machine."""
    blocks = make_chain(3)
    reading, answered = threading.Event(), threading.Event()

    class SignallingFiles(SlowFiles):
        def read_into(self, descriptor, buffers, *, offset):
            reading.set()
            return super().read_into(descriptor, buffers, offset=offset)

    class Answers(list):
        def append(self, answer: object) -> None:
            super().append(answer)
            answered.set()

    with StorageThread(tmp_path) as served:
        for block in blocks:
            served.spill(block)
        clock = ManualClock()
        answers = Answers()
        # By this share a piece of 10 ms is followed by a pause of three hours.
        settings = {"share_beside_decode": 1e-6}
        pool, model = pool_of(served, clock, answers, files=SignallingFiles(clock), settings=settings)
        pool.leave_cores(model, to_decode=True)
        pool.submit(model, *plan(blocks))
        thread = threading.Thread(target=pool.run, daemon=True)
        thread.start()
        assert reading.wait(BOUND_S)
        pool.leave_cores(model, to_decode=False)
        assert answered.wait(BOUND_S)
        pool.stop()
        pool.leave_cores(model, to_decode=True)
        assert pool._has_cores.is_set(), "a pool that stops leaves nothing to anybody"
        thread.join(BOUND_S)
    (loaded,) = answers
    assert isinstance(loaded, BlocksLoaded)
    assert_holds(loaded, blocks)


def test_the_rate_is_that_of_reading_without_pauses_and_others_loads(tmp_path: Path) -> None:
    """It says whether the next prompt is read or computed; pauses beside decode are not the disk's."""
    blocks = make_chain(3)
    rates: list[float] = []
    with StorageThread(tmp_path) as served:
        for block in blocks:
            served.spill(block)
        for beside_decode, load_count in ((False, 1), (True, 1), (False, 3)):
            clock = ManualClock()
            answers: list[Any] = []
            pool, model = pool_of(served, clock, answers, pause=clock.advance)
            pool.leave_cores(model, to_decode=beside_decode)
            for _ in range(load_count):
                pool.submit(model, *plan(blocks))
            while pool.step():
                pass
            rates += [answer.read_bytes_per_s for answer in answers]
    assert len(rates) == 5 and rates == pytest.approx([rates[0]] * 5)
    assert rates[0] > 0
