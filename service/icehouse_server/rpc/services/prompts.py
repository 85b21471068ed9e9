"""Prompts to token ids, off the event loop.

The pure half says what a prompt is and refuses what can be refused unseen; `PromptReader` runs the
tokenizer in a small executor, because a long prompt takes longer than a decode step.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

from icehouse.v1 import prompt_pb2, tool_pb2

from icehouse_server.domain.chat import Conversation
from icehouse_server.domain.model import ModelInfo
from icehouse_server.domain.request import GenerationRequest
from icehouse_server.domain.response_format import ResponseFormat
from icehouse_server.errors import InvalidRequest, Reason
from icehouse_server.rpc.engine_client.ports import ServedModel, TokenizerPort
from icehouse_server.rpc.messages.chat import check_no_tools, conversation_of
from icehouse_server.rpc.messages.validation import check_token_ids
from icehouse_server.rpc.services.prepared import RenderedConversation

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True, slots=True)
class Text:
    """Plain text."""

    text: str
    field: str = "text"


@dataclasses.dataclass(frozen=True, slots=True)
class Chat:
    """A conversation."""

    conversation: Conversation
    field: str = "chat"


@dataclasses.dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids, inside the vocabulary."""

    token_ids: tuple[int, ...]
    field: str = "tokens"


Prompt = Text | Chat | Tokens


@dataclasses.dataclass(frozen=True, slots=True)
class ReadPrompt:
    """A prompt's tokens; `chat` where it was a conversation."""

    token_ids: tuple[int, ...]
    chat: RenderedConversation | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Unread:
    """A call's request, checked as far as that needs no tokenizer; the rest of it is in `request`."""

    model: ServedModel
    request: GenerationRequest
    """Without its prompt, banned words and grammar."""
    prompt: Prompt
    bad_words: tuple[str, ...] = ()
    form: ResponseFormat | None = None
    completion_count: int = 1


class TextMessage(Protocol):
    """A request message with a prompt in plain text or as a conversation."""

    @property
    def text(self) -> str: ...
    @property
    def chat(self) -> prompt_pb2.ChatPrompt: ...
    @property
    def tools(self) -> Sequence[tool_pb2.Tool]: ...


class PromptMessage(TextMessage, Protocol):
    """A request message with any prompt."""

    @property
    def tokens(self) -> prompt_pb2.TokenPrompt: ...
    @property
    def model(self) -> str: ...
    @property
    def adapter(self) -> str: ...


def text_prompt_of(
    message: TextMessage, kind: str | None, info: ModelInfo, choice: tool_pb2.ToolChoice | None = None
) -> Text | Chat:
    """Return the prompt that `kind` (the oneof's set field) names; raises InvalidRequest."""
    if kind == "chat":
        return Chat(conversation_of(message.chat, tools=message.tools, choice=choice, info=info))
    check_no_tools(message.tools, choice)
    if kind == "text":
        return Text(message.text)
    raise _missing("`text` or `chat`")


def prompt_of(
    message: PromptMessage, kind: str | None, info: ModelInfo, choice: tool_pb2.ToolChoice | None = None
) -> Prompt:
    """Return the prompt that `kind` names, not empty; raises InvalidRequest."""
    if kind is None:
        raise _missing("`text`, `chat` or `tokens`")
    if kind == "tokens":
        check_no_tools(message.tools, choice)
        return _tokens_of(message.tokens, info)
    prompt = text_prompt_of(message, kind, info, choice)
    if isinstance(prompt, Text) and not prompt.text:
        raise _empty("text")
    return prompt


class InputMessage(Protocol):
    """A message with a text or tokens and nothing around them."""

    @property
    def text(self) -> str: ...
    @property
    def tokens(self) -> prompt_pb2.TokenPrompt: ...


