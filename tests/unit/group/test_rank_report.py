"""Reports of a follower: what rank 0 shows of its memory, its tier and how far it is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from icehouse.group.v1 import group_service_pb2 as group
from icehouse_server.domain.stats import RankTierStats
from icehouse_server.group.messages import tier_from, tier_report
from icehouse_server.group.silence import BEAT_S
from icehouse_server.storage.api import STALL_LIMIT_S, StorageFailed

from tests.unit.group.ranks import Ranks

COUNTS = st.integers(0, 2**63 - 1)


@pytest.fixture
def ranks() -> Ranks:
    opened = Ranks()
    opened.open()
    return opened


def told(ranks: Ranks) -> group.RankReport:
    """Return what the follower says of itself."""
    return ranks.one.follower.heartbeat().heartbeat.rank


def beat(ranks: Ranks) -> None:
    """Let a beat pass, and the follower and its tier do what they do in it."""
    ranks.clock.advance(BEAT_S)
    ranks.one.follower.count()
    ranks.one.work()


@given(st.builds(RankTierStats, *[COUNTS] * 9))
def test_the_numbers_of_a_tier_come_as_they_are(stats: RankTierStats) -> None:
    sent = group.TierReport.FromString(tier_report(stats).SerializeToString())
    assert tier_from(sent) == stats


def test_nothing_is_fewer_than_none() -> None:
    assert tier_from(group.TierReport(block_count=-1, read_byte_total=3)) == RankTierStats(read_byte_total=3)


def test_a_follower_tells_how_far_it_is_and_what_it_has(ranks: Ranks) -> None:
    assert told(ranks) == group.RankReport(), "it has not loaded"
    ranks.stored(3)
    ranks.one.runner.active_bytes = 7
    beat(ranks)
    report = told(ranks)
    assert report.order_total == ranks.log.order_count > 0
    assert report.active_memory_bytes == 7
    assert report.ssd.block_count == 3 and report.ssd.size_bytes > 0
    assert not report.ssd_trouble


def test_numbers_are_brought_up_to_date_once_a_beat(ranks: Ranks) -> None:
    ranks.stored(1)
    beat(ranks)
    ranks.one.runner.active_bytes = 7
    ranks.stored(2)
    ranks.one.follower.count()
    ranks.one.work()
    assert (told(ranks).active_memory_bytes, told(ranks).ssd.block_count) == (0, 1)
    assert told(ranks).order_total == ranks.log.order_count
    beat(ranks)
    assert (told(ranks).active_memory_bytes, told(ranks).ssd.block_count) == (7, 2)


def test_blocks_that_find_no_room_are_counted(ranks: Ranks) -> None:
    ranks.stored(1)
    beat(ranks)
    ranks.one.tier.queue_space_bytes = 0
    ranks.store(1)
    ranks.settle()
    beat(ranks)
    assert told(ranks).ssd.dropped_block_total == 1


def test_a_tier_that_does_not_answer_is_asked_once(ranks: Ranks) -> None:
    ranks.stored(1)
    beat(ranks)
    ranks.one.tier.hangs = True
    for _ in range(5):
        beat(ranks)
    assert len(ranks.one.tier._waiting) == 1
    assert told(ranks).ssd.block_count == 1, "the last numbers stay"
    ranks.one.tier.stall_s = STALL_LIMIT_S
    assert "The disk does not answer" in told(ranks).ssd_trouble


def test_a_tier_that_is_gone_is_told_without_its_folders(ranks: Ranks) -> None:
    ranks.one.follower.take(StorageFailed("/srv/blocks: broken"))
    assert told(ranks).ssd_trouble == "it is gone until the next start, and the log says why"


def test_a_follower_that_has_ended_asks_nothing_more(ranks: Ranks) -> None:
    ranks.stored(1)
    ranks.log.add(group.Order(end=group.End()))
    ranks.settle()
    before = told(ranks)
    beat(ranks)
    assert told(ranks) == before
