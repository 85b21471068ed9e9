"""Conversations and tools: what is sent of them and what comes back."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from icehouse.v1 import prompt_pb2, tool_pb2

from icehouse_client.options import chosen


@dataclasses.dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a model has made. `arguments_json` is the text of a JSON object."""

    id: str
    name: str
    arguments_json: str
    repaired: bool = False
    """The model wrote it otherwise than its notation wants, in a way that can mean one thing only."""

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments. They fit the tool's schema where a server of this version gave them."""
        parsed = json.loads(self.arguments_json)
        assert isinstance(parsed, dict), "the server lets only objects through"
        return parsed


ImageDetail = Literal["auto", "low", "high"]

_DETAILS = {
    "auto": prompt_pb2.IMAGE_DETAIL_UNSPECIFIED,
    "low": prompt_pb2.IMAGE_DETAIL_LOW,
    "high": prompt_pb2.IMAGE_DETAIL_HIGH,
}
PromptForm = Literal["default", "exact", "stable"]
_FORMS = {
    "default": prompt_pb2.PROMPT_FORM_UNSPECIFIED,
    "exact": prompt_pb2.PROMPT_FORM_EXACT,
    "stable": prompt_pb2.PROMPT_FORM_STABLE,
}
_DETAIL_NAMES: dict[int, ImageDetail] = {
    prompt_pb2.IMAGE_DETAIL_LOW: "low",
    prompt_pb2.IMAGE_DETAIL_HIGH: "high",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Image:
    """A picture in a user's turn, as it is in its file: PNG, JPEG, WebP or GIF."""

    data: bytes = b""
    media_type: str = ""
    """What you call it, such as "image/png"; its bytes decide."""
    position: int = 0
    """Characters of the turn's `content` before it."""
    detail: ImageDetail = "auto"
    """How much of it the model is shown: "low" takes fewer tokens, with the models that can."""
    uri: str = ""
    """In place of `data`: a data URI, or what the server's settings let it read, a file: or https: URL."""


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation. `role` is "system", "developer", "user", "assistant" or "tool", or the name
    of a role that only the model's chat template knows.

    An answer becomes one by `Reply.message()`; its `token_ids` let the server go on from its cached blocks.
    """

    role: str
    content: str
    name: str | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    token_ids: tuple[int, ...] = ()
    images: tuple[Image, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Infill:
    """A prompt with a gap, which the output fills: for models of code that were trained to."""

    prefix: str
    suffix: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may ask to be called. `parameters` is the JSON schema of its arguments, which
    those of a `strict` tool always fit. One that was `found_later`, during the conversation, stays behind the
    others in a stable prompt."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    strict: bool = False
    found_later: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class MalformedToolCall:
    """Text that began as a call and cannot be read as one. It is a part of the output's text too."""

    text: str
    problem: str


_MODES = {
    "auto": tool_pb2.TOOL_CHOICE_MODE_AUTO,
    "none": tool_pb2.TOOL_CHOICE_MODE_NONE,
    "required": tool_pb2.TOOL_CHOICE_MODE_REQUIRED,
}


_ROLES = {
    "system": prompt_pb2.ROLE_SYSTEM,
    "developer": prompt_pb2.ROLE_DEVELOPER,
    "user": prompt_pb2.ROLE_USER,
    "assistant": prompt_pb2.ROLE_ASSISTANT,
    "tool": prompt_pb2.ROLE_TOOL,
}
_ROLE_NAMES = {value: name for name, value in _ROLES.items()}


def role_of(message: prompt_pb2.ChatMessage) -> str:
    """Return who speaks in a message, as `Message.role` has it."""
    return _ROLE_NAMES.get(message.role, message.role_name)


def tool_result(call: ToolCall, content: str, *, images: Sequence[Image] = ()) -> Message:
    """Return the message that answers a call; the model sees its images in a user's turn behind it."""
    return Message("tool", content, name=call.name, tool_call_id=call.id, images=tuple(images))


def chat_proto(
    messages: Sequence[object],
    *,
    template_arguments: Mapping[str, Any] | None = None,
    continue_final_message: bool = False,
    prompt_form: PromptForm = "default",
) -> prompt_pb2.ChatPrompt:
    """Return the conversation as a message; raises TypeError for what is no Message."""
    form = chosen("prompt_form", prompt_form, _FORMS)
    chat = prompt_pb2.ChatPrompt(continue_final_message=continue_final_message, form=form)
    if template_arguments:
        chat.template_arguments.update(template_arguments)
    for message in messages:
        if not isinstance(message, Message):
            raise TypeError(f"a conversation holds Message, not {type(message).__name__}")
        for image in message.images:
            if not isinstance(image, Image):
                raise TypeError(f"a message's images hold Image, not {type(image).__name__}")
        chat.messages.add(
            role=_ROLES.get(message.role, prompt_pb2.ROLE_UNSPECIFIED),
            role_name="" if message.role in _ROLES else message.role,
            content="" if message.images else message.content,
            parts=content_parts(message) if message.images else (),
            name=message.name or "",
            reasoning=message.reasoning,
            tool_calls=[
                tool_pb2.ToolCall(id=call.id, name=call.name, arguments_json=call.arguments_json)
                for call in message.tool_calls
            ],
            tool_call_id=message.tool_call_id,
            token_ids=message.token_ids,
        )
    return chat


def content_parts(message: Message) -> list[prompt_pb2.ContentPart]:
    """Return the content with its images where they belong."""
    parts: list[prompt_pb2.ContentPart] = []
    end = 0
    for image in sorted(message.images, key=lambda image: image.position):
        if text := message.content[end : image.position]:
            parts.append(prompt_pb2.ContentPart(text=text))
        end = max(end, image.position)
        detail = chosen("detail", image.detail, _DETAILS)
        shown = prompt_pb2.ImagePart(media_type=image.media_type, detail=detail)
        if image.uri:
            shown.uri = image.uri
        else:
            shown.data = image.data
        parts.append(prompt_pb2.ContentPart(image=shown))
    if text := message.content[end:]:
        parts.append(prompt_pb2.ContentPart(text=text))
    return parts


def content_of(parts: Sequence[prompt_pb2.ContentPart]) -> tuple[str, tuple[Image, ...]]:
    """Return the content and the images whose parts these are; raises ValueError for one that is nowhere."""
    content = ""
    images: list[Image] = []
    for part in parts:
        if part.HasField("image"):
            if part.image.WhichOneof("source") is None:
                raise ValueError("an image has neither data nor uri")
            image, detail = part.image, _DETAIL_NAMES.get(part.image.detail, "auto")
            images.append(Image(image.data, image.media_type, len(content), detail, image.uri))
        else:
            content += part.text
    return content, tuple(images)


def tool_protos(tools: Sequence[Tool]) -> list[tool_pb2.Tool]:
    """Return the tools as messages; raises TypeError for what is no Tool."""
    for tool in tools:
        if not isinstance(tool, Tool):
            raise TypeError(f"tools hold Tool, not {type(tool).__name__}")
    return [
        tool_pb2.Tool(
            name=tool.name,
            description=tool.description,
            parameters_json="" if tool.parameters is None else json.dumps(tool.parameters),
            strict=tool.strict,
            found_later=tool.found_later,
        )
        for tool in tools
    ]


def mode_choice(choice: object) -> tool_pb2.ToolChoice:
    """Return the choice that a word is as a message; raises ValueError for another word."""
    return tool_pb2.ToolChoice(mode=chosen("tool_choice", choice, _MODES))


class CallSum:
    """Adds the pieces of an output's calls up."""

    def __init__(self) -> None:
        self._calls: dict[int, ToolCall] = {}

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The calls that were not withdrawn, in order."""
        return tuple(self._calls.values())

    def add(self, piece: tool_pb2.ToolCallDelta) -> None:
        """Add a piece."""
        if piece.withdrawn:
            self._calls.pop(piece.index, None)
            return
        call = self._calls.get(piece.index, ToolCall(piece.id, piece.name, ""))
        whole = call.arguments_json + piece.arguments_json
        repaired = call.repaired or piece.repaired
        self._calls[piece.index] = dataclasses.replace(call, arguments_json=whole, repaired=repaired)
