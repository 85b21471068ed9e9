"""A submission is ended by its ids while the engine has not ended it, and never when another has them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from icehouse_server.errors import AlreadyExists

from tests.fixtures.engine import request
from tests.fixtures.rpc.submissions import Submissions, submissions

FIRST, SECOND = request("a"), request("b")


@pytest.fixture
async def engine() -> AsyncIterator[Submissions]:
    with submissions() as made:
        yield made


async def test_what_runs_is_cancelled(engine: Submissions) -> None:
    submission = engine.begin(FIRST, SECOND)
    assert submission.is_running
    submission.cancel()
    assert engine.cancelled() == ["a", "b"]


async def test_what_has_ended_is_passed_over(engine: Submissions) -> None:
    submission = engine.begin(FIRST, SECOND)
    await engine.end(FIRST)
    assert submission.is_running
    submission.cancel()
    assert engine.cancelled() == ["b"]
    await engine.end(SECOND)
    assert not submission.is_running


async def test_the_next_one_of_its_name_is_left_alone(engine: Submissions) -> None:
    old = engine.begin(FIRST)
    await engine.end(FIRST)
    new = engine.begin(FIRST)
    old.cancel()
    assert (old.is_running, new.is_running, engine.cancelled()) == (False, True, [])
    new.cancel()
    assert engine.cancelled() == ["a"]


async def test_what_is_not_taken_leaves_its_other_ids_free(engine: Submissions) -> None:
    engine.begin(SECOND)
    with pytest.raises(AlreadyExists):
        engine.begin(FIRST, SECOND)
    assert engine.begin(FIRST).is_running and engine.cancelled() == []
