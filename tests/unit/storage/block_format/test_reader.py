"""What readers take of the cores that decode runs on."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from icehouse_server.storage.block_format.file import GROUP_BYTES
from icehouse_server.storage.block_format.reader import ReadPace
from icehouse_server.storage.files import SystemFiles
from icehouse_server.storage.loads import Loaded
from icehouse_server.storage.worker.reader_pool import ReaderPool

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
    pace = ReadPace(clock, share=0.1, pause=pause)
    for _ in range(100):
        clock.advance(0.001)
        pace.keep()
    assert 0.1 / (clock.now_s - began) == pytest.approx(0.1, rel=0.05)
    assert max(pauses) < 0.05, "pieces are short"
    assert len(pauses) < 40, "but not so short that waking up is most of the work"


def test_with_all_the_time_there_is_no_pause() -> None:
    clock = ManualClock()
    pace = ReadPace(clock, share=1.0, pause=lambda seconds: pytest.fail(f"paused for {seconds} s"))
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


@pytest.mark.parametrize("beside_decode", [True, False])
def test_loads_are_paced_while_others_decode_and_only_then(tmp_path: Path, beside_decode: bool) -> None:
    blocks = make_chain(3)
    with StorageThread(tmp_path) as served:
        for block in blocks:
            served.spill(block)
        clock = ManualClock()
        answers: list[object] = []
        pauses: list[float] = []
        settings = served.storage._store.settings
        pool = ReaderPool(
            dataclasses.replace(settings, reader_thread_count=1, share_beside_decode=0.25),
            files=SlowFiles(clock),
            clock=clock,
            post=answers.append,
            report=lambda report: None,
            cipher=None,
            pause=pauses.append,
        )
        pool.submit(dataclasses.replace(plan(blocks), beside_decode=beside_decode))
        while pool.step():
            pass
    (loaded,) = answers
    assert isinstance(loaded, Loaded)
    assert_holds(loaded, blocks)
    assert blocks[0].size_bytes < GROUP_BYTES, "one read a region"
    assert bool(pauses) == beside_decode and all(seconds >= 0.03 for seconds in pauses)
