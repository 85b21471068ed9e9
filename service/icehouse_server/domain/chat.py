"""Conversation of a request: its turns, tools and images; and the pieces of its reply."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from icehouse_server.domain.ids import ImageDigest
from icehouse_server.domain.response_format import TaggedJson


@dataclasses.dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a model has made; `arguments_json` is the text of one JSON object."""

    id: str
    name: str
    arguments_json: str


class ImageDetail(enum.Enum):
    """How much detail of an image the model gets."""

    AUTO = enum.auto()
    LOW = enum.auto()
    HIGH = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True)
class ImageSource:
    """An image that a caller sent or named."""

    data: bytes = dataclasses.field(repr=False)
    """Empty until it has been read from `uri`."""
    media_type: str
    """Empty if the caller does not say."""
    field: str
    """Its field in the request."""
    uri: str = dataclasses.field(default="", repr=False)
    """Where the image is; empty if the request contains it."""
    detail: ImageDetail = ImageDetail.AUTO


@dataclasses.dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image between the characters of a turn's text."""

    position: int
    """How many characters of the text come before it; images at the same position are in order."""
    source: ImageSource


@dataclasses.dataclass(frozen=True, slots=True)
class ImageTexts:
    """The text that represents each image in a prompt."""

    mark: str
    """What the chat template writes for an image."""
    texts: tuple[str, ...]
    digests: tuple[ImageDigest, ...]
    """What the model sees of each image."""

    def behind(self, count: int) -> ImageTexts:
        return ImageTexts(self.mark, self.texts[count:], self.digests[count:])


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
    """The tokens that were generated for this turn; empty if the caller does not say."""
    images: tuple[PlacedImage, ...] = ()
    """By ascending position."""
    sent_index: int | None = dataclasses.field(default=None, compare=False)
    """Its place among the messages of its request, for refusals; None if it was not sent."""


