"""What readers take of the cores that decode runs on."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest
from icehouse_server.storage.block_format.file import GROUP_BYTES
from icehouse_server.storage.block_format.reader import ReadPace
from icehouse_server.storage.files import SystemFiles
from icehouse_server.storage.loads import Loaded
from icehouse_server.storage.worker.reader_pool import ReaderPool

from tests.fixtures.engine import BOUND_S
from tests.fixtures.storage.blocks import make_chain
from tests.fixtures.storage.loading import assert_holds, plan
from tests.fixtures.storage.storage_thread import ManualClock, StorageThread


def test_a_reader_works_its_share_of_the_time() -> None:
    clock = ManualClock()
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        clock.advance(seconds)

    began = clock.now_s
    pace = ReadPace(clock, share=lambda: 0.1, pause=pause)
    for _ in range(100):
        clock.advance(0.001)
        pace.keep()
    assert 0.1 / (clock.now_s - began) == pytest.approx(0.1, rel=0.05)
    assert max(pauses) < 0.05, "pieces are short"
    assert len(pauses) < 40, "but not so short that waking up is most of the work"


def test_with_all_the_time_there_is_no_pause() -> None:
    clock = ManualClock()
    pace = ReadPace(clock, share=lambda: 1.0, pause=lambda seconds: pytest.fail(f"paused for {seconds} s"))
    for _ in range(10):
        clock.advance(1.0)
        pace.keep()


class SlowFiles(SystemFiles):
    """Every read takes 10 ms of a clock that stands still otherwise."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self._clock = clock

    def read_into(self, descriptor, buffers, *, offset):
        self._clock.advance(0.010)
        return super().read_into(descriptor, buffers, offset=offset)


def pool_of(
    served: StorageThread, clock: ManualClock, answers: list[object], *, files: SlowFiles | None = None, **how
) -> ReaderPool:
    """Return a pool of one reader that leaves three quarters of the time to others, when it is to."""
    settings = {"reader_thread_count": 1, "share_beside_decode": 0.25, **how.pop("settings", {})}
    return ReaderPool(
        dataclasses.replace(served.storage._store.settings, **settings),
        files=files or SlowFiles(clock),
        clock=clock,
        post=answers.append,
        report=lambda report: None,
        cipher=None,
        **how,
    )


@pytest.mark.parametrize("beside_decode", [True, False])
def test_loads_are_paced_while_others_decode_and_only_then(tmp_path: Path, beside_decode: bool) -> None:
    blocks = make_chain(3)
    with StorageThread(tmp_path) as served:
        for block in blocks:
            served.spill(block)
        clock = ManualClock()
        answers: list[object] = []
        pauses: list[float] = []
        pool = pool_of(served, clock, answers, pause=pauses.append)
        pool.leave_cores(to_decode=beside_decode)
        pool.submit(plan(blocks))
        while pool.step():
            pass
    (loaded,) = answers
    assert isinstance(loaded, Loaded)
    assert_holds(loaded, blocks)
    assert blocks[0].size_bytes < GROUP_BYTES, "one read a region"
    assert bool(pauses) == beside_decode and all(seconds >= 0.03 for seconds in pauses)


def test_a_load_goes_on_at_full_speed_when_the_cores_are_free(tmp_path: Path) -> None:
    """Who asked for it beside the last tokens of others waited for it at a small share of an idle machine."""
    blocks = make_chain(3)
    reading, answered = threading.Event(), threading.Event()

    class Files(SlowFiles):
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
        pool = pool_of(served, clock, answers, files=Files(clock), settings=settings)
        pool.leave_cores(to_decode=True)
        pool.submit(plan(blocks))
        thread = threading.Thread(target=pool.run, daemon=True)
        thread.start()
        assert reading.wait(BOUND_S)
        pool.leave_cores(to_decode=False)
        assert answered.wait(BOUND_S)
        pool.stop()
        pool.leave_cores(to_decode=True)
        assert pool._has_cores.is_set(), "a pool that stops leaves nothing to anybody"
        thread.join(BOUND_S)
    (loaded,) = answers
    assert isinstance(loaded, Loaded)
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
            pool = pool_of(served, clock, answers, pause=clock.advance)
            pool.leave_cores(to_decode=beside_decode)
            for _ in range(load_count):
                pool.submit(plan(blocks))
            while pool.step():
                pass
            rates += [answer.read_bytes_per_s for answer in answers]
    assert len(rates) == 5 and rates == pytest.approx([rates[0]] * 5)
    assert rates[0] > 0
