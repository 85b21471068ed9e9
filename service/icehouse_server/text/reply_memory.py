"""Reply memory: the tokens of earlier prompts and their replies, looked up by the conversation.

A reply's key is a hash of everything before it and of what it says, not of a session, so forks, sub-agents
and regenerated answers each find their own. The tenant is part of the key, so nobody finds another's replies.

Tokenizer threads use it and do all hashing; `remember` is for the event loop and only takes a note. A reply's
tokens begin with those of the reply before it, so only the new ones are kept. The least recently used replies
are dropped first, but a reply always after those that build on it.
"""

from __future__ import annotations

import array
import collections
import dataclasses
import functools
import hashlib
import itertools
import json
import threading
from collections.abc import Callable, Iterable, Iterator

from icehouse_server.domain.chat import ChatMessage, Conversation, ToolCall
from icehouse_server.domain.ids import AdapterName, Tenant
from icehouse_server.domain.stats import ReplyStats
from icehouse_server.text.chat.kept_reply import KeptReply
from icehouse_server.text.values.literals import uniform

ENTRY_LIMIT = 16_384
"""Most replies that are kept, however short they are."""
ENTRY_BYTES = 512
"""What a reply counts for besides its tokens: keys, links and Python objects."""
_TOKEN_BYTES = 4
_NOTE_LIMIT = 256
"""Most finished replies that wait for the next prompt; beyond that the oldest are forgotten."""
_GENERATED, _SENT = b"generated", b"sent"

_Key = bytes


@dataclasses.dataclass(frozen=True, slots=True)
class ReplyScope:
    """The tenant, model and adapter that replies belong to."""

    model: str
    """Identifies the model, with its weights and its template."""
    tenant: Tenant
    adapter: AdapterName


@dataclasses.dataclass(frozen=True, slots=True)
class ReplyPlace:
    """Where a conversation's reply belongs, and the last earlier reply that is known."""

    tenant: Tenant
    key: _Key
    """A hash of everything before the reply."""
    known: _Key | None = None
    """The key of the last known earlier reply."""
    kept: KeptReply | None = None
    """The tokens of that earlier reply, for the prompt."""


@dataclasses.dataclass(slots=True)
class _Entry:
    """A known reply."""

    parent: _Key | None
    """The last known reply before it."""
    shares_parent: bool
    """Whether its tokens begin with the parent's, which are then not stored again."""
    tokens: array.array[int]
    end_token_id: int | None
    reasoning: bytes
    """The digest of its reasoning."""

    @property
    def size_bytes(self) -> int:
        return ENTRY_BYTES + _TOKEN_BYTES * len(self.tokens)


@dataclasses.dataclass(slots=True)
class _TenantReplies:
    """A tenant's replies, the least recently used first."""

    entries: collections.OrderedDict[_Key, _Entry] = dataclasses.field(
        default_factory=collections.OrderedDict
    )
    size_bytes: int = 0

    def touch(self, key: _Key | None) -> None:
        """Mark a reply as used, and then those that it builds on, so that these are dropped later."""
        while key is not None:
            self.entries.move_to_end(key)
            key = self.entries[key].parent

    def token_ids(self, key: _Key | None) -> tuple[int, ...]:
        """Return all tokens of a reply, with those of its prompt."""
        parts: list[array.array[int]] = []
        while key is not None:
            entry = self.entries[key]
            parts.append(entry.tokens)
            key = entry.parent if entry.shares_parent else None
        return tuple(itertools.chain.from_iterable(reversed(parts)))


