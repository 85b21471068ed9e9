"""Drawn turns come back as they were drawn, and never change what the prompt says."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from icehouse_server.domain.chat import ChatMessage, Conversation, ToolCall, ToolChoice, ToolMode

from tests.fixtures.chat.families import (
    ALTERNATING,
    CLOCK,
    HEADERS,
    REMEMBERING,
    SYSTEMLESS,
    THINKING,
    WEATHER,
    spelled,
    tokenizer_of,
)
from tests.fixtures.models.chat_templates import Family
from tests.fixtures.models.vocabulary import EOS_ID

WORDS = st.text(st.characters(codec="utf-8", exclude_characters="<>[]|"), min_size=1, max_size=12)


def drawn(text: str, seed: int) -> tuple[int, ...]:
    """Return tokens of `text` as a model may draw them: cut at a random place, an end token behind."""
    tokenizer = tokenizer_of(REMEMBERING)
    cut = random.Random(seed).randint(0, len(text))
    return (
        *tokenizer._encode(text[:cut], add_special_tokens=False),
        *tokenizer._encode(text[cut:], add_special_tokens=False),
        EOS_ID,
    )


def conversation(said: list[str], *, with_tokens: bool) -> Conversation:
    """Return a conversation in which the assistant said these, one turn each."""
    messages = []
    for index, text in enumerate(said):
        tokens = drawn(text, index) if with_tokens else ()
        messages += [ChatMessage("user", f"and {index}?"), ChatMessage("assistant", text, token_ids=tokens)]
    return Conversation((*messages, ChatMessage("user", "so?")))


@pytest.mark.parametrize(
    "family", [THINKING, REMEMBERING, HEADERS, ALTERNATING, SYSTEMLESS], ids=lambda f: f.template[:20]
)
@given(said=st.lists(WORDS, min_size=1, max_size=4))
def test_drawn_tokens_never_change_the_text(family: Family, said: list[str]) -> None:
    tokenizer = tokenizer_of(family)
    plain = tokenizer.render_chat(conversation(said, with_tokens=False)).token_ids
    given_back = tokenizer.render_chat(conversation(said, with_tokens=True)).token_ids
    assert spelled(tokenizer, given_back) == spelled(tokenizer, plain)


@given(said=st.lists(WORDS, min_size=1, max_size=4))
def test_every_turn_begins_with_the_prompt_and_the_output_before(said: list[str]) -> None:
    """For a template that rewrites nothing: prompt and drawn tokens are a prefix of the next prompt."""
    tokenizer = tokenizer_of(REMEMBERING)
    for count in range(len(said)):
        messages = conversation(said, with_tokens=True).messages
        before = tokenizer.render_chat(Conversation(messages[: 2 * count + 1])).token_ids
        output = messages[2 * count + 1].token_ids[:-1]
        after = tokenizer.render_chat(Conversation(messages[: 2 * count + 3])).token_ids
        assert after[: len(before) + len(output)] == (*before, *output)


def test_without_them_the_same_words_can_be_other_tokens() -> None:
    tokenizer = tokenizer_of(REMEMBERING)
    tokens = (
        *tokenizer._encode("t", add_special_tokens=False),
        *tokenizer._encode("he", add_special_tokens=False),
    )
    asked, answered = ChatMessage("user", "Hi"), ChatMessage("assistant", "the")
    plain = tokenizer.render_chat(Conversation((asked, answered, asked))).token_ids
    kept = tokenizer.render_chat(
        Conversation((asked, ChatMessage("assistant", "the", token_ids=tokens), asked))
    ).token_ids
    assert plain != kept and spelled(tokenizer, plain) == spelled(tokenizer, kept)


def test_tokens_that_spell_something_else_are_left_alone() -> None:
    tokenizer = tokenizer_of(REMEMBERING)
    lie = tuple(tokenizer._encode("no", add_special_tokens=False))
    asked = ChatMessage("user", "Hi")
    honest = Conversation((asked, ChatMessage("assistant", "yes"), asked))
    lying = Conversation((asked, ChatMessage("assistant", "yes", token_ids=lie), asked))
    assert tokenizer.render_chat(honest) == tokenizer.render_chat(lying)


def test_a_turn_that_the_template_trims_or_closes_keeps_its_beginning() -> None:
    """A thought that the limit cut is closed by the template; what was drawn of it stays as it was drawn."""
    tokenizer = tokenizer_of(REMEMBERING)
    pieces = ["<think>", "t", "he", " way"]
    tokens = tuple(i for piece in pieces for i in tokenizer._encode(piece, add_special_tokens=False))
    asked = ChatMessage("user", "Hi")
    cut = ChatMessage("assistant", "", reasoning="the way", token_ids=tokens)
    before = tokenizer.render_chat(Conversation((asked,))).token_ids
    after = tokenizer.render_chat(Conversation((asked, cut, asked))).token_ids
    assert after[: len(before) + len(tokens)] == (*before, *tokens)
    assert "the way</think><|im_end|>" in spelled(tokenizer, after)


def test_a_turn_that_was_edited_is_tokenized_anew() -> None:
    tokenizer = tokenizer_of(REMEMBERING)
    tokens = tuple(
        i for piece in ("t", "he", " cat") for i in tokenizer._encode(piece, add_special_tokens=False)
    )
    asked = ChatMessage("user", "Hi")
    edited = Conversation((asked, ChatMessage("assistant", "the caterpillar", token_ids=tokens), asked))
    plain = Conversation((asked, ChatMessage("assistant", "the caterpillar"), asked))
    assert tokenizer.render_chat(edited) == tokenizer.render_chat(plain)


COMPACT = '{"city":"Oslo","days":2}'
CALLING = ("let me", ' see<tool_call>\n{"na', f'me": "get_weather", "arguments": {COMPACT[:9]}', COMPACT[9:])
AS_DRAWN = REMEMBERING.template.replace("\n<tool_call>", "<tool_call>").replace(
    "{{ tool_call.arguments | tojson }}",
    "{{ tool_call.arguments if tool_call.arguments is string else tool_call.arguments | tojson }}",
)
"""As REMEMBERING, but arguments that are a text are written as it is, as Qwen3, Kimi K2 and many do."""


def called(*pieces: str) -> tuple[ChatMessage, ...]:
    """Return a loop in which the model drew a call in these pieces."""
    tokenizer = tokenizer_of(REMEMBERING)
    tokens = tuple(i for piece in pieces for i in tokenizer._encode(piece, add_special_tokens=False))
    call = ToolCall("c", "get_weather", COMPACT)
    made = ChatMessage("assistant", "let me see", tool_calls=(call,), token_ids=(*tokens, EOS_ID))
    return (ChatMessage("user", "Rain?"), made, ChatMessage("tool", "dry", tool_call_id="c"))


def test_a_call_comes_back_as_it_was_drawn_where_the_template_writes_arguments_as_they_are() -> None:
    tokenizer = tokenizer_of(dataclasses.replace(REMEMBERING, template=AS_DRAWN))
    messages = called(*CALLING, "}\n</tool_call>")
    before = tokenizer.render_chat(Conversation(messages[:1])).token_ids
    after = tokenizer.render_chat(Conversation(messages)).token_ids
    drawn_tokens = messages[1].token_ids[:-1]
    assert after[: len(before) + len(drawn_tokens)] == (*before, *drawn_tokens)
    assert COMPACT in spelled(tokenizer, after)


def test_a_forced_call_has_an_id_that_holds_its_name_where_the_template_writes_no_other() -> None:
    """Its number is the one that the model would write: calls are counted from the first."""
    template = REMEMBERING.template.replace("{{ tool_call.name }}", "{{ id }}{# tool_call.name #}").replace(
        "set tool_call = tool_call.function", "set id = tool_call.id %}{% set tool_call = tool_call.function"
    )
    tokenizer = tokenizer_of(dataclasses.replace(REMEMBERING, template=template))
    choice = ToolChoice(ToolMode.NAMED, "get_time")
    messages = (*called(*CALLING), ChatMessage("user", "And when?"))
    rendered = tokenizer.render_chat(Conversation(messages, tools=(WEATHER, CLOCK), tool_choice=choice))
    assert rendered.opening.startswith('<tool_call>\n{"name": "functions.get_time:1')
    assert '{"name": "functions.get_weather:0"' in spelled(tokenizer, rendered.token_ids)
