"""The log keeps the order of changes, and goes off rather than grow."""

from __future__ import annotations

from icehouse_server.domain.cache_commands import Tier
from icehouse_server.domain.ids import DEFAULT_SCOPE, BlockHash
from icehouse_server.engine.core.block_log import (
    BlockLog,
    Left,
    ListingBegan,
    RootForgotten,
    RootsKnown,
)

ROOT = BlockHash(b"r" * 32)


def left(number: int) -> Left:
    return Left(Tier.RAM, BlockHash(bytes([number]) * 32))


def test_it_begins_with_the_roots_that_are_known() -> None:
    log = BlockLog()
    log.add_roots({ROOT: DEFAULT_SCOPE})
    assert not log.is_on and len(log) == 0
    log.begin()
    assert log.take(limit=10) == [ListingBegan(), RootsKnown(((ROOT, DEFAULT_SCOPE),))]
    log.drop_root(ROOT)
    log.begin()
    assert log.take(limit=10) == [RootForgotten(ROOT), ListingBegan(), RootsKnown(())]


def test_changes_are_taken_in_order_a_part_at_a_time() -> None:
    log = BlockLog()
    log.begin()
    log.take(limit=10)
    for number in range(5):
        log.note(left(number))
    assert log.take(limit=3) == [left(0), left(1), left(2)]
    assert log.take(limit=3) == [left(3), left(4)] and log.is_on


def test_a_full_log_goes_off_and_keeps_what_it_has() -> None:
    log = BlockLog(limit=3)
    log.begin()
    log.note(left(0))
    log.note(left(1))
    assert not log.is_on and len(log) == 3
    log.take(limit=10)
    log.begin()
    assert log.is_on