class ReplyMemory:
    """Bounded in bytes and in replies. Over a bound, the tenant with most bytes loses its oldest reply."""

    def __init__(self, *, limit_bytes: int, entry_limit: int = ENTRY_LIMIT) -> None:
        self._limit_bytes = limit_bytes
        self._entry_limit = entry_limit
        self._lock = threading.Lock()
        self._notes: collections.deque[Callable[[], None]] = collections.deque(maxlen=_NOTE_LIMIT)
        """Functions that each add a reply."""
        self._tenants: dict[Tenant, _TenantReplies] = {}
        self._size_bytes = 0
        self._entry_count = 0
        self._found_total = 0

    def stats(self) -> ReplyStats:
        """Return the counters, without replies that wait for the next prompt. Any thread."""
        return ReplyStats(self._entry_count, self._size_bytes, self._found_total)

    def forget_all(self) -> None:
        """Forget all replies, of every tenant. Any thread."""
        with self._lock:
            self._notes.clear()
            self._tenants.clear()
            self._size_bytes = self._entry_count = 0

    def remember(
        self,
        place: ReplyPlace,
        prompt_token_ids: tuple[int, ...],
        message: ChatMessage,
        end_token_id: int | None,
    ) -> None:
        """Note a reply that the model ended itself, as its caller received it. Any thread; takes no time.

        The message's `token_ids` are those that were drawn, without the end token.
        """
        self._notes.append(functools.partial(self._add, place, prompt_token_ids, message, end_token_id))

    def place(self, conversation: Conversation, scope: ReplyScope) -> ReplyPlace:
        """Return the place of a conversation's reply, with the last of its earlier replies that is known.

        The conversation's images, if any, must have been read.
        """
        key = _root_key(conversation, scope)
        images = conversation.image_texts
        shown = () if images is None else zip(images.texts, (d.hex() for d in images.digests), strict=True)
        digests = list(_message_digests(conversation.messages, shown))
        known: tuple[int, _Key] | None = None
        with self._lock:
            while self._notes:
                self._notes.popleft()()
            replies = self._tenants.get(scope.tenant, _TenantReplies())
            for index, (message, digest) in enumerate(zip(conversation.messages, digests, strict=True)):
                key = _joined(key, digest)
                if message.role != "assistant":
                    continue
                reasoning = _text_digest(message.reasoning)
                entry = replies.entries.get(key)
                if entry is not None and (not message.reasoning.strip() or reasoning == entry.reasoning):
                    known, key = (index, key), _joined(key, _GENERATED)
                else:
                    key = _joined(key, _SENT, reasoning)
            if known is None:
                return ReplyPlace(scope.tenant, key)
            self._found_total += 1
            index, found = known
            replies.touch(found)
            end_token_id = replies.entries[found].end_token_id
            kept = KeptReply(index, replies.token_ids(found), end_token_id)
            return ReplyPlace(scope.tenant, key, found, kept)

    def _add(
        self,
        place: ReplyPlace,
        prompt_token_ids: tuple[int, ...],
        message: ChatMessage,
        end_token_id: int | None,
    ) -> None:
        replies = self._tenants.setdefault(place.tenant, _TenantReplies())
        key = _joined(place.key, next(_message_digests((message,), ())))
        parent = None if place.known is None else replies.entries.get(place.known)
        if place.known is None or parent is not None:
            # If the reply that its key builds on was dropped meanwhile, nobody would find it.
            token_ids = (*prompt_token_ids, *message.token_ids)
            earlier = replies.token_ids(place.known)
            shares_parent = parent is not None and token_ids[: len(earlier)] == earlier
            entry = _Entry(
                parent=place.known,
                shares_parent=shares_parent,
                tokens=array.array("i", token_ids[len(earlier) :] if shares_parent else token_ids),
                end_token_id=end_token_id,
                reasoning=_text_digest(message.reasoning),
            )
            self._put(replies, key, entry)
        if not replies.entries:
            self._tenants.pop(place.tenant, None)

    def _put(self, replies: _TenantReplies, key: _Key, entry: _Entry) -> None:
        if key not in replies.entries:
            replies.entries[key] = entry
            replies.size_bytes += entry.size_bytes
            self._size_bytes += entry.size_bytes
            self._entry_count += 1
        replies.touch(key)
        while self._size_bytes > self._limit_bytes or self._entry_count > self._entry_limit:
            self._drop_one()

    def _drop_one(self) -> None:
        tenant = max(self._tenants, key=lambda tenant: self._tenants[tenant].size_bytes)
        replies = self._tenants[tenant]
        _, entry = replies.entries.popitem(last=False)
        replies.size_bytes -= entry.size_bytes
        self._size_bytes -= entry.size_bytes
        self._entry_count -= 1
        if not replies.entries:
            del self._tenants[tenant]


def _root_key(conversation: Conversation, scope: ReplyScope) -> _Key:
    """Return a hash of everything before a conversation's messages."""
    tools = [[tool.name, tool.description, tool.parameters] for tool in conversation.tools]
    facts = [scope.model, scope.tenant, scope.adapter, conversation.template_arguments, tools]
    return _text_digest(json.dumps(facts))


def _message_digests(messages: Iterable[ChatMessage], images: Iterable[tuple[str, str]]) -> Iterator[bytes]:
    """Yield a digest of each message, without reasoning. Calls count by their position, not by their ids,
    which clients replace. Spaces around an assistant's text do not count. `images` has the text and digest of
    each image of all messages."""
    places: dict[str, int] = {}
    shown = iter(images)
    for message in messages:
        for call in message.tool_calls:
            places[call.id] = len(places)
        is_reply = message.role == "assistant"
        facts = [
            message.role,
            message.name,
            message.content.strip() if is_reply else message.content,
            [[call.name, _arguments(call)] for call in message.tool_calls],
            places.get(message.tool_call_id, message.tool_call_id),
            [[placed.position, *next(shown)] for placed in message.images],
        ]
        yield _text_digest(json.dumps(facts))


def _arguments(call: ToolCall) -> str:
    """Return a call's arguments in canonical form; text that is not JSON is returned as it is.

    Some clients send back what they parsed, with `false` or `null` for what the model left out.
    """
    try:
        arguments = json.loads(call.arguments_json)
        if isinstance(arguments, dict):
            arguments = {
                name: value for name, value in arguments.items() if value is not False and value is not None
            }
        return json.dumps(uniform(arguments))
    except (ValueError, RecursionError):
        return call.arguments_json


def _text_digest(text: str) -> bytes:
    """Return the digest of a text; half of a surrogate pair is no error."""
    return _joined(text.strip().encode("utf-8", "surrogatepass"))


def _joined(*parts: bytes) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.digest()
