"""An Abort costs what runs, once: never what its message repeats, nor another tenant's choice of a name."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence

import pytest
from icehouse_server.domain.events import Started
from icehouse_server.domain.ids import DEFAULT_TENANT as TENANT
from icehouse_server.domain.ids import RequestId, Tenant
from icehouse_server.errors import InvalidRequest
from icehouse_server.rpc.access.caller import UNPROVED, Caller, Role
from icehouse_server.rpc.worker.vllm_engine_service import ABORT_LIMIT, RunningRequest, RunningRequests

from tests.fixtures.engine import request as generation_request
from tests.fixtures.rpc.fake_engine import REPORT
from tests.fixtures.rpc.submissions import Submissions, submissions

ADS, SEARCH = Caller(Tenant("ads"), Role.TENANT), Caller(Tenant("search"), Role.TENANT)


class Running:
    """Requests that run until the test ends, and what was cancelled of them."""

    def __init__(self, engine: Submissions) -> None:
        self.engine = engine
        self.requests = RunningRequests()
        self._stack = contextlib.ExitStack()
        self.end = self._stack.close

    def begin(self, name: str, caller: Caller, *request_ids: str) -> RunningRequest:
        request = self._stack.enter_context(self.requests.running(name, caller))
        request.submit(self.engine.begin(*[generation_request(request_id) for request_id in request_ids]))
        return request

    def abort(self, names: Sequence[str], caller: Caller) -> list[RequestId]:
        """Abort, and return what the engine was told to cancel."""
        self.requests.abort(names, caller)
        return self.engine.cancelled()


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    with submissions() as engine:
        yield Running(engine)


async def test_a_request_is_cancelled_once_however_often_it_is_named(running: Running) -> None:
    running.begin("x", ADS, "a", "b")
    assert running.abort(["x"] * ABORT_LIMIT, ADS) == ["a", "b"]
    assert running.abort(["x"], ADS) == []


async def test_more_names_than_fit_one_abort_are_refused(running: Running) -> None:
    request = running.begin("x", ADS, "a")
    with pytest.raises(InvalidRequest, match=f"request_ids.*{ABORT_LIMIT + 1}.*at most {ABORT_LIMIT}"):
        running.abort(["x"] * (ABORT_LIMIT + 1), ADS)
    assert not request.is_aborted and running.engine.cancelled() == []


async def test_whoever_had_a_name_first_does_not_keep_its_owner_from_aborting(running: Running) -> None:
    squatter = running.begin("x", SEARCH, "s")
    running.begin("x", ADS, "a")
    assert running.abort(["x"], ADS) == ["a"]
    assert not squatter.is_aborted
    assert running.abort(["x"], UNPROVED) == ["s"]


async def test_what_has_ended_leaves_the_next_one_of_its_name_alone(running: Running) -> None:
    running.begin("x", SEARCH, "x", "x#1")
    await running.engine.end(generation_request("x"))
    later = running.begin("x", ADS, "x")
    assert running.abort(["x"], SEARCH) == ["x#1"]
    assert not later.is_aborted
    assert running.abort(["x"], ADS) == ["x"]


async def test_tokens_wait_until_their_prompt_starts_or_never_will(running: Running) -> None:
    waiting = running.requests.waiting_tokens
    first = running.begin("x", ADS, "a", "b")
    running.begin("y", ADS, "c")
    assert (waiting[None], waiting[TENANT], waiting[Tenant("none")]) == (6, 6, 0)
    for _ in range(2):
        first.note(Started(prompt_token_count=3, cache=REPORT, queue_s=0.0))
    assert (waiting[None], waiting[TENANT]) == (3, 3)
    running.end()
    assert (waiting[None], waiting[TENANT]) == (0, 0)


async def test_no_name_names_nothing(running: Running) -> None:
    running.begin("", ADS, "a")
    assert running.abort([""], ADS) == []
