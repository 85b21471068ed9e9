"""Conversation: the turns so far, each answer with its tokens, reasoning and tool calls.

So each turn starts from the cached blocks of the one before. It is a list of messages, which every method
that takes a prompt takes:

    talk = Conversation(system="Be brief.")
    talk.say("What is ice?")
    talk.add(client.chat(talk, session_id=talk.session_id))
"""

from __future__ import annotations

import dataclasses
import json
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

from google.protobuf import json_format

from icehouse_client.chat import Image, Message, ToolCall, content_parts, tool_result
from icehouse_client.message_dicts import Turn, message_of, messages_of
from icehouse_client.tool_dicts import GivenTool, tools_of

if TYPE_CHECKING:
    from icehouse_client.results import Completion

_KIND = "icehouse-conversation"
_VERSION = 1


class Conversation(list[Message]):
    """Messages, oldest first. `session_id` names it to gateways, logs and traces; one is made for it."""

    def __init__(
        self,
        messages: Sequence[Turn] = (),
        *,
        system: str = "",
        tools: Sequence[GivenTool] = (),
        session_id: str | None = None,
    ) -> None:
        super().__init__(messages_of(messages))
        self.tools: Sequence[GivenTool] = tuple(tools_of(tools))
        """What the model may ask for, in each call that names no `tools` of its own. They stand before the
        turns: with others nothing is reused. `to_json` does not keep them."""
        self.session_id = uuid.uuid4().hex if session_id is None else session_id
        if system:
            self.system = system

    @property
    def system(self) -> str:
        """The system prompt, empty for none. Another one means that nothing behind it is reused."""
        return self[0].content if self and self[0].role == "system" else ""

    @system.setter
    def system(self, text: str) -> None:
        if self and self[0].role == "system":
            del self[0]
        if text:
            self.insert(0, Message("system", text))

    def say(self, text: str, *, images: Sequence[Image] = ()) -> None:
        """Add the user's turn."""
        self.append(Message("user", text, images=tuple(images)))

    def add(self, reply: Completion) -> None:
        """Add the assistant's turn, an answer as it came."""
        self.append(reply.message())

    def answer(self, call: ToolCall, content: str, *, images: Sequence[Image] = ()) -> None:
        """Add the result of a call that the assistant asked for."""
        self.append(tool_result(call, content, images=images))

    def undo(self) -> None:
        """Take back the last turn of the user and all that came after it; nothing where there is none."""
        turns = [index for index, message in enumerate(self) if message.role == "user"]
        if turns:
            del self[turns[-1] :]

    def to_json(self) -> str:
        """Return it as text, to be kept; `from_json` reads it."""
        messages = [_message_facts(message) for message in self]
        facts = {"kind": _KIND, "version": _VERSION, "session_id": self.session_id, "messages": messages}
        return json.dumps(facts, ensure_ascii=False, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return what `to_json` wrote, or a list of messages as OpenAI's API has them; raises ValueError."""
        try:
            facts = json.loads(text)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        session_id = None
        if isinstance(facts, dict):
            if facts.get("kind") != _KIND or facts.get("version") != _VERSION:
                kind, version = facts.get("kind"), facts.get("version")
                raise ValueError(f"it is of kind {kind!r}, version {version!r}")
            session_id = str(facts.get("session_id") or "") or None
            facts = facts.get("messages")
        if not isinstance(facts, list):
            raise ValueError("there is no list of messages")
        messages = [message_of(item, f"messages[{index}]") for index, item in enumerate(facts)]
        return cls(messages, session_id=session_id)


def _message_facts(message: Message) -> dict[str, Any]:
    """Return the fields that say something."""
    facts: dict[str, Any] = {"role": message.role, "content": message.content}
    facts |= {name: value for name, value in dataclasses.asdict(message).items() if value}
    if facts.pop("images", None):
        parts = content_parts(message)
        told = [json_format.MessageToDict(part, preserving_proto_field_name=True) for part in parts]
        facts |= {"content": "", "parts": told}
    return facts
