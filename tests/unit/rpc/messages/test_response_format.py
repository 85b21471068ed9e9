"""The response format of a request: every kind arrives compiled, every misuse is named."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from icehouse.v1 import inference_service_pb2 as messages
from icehouse.v1 import inference_service_pb2_grpc
from icehouse.v1 import response_format_pb2 as formats
from icehouse_server.domain.response_format import (
    Choice,
    JsonObject,
    JsonSchema,
    LarkGrammar,
    Regex,
    ResponseFormat,
)
from icehouse_server.errors import InvalidRequest, Reason
from icehouse_server.rpc.engine_client.grammars import GrammarCompilers
from icehouse_server.rpc.messages.options import CHOICE_TEXT_LIMIT, response_format_of

from tests.fixtures.patience import BOUND_S
from tests.fixtures.rpc.details import refused
from tests.fixtures.rpc.fake_grammars import FakeGrammars
from tests.unit.rpc.conftest import RunningServer, channel_options, running

INVALID = grpc.StatusCode.INVALID_ARGUMENT
OBJECT = formats.JsonObjectFormat()


def request(**format_fields: Any) -> messages.GenerateRequest:
    return messages.GenerateRequest(
        prompt={"text": "Hi"}, max_output_tokens=2, response_format=formats.ResponseFormat(**format_fields)
    )


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"json_schema": '{"b":1,"a":2}'}, JsonSchema('{"b":1,"a":2}')),
        ({"json_schema": "true", "compact": True}, JsonSchema("true", is_compact=True)),
        ({"json_object": OBJECT}, JsonObject()),
        ({"json_object": OBJECT, "compact": True}, JsonObject(is_compact=True)),
        ({"regex": "a+"}, Regex("a+")),
        ({"lark": 'start: "a"'}, LarkGrammar('start: "a"')),
        ({"choice": formats.ChoiceFormat(texts=["b", "a"])}, Choice(("b", "a"))),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_each_kind_reaches_the_engine_compiled(
    served: RunningServer, fields: dict[str, Any], form: ResponseFormat
) -> None:
    await served.inference.Generate(request(**fields))
    assert [event async for event in served.inference.Stream(request(**fields))]
    arrived = [submitted.grammar.form for submitted in served.engine.submitted]
    assert arrived == [form, form]


async def test_the_reply_tells_what_of_the_schema_is_not_enforced(served: RunningServer) -> None:
    whole = await served.inference.Generate(request(json_schema="{}"))
    first, *_ = [event async for event in served.inference.Stream(request(json_schema="{}"))]
    assert list(whole.unenforced_keywords) == list(first.started.unenforced_keywords) == ["/a/uniqueItems"]
    plain = await served.inference.Generate(
        messages.GenerateRequest(prompt={"text": "Hi"}, max_output_tokens=1)
    )
    assert list(plain.unenforced_keywords) == []


async def test_without_a_format_nothing_is_compiled(served: RunningServer) -> None:
    await served.inference.Generate(messages.GenerateRequest(prompt={"text": "Hi"}, max_output_tokens=1))
    assert served.engine.submitted[0].grammar is None and served.grammars.compiled == []


@pytest.mark.parametrize(
    ("fields", "reason", "field"),
    [
        ({}, "RESPONSE_FORMAT_INVALID", "response_format"),
        ({"choice": formats.ChoiceFormat()}, "RESPONSE_FORMAT_INVALID", "response_format.choice.texts"),
        ({"regex": "a", "compact": True}, "PARAMETER_OUT_OF_RANGE", "response_format.compact"),
        ({"compact": True}, "PARAMETER_OUT_OF_RANGE", "response_format.compact"),
        ({"regex": "wrong"}, "RESPONSE_FORMAT_INVALID", "response_format.regex"),
        ({"regex": "é" * 600}, "GRAMMAR_TOO_COMPLEX", "response_format"),
        (
            {"choice": formats.ChoiceFormat(texts=["a", *[""] * 100_000])},
            "PARAMETER_OUT_OF_RANGE",
            "response_format.choice.texts",
        ),
    ],
    ids=["nothing", "no choices", "compact regex", "compact alone", "wrong", "too long", "too many choices"],
)
async def test_misuse_is_named_before_anything_runs(fields: dict[str, Any], reason: str, field: str) -> None:
    async with running(max_grammar_bytes=1024) as served:
        answer = await refused(served.inference.Generate(request(**fields)))
        assert (answer.code, answer.reason, answer.field) == (INVALID, reason, field)
        assert served.engine.submitted == [] and served.grammars.compiled == []
        if reason == "GRAMMAR_TOO_COMPLEX":
            assert answer.info.metadata == {"size_bytes": "1200", "limit_bytes": "1024"}
        if field == "response_format.regex":
            assert answer.info.metadata == {"place": "column 3", "detail": "it is wrong"}


def test_a_choice_is_remembered_without_repetitions() -> None:
    texts = ["b", "a", "b"] + [""] * (CHOICE_TEXT_LIMIT - 3)
    choice = formats.ResponseFormat(choice=formats.ChoiceFormat(texts=texts))
    assert response_format_of(choice) == Choice(("b", "a", ""))


async def test_a_text_without_a_byte_counts_as_one() -> None:
    compiler = FakeGrammars()
    compilers = GrammarCompilers(compiler, byte_limit=1024, timeout_s=1.0)
    with pytest.raises(InvalidRequest, match="1025 bytes") as caught:
        await compilers.compile(Choice(("",) * 1025))
    assert caught.value.reason is Reason.GRAMMAR_TOO_COMPLEX and compiler.compiled == []
    compilers.close()


async def test_the_compiler_has_threads_of_its_own_and_reads_the_vocabulary_at_once(
    served: RunningServer,
) -> None:
    await served.inference.Generate(request(regex="a"))
    assert len(served.grammars.calls) == 3
    assert set(served.grammars.calls) == {"grammar-0_0", "grammar-1_0"}


async def test_a_format_that_compiles_too_long_is_refused_and_one_behind_it_asked_to_come_again() -> None:
    async with running(grammar_timeout_s=0.2) as served:
        slow = asyncio.ensure_future(refused(served.inference.Generate(request(regex="held"))))
        await asyncio.get_running_loop().run_in_executor(None, served.grammars.held.wait, 30)
        behind = await refused(served.inference.Generate(request(regex="quick")))
        answer = await slow
        served.grammars.let_go.set()
        assert (answer.code, answer.reason) == (INVALID, "GRAMMAR_TOO_COMPLEX")
        assert answer.info.metadata == {"timeout_s": "0.2"}
        assert (behind.code, behind.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        assert behind.retry is not None
        await served.inference.Generate(request(regex="later"))
        arrived: Any = served.engine.submitted[0].grammar
        assert arrived.form == Regex("later")
        assert Regex("quick") not in served.grammars.compiled, "nobody waits for it any more"


async def test_one_callers_slow_format_does_not_hold_up_anothers(served: RunningServer) -> None:
    slow = [asyncio.ensure_future(served.inference.Generate(request(regex="held"))) for _ in range(3)]
    await asyncio.get_running_loop().run_in_executor(None, served.grammars.held.wait, 30)
    async with grpc.aio.insecure_channel(served.server.address, options=channel_options()) as channel:
        other: Any = inference_service_pb2_grpc.InferenceServiceStub(channel)
        await other.Generate(request(regex="quick"), timeout=BOUND_S)
    assert served.grammars.compiled == [Regex("quick")]
    served.grammars.let_go.set()
    await asyncio.gather(*slow)


async def test_a_server_without_a_compiler_says_so() -> None:
    async with running(grammars=None) as served:
        answer = await refused(served.inference.Generate(request(regex="a")))
        assert (answer.code, answer.reason, answer.field) == (INVALID, "UNSUPPORTED", "response_format")
