"""Messages as dicts: each shape that a caller may have, on its way to a server, and what is none."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from typing import Any

import pytest
from icehouse_client import AsyncClient, Conversation, Image, Message, ToolCall
from icehouse_client.message_dicts import messages_of

from tests.unit.rpc.conftest import RunningServer

DOT = b"\x89PNG"
URI = "data:image/png;base64," + base64.b64encode(DOT).decode()
CALL = ToolCall("c1", "weather", '{"city": "Oslo"}')
ANSWER = Message("assistant", "", reasoning="hm", tool_calls=(CALL,))


async def test_a_chat_of_dicts_is_that_of_messages(served: RunningServer) -> None:
    given: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi", "name": "ann"},
    ]
    async with AsyncClient(served.server.address) as client:
        await client.chat(given)
        await client.generate(given)
        await client.chat([Message("system", "Be brief."), given[1]])
        await client.chat(Conversation(given[1:], system="Be brief."))
        await client.tokenize(given)
    first, *others = served.tokenizer.conversations
    assert [(m.role, m.content, m.name) for m in first.messages] == [
        ("system", "Be brief.", None),
        ("user", "Hi", "ann"),
    ]
    assert len(others) == 4 and all(other == first for other in others)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "ab"),
        (
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "one"},
                    {"type": "image_url", "image_url": {"url": URI, "detail": "low"}},
                    {"type": "image_url", "image_url": URI},
                ],
            },
            Message(
                "user",
                "one",
                images=(Image(position=3, detail="low", uri=URI), Image(position=3, uri=URI)),
            ),
        ),
        (
            {
                "role": "assistant",
                "content": None,
                "refusal": None,
                "annotations": [],
                "reasoning_content": "hm",
                "tool_calls": [
                    {
                        "id": "c1",
                        "type": "function",
                        "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
                    }
                ],
            },
            ANSWER,
        ),
        (
            {
                "role": "assistant",
                "reasoning": "hm",
                "tool_calls": [{"id": "c1", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}],
            },
            ANSWER,
        ),
        (
            {
                "role": "assistant",
                "reasoning": "hm",
                "tool_calls": [{"id": "c1", "name": "weather", "arguments_json": '{"city": "Oslo"}'}],
            },
            ANSWER,
        ),
        (
            {"role": "tool", "tool_call_id": "c1", "content": "dry"},
            Message("tool", "dry", tool_call_id="c1"),
        ),
    ],
    ids=["texts", "pictures", "answer of an API", "call with an object", "kept call", "result"],
)
def test_each_shape_is_read(given: Mapping[str, Any], message: Message | str) -> None:
    wanted = Message("user", message) if isinstance(message, str) else message
    assert messages_of([given]) == [wanted]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"role": "user", "text": "Hi"}, "messages[0] has 'text', which is not known"),
        ({"content": "Hi"}, "messages[0] has no role"),
        ({"role": "user", "content": 7}, "messages[0].content is not a string"),
        (
            {"role": "user", "content": [{"type": "input_audio"}]},
            "messages[0].content[0] is neither a text",
        ),
        ({"role": "user", "content": ["Hi"]}, "messages[0].content[0] is neither a text"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"detail": "low"}}]},
            "messages[0].content[0].image_url has no url",
        ),
        ({"role": "assistant", "tool_calls": {"id": "1"}}, "messages[0].tool_calls is not a list"),
        ({"role": "assistant", "tool_calls": ["f"]}, "messages[0].tool_calls[0] is not a call"),
        ({"role": "assistant", "tool_calls": [{"function": "f"}]}, "messages[0].tool_calls[0] is not a call"),
        ({"role": "assistant", "token_ids": "12"}, "messages[0].token_ids is not a list of numbers"),
    ],
)
def test_what_is_no_message_is_refused_with_its_place(given: Mapping[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        messages_of([given])


def test_where_a_picture_is_and_how_much_of_it_is_shown_is_kept_in_the_file() -> None:
    talk = Conversation()
    talk.say("one", images=[Image(DOT, detail="low"), Image(DOT, detail="high"), Image(uri=URI)])
    assert Conversation.from_json(talk.to_json()) == talk
