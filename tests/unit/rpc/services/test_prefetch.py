"""Which replies have their session's next turn computed ahead, and what is asked of the engine for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from icehouse.v1 import cache_policy_pb2, cache_service_pb2, prompt_pb2
from icehouse.v1 import inference_service_pb2 as messages
from icehouse_server.domain.cache_commands import EvictReport, SessionEndReport
from icehouse_server.domain.events import Delta, FinishReason
from icehouse_server.domain.request import GenerationRequest
from icehouse_server.rpc.engine_client import prefetcher

from tests.fixtures.rpc.stubs import done
from tests.unit.rpc.conftest import RunningServer, running
from tests.unit.rpc.services.test_stable_prompts import DRAWN, EXACT, ROOMY, STABLE, answering, asked

LONG = "Dry, as far as anybody can tell from here. " * 3
"""Its rendering has more tokens than what is hardly worth it."""


def answers(**how: Any) -> Any:
    """Return a script that answers LONG to requests, and nothing to warm-ups."""
    short = answering(**how)

    def script(request: GenerationRequest) -> Any:
        for event in short(request):
            yield Delta(LONG, event.token_ids) if isinstance(event, Delta) else event

    return script


def question(**fields: Any) -> messages.GenerateRequest:
    request: messages.GenerateRequest = asked("Rain?", form=EXACT, **{"session_id": "s", **fields})
    return request


def waiting(served: RunningServer) -> list[tuple[str, str]]:
    """Return whose next turns wait to be computed."""
    [seat] = served.server._seats.loaded().values()
    return [(key.tenant, key.session_id) for key in seat.prefetcher._waiting]


@pytest.fixture
async def house(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RunningServer]:
    monkeypatch.setattr(prefetcher, "_IDLE_S", 0.0)
    async with running(info=ROOMY) as served:
        served.engine.script = answers()
        yield served


@pytest.fixture
async def resting(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RunningServer]:
    """A server that computes nothing ahead as long as a test runs."""
    monkeypatch.setattr(prefetcher, "_IDLE_S", 3600.0)
    async with running(info=ROOMY) as served:
        served.engine.script = answers()
        yield served


async def until(served: RunningServer, count: int) -> list[GenerationRequest]:
    """Return what the engine was asked, once that is so much."""
    while len(served.engine.submitted) < count:
        await served.settle()
    return served.engine.submitted


async def test_the_next_turn_begins_as_what_is_computed_ahead(house: RunningServer) -> None:
    await house.inference.Generate(question())
    _, warm = await until(house, 2)
    assert warm.is_prefetch and warm.max_output_tokens == 0 and warm.session_id == "s"
    assert not warm.sampling.stop_token_ids and warm.deadline_time is None
    after: messages.GenerateRequest = asked("Rain?", LONG, "Sure?", form=EXACT, session_id="s")
    await house.inference.Generate(after)
    *_, then = (request for request in house.engine.submitted if not request.is_prefetch)
    start = warm.prompt_token_ids[:-1]
    assert then.prompt_token_ids[: len(start)] == start
    assert bytes(then.prompt_token_ids[len(start) :]) == b"Sure?;"


async def test_it_goes_by_no_name_of_a_caller(house: RunningServer) -> None:
    request = question()
    request.cache.tenant = "ann"
    await house.inference.Generate(request)
    first, warm = await until(house, 2)
    assert warm.tenant == first.tenant == "ann" and warm.request_id.startswith("~prefetch")


Change = Callable[[messages.GenerateRequest], object]
NOT_AHEAD: dict[str, Change] = {
    "no session": lambda r: r.ClearField("session_id"),
    "the last turn": lambda r: setattr(r, "ends_session", True),
    "a prompt that is not kept": lambda r: setattr(r.cache, "use", cache_policy_pb2.CACHE_USE_READ_ONLY),
    "a cache that is not read": lambda r: setattr(r.cache, "use", cache_policy_pb2.CACHE_USE_WRITE_ONLY),
    "several replies": lambda r: setattr(r, "completions", 2),
    "a stable prompt": lambda r: setattr(r.prompt.chat, "form", STABLE),
    "no conversation": lambda r: r.prompt.CopyFrom(prompt_pb2.Prompt(text="Rain?")),
}


@pytest.mark.parametrize("change", NOT_AHEAD.values(), ids=NOT_AHEAD.keys())
async def test_nothing_is_computed_ahead_for(resting: RunningServer, change: Change) -> None:
    request = question()
    change(request)
    await resting.inference.Generate(request)
    assert waiting(resting) == []
    await resting.inference.Generate(question())
    assert waiting(resting) == [("", "s")]


@pytest.mark.parametrize(
    "how", [{"reason": FinishReason.LENGTH, "end": None}, {"reason": FinishReason.STOP_STRING, "end": None}]
)
async def test_a_reply_that_the_model_did_not_end_has_no_next_turn(
    resting: RunningServer, how: dict[str, Any]
) -> None:
    resting.engine.script = answers(**how)
    await resting.inference.Generate(question())
    assert waiting(resting) == []


async def test_the_setting_bounds_it_and_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetcher, "_IDLE_S", 0.0)
    async with running(info=ROOMY, prefetch_token_limit=0) as served:
        served.engine.script = answers()
        await served.inference.Generate(question())
        assert waiting(served) == []
    async with running(info=ROOMY, prefetch_token_limit=70) as served:
        served.engine.script = answers()
        await served.inference.Generate(question())
        first, warm = await until(served, 2)
        known = (*first.prompt_token_ids, *DRAWN)
        assert len(warm.prompt_token_ids) == len(first.prompt_token_ids) + 70 + 1
        assert warm.prompt_token_ids[: len(first.prompt_token_ids)] == known[: -len(DRAWN)]


async def test_a_stable_prompt_that_could_not_begin_with_the_reply_is_computed_ahead(
    resting: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    render = resting.tokenizer.render_chat
    monkeypatch.setattr(
        resting.tokenizer, "render_chat", lambda conversation, kept=None: render(conversation)
    )
    first = question()
    first.prompt.chat.form = STABLE
    await resting.inference.Generate(first)
    assert waiting(resting) == []
    await resting.inference.Generate(asked("Rain?", LONG, "Sure?", form=STABLE, session_id="s"))
    assert waiting(resting) == [("", "s")]


async def test_a_subagent_does_not_replace_its_agents_next_turn(resting: RunningServer) -> None:
    await resting.inference.Generate(question())
    task: messages.GenerateRequest = asked("Look it up.", form=EXACT, session_id="s")
    await resting.inference.Generate(task)
    assert waiting(resting) == [("", "s"), ("", "s")]
    await resting.inference.Generate(asked("Look it up.", LONG, "And?", form=EXACT, session_id="s"))
    assert waiting(resting) == [("", "s"), ("", "s")], "its own was replaced"


async def test_who_ends_a_session_or_evicts_has_nothing_computed_any_more(resting: RunningServer) -> None:
    prompt = prompt_pb2.Prompt(text="x")
    for command in (
        lambda: resting.cache.EndSession(cache_service_pb2.EndSessionRequest(session_id="s")),
        lambda: done(resting.cache.Evict(cache_service_pb2.EvictRequest(prompt=prompt))),
        lambda: done(resting.cache.EvictAll(cache_service_pb2.EvictAllRequest())),
    ):
        await resting.inference.Generate(question())
        assert waiting(resting) == [("", "s")]
        resting.engine.order_answer = EvictReport()
        if len(resting.engine.orders) == 0:
            resting.engine.order_answer = SessionEndReport()
        await command()
        assert waiting(resting) == []


async def test_a_stop_gives_it_up(house: RunningServer) -> None:
    ended = answers()

    def script(request: GenerationRequest) -> Any:
        events = list(ended(request))
        return events[:1] if request.is_prefetch else events

    house.engine.script = script
    await house.inference.Generate(question())
    _, warm = await until(house, 2)
    await house.server.stop(grace_s=0)
    assert await house.cancelled() == warm.request_id
