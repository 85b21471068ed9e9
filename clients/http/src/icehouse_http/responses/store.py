"""Store of the conversations behind responses: in memory, bounded, the least recently used go first."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence

from icehouse_client import Message

from icehouse_http.responses.items import Item

_TOKEN_BYTES = 8
_MESSAGE_BYTES = 256
"""What a message takes beside its texts."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Kept:
    messages: tuple[Message, ...]
    items: Mapping[str, Item]
    """What the response itself told, by the items' ids."""
    size_bytes: int


class ResponseStore:
    """Conversations by the id of their last response. A caller finds only those of its own token."""

    def __init__(self, *, max_entries: int, max_bytes: int) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._size_bytes = 0
        self._entries: collections.OrderedDict[tuple[str, str], _Kept] = collections.OrderedDict()

    def get(self, scope: str, response_id: str) -> tuple[Message, ...] | None:
        """Return a conversation, or None where it was never kept or is gone."""
        key = (scope, response_id)
        if key not in self._entries:
            return None
        self._entries.move_to_end(key)
        return self._entries[key].messages

    def item(self, scope: str, item_id: str) -> Item | None:
        """Return an item that a response told, or None where none is kept that did."""
        for key, kept in reversed(self._entries.items()):
            if key[0] == scope and item_id in kept.items:
                self._entries.move_to_end(key)
                return kept.items[item_id]
        return None

    def put(
        self, scope: str, response_id: str, messages: Sequence[Message], items: Sequence[Item] = ()
    ) -> None:
        """Keep a conversation and the items of its last message; one that is larger than the bound by itself
        is not kept."""
        size_bytes = sum(map(_size_bytes, (*messages, *(messages[-1:] if items else ()))))
        if size_bytes > self._max_bytes:
            return
        told = {item["id"]: item for item in items}
        self._entries[scope, response_id] = _Kept(tuple(messages), told, size_bytes)
        self._size_bytes += size_bytes
        while len(self._entries) > self._max_entries or self._size_bytes > self._max_bytes:
            _, freed = self._entries.popitem(last=False)
            self._size_bytes -= freed.size_bytes


def _size_bytes(message: Message) -> int:
    texts = [message.content, message.reasoning]
    texts += [call.arguments_json for call in message.tool_calls]
    texts += [image.uri for image in message.images]
    images = sum(len(image.data) for image in message.images)
    # A character of Python's may take four bytes.
    return _MESSAGE_BYTES + 4 * sum(map(len, texts)) + images + _TOKEN_BYTES * len(message.token_ids)
