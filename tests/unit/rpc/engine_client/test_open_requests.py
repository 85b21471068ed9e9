"""Open requests: ended by their ids while these are theirs, and what is known of one while it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator

import pytest
from icehouse_server.domain.events import CacheReport, Delta, Started
from icehouse_server.domain.ids import Tenant
from icehouse_server.domain.request import GenerationRequest, part_of, request_id_of
from icehouse_server.domain.sampling import SamplingParams
from icehouse_server.errors import AlreadyExists, InvalidRequest, NotFound
from icehouse_server.rpc.access.caller import UNPROVED, Caller, CallerRole
from icehouse_server.rpc.engine_client.open_requests import RequestPhase

from tests.fixtures.engine import request as plain_request
from tests.fixtures.rpc.submissions import Submissions, submissions

RED, BLUE = Caller(Tenant("red"), CallerRole.TENANT), Caller(Tenant("blue"), CallerRole.TENANT)


@pytest.fixture
async def engine() -> AsyncIterator[Submissions]:
    with submissions() as made:
        yield made


def request(name: str = "r", *, tenant: str = "red", prompt: tuple[int, ...] = (1, 2)) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id_of(name, Tenant(tenant)),
        prompt_token_ids=prompt,
        max_output_tokens=4,
        sampling=SamplingParams(),
        stop=(),
        arrival_time=0.0,
        tenant=Tenant(tenant),
    )


@pytest.mark.parametrize(("tenant", "caller"), [("red", RED), ("blue", BLUE)])
async def test_a_name_that_is_taken_again_is_the_later_ones(
    engine: Submissions, tenant: str, caller: Caller
) -> None:
    known = engine.known
    engine.begin(request())
    # The engine has ended the first; its call closes when the second is there.
    await engine.end(request())
    later = engine.begin(request(tenant=tenant))
    assert known.visible_to(UNPROVED) == (later,)
    assert known.cancel("r", caller) is later
    assert engine.cancelled() == [f"r@{tenant}"]
    engine.end_calls()
    assert known.visible_to(UNPROVED) == ()


async def test_what_has_ended_is_not_there_whoever_has_its_name_now(engine: Submissions) -> None:
    first = engine.begin(request())
    await engine.end(request())
    later = engine.begin(request(tenant="blue"))
    assert engine.known.visible_to(RED) == ()
    with pytest.raises(NotFound):
        engine.known.cancel("r", RED)
    assert engine.cancelled() == [] and not (first.is_cancelled or later.is_cancelled)


async def test_whose_of_one_name_is_ended_has_to_be_said_where_it_is_not_clear(engine: Submissions) -> None:
    known = engine.known
    _, second = engine.begin(request()), engine.begin(request(tenant="blue"))
    with pytest.raises(InvalidRequest) as caught:
        known.cancel("r", UNPROVED)
    assert caught.value.field == "tenant" and engine.cancelled() == []
    with pytest.raises(NotFound):
        known.cancel("r", UNPROVED, tenant="")
    assert known.cancel("r", UNPROVED, tenant="blue") is second
    assert engine.cancelled() == ["r@blue"]
    known.cancel("r", RED)
    assert engine.cancelled() == ["r@red"]


async def test_another_tenants_request_is_as_if_it_were_not_there(engine: Submissions) -> None:
    known = engine.known
    engine.begin(request(tenant="blue"))
    assert known.visible_to(RED) == () and len(known.visible_to(UNPROVED)) == 1
    with pytest.raises(NotFound) as caught:
        known.cancel("r", RED)
    assert engine.cancelled() == []
    engine.end_calls()
    with pytest.raises(NotFound) as gone:
        known.cancel("r", RED)
    assert caught.value.message == gone.value.message


async def test_an_abort_ends_a_callers_own_requests_once(engine: Submissions) -> None:
    known = engine.known
    engine.begin(request(tenant="blue"))
    engine.begin(request("s"))
    known.abort({"r", "s", "nobody"}, RED)
    assert engine.cancelled() == ["s@red"]
    known.abort({"r", "s"}, UNPROVED)
    assert engine.cancelled() == ["r@blue"], "the other was cancelled before"
    known.abort({"r", "s"}, UNPROVED)
    assert engine.cancelled() == []


async def test_tokens_wait_until_their_prompt_starts_or_never_will(engine: Submissions) -> None:
    waiting = engine.known.waiting_token_count
    first = engine.begin(request())
    engine.begin(request(tenant="blue", prompt=(1, 2, 3)))
    assert (waiting(None), waiting(Tenant("red")), waiting(Tenant("none"))) == (5, 2, 0)
    first.note(Started(prompt_token_count=2, cache=CacheReport(), queue_s=0.0))
    assert (waiting(None), waiting(Tenant("red"))) == (3, 0)
    engine.end_calls()
    assert waiting(None) == 0


async def test_it_is_as_far_as_its_furthest_part(engine: Submissions) -> None:
    one = request()
    opened = engine.begin(one, dataclasses.replace(one, request_id=part_of(one.request_id, 1)))
    assert (opened.phase, opened.prompt_token_count) == (RequestPhase.WAITING, 2)
    opened.note(Started(prompt_token_count=2, cache=CacheReport(ram_token_count=1), queue_s=0.0))
    assert (opened.phase, opened.cached_token_count) == (RequestPhase.PREFILLING, 1)
    opened.note(Delta("a", (5, 6)))
    opened.note(Started(prompt_token_count=2, cache=CacheReport(ram_token_count=1), queue_s=0.0))
    assert (opened.phase, opened.output_token_count) == (RequestPhase.DECODING, 2)
    assert opened.cached_token_count == 1, "the prompt is one, for all outputs"


FIRST, SECOND = plain_request("a"), plain_request("b")


async def test_what_runs_is_cancelled(engine: Submissions) -> None:
    opened = engine.begin(FIRST, SECOND)
    assert opened.is_running
    opened.cancel()
    assert engine.cancelled() == ["a", "b"]


async def test_what_has_ended_is_passed_over(engine: Submissions) -> None:
    opened = engine.begin(FIRST, SECOND)
    await engine.end(FIRST)
    assert opened.is_running
    opened.cancel()
    assert engine.cancelled() == ["b"]
    await engine.end(SECOND)
    assert not opened.is_running


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
