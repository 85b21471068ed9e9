"""The tokenizer, without mlx: text and chats to token ids, token ids to text.

Used by the rpc room's small executor (encode, render) and by the inference thread (decode).
Both go straight to the immutable Rust tokenizer where there is one, which any number of
threads may call at once; the Python wrapper around it may not be shared so.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from service.domain.model import ChatMessage
from service.errors import InvalidRequest, Reason


class Tokenizer:
    """One model's tokenizer. `wrapper` is mlx-lm's TokenizerWrapper around a Hugging Face one."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self._fast = getattr(wrapper, "backend_tokenizer", None)
        # Only the slow path and the chat template share Python state between callers.
        self._wrapper_lock = threading.Lock()

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an output, from generation_config.json, config.json and the tokenizer."""
        return tuple(sorted(int(i) for i in self._wrapper.eos_token_ids))

    @property
    def has_chat_template(self) -> bool:
        return bool(self._wrapper.has_chat_template)

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids the tokenizer knows; the model's own table may be larger."""
        return len(self._wrapper)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text` with the model's own special tokens around it (`<bos>`)."""
        return self._encode(text, add_special_tokens=True)

    def render_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Return the token ids of a conversation, ready for the assistant's next turn.

        Raises InvalidRequest when the model has no chat template or the template refuses.
        """
        if not self.has_chat_template:
            raise InvalidRequest(
                Reason.CHAT_TEMPLATE_MISSING,
                "this model has no chat template; send `text` or `tokens` instead of `chat`",
                field="chat",
            )
        turns = [
            {"role": m.role, "content": m.content} | ({"name": m.name} if m.name else {}) for m in messages
        ]
        try:
            with self._wrapper_lock:
                text = self._wrapper.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template is a program of the model's author and raises what it likes
            raise InvalidRequest(
                Reason.CHAT_INVALID, f"the model's chat template refused the messages: {error}", field="chat"
            ) from error
        return self._encode(str(text), add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids`, without special tokens, bytes that are no UTF-8 as U+FFFD."""
        if self._fast is not None:
            return str(self._fast.decode(list(token_ids), skip_special_tokens=True))
        with self._wrapper_lock:
            return str(self._wrapper.decode(list(token_ids), skip_special_tokens=True))

    def piece(self, token_id: int) -> str:
        """Return one token's own spelling, special tokens included; empty outside the vocabulary."""
        if self._fast is not None:
            return self._fast.id_to_token(token_id) or ""
        with self._wrapper_lock:
            return str(self._wrapper.convert_ids_to_tokens(token_id) or "")

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if self._fast is not None:
            return list(self._fast.encode(text, add_special_tokens=add_special_tokens).ids)
        with self._wrapper_lock:
            return [int(i) for i in self._wrapper.encode(text, add_special_tokens=add_special_tokens)]
