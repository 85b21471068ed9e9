"""gpt-oss: thoughts, answers and calls in messages of their own, whose markers are special tokens."""

from __future__ import annotations

import json

import pytest
from icehouse_server.domain.chat import CallPiece, ChatMessage, Conversation, Tool, ToolChoice, ToolMode
from icehouse_server.structured_output.compiler import GrammarCompiler
from icehouse_server.text.tokenizer import Tokenizer

from tests.fixtures.chat.families import CLOCK, WEATHER, spelled, tokenizer_of, turns
from tests.fixtures.chat.family_templates import template_of
from tests.fixtures.chat.reply_pieces import events
from tests.fixtures.models.chat_templates import Family

MARKERS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>")
GPT_OSS = Family(template_of("harmony"), tuple((marker, True) for marker in MARKERS))
ASKED = turns(("user", "Hi"))
THOUGHT = "<|channel|>analysis<|message|>hm<|end|>"
ANSWER = "<|start|>assistant<|channel|>final<|message|>Dry.<|return|>"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tokenizer_of(GPT_OSS)


def read(tokenizer: Tokenizer, conversation: Conversation, text: str) -> list[list[object]]:
    """Return the events of a reply, as plain decoding of its tokens would show it, or with markers."""
    rendered = tokenizer.render_chat(conversation)
    splitter = tokenizer.reply_splitter(conversation, rendered, make_call_id=str)
    assert splitter is not None
    ids = tokenizer._encode(text, add_special_tokens=False)
    decode = tokenizer.decode_with_markers if tokenizer.hides_markers(conversation) else tokenizer.decode
    return events([*splitter.push(decode(ids)), *splitter.finish()])


def test_thoughts_are_distinguished_without_tools(tokenizer: Tokenizer) -> None:
    found = read(tokenizer, Conversation(ASKED), THOUGHT + ANSWER)
    assert found == [["think", "hm"], ["say", "Dry."]]


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>",
        " to=functions.get_weather<|channel|>commentary json<|message|>",
        "<|channel|>analysis to=functions.get_weather code<|message|>",
    ],
)
def test_a_recipient_may_stand_anywhere_in_a_header(tokenizer: Tokenizer, header: str) -> None:
    text = f'{THOUGHT}<|start|>assistant{header}{{"city": "Oslo"}}<|call|>'
    found = read(tokenizer, Conversation(ASKED, tools=(WEATHER,)), text)
    assert found == [["think", "hm"], ["call", "get_weather", {"city": "Oslo"}]]


def test_a_preamble_is_said(tokenizer: Tokenizer) -> None:
    text = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.get_time"
    text += "<|channel|>commentary json<|message|>{}<|call|>"
    found = read(tokenizer, Conversation(ASKED, tools=(CLOCK,)), text)
    assert found == [["say", "I look."], ["call", "get_time", {}]]


def test_an_answer_is_continued_inside_its_message(tokenizer: Tokenizer) -> None:
    begun = (*ASKED, ChatMessage("assistant", "It is "))
    conversation = Conversation(begun, adds_generation_prompt=False, continues_final_message=True)
    rendered = tokenizer.render_chat(conversation)
    assert rendered.opening == "<|start|>assistant<|channel|>final<|message|>"
    assert read(tokenizer, conversation, "dry.<|return|>") == [["say", "dry."]]


def test_a_forced_call_goes_on_where_the_prompt_stops(tokenizer: Tokenizer) -> None:
    choice = ToolChoice(ToolMode.NAMED, "get_weather")
    conversation = Conversation(ASKED, tools=(WEATHER, CLOCK), tool_choice=choice)
    rendered = tokenizer.render_chat(conversation)
    assert rendered.opening.startswith(" to=functions.get_weather")
    assert spelled(tokenizer, rendered.token_ids).endswith("<|start|>assistant" + rendered.opening)
    whole = ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Oslo"}<|call|>'
    found = read(tokenizer, conversation, whole.removeprefix(rendered.opening))
    assert found == [["call", "get_weather", {"city": "Oslo"}]]


def test_strict_calls_are_held_to_their_schema(tokenizer: Tokenizer) -> None:
    strict = Tool("get_weather", "", {**WEATHER.parameters, "additionalProperties": False}, is_strict=True)
    form = tokenizer.render_chat(Conversation(ASKED, tools=(strict,))).call_form
    assert form is not None
    compiler = GrammarCompiler(tokenizer, vocabulary_size=tokenizer.vocabulary_size, cache_limit=1)
    begun = f"{THOUGHT}<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>"
    for arguments, fits in (('{"city": "Oslo"}', True), ('{"town": "Oslo"}', False)):
        constraint = compiler.compile(form).start()
        taken = True
        for token_id in tokenizer._encode(begun + arguments, add_special_tokens=False):
            taken = taken and constraint.allows(token_id)
            if not taken:
                break
            constraint.accept(token_id)
        assert taken is fits


def test_reasoning_tokens_are_counted_and_can_be_ended(tokenizer: Tokenizer) -> None:
    reasoning = tokenizer.reply_reasoning(Conversation(ASKED), tokenizer.render_chat(Conversation(ASKED)))
    assert reasoning is not None
    meter = reasoning.meter()
    counts = []
    for text in ("<|channel|>", "analysis", "<|message|>", "a", "b", "<|end|>", "<|start|>", "assistant"):
        meter.push(text)
        counts.append(meter.token_count)
    assert counts[:5] == [0, 0, 0, 1, 2] and meter.is_open
    for text in ("<|channel|>", "final", "<|message|>", "c"):
        meter.push(text)
    assert meter.token_count == 2 and not meter.is_open
    ended = tokenizer.decode_with_markers(reasoning.end_token_ids)
    assert ended == "<|end|><|start|>assistant<|channel|>final<|message|>"


def test_what_the_prompt_cuts_off_is_no_call(tokenizer: Tokenizer) -> None:
    conversation = Conversation(ASKED, tools=(WEATHER,))
    splitter = tokenizer.reply_splitter(conversation, tokenizer.render_chat(conversation), make_call_id=str)
    assert splitter is not None
    pieces = splitter.push('<|channel|>commentary to=functions.get_weather<|message|>{"city": "Os')
    pieces += splitter.finish(is_cut=True)
    calls = [piece for piece in pieces if isinstance(piece, CallPiece)]
    assert calls[-1].is_withdrawn and json.loads('"Os"') in calls[1].arguments_json
