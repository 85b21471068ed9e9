"""An Abort costs what runs, once: never what its message repeats, nor another tenant's choice of a name."""

from __future__ import annotations

import contextlib

import pytest
from icehouse_server.domain.events import Started
from icehouse_server.domain.ids import DEFAULT_TENANT as TENANT
from icehouse_server.domain.ids import RequestId, Tenant
from icehouse_server.errors import InvalidRequest
from icehouse_server.rpc.access.caller import UNPROVED, Caller, Role
from icehouse_server.rpc.worker.running import ABORT_LIMIT, RunningRequest, RunningRequests

from tests.fixtures.engine import request as generation_request
from tests.fixtures.rpc.fake_engine import REPORT

ADS, SEARCH = Caller(Tenant("ads"), Role.TENANT), Caller(Tenant("search"), Role.TENANT)


class Running:
    """Requests that run until the test ends, and what was cancelled of them."""

    def __init__(self) -> None:
        self.cancelled: list[RequestId] = []
        self.requests = RunningRequests(self.cancelled.append)
        self._stack = contextlib.ExitStack()
        self.end = self._stack.close

    def begin(self, name: str, caller: Caller, *request_ids: str) -> RunningRequest:
        request = self._stack.enter_context(self.requests.running(name, caller))
        request.submit([generation_request(request_id) for request_id in request_ids])
        return request


def test_a_request_is_cancelled_once_however_often_it_is_named() -> None:
    running = Running()
    running.begin("x", ADS, "a", "b")
    running.requests.abort(["x"] * ABORT_LIMIT, ADS)
    running.requests.abort(["x"], ADS)
    assert running.cancelled == ["a", "b"]


def test_more_names_than_fit_one_abort_are_refused() -> None:
    running = Running()
    request = running.begin("x", ADS, "a")
    with pytest.raises(InvalidRequest, match=f"request_ids.*{ABORT_LIMIT + 1}.*at most {ABORT_LIMIT}"):
        running.requests.abort(["x"] * (ABORT_LIMIT + 1), ADS)
    assert not request.is_aborted and running.cancelled == []


def test_whoever_had_a_name_first_does_not_keep_its_owner_from_aborting() -> None:
    running = Running()
    squatter = running.begin("x", SEARCH, "s")
    running.begin("x", ADS, "a")
    running.requests.abort(["x"], ADS)
    assert running.cancelled == ["a"] and not squatter.is_aborted
    running.requests.abort(["x"], UNPROVED)
    assert running.cancelled == ["a", "s"]


def test_tokens_wait_until_their_prompt_starts_or_never_will() -> None:
    running = Running()
    waiting = running.requests.waiting_tokens
    first = running.begin("x", ADS, "a", "b")
    running.begin("y", ADS, "c")
    assert (waiting.count(None), waiting.count(TENANT), waiting.count(Tenant("none"))) == (6, 6, 0)
    for _ in range(2):
        first.note(Started(prompt_token_count=3, cache=REPORT, queue_s=0.0))
    assert (waiting.count(None), waiting.count(TENANT)) == (3, 3)
    running.end()
    assert (waiting.count(None), waiting.count(TENANT)) == (0, 0)


def test_no_name_names_nothing() -> None:
    running = Running()
    running.begin("", ADS, "a")
    running.requests.abort([""], ADS)
    assert running.cancelled == []
