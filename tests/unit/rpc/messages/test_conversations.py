"""What a conversation may hold, on its way to the tokenizer, and what is refused with which words."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import grpc
import pytest
from google.protobuf.json_format import ParseDict
from icehouse.v1 import cache_service_pb2, tool_pb2
from icehouse.v1 import inference_service_pb2 as messages
from icehouse_server.domain.chat import ChatMessage, Conversation, Tool, ToolCall, ToolChoice, ToolMode
from icehouse_server.domain.response_format import JsonObject, Regex, TaggedJson

from tests.fixtures.rpc.details import refused
from tests.fixtures.rpc.fake_engine import CALL_FORM
from tests.fixtures.rpc.stubs import done
from tests.unit.rpc.conftest import RunningServer

USER = {"role": "ROLE_USER", "content": "Hi"}
TOOL = {
    "name": "f",
    "description": "does",
    "parameters_json": '{"type": "object", "properties": {"b": {}, "a": {}}}',
}


def request(chat: dict[str, Any] | None = None, **fields: Any) -> messages.GenerateRequest:
    """Return a request written as JSON."""
    prompt = {"chat": chat or {"messages": [USER]}, "tools": fields.pop("tools", [])}
    return ParseDict({"prompt": prompt, **fields}, messages.GenerateRequest())


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
async def test_whoever_speaks_may_say_nothing(served: RunningServer, role: str) -> None:
    await served.inference.Generate(request({"messages": [{"role": f"ROLE_{role.upper()}"}, USER]}))
    assert served.tokenizer.conversations[-1].messages[0] == ChatMessage(role, "")


async def test_a_role_of_the_template_goes_to_the_template(served: RunningServer) -> None:
    await served.inference.Generate(request({"messages": [{"role_name": "ipython", "content": "2"}, USER]}))
    assert served.tokenizer.conversations[-1].messages[0] == ChatMessage("ipython", "2")


@pytest.mark.parametrize("text", ['{"a": ', "[1]", "now", '{"a": "\\n'])
async def test_arguments_of_the_past_are_what_a_model_wrote(served: RunningServer, text: str) -> None:
    turn = {"role": "ROLE_ASSISTANT", "tool_calls": [{"name": "f", "arguments_json": text}]}
    await served.inference.Generate(request({"messages": [USER, turn, USER]}))
    assert served.tokenizer.conversations[-1].messages[1].tool_calls == (ToolCall("", "f", text),)


async def test_everything_of_a_conversation_arrives(served: RunningServer) -> None:
    calls = [{"id": "c1", "name": "f", "arguments_json": '{"a": 1}'}, {"id": "c2", "name": "g"}]
    chat = {
        "messages": [
            {"role": "ROLE_SYSTEM", "parts": [{"text": "Be "}, {"text": "brief."}]},
            USER,
            {"role": "ROLE_ASSISTANT", "reasoning": "hm", "tool_calls": calls, "token_ids": [1, 2]},
            {"role": "ROLE_TOOL", "content": "dry", "tool_call_id": "c1", "name": "f"},
            {"role": "ROLE_TOOL", "content": "", "tool_call_id": "c2"},
            USER,
        ],
        "template_arguments": {"z": 1, "a": {"d": 1.5, "c": [2]}, "on": True},
        "add_generation_prompt": False,
    }
    await served.inference.Generate(
        request(chat, tools=[TOOL], tool_choice={"mode": "TOOL_CHOICE_MODE_NONE"})
    )
    (asked,) = served.tokenizer.conversations
    assert asked == Conversation(
        messages=(
            ChatMessage("system", "Be brief."),
            ChatMessage("user", "Hi"),
            ChatMessage(
                "assistant",
                "",
                reasoning="hm",
                tool_calls=(ToolCall("c1", "f", '{"a": 1}'), ToolCall("c2", "g", "{}")),
                token_ids=(1, 2),
            ),
            ChatMessage("tool", "dry", name="f", tool_call_id="c1"),
            ChatMessage("tool", "", tool_call_id="c2"),
            ChatMessage("user", "Hi"),
        ),
        tools=(Tool("f", "does", {"type": "object", "properties": {"b": {}, "a": {}}}),),
        tool_choice=ToolChoice(ToolMode.NONE),
        template_arguments={"a": {"c": [2], "d": 1.5}, "on": True, "z": 1},
        adds_generation_prompt=False,
    )
    assert list(asked.template_arguments) == ["a", "on", "z"]
    assert list(asked.template_arguments["a"]) == ["c", "d"]
    assert isinstance(asked.template_arguments["z"], int)
    assert list(asked.tools[0].parameters["properties"]) == ["b", "a"], "a schema keeps its order"


async def test_continuing_needs_no_generation_prompt(served: RunningServer) -> None:
    chat = {
        "messages": [USER, {"role": "ROLE_ASSISTANT", "content": "Well"}, USER],
        "continue_final_message": False,
    }
    await served.inference.Generate(request(chat))
    assert served.tokenizer.conversations[0].adds_generation_prompt


async def test_tools_are_a_part_of_every_prompt(served: RunningServer) -> None:
    fields = {"prompt": {"chat": {"messages": [USER]}, "tools": [TOOL]}}
    await served.inference.Tokenize(ParseDict(fields, messages.TokenizeRequest()))
    await done(served.cache.Warm(ParseDict(fields, cache_service_pb2.WarmRequest())))
    for name in ("Explain", "Pin", "Unpin", "Evict"):
        asked = ParseDict(fields, getattr(cache_service_pb2, f"{name}Request")())
        call = getattr(served.cache, name)(asked)
        with pytest.raises(grpc.aio.AioRpcError):
            await (call.read() if name == "Evict" else call)
    assert [len(asked.tools) for asked in served.tokenizer.conversations] == [1] * 6


async def test_markers_are_shown_where_they_tell_parts_apart(served: RunningServer) -> None:
    await served.inference.Generate(request(tools=[TOOL]))
    await served.inference.Generate(request())
    await served.inference.Generate(messages.GenerateRequest(prompt={"text": "Hi"}))
    assert [asked.shows_markers for asked in served.engine.submitted] == [True, False, False]


ASSISTANT = {"role": "ROLE_ASSISTANT", "content": "Well"}
NAMED = "TOOL_CHOICE_MODE_NAMED"


@pytest.mark.parametrize(
    ("chat", "fields", "reason", "field"),
    [
        (
            {"messages": [{**USER, "reasoning": "hm"}]},
            {},
            "CHAT_INVALID",
            "prompt.chat.messages[0].reasoning",
        ),
        ({"messages": [{**USER, "token_ids": [1]}]}, {}, "CHAT_INVALID", "prompt.chat.messages[0].token_ids"),
        (
            {"messages": [{**USER, "tool_calls": [{"name": "f"}]}]},
            {},
            "CHAT_INVALID",
            "prompt.chat.messages[0].tool_calls",
        ),
        (
            {"messages": [{**USER, "tool_call_id": "c"}]},
            {},
            "CHAT_INVALID",
            "prompt.chat.messages[0].tool_call_id",
        ),
        (
            {"messages": [{**USER, "parts": [{"text": "x"}]}]},
            {},
            "CHAT_INVALID",
            "prompt.chat.messages[0].parts",
        ),
        (
            {"messages": [{"role": "ROLE_USER", "parts": [{"text": "x"}, {"image": {"data": "iVBO"}}]}]},
            {},
            "IMAGES_UNSUPPORTED",
            "prompt.chat.messages[0].parts[1].image",
        ),
        (
            {"messages": [{"role": "ROLE_USER", "parts": [{}]}]},
            {},
            "CHAT_INVALID",
            "prompt.chat.messages[0].parts[0]",
        ),
        (
            {"messages": [USER, {**ASSISTANT, "token_ids": [5, 300]}]},
            {},
            "TOKEN_OUT_OF_RANGE",
            "prompt.chat.messages[1].token_ids[1]",
        ),
        (
            {"messages": [{**ASSISTANT, "tool_calls": [{"id": "c"}]}]},
            {},
            "CHAT_INVALID",
            "prompt.chat.messages[0].tool_calls[0].name",
        ),
        (
            {"messages": [{**ASSISTANT, "tool_calls": [{"name": "f", "arguments_json": '"\\ud800"'}]}]},
            {},
            "CHAT_INVALID",
            "prompt.chat.messages[0].tool_calls[0].arguments_json",
        ),
        (
            {"messages": [USER], "continue_final_message": True},
            {},
            "CHAT_INVALID",
            "prompt.chat.continue_final_message",
        ),
        (
            {"messages": [USER, ASSISTANT], "continue_final_message": True, "add_generation_prompt": True},
            {},
            "CHAT_INVALID",
            "prompt.chat.continue_final_message",
        ),
        (None, {"tools": [{"name": "no spaces"}]}, "TOOL_INVALID", "prompt.tools[0].name"),
        (None, {"tools": [{"name": "n" * 129}]}, "TOOL_INVALID", "prompt.tools[0].name"),
        (None, {"tools": [{}]}, "TOOL_INVALID", "prompt.tools[0].name"),
        (None, {"tools": [TOOL, TOOL]}, "TOOL_INVALID", "prompt.tools[1].name"),
        (
            None,
            {"tools": [{"name": "f", "parameters_json": "{"}]},
            "TOOL_INVALID",
            "prompt.tools[0].parameters_json",
        ),
        (
            None,
            {"tools": [{"name": "f", "parameters_json": "7"}]},
            "TOOL_INVALID",
            "prompt.tools[0].parameters_json",
        ),
        (
            None,
            {"tools": [{"name": "f", "parameters_json": '{"const": "\\ud800"}'}]},
            "TOOL_INVALID",
            "prompt.tools[0].parameters_json",
        ),
        (
            None,
            {"tools": [{"name": "f", "parameters_json": '{"const": ' + "9" * 5000 + "}"}]},
            "TOOL_INVALID",
            "prompt.tools[0].parameters_json",
        ),
        (
            None,
            {"tools": [{"name": "f", "parameters_json": json.dumps({"title": "a" * (1 << 20)})}]},
            "TOOL_INVALID",
            "prompt.tools",
        ),
        (None, {"tools": [{"name": f"f{i}"} for i in range(129)]}, "TOOL_INVALID", "prompt.tools"),
        (None, {"tool_choice": {"mode": NAMED, "name": "f"}}, "TOOL_CHOICE_INVALID", "tool_choice.name"),
        (
            None,
            {"tools": [TOOL], "tool_choice": {"mode": NAMED, "name": "g"}},
            "TOOL_CHOICE_INVALID",
            "tool_choice.name",
        ),
        (None, {"tools": [TOOL], "tool_choice": {"name": "f"}}, "TOOL_CHOICE_INVALID", "tool_choice.name"),
        (
            None,
            {"tool_choice": {"mode": "TOOL_CHOICE_MODE_REQUIRED"}},
            "TOOL_CHOICE_INVALID",
            "tool_choice.mode",
        ),
        (None, {"tools": [TOOL], "tool_choice": {"mode": 99}}, "TOOL_CHOICE_INVALID", "tool_choice.mode"),
        (
            None,
            {"tools": [TOOL], "tool_choice": {"allowed": ["f", "g"]}},
            "TOOL_CHOICE_INVALID",
            "tool_choice.allowed[1]",
        ),
        (
            None,
            {"tools": [TOOL], "tool_choice": {"mode": NAMED, "name": "f", "allowed": ["f"]}},
            "TOOL_CHOICE_INVALID",
            "tool_choice.allowed",
        ),
        (
            {"messages": [USER, ASSISTANT], "continue_final_message": True},
            {"tools": [TOOL], "tool_choice": {"mode": "TOOL_CHOICE_MODE_REQUIRED"}},
            "TOOL_CHOICE_INVALID",
            "tool_choice.mode",
        ),
    ],
)
async def test_misuse_is_refused_and_names_its_field(
    served: RunningServer, chat: dict[str, Any] | None, fields: dict[str, Any], reason: str, field: str
) -> None:
    refusal = await refused(served.inference.Generate(request(chat, **fields)))
    assert (refusal.code, refusal.reason, refusal.field) == (grpc.StatusCode.INVALID_ARGUMENT, reason, field)
    assert refusal.info.metadata and not served.engine.submitted


@pytest.mark.parametrize("number", [math.nan, math.inf])
async def test_a_template_argument_that_json_has_not_is_refused(served: RunningServer, number: float) -> None:
    asked = request()
    asked.prompt.chat.template_arguments.fields["a"].list_value.values.add(number_value=number)
    answer = await refused(served.inference.Generate(asked))
    assert (answer.reason, answer.field) == ("CHAT_INVALID", "prompt.chat.template_arguments")


async def test_what_constrains_calls_reaches_the_template_and_the_compiler(served: RunningServer) -> None:
    choice = {"mode": "TOOL_CHOICE_MODE_REQUIRED", "allowed": ["f"], "parallel_tool_calls": False}
    fields = {"tools": [{**TOOL, "strict": True}, {"name": "g", "found_later": True}], "tool_choice": choice}
    await served.inference.Generate(request(None, **fields))
    [conversation] = served.tokenizer.conversations
    assert [tool.is_strict for tool in conversation.tools] == [True, False]
    assert [tool.is_found_later for tool in conversation.tools] == [False, True]
    assert conversation.tool_choice == ToolChoice(
        ToolMode.REQUIRED, allowed=frozenset({"f"}), is_parallel=False
    )
    assert served.grammars.compiled == [CALL_FORM]
    assert served.engine.submitted[0].grammar is not None


async def test_calls_that_are_free_are_not_constrained(served: RunningServer) -> None:
    choice = {"parallel_tool_calls": True}
    await served.inference.Generate(request(None, tools=[TOOL], tool_choice=choice))
    assert served.engine.submitted[0].grammar is None and not served.grammars.compiled


async def test_a_forced_call_is_constrained_as_far_as_it_can_be(served: RunningServer) -> None:
    loose = TaggedJson((dataclasses.replace(CALL_FORM.tags[0], schema='{"type": "object"}'),))
    asked = request(None, tools=[TOOL], tool_choice={"mode": "TOOL_CHOICE_MODE_REQUIRED"})
    for wrong, compiled in (([], [CALL_FORM]), ([CALL_FORM], [loose]), ([CALL_FORM, loose], [])):
        served.grammars.wrong, served.grammars.compiled = list(wrong), []
        await served.inference.Generate(asked)
        assert served.grammars.compiled == compiled
        assert (served.engine.submitted[-1].grammar is not None) == bool(compiled)
    asked.prompt.tools[0].strict = True
    refusal = await refused(served.inference.Generate(asked))
    assert refusal.reason == "RESPONSE_FORMAT_INVALID", "a strict tool is no wish"


@pytest.mark.parametrize("is_strict", [False, True])
async def test_beside_tools_an_answer_in_json_is_one_of_two(served: RunningServer, is_strict: bool) -> None:
    either = dataclasses.replace(CALL_FORM, answer=JsonObject())
    asked = request(None, tools=[{**TOOL, "strict": is_strict}], response_format={"json_object": {}})
    await served.inference.Generate(asked)
    assert served.grammars.compiled == [either]
    loose = dataclasses.replace(
        either, tags=(dataclasses.replace(either.tags[0], schema='{"type": "object"}'),)
    )
    served.grammars.wrong, served.grammars.compiled = [either, loose], []
    if is_strict:
        refusal = await refused(served.inference.Generate(asked))
        assert refusal.reason == "RESPONSE_FORMAT_INVALID"
    else:
        await served.inference.Generate(asked)
        assert served.grammars.compiled == [JsonObject()], "calls cannot be told from it"


async def test_a_forced_call_has_no_answer_with_a_format(served: RunningServer) -> None:
    choice = {"mode": "TOOL_CHOICE_MODE_REQUIRED"}
    fields = {"tools": [TOOL], "tool_choice": choice, "response_format": {"json_object": {}}}
    await served.inference.Generate(request(None, **fields))
    assert served.grammars.compiled == [CALL_FORM]


async def test_strict_tools_and_a_format_that_is_not_json_cannot_both_constrain(
    served: RunningServer,
) -> None:
    fields = {"tools": [{**TOOL, "strict": True}], "response_format": {"regex": "a*"}}
    refusal = await refused(served.inference.Generate(request(None, **fields)))
    assert (refusal.reason, refusal.field) == ("RESPONSE_FORMAT_INVALID", "response_format")
    fields["tools"] = [TOOL]
    await served.inference.Generate(request(None, **fields))
    assert served.grammars.compiled == [Regex("a*")]


async def test_tools_beside_plain_text_are_refused(served: RunningServer) -> None:
    plain = messages.GenerateRequest(prompt={"text": "Hi", "tools": [tool_pb2.Tool(name="f")]})
    tokens = messages.GenerateRequest(prompt={"tools": [tool_pb2.Tool(name="f")]})
    tokens.prompt.tokens.ids.append(1)
    for asked in (plain, tokens):
        refusal = await refused(served.inference.Generate(asked))
        assert (refusal.reason, refusal.field) == ("TOOL_INVALID", "prompt.tools")
