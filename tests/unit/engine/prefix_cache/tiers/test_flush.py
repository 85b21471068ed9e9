"""The last flush: all of it where the disk keeps up, and never longer than its deadline."""

from __future__ import annotations

from typing import Any, cast

import pytest
from icehouse_server.engine.prefix_cache.tiers.node import Node
from icehouse_server.engine.prefix_cache.tiers.spill import Spills as RealSpills
from icehouse_server.engine.prefix_cache.tiers.spill import flush

from tests.fixtures.engine import FakeClock


class Spills:
    """A write queue of two places, in front of a disk that writes one block a second, or none. Blocks of
    other models are in it, too."""

    is_stalled = False

    def __init__(self, *, is_stuck: bool, other_count: int = 0) -> None:
        self.is_stuck = is_stuck
        self.under_way_count = 0
        self.other_count = other_count

    def wants(self, entry: object) -> bool:
        return entry != 0  # it is on SSD already

    def must_wait(self, entry: object) -> bool:
        return self.under_way_count + self.other_count >= 2

    def send(self, entry: object, *, request_id: None) -> None:
        assert not self.must_wait(entry), "it is dropped"
        self.under_way_count += 1

    def hand_over(self, *, may_wait: bool) -> None:
        assert may_wait, "no pass runs that would wait for it"

    def written(self) -> None:
        if self.other_count:
            self.other_count -= not self.is_stuck
        else:
            self.under_way_count -= not self.is_stuck


def flushed(spills: Spills, caplog: pytest.LogCaptureFixture) -> Any:
    """Flush five of six blocks within ten seconds; return the log's record of the end."""
    clock = FakeClock()
    deadline_time = clock.now + 10.0
    caplog.set_level("INFO", logger="icehouse.engine")
    for wait_s in flush(
        cast("RealSpills", spills),
        cast("list[Node]", list(range(6))),
        clock=clock,
        deadline_time=deadline_time,
    ):
        assert wait_s > 0.0, "waited past the deadline"
        clock.now += 1.0
        spills.written()
    assert clock.now <= deadline_time
    return caplog.records[-1]


def test_everything_is_written_as_the_queue_takes_it(caplog: pytest.LogCaptureFixture) -> None:
    ended = flushed(Spills(is_stuck=False), caplog)
    assert (ended.message, ended.block_count, ended.left_count, ended.duration_s) == (
        "flush_ended",
        5,
        0,
        5.0,
    )


def test_a_disk_that_does_not_write_ends_it_at_the_deadline(caplog: pytest.LogCaptureFixture) -> None:
    ended = flushed(Spills(is_stuck=True), caplog)
    assert (ended.message, ended.left_count, ended.duration_s) == ("flush_ended", 5, 10.0)


def test_a_queue_full_of_another_models_blocks_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    ended = flushed(Spills(is_stuck=False, other_count=2), caplog)
    assert (ended.message, ended.left_count, ended.duration_s) == ("flush_ended", 0, 7.0)
