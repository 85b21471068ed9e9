"""Prompts to token ids, off the event loop.

The pure functions say what a prompt is and refuse what needs no tokenizer. `PromptReader` runs the tokenizer
in a few threads, because a long prompt takes longer than a decode step.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from icehouse.v1 import embedding_service_pb2, prompt_pb2, tool_pb2

from icehouse_server.config import ServerConfig
from icehouse_server.domain.blocks import TokenKeys
from icehouse_server.domain.chat import (
    ChatMessage,
    Conversation,
    PromptChange,
    PromptChangeKind,
    RenderedChat,
)
from icehouse_server.domain.model import ModelInfo
from icehouse_server.domain.request import ImageSpan, SentImages, keys_of
from icehouse_server.errors import InvalidRequest, Reason
from icehouse_server.rpc.access import caller as callers
from icehouse_server.rpc.access.shares import FairQueue, FairShare, ended
from icehouse_server.rpc.engine_client.engine_ports import ServedModel
from icehouse_server.rpc.image_sources.image_fetcher import ImageFetcher
from icehouse_server.rpc.messages.conversations import check_no_tools, conversation_of, is_stable
from icehouse_server.rpc.messages.field_checks import check_length, check_token_ids, shown
from icehouse_server.rpc.services.prepared import KnownReplies, RenderedConversation
from icehouse_server.text.chat.kept_reply import KeptReply
from icehouse_server.text.chat.next_turn import new_beginning, with_next_turn
from icehouse_server.text.prompt_normalizer import normalized
from icehouse_server.text.reply_memory import ReplyMemory

if TYPE_CHECKING:
    # This needs an optional extra.
    from icehouse_server.vision.image_reader import PromptImages

Result = TypeVar("Result")

_SHORT_BYTES, _LONG_BYTES = 16 << 10, 256 << 10
"""Up to the first size a message is checked on the event loop. Above the second it takes a long-work turn."""
_TEXT_BYTES, TOKENIZED_BYTES_PER_TOKEN = 1 << 20, 8
"""Text up to this size is tokenized for any model; Tokenize accepts this many bytes per token of the
context."""

_CROWDED, _ROOMY = 7 / 8, 3 / 4
"""Shares of the context. Old reasoning fills it: a stable prompt that takes more than the first share is
replaced by the template's, which drops it, if that takes less than the second. Later prompts extend that."""


@dataclasses.dataclass(frozen=True, slots=True)
class Text:
    """Plain text."""

    text: str
    field: str = "prompt.text"

    @property
    def size_bytes(self) -> int:
        return len(self.text)


@dataclasses.dataclass(frozen=True, slots=True)
class Chat:
    """A conversation."""

    conversation: Conversation
    field: str = "prompt.chat"
    changes: tuple[PromptChange, ...] = ()
    """What the normaliser changed in it."""
    replies: KnownReplies | None = None
    """Earlier replies, if they stay in the prompt as they were generated."""

    @property
    def size_bytes(self) -> int:
        return sum(len(message.content) for message in self.conversation.messages)


