"""Conversation as it is asked for: its turns, tools and images; and the pieces that its reply is made of."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from icehouse_server.domain.response_format import TaggedJson


@dataclasses.dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a model has made; `arguments_json` is the text of one JSON object."""

    id: str
    name: str
    arguments_json: str


class ImageDetail(enum.Enum):
    """How much of an image the model is shown."""

    AUTO = enum.auto()
    LOW = enum.auto()
    HIGH = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True)
class ImageSource:
    """An image as its caller sent it, or named it."""

    data: bytes = dataclasses.field(repr=False)
    """Empty until it was read from where `uri` says."""
    media_type: str
    """Empty when the caller does not say."""
    field: str
    """Where in the request it stands."""
    uri: str = dataclasses.field(default="", repr=False)
    """Where the image is; empty when the request has it."""
    detail: ImageDetail = ImageDetail.AUTO


@dataclasses.dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image between the characters of a turn's text."""

    position: int
    """Characters of the text before it; images of one position stand in order."""
    source: ImageSource


@dataclasses.dataclass(frozen=True, slots=True)
class ImageTexts:
    """What is written in a prompt for each of its images."""

    mark: str
    """What the model's template writes in the place of an image."""
    texts: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    content: str
    name: str | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    token_ids: tuple[int, ...] = ()
    """The tokens that were generated for this turn; empty when the caller does not say."""
    images: tuple[PlacedImage, ...] = ()
    """Ascending."""


def with_result_images_in_user_turns(messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
    """Return the turns with the images of tools' results moved to a user's turn behind the results.

    Families are trained on images of users, and most templates show none of a result. Where several results
    stand together, a line before its images says which one they are of. All images keep their order.
    """
    turns: list[ChatMessage] = []
    results: list[ChatMessage] = []
    for message in messages:
        if message.role != "tool":
            turns += [*_shown_by_user(results), message]
            results = []
        else:
            turns.append(dataclasses.replace(message, images=()))
            results.append(message)
    return (*turns, *_shown_by_user(results))


def _shown_by_user(results: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return a user's turn with the images of results that stand together; none where they have none."""
    text = ""
    images: list[PlacedImage] = []
    for number, result in enumerate(results, start=1):
        if result.images and len(results) > 1:
            text += f"{chr(10) if text else ''}Tool result {number}:"
        images += [PlacedImage(len(text), placed.source) for placed in result.images]
    return [ChatMessage("user", text, images=tuple(images))] if images else []


@dataclasses.dataclass(frozen=True, slots=True)
class Tool:
    """A function on offer; `parameters` is the JSON schema of its arguments."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    is_strict: bool = False
    """Whether the arguments of its calls are kept to the schema."""


class ToolMode(enum.Enum):
    """Whether the model calls tools."""

    AUTO = enum.auto()
    NONE = enum.auto()
    REQUIRED = enum.auto()
    NAMED = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether, and which tool, the model calls; `name` only with NAMED."""

    mode: ToolMode = ToolMode.AUTO
    name: str = ""
    allowed: frozenset[str] = frozenset()
    """Names of those that may be called; empty for all."""
    is_parallel: bool = True
    """Whether an output may have several calls."""

    @property
    def is_forced(self) -> bool:
        return self.mode in (ToolMode.REQUIRED, ToolMode.NAMED)


@dataclasses.dataclass(frozen=True, slots=True)
class Conversation:
    """What is rendered by a chat template."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    template_arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    adds_generation_prompt: bool = True
    continues_final_message: bool = False
    image_texts: ImageTexts | None = None
    """Set once its images were read."""

    @property
    def images(self) -> tuple[ImageSource, ...]:
        """All images, in the order in which they stand."""
        return tuple(placed.source for message in self.messages for placed in message.images)

    @property
    def reads_tool_calls(self) -> bool:
        """Whether calls in the reply are told as calls."""
        return bool(self.tools) and self.tool_choice.mode is not ToolMode.NONE

    @property
    def callable_tools(self) -> tuple[tuple[int, Tool], ...]:
        """The tools that the reply may call, each with its place among all."""
        choice = self.tool_choice
        names = {choice.name} if choice.mode is ToolMode.NAMED else choice.allowed
        return tuple((i, tool) for i, tool in enumerate(self.tools) if not names or tool.name in names)

    @property
    def constrains_calls(self) -> bool:
        """Whether what the reply calls has to be held to what was said of it."""
        choice = self.tool_choice
        is_bound = bool(choice.allowed) or not choice.is_parallel
        return self.reads_tool_calls and (is_bound or any(tool.is_strict for _, tool in self.callable_tools))


class PromptChangeKind(enum.Enum):
    """What a conversation may be relieved of before it is rendered."""

    BILLING_LINE_DROPPED = enum.auto()
    TOOL_KEYS_SORTED = enum.auto()
    TOOLS_SORTED = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True)
class PromptChange:
    """One change, and of how many lines or tools."""

    kind: PromptChangeKind
    count: int


@dataclasses.dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation's tokens, and how the reply has begun inside them."""

    token_ids: tuple[int, ...]
    opening: str = ""
    """Text at the prompt's end that is a part of the reply: the beginning of a tool call."""
    is_reasoning: bool = False
    """The prompt ends within the model's reasoning."""
    call_form: TaggedJson | None = None
    """What holds the reply's calls to what was said of the tools, where that is wanted."""


@dataclasses.dataclass(frozen=True, slots=True)
class TextPiece:
    """What the model says. The pieces of one output come in the order in which it was written."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """What the model thinks before it speaks."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallPiece:
    """A piece of tool call `index`. The first of a call has its id and name and no arguments."""

    index: int
    id: str = ""
    name: str = ""
    arguments_json: str = ""
    is_withdrawn: bool = False
    """The call turned out to be malformed: what came for this index is void."""
    is_repaired: bool = False
    """The call was not written as its notation wants it, and what it means was plain all the same."""


@dataclasses.dataclass(frozen=True, slots=True)
class MalformedPiece:
    """Text that began as a tool call and cannot be read as one; `problem` says why, in words."""

    text: str
    problem: str


Piece = TextPiece | ReasoningPiece | CallPiece | MalformedPiece


class ReasoningMeter(Protocol):
    """Counts the tokens of one output that the model thinks with."""

    @property
    def token_count(self) -> int: ...
    @property
    def is_open(self) -> bool:
        """Whether the next token is drawn within reasoning."""
        ...

    def push(self, text: str) -> None:
        """Take one more token with the text that became certain with it, which may be empty."""
        ...


class Reasoning(Protocol):
    """How an output marks its reasoning. Never changes; any number of outputs on any thread may use it."""

    def meter(self) -> ReasoningMeter:
        """Return a meter at the beginning of an output."""
        ...
