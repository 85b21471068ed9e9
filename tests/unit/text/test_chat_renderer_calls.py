"""Calls are held to what the request says of its tools, in the notation that the template writes."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from icehouse_server.domain.chat import CallPiece, Conversation, Tool, ToolChoice, ToolMode
from icehouse_server.domain.response_format import JsonSchema
from icehouse_server.errors import InvalidRequest, Reason
from icehouse_server.structured_output.compiler import GrammarCompiler

from tests.fixtures.chat.families import ALTERNATING, CLOCK, THINKING, WEATHER, render, tokenizer_of, turns
from tests.fixtures.chat.family_templates import template_of
from tests.fixtures.chat.notations import BY_NAME
from tests.fixtures.models.chat_templates import Family

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
STRICT = Tool("get_weather", "", {**CITY, "additionalProperties": False}, is_strict=True)
ASKED = turns(("user", "Hi"))
HERMES = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
MISTRAL = "[TOOL_CALLS]{}[ARGS]{}"
NOTATIONS = pytest.mark.parametrize(("family", "notation"), [(THINKING, HERMES), (ALTERNATING, MISTRAL)])


def takes(
    family: Family, conversation: Conversation, reply: str, *, answer: JsonSchema | None = None
) -> bool:
    """Whether a reply, without what the prompt has of it, may be written and end there."""
    tokenizer = tokenizer_of(family)
    form = tokenizer.render_chat(conversation).call_form
    assert form is not None
    form = dataclasses.replace(form, answer=answer)
    compiler = GrammarCompiler(tokenizer, vocabulary_size=tokenizer.vocabulary_size, cache_limit=1)
    constraint = compiler.compile(form).start()
    for token_id in tokenizer._encode(reply, add_special_tokens=False):
        if constraint.is_finished or not constraint.allows(token_id):
            return False
        constraint.accept(token_id)
    bits = np.unpackbits(constraint.allowed_tokens().view(np.uint8), bitorder="little")
    return constraint.is_finished or bool(bits[tokenizer.eos_token_ids[0]])


@NOTATIONS
def test_the_arguments_of_a_strict_tool_fit_its_schema(family: Family, notation: str) -> None:
    conversation = Conversation(ASKED, tools=(STRICT, CLOCK))
    oslo, clock = (
        notation.format("get_weather", '{"city": "Oslo"}'),
        notation.format("get_time", '{"a": [1]}'),
    )
    for good in ("It rains.", oslo, f"<think>so</think>{oslo}", f"{oslo}{clock}"):
        assert takes(family, conversation, good)
    for bad in ('{"city": 1}', "{}", '{"city": "Oslo", "days": 3}'):
        assert not takes(family, conversation, notation.format("get_weather", bad))
    assert not takes(family, conversation, notation.format("get_money", "{}"))
    assert not takes(family, conversation, oslo[: len(oslo) // 2])


@NOTATIONS
def test_one_call_is_all_where_calls_are_not_parallel(family: Family, notation: str) -> None:
    choice = ToolChoice(is_parallel=False)
    conversation = Conversation(ASKED, tools=(WEATHER, CLOCK), tool_choice=choice)
    call = notation.format("get_time", "{}")
    assert takes(family, conversation, call) and takes(family, conversation, "No.")
    assert not takes(family, conversation, call + call)


@NOTATIONS
def test_tools_that_are_not_allowed_are_shown_and_not_called(family: Family, notation: str) -> None:
    both = Conversation(ASKED, tools=(WEATHER, CLOCK))
    choice = ToolChoice(allowed=frozenset({"get_time"}))
    conversation = dataclasses.replace(both, tool_choice=choice)
    assert render(family, conversation) == render(family, both)
    assert takes(family, conversation, notation.format("get_time", "{}"))
    assert not takes(family, conversation, notation.format("get_weather", "{}"))


@NOTATIONS
@pytest.mark.parametrize("mode", [ToolMode.REQUIRED, ToolMode.NAMED])
def test_a_forced_call_goes_on_where_the_prompt_stops(family: Family, notation: str, mode: ToolMode) -> None:
    name = "get_weather" if mode is ToolMode.NAMED else ""
    conversation = Conversation(ASKED, tools=(STRICT, CLOCK), tool_choice=ToolChoice(mode, name))
    opening = tokenizer_of(family).render_chat(conversation).opening
    call = notation.format("get_weather", '{"city": "Oslo"}')
    assert opening and call.startswith(opening) and not opening.endswith("{")
    assert takes(family, conversation, call.removeprefix(opening))
    wrong = notation.format("get_weather", '{"town": "Oslo"}')
    assert not takes(family, conversation, wrong.removeprefix(opening))
    assert not takes(family, conversation, "No.")


@NOTATIONS
@pytest.mark.parametrize("mode", [ToolMode.REQUIRED, ToolMode.NAMED])
def test_a_forced_call_is_one_of_a_tool_that_need_not_be_strict(
    family: Family, notation: str, mode: ToolMode
) -> None:
    free = dataclasses.replace(STRICT, is_strict=False)
    name = "get_weather" if mode is ToolMode.NAMED else ""
    conversation = Conversation(ASKED, tools=(free, CLOCK), tool_choice=ToolChoice(mode, name))
    opening = tokenizer_of(family).render_chat(conversation).opening
    oslo, clock = notation.format("get_weather", '{"city": "Oslo"}'), notation.format("get_time", "{}")
    assert takes(family, conversation, oslo.removeprefix(opening))
    assert takes(family, conversation, clock.removeprefix(opening)) is (mode is ToolMode.REQUIRED)
    assert takes(family, conversation, (2 * oslo).removeprefix(opening)) is (mode is ToolMode.REQUIRED)
    for bad in (notation.format("get_weather", "{}"), notation.format("get_money", "{}")):
        assert not takes(family, conversation, bad.removeprefix(opening))


@NOTATIONS
def test_beside_an_answer_in_json_calls_are_held_to_their_tools(family: Family, notation: str) -> None:
    free = dataclasses.replace(STRICT, is_strict=False)
    conversation = Conversation(ASKED, tools=(free, CLOCK), answers_in_json=True)
    answer = JsonSchema('{"type": "object", "properties": {"rains": {"type": "boolean"}}}')
    oslo, clock = notation.format("get_weather", '{"city": "Oslo"}'), notation.format("get_time", "{}")
    for good in ('{"rains": true}', oslo, f"{oslo}{clock}"):
        assert takes(family, conversation, good, answer=answer)
    for bad in (
        "It rains.",
        '{"rains": 1}',
        f'{oslo}{{"rains": true}}',
        notation.format("get_weather", "{}"),
    ):
        assert not takes(family, conversation, bad, answer=answer)


def test_a_template_that_takes_no_call_there_leaves_the_answer_alone() -> None:
    ending = "{% if messages[-1].role == 'assistant' %}{{ raise_exception('a reply is last') }}{% endif %}"
    tokenizer = tokenizer_of(dataclasses.replace(THINKING, template=ending + THINKING.template))
    free = Conversation(ASKED, tools=(WEATHER,), answers_in_json=True)
    assert tokenizer.render_chat(free).call_form is None
    with pytest.raises(InvalidRequest, match="a reply is last"):
        tokenizer.render_chat(dataclasses.replace(free, tools=(STRICT,)))


@NOTATIONS
def test_what_is_constrained_is_read_as_calls(family: Family, notation: str) -> None:
    conversation = Conversation(ASKED, tools=(STRICT,))
    tokenizer = tokenizer_of(family)
    splitter = tokenizer.reply_splitter(
        conversation, tokenizer.render_chat(conversation), make_call_id=lambda index: "000000000"
    )
    assert splitter is not None
    pieces = [*splitter.push(notation.format("get_weather", '{"city": "Oslo"}')), *splitter.finish()]
    calls = [piece for piece in pieces if isinstance(piece, CallPiece)]
    assert json.loads("".join(call.arguments_json for call in calls)) == {"city": "Oslo"}


def test_without_a_wish_nothing_is_constrained() -> None:
    for choice in (ToolChoice(), ToolChoice(ToolMode.NONE, is_parallel=False)):
        conversation = Conversation(ASKED, tools=(WEATHER, CLOCK), tool_choice=choice)
        assert tokenizer_of(THINKING).render_chat(conversation).call_form is None


def test_a_notation_without_json_is_refused() -> None:
    template = THINKING.template.replace(
        '"arguments": {{ tool_call.arguments | tojson }}',
        "{% for name, value in tool_call.arguments | items %}{{ name }}={{ value }}{% endfor %}",
    )
    family = dataclasses.replace(THINKING, template=template)
    with pytest.raises(InvalidRequest, match="does not write their arguments as JSON") as caught:
        tokenizer_of(family).render_chat(Conversation(ASKED, tools=(CLOCK, STRICT)))
    assert (caught.value.reason, caught.value.field) == (Reason.TOOLS_UNSUPPORTED, "prompt.tools[1].strict")
    sorted_since = dataclasses.replace(STRICT, sent_index=7)
    with pytest.raises(InvalidRequest) as caught:
        tokenizer_of(family).render_chat(Conversation(ASKED, tools=(CLOCK, sorted_since)))
    assert caught.value.field == "prompt.tools[7].strict"
    forced = Conversation(ASKED, tools=(CLOCK, WEATHER), tool_choice=ToolChoice(ToolMode.REQUIRED))
    rendered = tokenizer_of(family).render_chat(forced)
    assert rendered.opening and rendered.call_form is None, "a call is only begun"


@pytest.mark.parametrize("name", BY_NAME)
def test_every_family_that_is_said_to_be_strict_is(name: str) -> None:
    tokenizer = tokenizer_of(Family(template_of(name)))
    conversation = Conversation(ASKED, tools=(CLOCK, STRICT))
    if not BY_NAME[name].is_strict:
        with pytest.raises(InvalidRequest, match="does not write their arguments as JSON"):
            tokenizer.render_chat(conversation)
        return
    form = tokenizer.render_chat(conversation).call_form
    assert form is not None
    splitter = tokenizer.reply_splitter(conversation, tokenizer.render_chat(conversation), make_call_id=str)
    assert splitter is not None
    tag = form.tags[1]
    pieces = [*splitter.push(f'{tag.begin}{{"city": "Oslo"}}{tag.end}'), *splitter.finish()]
    assert all(isinstance(piece, CallPiece) and not piece.is_repaired for piece in pieces)
    assert splitter.good_count == 1
