"""Agents' prefixes: sessions told on, conversations normalised for whom it is set, where a prompt parted."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from icehouse.v1 import cache_service_pb2, tool_pb2, usage_pb2
from icehouse.v1 import inference_service_pb2 as messages
from icehouse_server.config import ServerConfig, TenantConfig
from icehouse_server.domain.cache_commands import EndSession, Explanation, SessionEndReport
from icehouse_server.domain.events import CacheReport, PromptDivergence
from icehouse_server.domain.request import GenerationRequest
from icehouse_server.rpc.calls.watchers import log_fields_of

from tests.fixtures.rpc.details import refused
from tests.fixtures.rpc.fake_engine import finished, started
from tests.fixtures.rpc.stubs import done
from tests.tidy.tree import ROOT
from tests.unit.rpc.access.test_tokens import BOSS, SEARCH, bearer, guarded_server
from tests.unit.rpc.calls.test_wire import watched_server
from tests.unit.rpc.conftest import RunningServer, running

PARTED = CacheReport(ram_token_count=3, divergence=PromptDivergence(3, ord("a"), ord("b")))
TOLD = usage_pb2.PrefixDivergence(
    token_index=3,
    prompt_token=usage_pb2.DivergentToken(id=ord("a"), text="a"),
    cached_token=usage_pb2.DivergentToken(id=ord("b"), text="b"),
)
DROPPED, KEYS_SORTED, TOOLS_SORTED = (
    usage_pb2.PromptChange(kind=usage_pb2.PROMPT_CHANGE_KIND_BILLING_LINE_DROPPED, count=1),
    usage_pb2.PromptChange(kind=usage_pb2.PROMPT_CHANGE_KIND_TOOL_KEYS_SORTED, count=1),
    usage_pb2.PromptChange(kind=usage_pb2.PROMPT_CHANGE_KIND_TOOLS_SORTED, count=2),
)
CHANGES_OF = {0: [DROPPED, KEYS_SORTED], 1: [DROPPED, TOOLS_SORTED]}
"""By the number of an agent's request."""


def short(**fields: Any) -> messages.GenerateRequest:
    return messages.GenerateRequest(prompt={"text": "Hi"}, max_output_tokens=1, **fields)


def agents(number: int, kind: Any = messages.GenerateRequest, **fields: Any) -> Any:
    """Return an agent's request, whose `number` is in what changes from one to the next."""
    request = kind(**fields)
    request.prompt.chat.messages.add(role="ROLE_SYSTEM").parts.add(text=f"x-billing: v=1; cch={number};")
    request.prompt.chat.messages[0].parts.add(text="Be brief.")
    request.prompt.chat.messages.add(role="ROLE_USER", content="Hi")
    schemas = ['{"type":"object","properties":{}}', '{"properties":{},"type":"object"}']
    tools = [tool_pb2.Tool(name="b", parameters_json=schemas[number % 2])]
    tools.insert(number % 2, tool_pb2.Tool(name="a", parameters_json='{"properties":{}}'))
    request.prompt.tools.extend(tools)
    return request


def parting(request: GenerationRequest) -> list[Any]:
    end = finished(request)
    usage = dataclasses.replace(end.usage, cache=PARTED)
    return [
        dataclasses.replace(started(request), cache=PARTED),
        dataclasses.replace(end, usage=usage),
    ]


def test_the_pages_example_is_an_answer() -> None:
    page = (ROOT / "docs/agents.md").read_text()
    (example,) = re.findall(r'```json\n(\{"cache".*?)```', page, re.DOTALL)
    report = json_format.Parse(example, cache_service_pb2.ExplainResponse()).cache
    assert report.divergence.token_index >= report.cached_tokens == report.ram_tokens > 0


@pytest.mark.parametrize(
    ("metadata", "session"),
    [
        ((), ""),
        ((("session-id", "s1"),), "s1"),
        ((("x-claude-code-session-id", "0f-1.2:3_4"),), "0f-1.2:3_4"),
        ((("x-claude-code-session-id", "later"), ("x-session-id", "first")), "first"),
        ((("session-id", "not a name"), ("x-session-id", "s2")), "s2"),
        ((("session-id", "x" * 129),), ""),
        ((("x-opencode-session", "ses_1"),), "ses_1"),
        ((("x-session-affinity", "ses_2"),), "ses_2"),
    ],
)
async def test_a_session_comes_from_the_metadata(metadata: tuple[tuple[str, str], ...], session: str) -> None:
    async with watched_server() as (served, notes):
        await served.inference.Generate(short(), metadata=metadata)
        await notes.ended(1)
    [record], [submitted] = notes.calls, served.engine.submitted
    assert record.session_id == submitted.session_id == session
    assert log_fields_of(record, trace_id="").get("session_id", "") == session


