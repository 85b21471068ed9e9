"""Open requests: two of one name that overlap, and what is known of one while it runs."""

from __future__ import annotations

import dataclasses

import pytest
from icehouse_server.domain.events import CacheReport, Delta, Started
from icehouse_server.domain.ids import RequestId, Tenant
from icehouse_server.domain.request import GenerationRequest
from icehouse_server.domain.sampling import SamplingParams
from icehouse_server.errors import NotFound
from icehouse_server.rpc.access.caller import UNPROVED, Caller, Role
from icehouse_server.rpc.engine_client.open_requests import OpenRequests, RequestPhase

RED = Caller(Tenant("red"), Role.TENANT)


def request(name: str = "r", *, tenant: str = "red", prompt: tuple[int, ...] = (1, 2)) -> GenerationRequest:
    return GenerationRequest(
        request_id=RequestId(name),
        prompt_token_ids=prompt,
        max_output_tokens=4,
        sampling=SamplingParams(),
        stop=(),
        arrival_time=0.0,
        tenant=Tenant(tenant),
    )


def test_a_name_that_is_taken_again_is_the_later_ones() -> None:
    cancelled: list[str] = []
    known = OpenRequests(cancelled.append)
    first = known.opened("Generate", [request()])
    second = known.opened("Stream", [request()])
    # The engine has ended the first; its call closes when the second is there.
    first.__enter__()
    later = second.__enter__()
    assert known.cancel("r", RED) is later
    first.__exit__(None, None, None)
    assert known.visible_to(RED) == (later,)
    second.__exit__(None, None, None)
    assert known.visible_to(RED) == ()
    with pytest.raises(NotFound):
        known.cancel("r", RED)
    assert cancelled == ["r"]


def test_another_tenants_request_is_as_if_it_were_not_there() -> None:
    known = OpenRequests(lambda _: pytest.fail("nothing may be cancelled"))
    with known.opened("Generate", [request(tenant="blue")]):
        assert known.visible_to(RED) == () and len(known.visible_to(UNPROVED)) == 1
        with pytest.raises(NotFound) as caught:
            known.cancel("r", RED)
    with pytest.raises(NotFound) as gone:
        known.cancel("r", RED)
    assert caught.value.message == gone.value.message


def test_it_is_as_far_as_its_furthest_part() -> None:
    one = request()
    known = OpenRequests(lambda _: None)
    with known.opened("Generate", [one, dataclasses.replace(one, request_id=RequestId("r/1"))]) as opened:
        assert (opened.phase, opened.prompt_token_count) == (RequestPhase.WAITING, 2)
        opened.note(Started(prompt_token_count=2, cache=CacheReport(ram_token_count=1), queue_s=0.0))
        assert (opened.phase, opened.cached_token_count) == (RequestPhase.PREFILLING, 1)
        opened.note(Delta("a", (5, 6)))
        opened.note(Started(prompt_token_count=2, cache=CacheReport(ram_token_count=1), queue_s=0.0))
        assert (opened.phase, opened.output_token_count) == (RequestPhase.DECODING, 2)
        assert opened.cached_token_count == 1, "the prompt is one, for all outputs"