def with_result_images_in_user_turns(messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
    """Return the turns with the images of tool results moved to a user's turn after the results.

    Most templates show no images of results, since models are trained on users' images. If several results
    follow each other, a line before the images names the result that they belong to. Images keep their order.
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
    """Return a user's turn with the images of consecutive results; none if they have no images."""
    text = ""
    images: list[PlacedImage] = []
    for number, result in enumerate(results, start=1):
        if result.images and len(results) > 1:
            text += f"{chr(10) if text else ''}Tool result {number}:"
        images += [PlacedImage(len(text), placed.source) for placed in result.images]
    if not images:
        return []
    return [ChatMessage("user", text, images=tuple(images), sent_index=results[-1].sent_index)]


@dataclasses.dataclass(frozen=True, slots=True)
class Tool:
    """A function on offer; `parameters` is the JSON schema of its arguments."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    is_strict: bool = False
    """Whether the arguments of its calls are constrained to the schema."""
    is_found_later: bool = False
    """Whether the model found it during the conversation."""
    sent_index: int | None = dataclasses.field(default=None, compare=False)
    """Its place among the tools of its request, for refusals; None where it was not sent."""


class ToolMode(enum.Enum):
    """Whether the model calls tools."""

    AUTO = enum.auto()
    NONE = enum.auto()
    REQUIRED = enum.auto()
    NAMED = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model calls a tool, and which; `name` only with NAMED."""

    mode: ToolMode = ToolMode.AUTO
    name: str = ""
    allowed: frozenset[str] = frozenset()
    """Names of the tools that may be called; empty for all."""
    is_parallel: bool = True
    """Whether an output may contain several calls."""

    @property
    def is_forced(self) -> bool:
        return self.mode in (ToolMode.REQUIRED, ToolMode.NAMED)


@dataclasses.dataclass(frozen=True, slots=True)
class Conversation:
    """What a chat template renders."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    template_arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    adds_generation_prompt: bool = True
    continues_final_message: bool = False
    answers_in_json: bool = False
    """Whether the answer is held to JSON, so that calls must be told apart from it."""
    image_texts: ImageTexts | None = None
    """Set once its images have been read."""

    @property
    def images(self) -> tuple[ImageSource, ...]:
        return tuple(placed.source for message in self.messages for placed in message.images)

    @property
    def reads_tool_calls(self) -> bool:
        """Whether the reply is searched for tool calls."""
        return bool(self.tools) and self.tool_choice.mode is not ToolMode.NONE

    @property
    def callable_tools(self) -> tuple[tuple[int, Tool], ...]:
        """The tools that the reply may call, each with its index among those of the request."""
        choice = self.tool_choice
        names = {choice.name} if choice.mode is ToolMode.NAMED else choice.allowed
        return tuple(
            (index if tool.sent_index is None else tool.sent_index, tool)
            for index, tool in enumerate(self.tools)
            if not names or tool.name in names
        )

    @property
    def holds_calls(self) -> bool:
        """Whether the reply's calls are constrained as far as the model's notation allows."""
        is_held = self.constrains_calls or self.tool_choice.is_forced or self.answers_in_json
        return self.reads_tool_calls and is_held

    @property
    def constrains_calls(self) -> bool:
        """Whether tool choice or strict tools demand that the reply's calls are constrained."""
        choice = self.tool_choice
        is_bound = bool(choice.allowed) or not choice.is_parallel
        return self.reads_tool_calls and (is_bound or any(tool.is_strict for _, tool in self.callable_tools))


class PromptChangeKind(enum.Enum):
    """How a conversation may be changed to make its prompt stable."""

    BILLING_LINE_DROPPED = enum.auto()
    TOOL_KEYS_SORTED = enum.auto()
    TOOLS_SORTED = enum.auto()
    HISTORY_KEPT = enum.auto()
    """Earlier turns keep their generated tokens instead of what the template makes of them."""


@dataclasses.dataclass(frozen=True, slots=True)
class PromptChange:
    """One kind of change, and how many lines or tools it changed or tokens it kept."""

    kind: PromptChangeKind
    count: int


@dataclasses.dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation's tokens, and the start of the reply if they contain it."""

    token_ids: tuple[int, ...]
    opening: str = ""
    """Text at the prompt's end that belongs to the reply: the beginning of a tool call."""
    is_reasoning: bool = False
    """Whether the prompt ends within the model's reasoning."""
    call_form: TaggedJson | None = None
    """The format that constrains the reply's calls, if they are constrained."""
    kept_token_count: int = 0
    """Tokens at the beginning that are taken from an earlier prompt and its reply."""
    border_token_indices: tuple[int, ...] = ()
    """Where the system message ends and the last message begins, ascending, as far as known: other prompts
    may diverge from this one there."""


@dataclasses.dataclass(frozen=True, slots=True)
class TextPiece:
    """Text of the answer. Pieces come in the order in which the output was written."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """Text of the model's reasoning."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallPiece:
    """A piece of tool call `index`. A call's first piece has its id and name but no arguments."""

    index: int
    id: str = ""
    name: str = ""
    arguments_json: str = ""
    is_withdrawn: bool = False
    """Whether the call turned out to be malformed: the earlier pieces of this index are void."""
    is_repaired: bool = False
    """Whether the call did not follow its notation but its meaning was clear."""


@dataclasses.dataclass(frozen=True, slots=True)
class MalformedPiece:
    """Text that began as a tool call but cannot be parsed as one; `problem` says why."""

    text: str
    problem: str


Piece = TextPiece | ReasoningPiece | CallPiece | MalformedPiece


class ReasoningMeter(Protocol):
    """Counts the reasoning tokens of one output."""

    @property
    def token_count(self) -> int: ...
    @property
    def is_open(self) -> bool:
        """Whether the next token belongs to reasoning."""

    def push(self, text: str) -> None:
        """Add a token and the text that it completes, which may be empty."""


class Reasoning(Protocol):
    """How an output marks its reasoning. Immutable; shared by outputs on all threads."""

    def meter(self) -> ReasoningMeter:
        """Return a meter at the beginning of an output."""