async def test_a_session_of_the_request_counts_before_the_metadata() -> None:
    async with watched_server() as (served, notes):
        await served.inference.Generate(short(session_id="mine"), metadata=(("session-id", "other"),))
        refusal = await refused(served.inference.Generate(short(session_id="not a name")))
        await notes.ended(2)
    assert (refusal.reason, refusal.field) == ("PARAMETER_OUT_OF_RANGE", "session_id")
    assert notes.calls[0].session_id == served.engine.submitted[0].session_id == "mine"
    assert not served.engine.submitted[0].ends_session
    assert len(served.engine.submitted) == 1


async def test_keys_of_metadata_are_a_setting() -> None:
    metadata = (("my-session", "mine"), ("session-id", "other"))
    for told, expected in (("My-Session", "mine"), ("none", "")):
        async with running(session_metadata=told) as served:
            await served.inference.Generate(short(), metadata=metadata)
            assert served.engine.submitted[0].session_id == expected
    assert ServerConfig().session_keys[:3] == ("session-id", "x-session-id", "x-claude-code-session-id")
    assert ServerConfig(agent_metadata="none").agent_keys == ()


@pytest.mark.parametrize(
    ("metadata", "agent"),
    [
        ((), ""),
        ((("x-claude-code-agent-id", "a1"),), "a1"),
        ((("thread-id", "later"), ("agent-id", "first")), "first"),
        ((("agent-id", "not a name"),), ""),
    ],
)
async def test_an_agent_comes_from_the_metadata(metadata: tuple[tuple[str, str], ...], agent: str) -> None:
    async with watched_server() as (served, notes):
        await served.inference.Generate(short(), metadata=metadata)
        await notes.ended(1)
    [record] = notes.calls
    assert record.agent_id == agent
    assert log_fields_of(record, trace_id="").get("agent_id", "") == agent


@pytest.mark.parametrize(
    ("metadata", "session", "parent"),
    [
        ((("x-claude-code-session-id", "s"),), "s", ""),
        ((("x-claude-code-session-id", "s"), ("x-claude-code-agent-id", "a")), "s/a", "s"),
        ((("session-id", "s"), ("thread-id", "s")), "s", ""),
        ((("session-id", "s"), ("thread-id", "t"), ("x-parent-session-id", "p")), "s/t", "s"),
        ((("x-session-affinity", "s"), ("x-parent-session-id", "p")), "s", "p"),
        ((("parent-session-id", "not a name"), ("session-id", "s")), "s", ""),
        ((("agent-id", "a"), ("parent-session-id", "p")), "", "p"),
    ],
)
async def test_an_agent_has_a_session_of_its_own_within_its_session(
    metadata: tuple[tuple[str, str], ...], session: str, parent: str
) -> None:
    async with watched_server() as (served, notes):
        await served.inference.Generate(short(), metadata=metadata)
        served.engine.order_answer = SessionEndReport()
        if session:
            await served.cache.EndSession(cache_service_pb2.EndSessionRequest(), metadata=metadata)
        await notes.ended(1)
    [submitted], told = served.engine.submitted, dict(metadata)
    assert (submitted.session_id, submitted.parent_session_id) == (session, parent)
    assert served.engine.orders == ([EndSession(session)] if session else [])
    fields = log_fields_of(notes.calls[0], trace_id="")
    assert fields.get("session_id", "") == session.partition("/")[0], "the log has the names that were told"
    assert fields.get("parent_session_id", "") == told.get("x-parent-session-id", "p" * (parent == "p"))


async def test_a_parent_of_the_request_counts_before_the_metadata() -> None:
    metadata = (("parent-session-id", "other"),)
    async with running() as served:
        await served.inference.Generate(short(session_id="s", parent_session_id="p"), metadata=metadata)
        refusal = await refused(served.inference.Generate(short(parent_session_id="not a name")))
        [submitted] = served.engine.submitted
    assert (refusal.reason, refusal.field) == ("PARAMETER_OUT_OF_RANGE", "parent_session_id")
    assert (submitted.session_id, submitted.parent_session_id) == ("s", "p")
    assert ServerConfig(parent_metadata="none").parent_keys == ()


