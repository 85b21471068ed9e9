"""Whose blocks are whose: one session's own, a family's, several families'."""

from __future__ import annotations

import dataclasses

from bench.agents.owners import Owners
from bench.agents.trace import Request, StreamIndex
from tests.fixtures.agent_traces import request


def asked(session: int, parent: int | None = None) -> Request:
    made = request(StreamIndex(), [1], session=session, time_s=0.0)
    return dataclasses.replace(made, parent=parent)


def test_what_one_session_uses_is_its_own_until_another_one_uses_it() -> None:
    owners = Owners(4)
    owners.use([2, 1, 0], asked(7))
    assert owners.of(7) == [0, 1, 2] and not owners.is_shared(0)
    owners.use([3, 0], asked(8))
    assert (owners.of(7), owners.of(8)) == ([1, 2], [3])
    assert owners.is_shared(0) and not owners.is_shared(3)
    owners.use([1, 0], asked(7))
    assert owners.of(7) == [1, 2]
    assert owners.end(7) == [1, 2] and owners.end(7) == []


def test_what_a_session_and_its_agents_use_is_the_first_ones() -> None:
    owners = Owners(6)
    owners.use([1, 0], asked(1))
    owners.use([2, 0], asked(2, parent=1))
    owners.use([3, 2, 0], asked(3, parent=2))
    assert (owners.of(1), owners.of(2), owners.of(3)) == ([0, 1, 2], [], [3])
    owners.use([4, 3], asked(4, parent=1))
    assert sorted(owners.of(1)) == [0, 1, 2, 3] and owners.end(4) == [4]
    owners.use([5, 0], asked(9))
    assert sorted(owners.end(1)) == [1, 2, 3] and owners.is_shared(0)
