"""Tokens of reasoning are those whose text lies between the markers, however these are spelled."""

from __future__ import annotations

import pytest
from icehouse_server.domain.chat import Conversation, RenderedChat
from icehouse_server.text.reasoning import ReasoningCounter

from tests.fixtures.chat.families import ALTERNATING, THINKING, WEATHER, tokenizer_of, turns

ASKED = turns(("user", "Hi"))


def meter(*, opening: str = "", is_open: bool = False, with_tools: bool = False) -> ReasoningCounter:
    conversation = Conversation(ASKED, tools=(WEATHER,) if with_tools else ())
    rendered = RenderedChat((), opening=opening, is_reasoning=is_open)
    found = tokenizer_of(THINKING).reply_reasoning(conversation, rendered)
    assert found is not None
    return found.meter()


def counts(texts: list[str], made: ReasoningCounter) -> list[int]:
    """Return the count after each token, whose text this is."""
    found = []
    for text in texts:
        made.push(text)
        found.append(made.token_count)
    return found


def test_markers_are_not_counted() -> None:
    texts = ["<think>", "\n", "why", "</think>", "so", " <", "think"]
    assert counts(texts, meter()) == [0, 1, 2, 2, 2, 2, 2]


def test_a_prompt_may_end_within_reasoning() -> None:
    assert counts(["why", "</think>", "so"], meter(is_open=True)) == [1, 1, 1]


def test_it_may_begin_again() -> None:
    texts = ["<think>", "a", "</think>", "b", "<think>", "c", "d", "</think>"]
    assert counts(texts, meter()) == [0, 1, 1, 1, 1, 2, 3, 3]


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["a", "<", "/think", ">"], [1, 2, 3, 1]),
        (["a</", "think>b"], [1, 1]),
        (["a", "</think>b"], [1, 1]),
        (["a", "<", "b", "</", "c"], [1, 2, 3, 4, 5]),
        (["<", "<", "/think>"], [1, 2, 1]),
    ],
    ids=[
        "a marker of many tokens",
        "cut within tokens",
        "behind it in one token",
        "no marker",
        "half of one",
    ],
)
def test_what_may_become_a_marker_counts_until_it_is_one(texts: list[str], expected: list[int]) -> None:
    assert counts(texts, meter(is_open=True)) == expected


def test_a_token_without_text_counts_with_the_character_that_it_is_a_part_of() -> None:
    assert counts(["", "", "é", "</think>", "", "è"], meter(is_open=True)) == [1, 2, 3, 3, 3, 3]
    assert counts(["", "\ufffd</think>", "a"], meter(is_open=True)) == [1, 1, 1]


def test_a_tool_call_ends_it() -> None:
    texts = ["a", "<tool_call>", "{}", "</tool_call>"]
    assert counts(texts, meter(is_open=True, with_tools=True)) == [1, 1, 1, 1]
    made = meter(opening="<tool_call>", with_tools=True)
    assert counts(["<think>", "a"], made) == [0, 0] and not made.is_open


def test_the_end_marker_has_tokens_where_the_model_marks_reasoning() -> None:
    tokenizer = tokenizer_of(THINKING)
    found = tokenizer.reply_reasoning(Conversation(ASKED), RenderedChat(()))
    assert found is not None
    assert tokenizer.decode_with_markers(found.end_token_ids) == "</think>"
    assert tokenizer.decode_with_markers(found.start_token_ids) == "<think>"
    assert tokenizer_of(ALTERNATING).reply_reasoning(Conversation(ASKED), RenderedChat(())) is None
