"""Prompts to token ids, off the event loop.

The pure half says what a prompt is and refuses what can be refused unseen; `PromptReader` runs the
tokenizer in a small executor, because a long prompt takes longer than a decode step.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
from typing import Protocol

from icehouse.v1 import prompt_pb2

from service.domain.model import ChatMessage, ModelInfo
from service.errors import InvalidRequest, Reason
from service.rpc.ports import ServedModel, TokenizerPort
from service.rpc.validation import shown

CHAT_ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclasses.dataclass(frozen=True, slots=True)
class Text:
    """Plain text."""

    text: str
    field: str = "text"


@dataclasses.dataclass(frozen=True, slots=True)
class Chat:
    """A conversation."""

    messages: tuple[ChatMessage, ...]
    field: str = "chat"


@dataclasses.dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids, inside the vocabulary."""

    token_ids: tuple[int, ...]
    field: str = "tokens"


Prompt = Text | Chat | Tokens


class TextMessage(Protocol):
    """A request message with a prompt in plain text or as a conversation."""

    @property
    def text(self) -> str: ...
    @property
    def chat(self) -> prompt_pb2.ChatPrompt: ...


class PromptMessage(TextMessage, Protocol):
    """A request message with any prompt."""

    @property
    def tokens(self) -> prompt_pb2.TokenPrompt: ...


def text_prompt_of(message: TextMessage, kind: str | None, info: ModelInfo) -> Text | Chat:
    """Return the prompt that `kind` (the oneof's set field) names; raises InvalidRequest."""
    if kind == "text":
        return Text(message.text)
    if kind == "chat":
        return _chat_of(message.chat, info)
    raise _missing("`text` or `chat`")


def prompt_of(message: PromptMessage, kind: str | None, info: ModelInfo) -> Prompt:
    """Return the prompt that `kind` names, not empty; raises InvalidRequest."""
    if kind is None:
        raise _missing("`text`, `chat` or `tokens`")
    if kind == "tokens":
        return _tokens_of(message.tokens, info)
    prompt = text_prompt_of(message, kind, info)
    if isinstance(prompt, Text) and not prompt.text:
        raise _empty("text")
    return prompt


class PromptReader:
    """Runs a tokenizer in `thread_count` threads. `close` ends them."""

    def __init__(self, *, thread_count: int) -> None:
        self._executor = concurrent.futures.ThreadPoolExecutor(
            max_workers=thread_count, thread_name_prefix="tokenizer"
        )

    async def read(self, prompt: Prompt, model: ServedModel) -> tuple[int, ...]:
        """Return the prompt's token ids; raises InvalidRequest if none, or if it fills the context."""
        if isinstance(prompt, Tokens):
            return prompt.token_ids
        token_ids = await self._run(prompt, model.tokenizer)
        if not token_ids:
            raise _empty(prompt.field)
        check_length(len(token_ids), model.info, field=prompt.field)
        return tuple(token_ids)

    async def pieces(self, prompt: Text | Chat, model: ServedModel) -> list[tuple[int, str]]:
        """Return each token's id and spelling, without a limit but the message's own."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, _read_pieces, prompt, model.tokenizer)

    async def _run(self, prompt: Text | Chat, tokenizer: TokenizerPort) -> list[int]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, _read, prompt, tokenizer)

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


def _read(prompt: Text | Chat, tokenizer: TokenizerPort) -> list[int]:
    if isinstance(prompt, Text):
        return tokenizer.encode(prompt.text)
    return tokenizer.render_chat(prompt.messages)


def _read_pieces(prompt: Text | Chat, tokenizer: TokenizerPort) -> list[tuple[int, str]]:
    return [(token_id, tokenizer.piece(token_id)) for token_id in _read(prompt, tokenizer)]


def _chat_of(chat: prompt_pb2.ChatPrompt, info: ModelInfo) -> Chat:
    if not info.has_chat_template:
        raise InvalidRequest(
            Reason.CHAT_TEMPLATE_MISSING,
            f"the model {info.model_id!r} has no chat template; send `text` or `tokens` instead",
            field="chat",
        )
    if not chat.messages:
        raise _bad_chat("the conversation has no messages; send at least one", field="chat.messages")
    return Chat(tuple(_message_of(message, index) for index, message in enumerate(chat.messages)))


def _message_of(message: prompt_pb2.ChatMessage, index: int) -> ChatMessage:
    field = f"chat.messages[{index}]"
    if message.role not in CHAT_ROLES:
        known = ", ".join(CHAT_ROLES)
        raise _bad_chat(
            f"{field}.role is {shown(message.role)}; it must be one of {known}", field=f"{field}.role"
        )
    if not message.content and message.role != "assistant":
        raise _bad_chat(f"{field}.content is empty; only the assistant's may be", field=f"{field}.content")
    return ChatMessage(
        role=message.role, content=message.content, name=message.name if message.HasField("name") else None
    )


def _tokens_of(tokens: prompt_pb2.TokenPrompt, info: ModelInfo) -> Tokens:
    if not tokens.ids:
        raise _empty("tokens")
    # Before the ids are looked at one by one, so that the longest message costs the loop little.
    check_length(len(tokens.ids), info, field="tokens")
    for index, token_id in enumerate(tokens.ids):
        if not 0 <= token_id < info.vocabulary_size:
            field = f"tokens.ids[{index}]"
            raise InvalidRequest(
                Reason.TOKEN_OUT_OF_RANGE,
                f"{field} is {token_id}; token ids of this model are 0 to {info.vocabulary_size - 1}",
                field=field,
                metadata={"index": index, "token_id": token_id, "vocabulary_size": info.vocabulary_size},
            )
    return Tokens(tuple(tokens.ids))


def _bad_chat(message: str, *, field: str) -> InvalidRequest:
    return InvalidRequest(Reason.CHAT_INVALID, message, field=field)


def _missing(choices: str) -> InvalidRequest:
    return InvalidRequest(Reason.PROMPT_MISSING, f"there is no prompt; set one of {choices}", field="prompt")


def _empty(field: str) -> InvalidRequest:
    return InvalidRequest(
        Reason.PROMPT_EMPTY, f"`{field}` is empty; a prompt needs at least one token", field=field
    )