def input_of(message: InputMessage, kind: str | None, info: ModelInfo) -> Text | Tokens:
    """Return the input that `kind` names, not empty; raises InvalidRequest."""
    if kind is None:
        raise _missing("`text` or `tokens`")
    if kind == "tokens":
        return _tokens_of(message.tokens, info)
    if not message.text:
        raise _empty("text")
    return Text(message.text)


@contextlib.contextmanager
def names_item(item: str, *, names_field: bool = True) -> Iterator[None]:
    """Have a refusal name the item of a list at fault, such as `inputs[3]`, and the field within it."""
    try:
        yield
    except InvalidRequest as error:
        raise InvalidRequest(
            error.reason,
            f"{item}: {error.message}",
            field=f"{item}.{error.field}" if names_field else item,
            metadata=error.metadata,
        ) from error


class PromptReader:
    """Runs a tokenizer in `thread_count` threads. `close` ends them."""

    def __init__(self, *, thread_count: int) -> None:
        self._executor = concurrent.futures.ThreadPoolExecutor(
            max_workers=thread_count, thread_name_prefix="tokenizer"
        )

    async def read(self, prompt: Prompt, model: ServedModel) -> ReadPrompt:
        """Return the prompt's tokens; raises InvalidRequest if none, or if it fills the context."""
        if isinstance(prompt, Tokens):
            return ReadPrompt(prompt.token_ids)
        loop = asyncio.get_running_loop()
        read = await loop.run_in_executor(self._executor, _read, prompt, model.tokenizer)
        if not read.token_ids:
            raise _empty(prompt.field)
        check_length(len(read.token_ids), model.info, field=prompt.field)
        return read

    async def pieces(self, prompt: Text | Chat, model: ServedModel) -> list[tuple[int, str]]:
        """Return each token's id and spelling, without a limit but the message's own."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, _read_pieces, prompt, model.tokenizer)

    async def run(self, work: Callable[[], Result]) -> Result:
        """Return what `work` returns, off the event loop: for whatever else needs the tokenizer."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def close(self) -> None:
        """Let running work end and take no more."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def check_length(token_count: int, info: ModelInfo, *, field: str) -> None:
    """Refuse a prompt that leaves no room for one output token."""
    if token_count < info.context_token_limit:
        return
    raise InvalidRequest(
        Reason.PROMPT_TOO_LONG,
        f"the prompt has {token_count} tokens; the model's context holds {info.context_token_limit}, "
        "output included; shorten the prompt",
        field=field,
        metadata={"prompt_tokens": token_count, "context_tokens": info.context_token_limit},
    )


def _read(prompt: Text | Chat, tokenizer: TokenizerPort) -> ReadPrompt:
    if isinstance(prompt, Text):
        return ReadPrompt(tuple(tokenizer.encode(prompt.text)))
    rendered = tokenizer.render_chat(prompt.conversation)
    return ReadPrompt(rendered.token_ids, RenderedConversation(prompt.conversation, rendered))


def _read_pieces(prompt: Text | Chat, tokenizer: TokenizerPort) -> list[tuple[int, str]]:
    return [(token_id, tokenizer.piece(token_id)) for token_id in _read(prompt, tokenizer).token_ids]


def _tokens_of(tokens: prompt_pb2.TokenPrompt, info: ModelInfo) -> Tokens:
    if not tokens.ids:
        raise _empty("tokens")
    # Before the ids are looked at one by one, so that the longest message costs the loop little.
    check_length(len(tokens.ids), info, field="tokens")
    check_token_ids(tokens.ids, info, field="tokens.ids")
    return Tokens(tuple(tokens.ids))


def _missing(choices: str) -> InvalidRequest:
    return InvalidRequest(Reason.PROMPT_MISSING, f"there is no prompt; set one of {choices}", field="prompt")


def _empty(field: str) -> InvalidRequest:
    return InvalidRequest(
        Reason.PROMPT_EMPTY, f"`{field}` is empty; a prompt needs at least one token", field=field
    )
