"""Tokenizer, without mlx: text and chats to token ids, token ids to text.

Used by the small executor of `rpc` (encode, render), the inference thread (decode), and threads of the
metrics port (the status page). If there is an immutable Rust tokenizer, all call it directly: any number of
threads may use it at once. The Python wrapper around it must not be shared.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

from icehouse_server.domain.chat import Conversation, PromptChange, RenderedChat
from icehouse_server.domain.model import ReplyFormatInfo
from icehouse_server.errors import InvalidRequest, Reason
from icehouse_server.text.chat.kept_reply import KeptReply
from icehouse_server.text.chat.template import ChatTemplate, offer
from icehouse_server.text.chat_renderer import ChatRenderer, TurnTokens
from icehouse_server.text.infill import InfillFormat, InfillTokens, infill_format_of
from icehouse_server.text.prompt_normalizer import normalized_tokens
from icehouse_server.text.reasoning import ReplyReasoning
from icehouse_server.text.replies.recognition import Vocabulary, find_reply_format
from icehouse_server.text.replies.reply_splitter import ReplySplitter

_HIDDEN_NAMES = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id")
_UNINTERRUPTED_LENGTH = 4096
"""Characters that are tokenized in about a millisecond."""
_LETTER = "a"
"""A text that every vocabulary can encode; the tokens that come before its own begin every prompt."""
_MERGES = '"merges":['
"""How tokenizer.json begins its list of merges; inside a JSON string these quotes would be escaped."""


class Tokenizer:
    """One model's tokenizer. `wrapper` is mlx-lm's TokenizerWrapper around a Hugging Face one."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self._fast = getattr(wrapper, "backend_tokenizer", None)
        # The slow path shares Python state between callers, and so may a template written in Python. A Jinja
        # template does not, so it takes no lock: a short conversation must not wait for a long one.
        self._wrapper_lock = threading.RLock()
        is_jinja = self._fast is not None and getattr(wrapper, "_chat_template", None) is None
        self._template_lock = contextlib.nullcontext() if is_jinja else self._wrapper_lock
        template = ChatTemplate(wrapper)
        vocabulary = _vocabulary_of(wrapper)
        self._format = find_reply_format(template if self.has_chat_template else None, vocabulary)
        named = (getattr(wrapper, name, None) for name in _HIDDEN_NAMES)
        self._hidden_ids = frozenset(i for i in (*named, *self.eos_token_ids) if i is not None)
        self._renderer = ChatRenderer(
            template=template,
            turns=TurnTokens(
                encode=self.spell,
                decode=self._decode_all,
                eos_token_ids=frozenset(self.eos_token_ids),
                added_token_ids=frozenset(wrapper.added_tokens_decoder),
            ),
            format=self._format,
            common_tokens=self._common_tokens,
            turn_marks=self._turn_marks(vocabulary.special),
        )

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an output, from generation_config.json, config.json and the tokenizer; encoders
        have none."""
        return tuple(sorted(int(i) for i in self._wrapper.eos_token_ids if i is not None))

    @property
    def has_chat_template(self) -> bool:
        return bool(self._wrapper.has_chat_template)

    @property
    def reply_format(self) -> ReplyFormatInfo | None:
        """How replies to chats are read; None without a chat template."""
        return self._format.info if self.has_chat_template else None

    @property
    def vocabulary_size(self) -> int:
        """How many token ids the tokenizer knows; the model's embedding table may be larger."""
        return len(self._wrapper)

    @functools.cached_property
    def longest_token_bytes(self) -> int:
        """Bytes of the vocabulary's longest entry as spelled there: an upper bound of its text's bytes."""
        return max(len(spelling.encode("utf-8", "replace")) for spelling in self._wrapper.get_vocab())

    @functools.cached_property
    def _infill(self) -> InfillFormat | None:
        text, plain = self.encode(_LETTER), self.spell(_LETTER)
        start = next((i for i in range(len(text)) if text[i : i + len(plain)] == plain), 0)
        return infill_format_of(self._wrapper.get_vocab(), encode=self.spell, start=tuple(text[:start]))

    def normalized(self, token_ids: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[PromptChange, ...]]:
        """Return a prompt that a gateway has rendered, without its billing line, and what was changed."""
        return normalized_tokens(
            token_ids,
            encode=self.spell,
            decode=self._decode_all,
            added_token_ids=self._wrapper.added_tokens_decoder.keys(),
        )

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text` with the model's own special tokens around it (`<bos>`)."""
        return self._encode(text, add_special_tokens=True)

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Return the token ids of two texts, with the special tokens that the model expects around pairs."""
        if self._fast is not None:
            # As in `_encoding`: a batch of one, so that other threads run meanwhile.
            [encoding] = self._fast.encode_batch([(first, second)])
            return list(encoding.ids)
        with self._wrapper_lock:
            return [int(i) for i in self._wrapper.encode(first, second)]

    def spell(self, text: str) -> list[int]:
        """Return the token ids of a piece of text by itself, without a start token."""
        return self._encode(text, add_special_tokens=False)

    def render_infill(self, *, prefix: str, suffix: str) -> InfillTokens:
        """Return the prompt for the gap between two texts.

        Raises InvalidRequest if the vocabulary has no infill tokens.
        """
        if self._infill is None:
            raise InvalidRequest(
                Reason.UNSUPPORTED,
                "this model's vocabulary has no infill tokens, as code models have; send `text`",
                field="prompt.infill",
            )
        return self._infill.tokens(prefix=prefix, suffix=suffix)

    def render_chat(self, conversation: Conversation, kept: KeptReply | None = None) -> RenderedChat:
        """Return the prompt of a conversation. It begins with the tokens of `kept` if that is possible.

        Raises InvalidRequest if the model's chat template refuses.
        """
        assert self.has_chat_template, "a chat is refused before where there is none"
        with self._template_lock:
            return self._renderer.render(conversation, kept)

    def reply_splitter(
        self, conversation: Conversation, rendered: RenderedChat, *, make_call_id: Callable[[int], str]
    ) -> ReplySplitter | None:
        """Return what splits this conversation's reply into parts; None if the reply is only text."""
        has_tools = conversation.reads_tool_calls and self._format.marks_calls
        if not (has_tools or self._format.marks_reasoning or self._format.is_always_read):
            return None
        return ReplySplitter(
            format=self._format,
            tools=[offer(tool) for tool in conversation.tools] if has_tools else [],
            make_call_id=make_call_id,
            opening=rendered.opening,
            is_reasoning=rendered.is_reasoning,
        )

    def reply_reasoning(self, conversation: Conversation, rendered: RenderedChat) -> ReplyReasoning | None:
        """Return how this conversation's reply marks reasoning; None if the model does not."""
        format = self._format
        if not (format.marks_reasoning or format.is_always_read):
            return None
        return ReplyReasoning(
            format=format,
            reads_calls=conversation.reads_tool_calls and format.marks_calls,
            opening=rendered.opening,
            is_open=rendered.is_reasoning,
            start_token_ids=self._marker(format.think_start),
            end_token_ids=self._marker(format.think_end),
        )

    def hides_markers(self, conversation: Conversation) -> bool:
        """Whether plain decoding hides the markers in this conversation's reply."""
        return self._format.hides(reads_calls=conversation.reads_tool_calls)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids` without special tokens; invalid UTF-8 becomes U+FFFD."""
        return self._decode(token_ids, hides_special_tokens=True)

    def decode_with_markers(self, token_ids: Sequence[int]) -> str:
        """As `decode`, but hide only the special tokens that begin, end or pad a text."""
        shown = [token_id for token_id in token_ids if token_id not in self._hidden_ids]
        return self._decode_all(shown)

    def _decode_all(self, token_ids: Sequence[int]) -> str:
        return self._decode(token_ids, hides_special_tokens=False)

    def vocabulary_json(self) -> str | None:
        """Return the vocabulary as tokenizer.json writes it, without the merges; None for a slow tokenizer.

        Only encoding needs the merges, and they took three quarters of the memory to read 262,144 tokens.
        """
        if self._fast is None:
            return None
        text = str(self._fast.to_str())
        start = text.find(_MERGES)
        # The merges are the model's last entry, and the model is the last of all.
        return text if start < 0 or not text.endswith("]}}") else text[:start] + _MERGES + "]}}"

    def piece(self, token_id: int) -> str:
        """Return one token's own spelling, special tokens included; empty outside the vocabulary."""
        if self._fast is not None:
            return self._fast.id_to_token(token_id) or ""
        with self._wrapper_lock:
            try:
                return str(self._wrapper.convert_ids_to_tokens(token_id) or "")
            except Exception:  # each kind of tokenizer raises something else for an unknown id
                return ""

    def _turn_marks(self, special: Collection[str]) -> re.Pattern[str]:
        """Return a pattern that matches the special tokens that are never part of a reply."""
        format = self._format
        family = format.family
        own = {*family.call_markers, *family.dropped, format.think_start, format.think_end}
        ends = {self.piece(token_id) for token_id in self.eos_token_ids}
        marks = sorted(set(special) - (own - ends), key=lambda token: (-len(token), token))
        return re.compile("|".join(map(re.escape, marks)) or r"(?!)")

    def _marker(self, text: str) -> tuple[int, ...]:
        """Return the tokens that spell exactly this marker; none if that is not possible."""
        token_ids = tuple(self.spell(text)) if text else ()
        return token_ids if self.decode_with_markers(token_ids) == text else ()

    def _decode(self, token_ids: Sequence[int], *, hides_special_tokens: bool) -> str:
        if self._fast is not None:
            return str(self._fast.decode(list(token_ids), skip_special_tokens=hides_special_tokens))
        with self._wrapper_lock:
            try:
                return str(self._wrapper.decode(list(token_ids), skip_special_tokens=hides_special_tokens))
            except Exception:
                # The embedding table may be larger than the vocabulary. Fast tokenizers skip such ids too.
                known = [token_id for token_id in token_ids if self.piece(token_id)]
                if len(known) == len(token_ids):
                    raise
                return str(self._wrapper.decode(known, skip_special_tokens=hides_special_tokens))

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if self._fast is not None:
            return list(self._encoding(text, add_special_tokens=add_special_tokens).ids)
        with self._wrapper_lock:
            return [int(i) for i in self._wrapper.encode(text, add_special_tokens=add_special_tokens)]

    def _encoding(self, text: str, *, add_special_tokens: bool) -> Any:
        assert self._fast is not None, "a slow tokenizer has no encodings"
        if len(text) <= _UNINTERRUPTED_LENGTH:
            return self._fast.encode(text, add_special_tokens=add_special_tokens)
        # tokenizers (0.23) releases the GIL only for batches. Without a batch, a text of 2 MB held it for
        # seconds, which blocked the event loop and the inference thread.
        [encoding] = self._fast.encode_batch([text], add_special_tokens=add_special_tokens)
        return encoding

    def _common_tokens(self, texts: Sequence[str]) -> int:
        """Return the length of the common prefix, cut at a token's end if a fast tokenizer gives offsets."""
        different = (i for i, characters in enumerate(zip(*texts, strict=False)) if len(set(characters)) > 1)
        common = next(different, min(map(len, texts)))
        if self._fast is None:
            return common
        encodings = (self._encoding(text, add_special_tokens=False) for text in texts)
        ends = set.intersection(*({end for _, end in encoding.offsets} for encoding in encodings))
        return max((end for end in ends if end <= common), default=0)


def _vocabulary_of(wrapper: Any) -> Vocabulary:
    """Return the parts of the vocabulary in which markers are looked for."""
    added = wrapper.added_tokens_decoder.values()
    special = {*wrapper.all_special_tokens, *(token.content for token in added if token.special)}
    named = wrapper.init_kwargs.get("tool_parser_type")
    return Vocabulary(wrapper.get_vocab(), {token.content for token in added}, special, str(named or ""))
