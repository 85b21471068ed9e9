"""What is volatile in agents' prompts goes, the rest stays word for word, and it is said."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from icehouse_server.domain.chat import (
    ChatMessage,
    Conversation,
    PromptChange,
    PromptChangeKind,
    Tool,
    ToolCall,
)
from icehouse_server.text.prompt_normalizer import normalized

from tests.fixtures.chat.agent_loop import FAMILIES
from tests.fixtures.chat.families import tokenizer_of
from tests.fixtures.chat.histories import TEMPLATES
from tests.fixtures.models.chat_templates import Family

HEADER = "x-anthropic-billing-header: cc_version=2.1.36.fd9; cc_entrypoint=cli; cch=a1b2c;"
RULES = "You are an agent.\nBe brief; a=b; x=1."
DROPPED = (PromptChange(PromptChangeKind.BILLING_LINE_DROPPED, 1),)


def asked(system: str, *, role: str = "system", tools: tuple[Tool, ...] = ()) -> Conversation:
    return Conversation((ChatMessage(role, system), ChatMessage("user", "Hi")), tools=tools)


def tool(name: str, **parameters: object) -> Tool:
    return Tool(name, "", parameters)


@pytest.mark.parametrize("role", ["system", "developer"])
@pytest.mark.parametrize(
    ("system", "left"),
    [
        (f"{HEADER}\n{RULES}", RULES),
        # Parts are joined without a separator.
        (f"{HEADER}{RULES}", RULES),
        (f"{RULES}\n{HEADER}\n", f"{RULES}\n"),
        (f"{RULES}\n{HEADER}", f"{RULES}\n"),
        (f"cch=1f2e\n{RULES}", RULES),
        (f"cc_version=1; cch=1f2e \n{RULES}", RULES),
    ],
)
def test_a_billing_line_of_the_first_system_message_is_dropped(role: str, system: str, left: str) -> None:
    conversation, changes = normalized(asked(system, role=role))
    assert [message.content for message in conversation.messages] == [left, "Hi"]
    assert changes == DROPPED


def test_a_message_that_was_nothing_else_goes_with_it_unless_it_is_the_only_one() -> None:
    conversation, changes = normalized(asked(f"{HEADER}\n"))
    assert [message.role for message in conversation.messages] == ["user"] and changes == DROPPED
    alone = Conversation((ChatMessage("system", HEADER),))
    assert normalized(alone) == (alone, ())


@pytest.mark.parametrize(
    "system",
    [
        RULES,
        "cch=5 means five.",
        "The header has cch=a1b2c; in it.",
        "mode=fast; speed=high;",
        "See https://example.com/?cch=1",
        "a: b=c; Then some words; cch=1;",
    ],
)
def test_other_lines_stay(system: str) -> None:
    conversation = asked(system)
    assert normalized(conversation) == (conversation, ())


def test_later_system_messages_and_other_turns_stay() -> None:
    conversation = Conversation(
        (ChatMessage("user", HEADER), ChatMessage("system", RULES), ChatMessage("system", HEADER))
    )
    assert normalized(conversation) == (conversation, ())


def test_tools_come_in_one_order_with_their_keys() -> None:
    first = asked(RULES, tools=(tool("b", type="object", properties={"y": {}, "x": {}}), tool("a", a=[3, 1])))
    second = asked(
        RULES, tools=(tool("a", a=[3, 1]), tool("b", properties={"x": {}, "y": {}}, type="object"))
    )
    one, changes = normalized(first)
    other, _ = normalized(second)
    assert json.dumps([t.parameters for t in one.tools]) == json.dumps([t.parameters for t in other.tools])
    assert [t.name for t in one.tools] == ["a", "b"] and one.tools[0].parameters == {"a": [3, 1]}
    assert list(one.tools[1].parameters["properties"]) == ["x", "y"]
    assert changes == (
        PromptChange(PromptChangeKind.TOOL_KEYS_SORTED, 1),
        PromptChange(PromptChangeKind.TOOLS_SORTED, 2),
    )
    assert normalized(one) == (one, ())


def test_tools_that_were_found_later_stay_behind_the_others() -> None:
    late = [dataclasses.replace(tool(name), is_found_later=True) for name in ("c", "a")]
    one, _ = normalized(asked(RULES, tools=(tool("d"), tool("b"))))
    two, _ = normalized(asked(RULES, tools=(late[0], tool("d"), tool("b"), late[1])))
    assert [t.name for t in two.tools] == ["b", "d", "c", "a"] and two.tools[:2] == one.tools


def test_calls_of_earlier_turns_stay_as_they_were_drawn() -> None:
    call = ToolCall("1", "b", '{"y": 1, "x": 2}')
    turns = (ChatMessage("user", "Hi"), ChatMessage("assistant", "", tool_calls=(call,), token_ids=(1, 2)))
    conversation = Conversation(turns, tools=(tool("b"), tool("a")))
    assert normalized(conversation)[0].messages == turns


def test_a_schema_as_deep_as_the_reader_takes_is_put_in_order() -> None:
    depth = 400
    text = '{"b":1,"a":' * depth + "{}" + "}" * depth
    conversation, changes = normalized(asked(RULES, tools=(tool("t", **json.loads(text)),)))
    assert [change.kind for change in changes] == [PromptChangeKind.TOOL_KEYS_SORTED]
    assert json.dumps(conversation.tools[0].parameters).startswith('{"a": {"a": ')


@given(st.text(alphabet="ab=;: \ncch", max_size=60))
def test_every_other_line_is_kept(system: str) -> None:
    conversation = asked(system)
    changed, changes = normalized(conversation)
    kept = changed.messages[0].content if len(changed.messages) == 2 else ""
    assert bool(changes) == (changed != conversation)
    lines = [line for line in system.split("\n") if "cch=" not in line and line.strip()]
    assert [line for line in kept.split("\n") if line in lines] == lines


def test_a_long_message_takes_time_in_proportion_to_it() -> None:
    # As hard as it gets for a pattern of pairs: nothing but pairs, and never an end.
    conversation = asked("a=b=c.d;" * 20_000 + " ")
    assert normalized(conversation)[1] == ()


_MARKER = re.compile(r"<\|[^|<>{}]+\|>|\[/?[A-Z_]+\]")


def marked_tokenizer(name: str) -> Any:
    """Return a template's tokenizer, which has its markers as tokens."""
    markers = {"[system]", "[user]", *_MARKER.findall(TEMPLATES[name])}
    return tokenizer_of(Family(TEMPLATES[name], tuple((marker, True) for marker in sorted(markers))))


