"""Conversation of the Python client: what each turn sends, what is kept in a file, files that are none."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from icehouse_client import AsyncClient, Conversation, Image, Message, StreamEvent, Tool, ToolCall
from icehouse_client.chat import chat_proto
from icehouse_client.message_dicts import messages_of
from icehouse_server.domain.events import Delta

from tests.fixtures.rpc.fake_engine import finished, started
from tests.unit.rpc.conftest import RunningServer

CALL = ToolCall("c1", "weather", '{"city": "Oslo"}')


async def test_an_answer_comes_back_with_its_tokens(served: RunningServer) -> None:
    served.engine.script = lambda request: [started(request), Delta("so", (7, 8)), finished(request)]
    talk = Conversation(system="Be brief.")
    async with AsyncClient(served.server.address) as client:
        talk.say("Hi")
        talk.add(await client.chat(talk, session_id=talk.session_id))
        talk.say("On")
        async with client.stream(talk, session_id=talk.session_id) as stream:
            events: list[StreamEvent] = [event async for event in stream.events()]
        talk.add(stream.reply)
    assert [event.WhichOneof("event") for event in events] == ["started", "delta", "finished"]
    [_, second] = served.tokenizer.conversations
    assert [(m.role, m.content, m.token_ids) for m in second.messages] == [
        ("system", "Be brief.", ()),
        ("user", "Hi", ()),
        ("assistant", "so", (7, 8)),
        ("user", "On", ()),
    ]
    assert [m.role for m in talk] == ["system", "user", "assistant", "user", "assistant"]
    assert {request.session_id for request in served.engine.submitted} == {talk.session_id}


async def test_its_tools_go_with_each_call_that_names_none(served: RunningServer) -> None:
    talk = Conversation([Message("user", "Hi")], tools=[Tool("weather")])
    async with AsyncClient(served.server.address) as client:
        await client.chat(talk)
        await client.tokenize(talk)
        await client.chat(talk, tools=[Tool("time")])
        await client.chat(talk, tools=())
    names = [[tool.name for tool in asked.tools] for asked in served.tokenizer.conversations]
    assert names == [["weather"], ["weather"], ["time"], []]


def test_it_is_what_it_was_when_read_again() -> None:
    talk = Conversation(system="Be brief.")
    talk.say("Rain? 🌧")
    talk.append(Message("assistant", "", reasoning="hm", tool_calls=(CALL,), token_ids=(1, 2)))
    talk.answer(CALL, "dry")
    again = Conversation.from_json(talk.to_json())
    assert again == talk and again.session_id == talk.session_id
    assert "🌧" in talk.to_json()


def test_images_stand_where_they_were_put_and_are_kept_in_the_file() -> None:
    talk = Conversation()
    images = [Image(b"GIF8"), Image(b"\x89PNG", "image/png", position=4)]
    talk.say("one two", images=images)
    text = talk.to_json()
    assert json.loads(text)["messages"] == [
        {
            "role": "user",
            "content": "",
            "parts": [
                {"image": {"data": "R0lGOA=="}},
                {"text": "one "},
                {"image": {"data": "iVBORw==", "media_type": "image/png"}},
                {"text": "two"},
            ],
        }
    ], "as protobuf's JSON has it, for clients of every language"
    assert Conversation.from_json(text) == talk
    talk[0] = dataclasses.replace(talk[0], images=tuple(reversed(images)))
    [message] = chat_proto(talk).messages
    shown = [part.text or (part.image.data, part.image.media_type) for part in message.parts]
    assert shown == [(b"GIF8", ""), "one ", (b"\x89PNG", "image/png"), "two"]
    assert not message.content, "one of the two is sent"
    image: Any
    for image in ({"data": 1}, {"media_type": "image/png"}, {"data": "", "size": 1}, "x"):
        facts = [{"role": "user", "parts": [{"image": image}]}]
        with pytest.raises(ValueError, match=r"messages\[0\].parts is not a list of texts and images"):
            Conversation.from_json(json.dumps(facts))


def test_a_tools_result_may_have_images() -> None:
    talk = Conversation()
    shown = Image(b"GIF8")
    talk.answer(CALL, "taken", images=[shown])
    assert talk == [Message("tool", "taken", name=CALL.name, tool_call_id=CALL.id, images=(shown,))]
    assert Conversation.from_json(talk.to_json()) == talk
    url = "data:image/jpg;base64,R0lGOA=="
    parts = [{"type": "image_url", "image_url": {"url": url}}]
    [sent] = messages_of([{"role": "tool", "tool_call_id": "c", "content": parts}])
    assert sent.role == "tool" and [image.uri for image in sent.images] == [url]


def test_turns_are_taken_back_and_the_system_prompt_is_exchanged() -> None:
    talk = Conversation()
    talk.undo()
    talk.say("one")
    talk.append(Message("assistant", "two"))
    talk.system = "Be kind."
    talk.say("three")
    talk.undo()
    assert [m.content for m in talk] == ["Be kind.", "one", "two"]
    talk.system = ""
    assert talk.system == "" and [m.role for m in talk] == ["user", "assistant"]


def test_a_plain_list_is_read_too() -> None:
    assert Conversation.from_json('[{"role": "user", "content": "Hi"}]') == [Message("user", "Hi")]


@pytest.mark.parametrize(
    ("facts", "problem"),
    [
        ({"messages": []}, "it is of kind None, version None"),
        ({"kind": "icehouse-conversation", "version": 2, "messages": []}, "version 2"),
        ({"kind": "icehouse-conversation", "version": 1}, "no list of messages"),
        ("Hi", "no list of messages"),
        (["Hi"], r"messages\[0\] is not an object"),
        ([{"role": "user", "contents": "Hi"}], r"messages\[0\] has 'contents', which is not known"),
        ([{"role": "user", "content": 7}], r"messages\[0\].content is not a string"),
        ([{"content": "Hi"}], r"messages\[0\] has no role"),
        ([{"role": "assistant", "token_ids": [1, "2"]}], r"messages\[0\].token_ids"),
        ([{"role": "assistant", "token_ids": 7}], r"messages\[0\].token_ids"),
        (
            [{"role": "assistant", "tool_calls": [{"id": "1"}]}],
            r"messages\[0\].tool_calls\[0\] is not a call",
        ),
    ],
)
def test_what_is_no_conversation_is_refused_with_its_place(facts: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Conversation.from_json(json.dumps(facts))