def test_who_is_normalised() -> None:
    assert not TenantConfig().normalizes("a") and not TenantConfig().normalizes("")
    some = TenantConfig(normalized_prompts=" a , b")
    assert [some.normalizes(name) for name in ("a", "b", "c", "")] == [True, True, False, False]
    assert TenantConfig(normalized_prompts="*").normalizes("")


async def test_a_tenants_conversations_are_normalised_where_it_is_set() -> None:
    async with running(tenants=TenantConfig(normalized_prompts="agents")) as served:
        for tenant in ("agents", "others"):
            for number in (0, 1):
                request = agents(number, max_output_tokens=1)
                request.cache.tenant = tenant
                response = await served.inference.Generate(request)
                changes = CHANGES_OF[number] if tenant == "agents" else []
                assert list(response.cache.prompt_changes) == changes
    asked = served.tokenizer.conversations
    assert asked[0] == asked[1] and asked[2] != asked[3]
    assert asked[0].messages[0].content == "Be brief." and [t.name for t in asked[0].tools] == ["a", "b"]
    prompts = [request.prompt_token_ids for request in served.engine.submitted]
    assert prompts[0] == prompts[1] and prompts[2] != prompts[3]


async def test_every_call_sees_the_normalised_prompt() -> None:
    async with running(tenants=TenantConfig(normalized_prompts="*")) as served:
        served.engine.script = lambda request: [started(request), finished(request)]
        served.engine.order_answer = Explanation(CacheReport(), ())
        explained = await served.cache.Explain(agents(0, cache_service_pb2.ExplainRequest))
        warmed = await done(served.cache.Warm(agents(0, cache_service_pb2.WarmRequest)))
        tokenized = await served.inference.Tokenize(agents(0, messages.TokenizeRequest))
        stream = served.inference.Stream(agents(0, max_output_tokens=1))
        events = [response async for response in stream]
    reports = [explained.cache, warmed.cache, events[0].started.cache]
    assert [list(report.prompt_changes) for report in reports] == [CHANGES_OF[0]] * 3
    [first, second, third, fourth] = served.tokenizer.conversations
    assert first == second == third == fourth
    assert (
        tokenized.token_count == explained.prompt_tokens == len(served.engine.submitted[0].prompt_token_ids)
    )


async def test_where_a_prompt_parts_is_told_with_text(served: RunningServer) -> None:
    served.engine.script = parting
    served.engine.order_answer = Explanation(PARTED, ())
    response = await served.inference.Generate(short())
    assert response.cache.divergence == TOLD and not response.cache.prompt_changes
    events = [event async for event in served.inference.Stream(short())]
    assert events[0].started.cache.divergence == TOLD
    explained = await served.cache.Explain(cache_service_pb2.ExplainRequest(prompt={"text": "Hi"}))
    assert explained.cache.divergence == TOLD
    warmed = await done(served.cache.Warm(cache_service_pb2.WarmRequest(prompt={"text": "Hi"})))
    assert warmed.cache.divergence == TOLD
    served.engine.script = lambda request: [started(request), finished(request)]
    warmed = await done(served.cache.Warm(cache_service_pb2.WarmRequest(prompt={"text": "Hi"})))
    assert not warmed.cache.HasField("divergence")


async def test_an_operator_is_not_told_of_another_tenants_prompts(tmp_path: Path) -> None:
    async with guarded_server(tmp_path) as served:
        served.engine.script = parting
        served.engine.order_answer = Explanation(PARTED, ())
        request, explain = short(), cache_service_pb2.ExplainRequest(prompt={"text": "Hi"})
        for message in (request, explain):
            message.cache.tenant = "search"
        for caller, is_told in ((SEARCH, True), (BOSS, False)):
            generated = await served.inference.Generate(request, metadata=bearer(caller))
            explained = await served.cache.Explain(explain, metadata=bearer(caller))
            for report in (generated.cache, explained.cache):
                assert report.HasField("divergence") is is_told
                assert report.cached_tokens == 3