def rendered(tokenizer: Any, system: str, *more: ChatMessage) -> tuple[int, ...]:
    messages = (ChatMessage("system", system), ChatMessage("user", "Hi"), *more)
    return tuple(tokenizer.render_chat(Conversation(messages)).token_ids)


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_tokens_that_a_gateway_rendered_are_those_of_the_conversation_without_the_line(name: str) -> None:
    tokenizer = marked_tokenizer(name)
    wanted = rendered(tokenizer, RULES)
    for checksum in ("a1b2c", "0", "ffffffffff"):
        for end in ("", "\n"):
            system = HEADER.replace("a1b2c", checksum) + end + RULES
            assert tokenizer.normalized(rendered(tokenizer, system)) == (wanted, DROPPED)


@pytest.mark.parametrize("name", ["glm", "kimi", "deepseek-v3.1", "harmony"])
def test_the_line_is_found_behind_a_turn_of_tools(name: str) -> None:
    family = FAMILIES[name]
    tokenizer = tokenizer_of(Family(family.template, family.tokens))
    later = (ChatMessage("assistant", "Yes."), ChatMessage("user", f"What is this, can you say?\n{HEADER}\n"))

    def prompt(system: str) -> tuple[int, ...]:
        turns = (ChatMessage("system", system), ChatMessage("user", "Hi"), *later)
        offered = (tool("read", path={"type": "string"}), tool("write"))
        return tuple(tokenizer.render_chat(Conversation(turns, tools=offered)).token_ids)

    assert tokenizer.normalized(prompt(f"{HEADER}\n{RULES}")) == (prompt(RULES), DROPPED)
    assert tokenizer.normalized(prompt(RULES)) == (prompt(RULES), ()), "a user may write what he likes"


@pytest.mark.parametrize("name", ["glm", "kimi", "deepseek-v3.1", "harmony"])
def test_a_reply_keeps_the_line_where_a_user_speaks_first(name: str) -> None:
    family = FAMILIES[name]
    tokenizer = tokenizer_of(Family(family.template, family.tokens))
    asked = ChatMessage("user", "Write down the header of the last request, please.")
    turns = (asked, ChatMessage("assistant", f"{HEADER}\n{RULES}"), asked)
    tokens = tuple(tokenizer.render_chat(Conversation(turns)).token_ids)
    assert tokenizer.normalized(tokens) == (tokens, ())


def test_a_prompt_full_of_marks_is_looked_at_for_a_while_only() -> None:
    tokenizer = marked_tokenizer("chatml")
    [mark] = tokenizer.spell("<|im_start|>")
    tokens = (*[mark] * 5000, *tokenizer.spell(f"{HEADER}\n{RULES}"))
    assert tokenizer.normalized(tokens) == (tokens, ())


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_tokens_without_such_a_line_stay_as_they_are(name: str) -> None:
    tokenizer = marked_tokenizer(name)
    later = (ChatMessage("assistant", "Yes."), ChatMessage("user", f"What is this?\n{HEADER}\n"))
    for system in (RULES, "x-header: a=b; x=cch;" + RULES):
        tokens = rendered(tokenizer, system, *later)
        # Where a template has no markers, one turn cannot be distinguished from the next.
        if len({*tokens} & tokenizer._wrapper.added_tokens_decoder.keys()) > 2:
            assert tokenizer.normalized(tokens) == (tokens, ())


def test_a_prompt_that_is_nothing_but_the_line_stays() -> None:
    tokenizer = marked_tokenizer("strict_alternation")
    tokens = tuple(tokenizer.encode(HEADER))
    assert tokenizer.normalized(tokens) == (tokens, ())
    assert tokenizer.normalized(()) == ((), ())
