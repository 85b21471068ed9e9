"""Stable prompts: who gets them, which replies are remembered, and that every call sees the same prompt."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import pytest
from icehouse.v1 import cache_service_pb2, prompt_pb2, usage_pb2
from icehouse.v1 import inference_service_pb2 as messages
from icehouse_server.config import ServerConfig, TenantConfig
from icehouse_server.domain.cache_commands import EvictReport, Explanation
from icehouse_server.domain.events import CacheReport, Delta, Event, Finished, FinishReason
from icehouse_server.domain.request import GenerationRequest

from tests.fixtures.rpc.details import refused
from tests.fixtures.rpc.fake_engine import MODEL_INFO, Script, finished, started
from tests.fixtures.rpc.stubs import done
from tests.unit.rpc.conftest import RunningServer, running

STABLE, EXACT = prompt_pb2.PROMPT_FORM_STABLE, prompt_pb2.PROMPT_FORM_EXACT
ROOMY = dataclasses.replace(MODEL_INFO, context_token_limit=4096)
[END] = MODEL_INFO.eos_token_ids
DRAWN = (1, 2)
"""The tokens of a reply. The tokenizer would choose others for its text."""


def answering(
    *, reason: FinishReason = FinishReason.STOP_TOKEN, end: int | None = END, drawn: tuple[int, ...] = DRAWN
) -> Script:
    """Return a script that answers "Dry."."""

    def script(request: GenerationRequest) -> Iterable[Event]:
        yield started(request)
        if request.max_output_tokens:
            yield Delta("Dry.", drawn if end is None else (*drawn, end))
        last: Finished = finished(request)
        yield dataclasses.replace(last, reason=reason, stop_token_id=end)

    return script


def asked(*said: str, kind: Any = messages.GenerateRequest, form: int = STABLE, **fields: Any) -> Any:
    """Return a request in which user and assistant said these in turn."""
    request = kind(**fields)
    for index, text in enumerate(said):
        role = prompt_pb2.ROLE_ASSISTANT if index % 2 else prompt_pb2.ROLE_USER
        request.prompt.chat.messages.add(role=role, content=text)
    request.prompt.chat.form = prompt_pb2.PromptForm.ValueType(form)
    return request


def kept(count: int) -> list[usage_pb2.PromptChange]:
    change = usage_pb2.PromptChange(kind=usage_pb2.PROMPT_CHANGE_KIND_HISTORY_KEPT, count=count)
    return [change] if count else []


def known_prompt(served: RunningServer, index: int = 0) -> tuple[int, ...]:
    """Return a prompt that was asked before, and its reply."""
    return (*served.engine.submitted[index].prompt_token_ids, *DRAWN)


async def kept_count(served: RunningServer, request: messages.GenerateRequest) -> int:
    """Ask; return how many tokens of the prompt were kept."""
    response = await served.inference.Generate(request)
    changes = list(response.cache.prompt_changes)
    assert changes == kept(changes[0].count if changes else 0)
    return changes[0].count if changes else 0


@pytest.fixture
def house() -> Any:
    return running(info=ROOMY)


async def test_a_prompt_begins_as_the_one_before_and_its_reply(house: Any) -> None:
    async with house as served:
        served.engine.script = answering()
        assert await kept_count(served, asked("Rain?")) == 0
        known = known_prompt(served)
        assert await kept_count(served, asked("Rain?", " Dry.\n", "Sure?")) == len(known)
        assert served.engine.submitted[1].prompt_token_ids[: len(known)] == known
        assert await kept_count(served, asked("Rain?", "Dry.", "Sure?", "Dry.", "Why?")) == len(
            known_prompt(served, 1)
        )
        assert await kept_count(served, asked("Rain?", "Wet.", "Sure?")) == 0


async def test_the_caller_decides_and_where_it_does_not_the_tenants_setting() -> None:
    unsaid = prompt_pb2.PROMPT_FORM_UNSPECIFIED
    for setting, kept_forms in ((None, {STABLE}), ("*", {STABLE, unsaid})):
        async with running(info=ROOMY, tenants=TenantConfig(normalized_prompts=setting)) as served:
            served.engine.script = answering()
            await served.inference.Generate(asked("Rain?"))
            for form in (STABLE, EXACT, unsaid):
                count = await kept_count(served, asked("Rain?", "Dry.", "Sure?", form=form))
                assert bool(count) is (form in kept_forms)


async def test_an_exact_prompts_reply_is_not_remembered(house: Any) -> None:
    async with house as served:
        served.engine.script = answering()
        await served.inference.Generate(asked("Rain?", form=EXACT))
        assert await kept_count(served, asked("Rain?", "Dry.", "Sure?")) == 0


async def test_an_unknown_form_is_refused(house: Any) -> None:
    async with house as served:
        refusal = await refused(served.inference.Generate(asked("Rain?", form=9)))
        assert (refusal.reason, refusal.field) == ("CHAT_INVALID", "prompt.chat.form")


async def test_every_call_sees_the_same_prompt(house: Any) -> None:
    async with house as served:
        served.engine.script = answering()
        served.engine.order_answer = Explanation(CacheReport(), ())
        await served.inference.Generate(asked("Rain?"))
        said = ("Rain?", "Dry.", "Sure?")
        count = len(known_prompt(served))
        explained = await served.cache.Explain(asked(*said, kind=cache_service_pb2.ExplainRequest))
        warmed = await done(served.cache.Warm(asked(*said, kind=cache_service_pb2.WarmRequest)))
        tokenized = await served.inference.Tokenize(asked(*said, kind=messages.TokenizeRequest))
        stream = served.inference.Stream(asked(*said))
        events = [response async for response in stream]
        reports = [explained.cache, warmed.cache, events[0].started.cache]
        assert [list(report.prompt_changes) for report in reports] == [kept(count)] * 3
        _, warm, streamed = (request.prompt_token_ids for request in served.engine.submitted)
        assert warm == streamed == tuple(token.id for token in tokenized.tokens)
        assert explained.prompt_tokens == len(warm)


async def test_a_stream_is_remembered_as_an_answer_is(house: Any) -> None:
    async with house as served:
        served.engine.script = answering()
        _ = [response async for response in served.inference.Stream(asked("Rain?"))]
        assert await kept_count(served, asked("Rain?", "Dry.", "Sure?"))


@pytest.mark.parametrize(
    ("reason", "end", "is_kept"),
    [
        (FinishReason.STOP_TOKEN, END, True),
        # An end token was all that could follow, so none was drawn.
        (FinishReason.STOP_TOKEN, None, True),
        # A token of the caller's own.
        (FinishReason.STOP_TOKEN, 7, False),
        (FinishReason.STOP_STRING, None, False),
        (FinishReason.LENGTH, None, False),
        (FinishReason.CONTEXT_LENGTH, None, False),
    ],
)
async def test_only_a_reply_that_the_model_ended_is_remembered(
    house: Any, reason: FinishReason, end: int | None, is_kept: bool
) -> None:
    async with house as served:
        served.engine.script = answering(reason=reason, end=end)
        await served.inference.Generate(asked("Rain?"))
        assert bool(await kept_count(served, asked("Rain?", "Dry.", "Sure?"))) is is_kept


async def test_another_tenant_finds_nothing(house: Any) -> None:
    async with house as served:
        served.engine.script = answering()
        first = asked("Rain?")
        first.cache.tenant = "ann"
        await served.inference.Generate(first)
        for tenant, is_kept in (("bob", False), ("", False), ("ann", True)):
            request = asked("Rain?", "Dry.", "Sure?")
            request.cache.tenant = tenant
            assert bool(await kept_count(served, request)) is is_kept


@pytest.mark.parametrize(
    ("context_token_count", "is_kept"),
    [(200, True), (60, False), (50, False)],
    ids=["roomy", "crowded", "too long"],
)
async def test_reasoning_that_is_in_the_way_is_dropped(context_token_count: int, is_kept: bool) -> None:
    """The reply has many more tokens than its text."""
    info = dataclasses.replace(MODEL_INFO, context_token_limit=context_token_count)
    async with running(info=info) as served:
        served.engine.script = answering(drawn=tuple(range(30)))
        await served.inference.Generate(asked("Rain?"))
        said = ("Rain?", "Dry.", "Sure?")
        assert bool(await kept_count(served, asked(*said))) is is_kept
        longer = await served.inference.Tokenize(asked(*said, kind=messages.TokenizeRequest))
        assert longer.token_count == len(served.engine.submitted[1].prompt_token_ids)
        reply_count = len((*range(30), ";")) if is_kept else len("assistant:Dry.;")
        assert longer.token_count == len("user:Rain?;") + reply_count + len("user:Sure?;")


async def test_samples_tell_of_replies(house: Any) -> None:
    async with house as served:
        served.engine.script = answering()
        await served.inference.Generate(asked("Rain?"))
        await served.inference.Generate(asked("Rain?", "Dry.", "Sure?"))
        await served.server.observation.sample()
        replies = served.server.observation.latest.replies
        assert (replies.reply_count, replies.found_total) == (1, 1) and replies.size_bytes > 0


async def test_evicting_all_forgets_all(house: Any) -> None:
    async with house as served:
        served.engine.script = answering()
        await served.inference.Generate(asked("Rain?"))
        served.engine.order_answer = EvictReport()
        await done(served.cache.EvictAll(cache_service_pb2.EvictAllRequest()))
        assert await kept_count(served, asked("Rain?", "Dry.", "Sure?")) == 0


async def test_a_conversation_as_long_as_a_message_may_be_is_no_harm(house: Any) -> None:
    async with house as served:
        served.engine.script = answering()
        longest = ServerConfig().max_message_bytes - 1000
        refusal = await refused(served.inference.Generate(asked("x" * longest)))
        assert refusal.reason == "PROMPT_TOO_LONG"
        assert await kept_count(served, asked("Rain?")) == 0


async def test_without_memory_nothing_is_kept() -> None:
    async with running(info=ROOMY, reply_memory_bytes=0) as served:
        served.engine.script = answering()
        await served.inference.Generate(asked("Rain?"))
        assert await kept_count(served, asked("Rain?", "Dry.", "Sure?")) == 0