@dataclasses.dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids, inside the vocabulary."""

    token_ids: tuple[int, ...]
    images: SentImages | None = None
    """Images that some of the tokens stand for, prepared by the caller."""
    normalizes: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class InfillText:
    """A gap between two texts."""

    prefix: str
    suffix: str
    field: str = "prompt.infill"

    @property
    def size_bytes(self) -> int:
        return len(self.prefix) + len(self.suffix)


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """A query and a document, for a model that scores pairs."""

    query: str
    document: str
    field: str = "documents"

    @property
    def size_bytes(self) -> int:
        return len(self.query) + len(self.document)


TextPrompt = Text | Chat | InfillText | Pair
"""What is tokenized here. `size_bytes` is at least one byte for each character."""
Prompt = TextPrompt | Tokens
ImageWork = Callable[[TextPrompt, "PromptImages | None"], Result]
"""Work on a prompt and its images (None if it has none), in any thread."""


@dataclasses.dataclass(frozen=True, slots=True)
class UncheckedPrompt:
    """An unchecked prompt. Checking takes time in proportion to its size, so a long one is checked in a
    thread."""

    check: Callable[[], Prompt]
    """Raises InvalidRequest. Any thread."""
    size_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class ReadPrompt:
    """A prompt's tokens; `chat` is set if it was a conversation."""

    token_ids: tuple[int, ...]
    chat: RenderedConversation | None = None
    images: tuple[ImageSpan, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the output of such a prompt, besides the model's end tokens."""
    changes: tuple[PromptChange, ...] = ()
    """What was changed in it."""

    @property
    def keys(self) -> TokenKeys:
        return keys_of(self.token_ids, self.images)


@dataclasses.dataclass(frozen=True, slots=True)
class PromptRules:
    """How a caller's prompts are made stable."""

    replies: KnownReplies
    is_stable: bool = False
    """Whether they are by default, if a prompt does not say."""


def prompt_of(
    prompt: prompt_pb2.Prompt,
    info: ModelInfo,
    choice: tool_pb2.ToolChoice | None = None,
    *,
    rules: PromptRules,
    answers_in_json: bool = False,
) -> Prompt:
    """Return a prompt; raises InvalidRequest, also for an empty one."""
    form = prompt.WhichOneof("form")
    if form is None:
        raise _missing("`text`, `chat`, `tokens` or `infill`")
    if form == "tokens":
        check_no_tools(prompt.tools, choice)
        return _tokens_of(prompt.tokens, info, field="prompt.tokens", normalizes=rules.is_stable)
    if form == "text" and not prompt.text:
        raise _empty("prompt.text")
    return text_prompt_of(prompt, info, choice, rules=rules, answers_in_json=answers_in_json)


def text_prompt_of(
    prompt: prompt_pb2.Prompt,
    info: ModelInfo,
    choice: tool_pb2.ToolChoice | None = None,
    *,
    rules: PromptRules,
    answers_in_json: bool = False,
) -> TextPrompt:
    """Return a prompt that needs a tokenizer; raises InvalidRequest for tokens and for an empty infill."""
    form = prompt.WhichOneof("form")
    if form == "chat":
        conversation = conversation_of(
            prompt.chat, tools=prompt.tools, choice=choice, info=info, answers_in_json=answers_in_json
        )
        if not is_stable(prompt.chat, default=rules.is_stable):
            return Chat(conversation)
        conversation, changes = normalized(conversation)
        return Chat(conversation, changes=changes, replies=rules.replies)
    check_no_tools(prompt.tools, choice)
    if form == "text":
        return Text(prompt.text)
    if form == "infill":
        if not (prompt.infill.prefix or prompt.infill.suffix):
            raise _empty("prompt.infill")
        return InfillText(prompt.infill.prefix, prompt.infill.suffix)
    if form is None:
        raise _missing("`text`, `chat` or `infill`")
    message = "`prompt.tokens` is set, and tokens need no tokenizing; set `text`, `chat` or `infill`"
    raise InvalidRequest(Reason.UNSUPPORTED, message, field="prompt.tokens")


def with_sent_images(prompt: UncheckedPrompt, read: Callable[[], SentImages]) -> UncheckedPrompt:
    """Return a prompt of tokens with the images that `read` returns. Any thread; may raise InvalidRequest.

    It counts as long work, however few tokens it has.
    """

    def check() -> Prompt:
        tokens = prompt.check()
        assert isinstance(tokens, Tokens), "images are sent for tokens alone"
        return dataclasses.replace(tokens, images=read())

    return UncheckedPrompt(check, max(prompt.size_bytes, _LONG_BYTES + 1))


def input_of(message: embedding_service_pb2.EmbedInput, info: ModelInfo, before: str) -> Text | Tokens:
    """Return the input, with `before` in front of its text; raises InvalidRequest, also if it is empty."""
    kind = message.WhichOneof("input")
    if kind is None:
        raise _missing("`text` or `tokens`")
    if kind == "tokens":
        return _tokens_of(message.tokens, info, field="tokens")
    if not message.text:
        raise _empty("text")
    return Text(before + message.text, field="text")


class PromptReader:
    """Runs a tokenizer in a few threads, with fair turns for callers. Owned by the event loop; `close` ends
    it.

    Long work leaves one thread free for short work, if there are two.
    """

    def __init__(self, config: ServerConfig) -> None:
        """Raises ConfigError for invalid image folders or hosts."""
        thread_count = config.tokenizer_thread_count
        self._images = ImageFetcher(config)
        self.image_memory = FairShare(limit=config.image_memory_bytes, factor=1.0, what="bytes of images")
        """For pixels while they are decoded, then for prepared images until their call ends. One caller gets
        at most half."""
        self._executor = concurrent.futures.ThreadPoolExecutor(
            max_workers=thread_count, thread_name_prefix="tokenizer"
        )
        self.replies = ReplyMemory(limit_bytes=config.reply_memory_bytes)
        self._turns = FairQueue(capacity=thread_count)
        self._long_turns = FairQueue(capacity=max(1, thread_count - 1))

    async def read(self, prompt: UncheckedPrompt, model: ServedModel) -> ReadPrompt:
        size_bytes = prompt.size_bytes
        if size_bytes > _SHORT_BYTES:
            # A prompt with images is only checked here: each image takes its own turn.
            found = await self.run(
                lambda: checked if _has_images(checked := prompt.check()) else _read(checked, model),
                size_bytes=size_bytes,
            )
        else:
            checked = prompt.check()
            if isinstance(checked, Tokens) and not checked.normalizes:
                return ReadPrompt(checked.token_ids)
            found = checked if _has_images(checked) else await self.run(lambda: _read(checked, model))
        if isinstance(found, ReadPrompt):
            return found
        assert isinstance(found, Chat), "only images are put off"

        def work(prompt: TextPrompt, images: PromptImages | None) -> ReadPrompt:
            return _read(prompt, model, images)

        return await self.run_with_images(found, model, work, size_bytes=size_bytes)

    async def next_beginning(
        self,
        chat: RenderedConversation,
        reply: ChatMessage,
        model: ServedModel,
        *,
        known: Sequence[int],
        token_limit: int,
    ) -> tuple[int, ...]:
        """Return `new_beginning` of the prompt after a reply; raises what refuses that prompt."""
        prompt = Chat(with_next_turn(chat.conversation, reply), replies=chat.replies)

        def work() -> tuple[int, ...]:
            token_ids, decode = _read(prompt, model).token_ids, model.tokenizer.decode_with_markers
            return new_beginning(token_ids, known=known, decode=decode, token_limit=token_limit)

        return await self.run(work, size_bytes=prompt.size_bytes)

    async def run_with_images(
        self, prompt: TextPrompt, model: ServedModel, work: ImageWork[Result], *, size_bytes: int
    ) -> Result:
        """Return the result of `work` on a prompt and its images; raises what refuses an image, and
        Overloaded if there is no memory for it."""
        if not isinstance(prompt, Chat):
            return await self.run(lambda: work(prompt, None), size_bytes=size_bytes)
        async with self._images.fetched(prompt.conversation) as conversation:
            sources, opened = conversation.images, None
            with contextlib.ExitStack() as held:
                if sources:
                    # Long work, however few bytes it has: a small file may have millions of pixels.
                    size_bytes = max(size_bytes, _LONG_BYTES + 1)
                    images = model.images
                    assert images is not None, "a model that reads text alone refuses images before"
                    opened = await self.run(lambda: images.open(sources), size_bytes=size_bytes)
                    # Each image takes its own turn, so that others get theirs in between.
                    for pixel_bytes in opened.pixel_bytes:
                        read = self.run(opened.read_next, size_bytes=size_bytes, pixel_bytes=pixel_bytes)
                        held.enter_context(self.image_memory.hold(callers.origin.get(), await read))
                return await self.run(lambda: work(prompt, opened), size_bytes=size_bytes)

    async def run(self, work: Callable[[], Result], *, size_bytes: int = 0, pixel_bytes: int = 0) -> Result:
        """Return what `work` returns, run in a tokenizer thread.

        Decoding holds `pixel_bytes` meanwhile; raises Overloaded if the caller may have no more.
        """
        origin = callers.origin.get()
        with contextlib.ExitStack() as held:
            if size_bytes > _LONG_BYTES:
                held.callback((await self._long_turns.take(origin)).release)
            held.callback((await self._turns.take(origin)).release)
            if pixel_bytes:
                held.enter_context(self.image_memory.hold(origin, pixel_bytes))
            task = self._executor.submit(work)
            release = held.pop_all().close
        return await ended(task, release)

    def close(self) -> None:
        """Accept no more work; running work finishes."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def pieces(prompt: TextPrompt, model: ServedModel, images: PromptImages | None) -> list[tuple[int, str]]:
    """Return each token's id and spelling, even for more tokens than the context holds. Any thread."""
    _check_bytes(prompt, limit_bytes=_tokenized_limit(model.info))
    tokenizer = model.tokenizer
    return [(token_id, tokenizer.piece(token_id)) for token_id in _tokens(prompt, model, images).token_ids]


def _has_images(prompt: Prompt) -> bool:
    return isinstance(prompt, Chat) and bool(prompt.conversation.images)


def text_of(token_ids: Sequence[int], model: ServedModel) -> str:
    """Return the text of tokens, as many as `pieces` may return; raises InvalidRequest. Any thread."""
    limit = _tokenized_limit(model.info)
    if len(token_ids) > limit:
        raise InvalidRequest(
            Reason.PROMPT_TOO_LONG,
            f"there are {len(token_ids)} tokens; for this model's context at most {limit} are turned into "
            "text; send fewer",
            field="token_ids",
            metadata={"tokens": len(token_ids), "limit_tokens": limit},
        )
    check_token_ids(token_ids, model.info, field="token_ids")
    return model.tokenizer.decode_with_markers(token_ids)


def _tokenized_limit(info: ModelInfo) -> int:
    return max(_TEXT_BYTES, TOKENIZED_BYTES_PER_TOKEN * info.context_token_limit)


def _read(prompt: Prompt, model: ServedModel, images: PromptImages | None = None) -> ReadPrompt:
    """Return the prompt's tokens; what cannot fit is not tokenized. `images` are those of a conversation."""
    if isinstance(prompt, Tokens):
        if prompt.images is not None:
            assert model.images is not None, "a model that reads text alone refuses them before"
            return ReadPrompt(prompt.token_ids, images=model.images.place(prompt.token_ids, prompt.images))
        if not prompt.normalizes:
            return ReadPrompt(prompt.token_ids)
        token_ids, changes = model.tokenizer.normalized(prompt.token_ids)
        return ReadPrompt(token_ids, changes=changes)
    if prompt.size_bytes > _TEXT_BYTES:
        limit = model.info.context_token_limit * model.tokenizer.longest_token_bytes
        _check_bytes(prompt, limit_bytes=max(_TEXT_BYTES, limit))
    read = _tokens(prompt, model, images)
    if not read.token_ids:
        raise _empty(prompt.field)
    check_length(len(read.token_ids), model.info, field=prompt.field)
    _check_known(read.token_ids, model, field=prompt.field)
    return read


def _check_known(token_ids: Sequence[int], model: ServedModel, *, field: str) -> None:
    """Refuse a token that the tokenizer has but the model lacks: its embedding would be out of range."""
    largest, size = max(token_ids), model.info.vocabulary_size
    if largest < size:
        return
    raise InvalidRequest(
        Reason.TOKEN_OUT_OF_RANGE,
        f"the prompt contains the token {largest}, {shown(model.tokenizer.piece(largest))}, which the "
        f"tokenizer knows but the model does not; token ids of this model are 0 to {size - 1}",
        field=field,
        metadata={"token_id": largest, "vocabulary_size": size},
    )


def _tokens(prompt: TextPrompt, model: ServedModel, images: PromptImages | None) -> ReadPrompt:
    if isinstance(prompt, Text):
        return ReadPrompt(tuple(model.tokenizer.encode(prompt.text)))
    if isinstance(prompt, Pair):
        return ReadPrompt(tuple(model.tokenizer.encode_pair(prompt.query, prompt.document)))
    if isinstance(prompt, InfillText):
        infill = model.tokenizer.render_infill(prefix=prompt.prefix, suffix=prompt.suffix)
        stops = tuple(i for i in infill.stop_token_ids if i < model.info.vocabulary_size)
        return ReadPrompt(infill.token_ids, stop_token_ids=stops)
    conversation = prompt.conversation
    if images is not None:
        conversation = dataclasses.replace(conversation, image_texts=images.texts)
    replies = prompt.replies
    place = None if replies is None else replies.memory.place(conversation, replies.scope)
    rendered, spans = _rendered(conversation, model, images, None if place is None else place.kept)
    changes = prompt.changes
    if rendered.kept_token_count:
        changes += (PromptChange(PromptChangeKind.HISTORY_KEPT, rendered.kept_token_count),)
    chat = RenderedConversation(prompt.conversation, rendered, replies, place)
    return ReadPrompt(rendered.token_ids, chat, spans, changes=changes)


def _rendered(
    conversation: Conversation, model: ServedModel, images: PromptImages | None, kept: KeptReply | None
) -> tuple[RenderedChat, tuple[ImageSpan, ...]]:
    """Return a conversation's prompt and where its images are; raises InvalidRequest."""
    rendered = model.tokenizer.render_chat(conversation, kept)
    limit = model.info.context_token_limit
    if rendered.kept_token_count and len(rendered.token_ids) > _CROWDED * limit:
        plain = model.tokenizer.render_chat(conversation)
        if len(plain.token_ids) < _ROOMY * limit or len(rendered.token_ids) >= limit:
            rendered = plain
    if images is None:
        return rendered, ()
    try:
        return rendered, images.spans(rendered.token_ids)
    except InvalidRequest:
        if not rendered.kept_token_count:
            raise
    # The reply has text that is tokenized as an image's placeholder.
    return _rendered(conversation, model, images, None)


def _check_bytes(prompt: TextPrompt, *, limit_bytes: int) -> None:
    if prompt.size_bytes <= limit_bytes:
        return
    raise InvalidRequest(
        Reason.PROMPT_TOO_LONG,
        f"the prompt has {prompt.size_bytes} characters; for this model's context at most {limit_bytes} are "
        "tokenized; shorten the prompt",
        field=prompt.field,
        metadata={"size_bytes": prompt.size_bytes, "limit_bytes": limit_bytes},
    )


def _tokens_of(
    tokens: prompt_pb2.TokenPrompt, info: ModelInfo, *, field: str, normalizes: bool = False
) -> Tokens:
    if not tokens.ids:
        raise _empty(field)
    # Before the ids are checked one by one, so that even the longest message costs the loop little.
    check_length(len(tokens.ids), info, field=field)
    check_token_ids(tokens.ids, info, field=f"{field}.ids")
    return Tokens(tuple(tokens.ids), normalizes=normalizes)


def _missing(choices: str) -> InvalidRequest:
    return InvalidRequest(Reason.PROMPT_MISSING, f"there is no prompt; set one of {choices}", field="prompt")


def _empty(field: str) -> InvalidRequest:
    return InvalidRequest(
        Reason.PROMPT_EMPTY, f"`{field}` is empty; a prompt needs at least one token", field=field
    )
