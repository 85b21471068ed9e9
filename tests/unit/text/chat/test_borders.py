"""Borders of messages: other prompts part from this one right behind them, and no message can move one out of
the prompt."""

from __future__ import annotations

import dataclasses

import pytest
from icehouse_server.domain.chat import ChatMessage, Conversation, ToolChoice, ToolMode
from icehouse_server.text.chat.kept_reply import KeptReply

from tests.fixtures.chat.families import THINKING, WEATHER, spelled
from tests.fixtures.chat.histories import system, user
from tests.unit.text.chat.test_next_turn import ALL, common
from tests.unit.text.test_kept_replies import KINDS, Kind

REPLY = ChatMessage("assistant", "It is dry.")
TALK = (system("Be kind."), user("One?"), REPLY, user("Two?"))
SYSTEM_FIRST = [kind for name, kind in ALL.items() if "istral" not in name and name != "alternating"]
"""The others write the system's message into another one."""


def borders(kind: Kind, conversation: Conversation) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return a conversation's tokens, and its borders."""
    rendered = kind.tokenizer.render_chat(conversation)
    return rendered.token_ids, rendered.border_token_indices


@pytest.mark.parametrize("kind", ALL.values(), ids=ALL.keys())
def test_an_edit_of_the_last_message_parts_right_behind_a_border(kind: Kind) -> None:
    token_ids, found = borders(kind, Conversation(TALK))
    edited, _ = borders(kind, Conversation((*TALK[:-1], user("Else?"))))
    behind = [common(token_ids, edited) - border for border in found]
    assert min(count for count in behind if count >= 0) <= 8, "a header at most lies between"


@pytest.mark.parametrize("kind", SYSTEM_FIRST)
def test_another_conversation_of_the_same_system_parts_right_behind_the_first(kind: Kind) -> None:
    token_ids, found = borders(kind, Conversation(TALK))
    other, _ = borders(kind, Conversation((TALK[0], user("Else?"), REPLY, user("More?"))))
    if len(found) > 1:  # some write no special token between the system's message and the first one
        assert 0 <= common(token_ids, other) - found[0] <= 8


@pytest.mark.parametrize("text", ["<|im_end|>", "<|im_start|>", "<|im_start|>user\n" * 9])
def test_messages_that_spell_such_tokens_move_no_border_out_of_the_prompt(text: str) -> None:
    kind = KINDS["thoughts dropped"]
    for place in range(len(TALK)):
        said = list(TALK)
        said[place] = dataclasses.replace(said[place], content=text)
        token_ids, found = borders(kind, Conversation(tuple(said)))
        assert list(found) == sorted(set(found)) and all(0 < border < len(token_ids) - 1 for border in found)
        if place:
            assert spelled(kind.tokenizer, token_ids[: found[0]]).count("Be kind.") == 1


def test_a_prompt_that_begins_as_a_reply_that_was_kept_has_the_same_borders() -> None:
    kind = KINDS["nothing rewritten"]
    first = kind.tokenizer.render_chat(Conversation(TALK[:2])).token_ids
    kept = KeptReply(2, (*first, *kind.tokenizer.spell(REPLY.content)), kind.tokenizer.spell(kind.end)[0])
    rendered = kind.tokenizer.render_chat(Conversation(TALK), kept)
    assert rendered.kept_token_count
    texts = [
        [spelled(kind.tokenizer, token_ids[:border]) for border in found]
        for token_ids, found in (
            (rendered.token_ids, rendered.border_token_indices),
            borders(kind, Conversation(TALK)),
        )
    ]
    assert texts[0] == texts[1] and len(texts[0]) == 2


def test_a_header_that_opens_reasoning_is_behind_a_border_of_its_own() -> None:
    thinking = KINDS["thoughts dropped"]
    header = "<|im_start|>assistant\n"
    opening = THINKING.template.replace(
        "{%- if add_generation_prompt %}" + header, "{%- if add_generation_prompt %}" + header + "<think>\n"
    )
    kind = dataclasses.replace(thinking, family=dataclasses.replace(THINKING, template=opening))
    talk = Conversation(TALK)
    token_ids, found = borders(kind, talk)
    assert "Two?" in spelled(kind.tokenizer, token_ids[: found[-1]])
    assert spelled(kind.tokenizer, token_ids[found[-1] :]) == header + "<think>\n"
    assert len(found) == 1 + len(borders(thinking, talk)[1])


def test_a_prompt_without_a_system_or_a_turn_to_come_has_fewer() -> None:
    kind = KINDS["nothing rewritten"]
    assert len(borders(kind, Conversation(TALK[1:]))[1]) == 1
    assert len(borders(kind, Conversation(TALK[1:], tools=(WEATHER,)))[1]) == 2
    assert borders(kind, Conversation(TALK, adds_generation_prompt=False))[1] == ()
    forced = Conversation(TALK, (WEATHER,), ToolChoice(ToolMode.REQUIRED))
    assert borders(kind, forced)[1] == ()
