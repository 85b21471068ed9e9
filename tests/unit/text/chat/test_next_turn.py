"""How the prompt after a reply begins: as every next prompt does, whatever is said then.

CHAT_TEMPLATES may name a JSON file of real templates, name to text: those of `REAL` are tried too.
"""

from __future__ import annotations

import dataclasses

import pytest
from icehouse_server.domain.chat import ChatMessage, Conversation, ToolChoice, ToolMode
from icehouse_server.text.chat.next_turn import before_mark, new_beginning, opening_of, with_next_turn

from tests.fixtures.chat.families import CALL, CLOCK, WEATHER
from tests.fixtures.chat.histories import REAL_TEMPLATES_FILE, result, system, user
from tests.unit.text.test_kept_replies import KINDS, REAL, Kind, real_kind

ALL = KINDS | ({name: real_kind(name) for name in REAL} if REAL_TEMPLATES_FILE else {})
REASONED = ChatMessage("assistant", "The rain comes later today.", reasoning="Rain comes from the west.")
WORDS = " ".join(["and", "the", "rain"] * 40)


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, pair in enumerate(pairs) if pair[0] != pair[1]), min(len(one), len(other)))


def begun(kind: Kind, conversation: Conversation, reply: ChatMessage) -> tuple[int, ...]:
    """Return how the next prompt begins."""
    token_ids = kind.tokenizer.render_chat(with_next_turn(conversation, reply)).token_ids
    return token_ids[: before_mark(token_ids, kind.tokenizer.decode_with_markers)]


def test_a_conversation_begins_the_same_in_each_turn_and_otherwise_than_a_subagents() -> None:
    rules, long = system("Be kind. " * 10_000), "Look around. " * 10_000
    turns = (rules, user(long), REASONED, user("Two?"))
    openings = {opening_of(Conversation(turns[:count])) for count in (2, 3, 4)}
    others = ((rules, user("One?")), (rules, user(long + "!")), (rules, user("!" + long[1:])), (user(long),))
    assert len(openings) == 1
    assert len(openings | {opening_of(Conversation(each)) for each in others}) == 5


@pytest.mark.parametrize("kind", ALL.values(), ids=ALL.keys())
@pytest.mark.parametrize("following", ["Two?", "  Spaced.\n\nAnd more.", "<b>"])
def test_the_users_next_prompt_begins_so(kind: Kind, following: str) -> None:
    conversation = Conversation((system("Be kind."), user("One?")))
    start = begun(kind, conversation, REASONED)
    sent = dataclasses.replace(REASONED, reasoning="")
    messages = (*conversation.messages, sent, user(following))
    then = kind.tokenizer.render_chat(Conversation(messages)).token_ids
    assert start and common(start, then) >= len(start) - 1, "the last token may become one with what follows"
    alone = kind.tokenizer.render_chat(Conversation((*conversation.messages, sent, user("Two?")))).token_ids
    assert len(alone) - len(start) < 32, "hardly more is left than the message"


@pytest.mark.parametrize(
    "kind",
    [kind for kind in ALL.values() if kind.takes_calls],
    ids=[name for name, kind in ALL.items() if kind.takes_calls],
)
def test_the_prompt_with_a_calls_result_begins_so(kind: Kind) -> None:
    conversation = Conversation((system("Be kind."), user("Rain?")), tools=(WEATHER, CLOCK))
    reply = ChatMessage("assistant", "", reasoning="I look.", tool_calls=(CALL,))
    start = begun(kind, conversation, reply)
    sent = dataclasses.replace(reply, reasoning="")
    messages = (*conversation.messages, sent, result(CALL.id, "wet"))
    then = kind.tokenizer.render_chat(dataclasses.replace(conversation, messages=messages)).token_ids
    assert start and common(start, then) >= len(start) - 1
    assert len(then) - len(start) < 48


def test_a_reply_comes_back_as_its_caller_sends_earlier_ones() -> None:
    drawn = dataclasses.replace(REASONED, token_ids=(1, 2))
    without = Conversation((user("One?"), dataclasses.replace(REASONED, reasoning=""), user("Two?")))
    sent = with_next_turn(without, drawn).messages[-2]
    assert (sent.content, sent.reasoning, sent.token_ids) == (REASONED.content, "", ())
    whole = Conversation((user("One?"), drawn, user("Two?")))
    assert with_next_turn(whole, drawn).messages[-2] == drawn


def test_a_choice_that_forces_a_call_does_not_hold_for_the_next_turn() -> None:
    forced = Conversation((user("One?"),), (WEATHER,), ToolChoice(ToolMode.REQUIRED))
    assert with_next_turn(forced, REASONED).tool_choice == ToolChoice()
    none = dataclasses.replace(forced, tool_choice=ToolChoice(ToolMode.NONE))
    assert with_next_turn(none, REASONED).tool_choice == none.tool_choice


def test_only_what_the_template_rewrites_is_new_and_one_token_more() -> None:
    kind = KINDS["thoughts dropped"]
    conversation = Conversation((system("Be kind."), user("One?")))
    reply = dataclasses.replace(REASONED, content=WORDS)
    prompt = kind.tokenizer.render_chat(conversation).token_ids
    start, decode = begun(kind, conversation, reply), kind.tokenizer.decode_with_markers
    whole = kind.tokenizer.render_chat(with_next_turn(conversation, reply)).token_ids
    new = new_beginning(whole, known=prompt, decode=decode, token_limit=1000)
    assert new[:-1] == start and len(new) == len(start) + 1
    assert len(new_beginning(whole, known=prompt, decode=decode, token_limit=70)) == (
        common(start, prompt) + 70 + 1
    )
    assert new_beginning(whole, known=start[:-63], decode=decode, token_limit=1000) == (), "hardly more"
    assert new_beginning(prompt, known=prompt, decode=decode, token_limit=1000) == (), "no mark"


def test_the_mark_is_found_at_any_depth() -> None:
    kind = KINDS["nothing rewritten"]
    spell, decode = kind.tokenizer.spell, kind.tokenizer.decode_with_markers
    for behind in (0, 1, 31, 32, 33, 100):
        token_ids = (*spell("one two"), *spell("qznextturnqz"), *spell("and ") * behind)
        assert before_mark(token_ids, decode) == len(spell("one two"))
    assert before_mark(tuple(spell("one two")), decode) == 0
