"""Known replies of one caller: found for a prompt, and noted when a reply ends.

`place` runs in a tokenizer thread. Everything else is for the event loop and only takes notes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from icehouse_server.domain.chat import (
    CallPiece,
    ChatMessage,
    Conversation,
    MalformedPiece,
    Piece,
    ReasoningPiece,
    TextPiece,
    ToolCall,
)
from icehouse_server.domain.events import Finished, FinishReason
from icehouse_server.domain.ids import AdapterName, Tenant
from icehouse_server.domain.model import ModelInfo
from icehouse_server.text.reply_memory import EndedReply, ReplyMemory, ReplyPlace, ReplyScope


@dataclasses.dataclass(frozen=True, slots=True)
class KnownReplies:
    """The replies to one tenant, with one adapter."""

    memory: ReplyMemory
    tenant: Tenant
    adapter: AdapterName

    def place(self, conversation: Conversation, info: ModelInfo) -> ReplyPlace:
        """Return the place of the conversation's reply; takes time in proportion to its size."""
        return self.memory.place(conversation, ReplyScope(info.fingerprint_hex, self.tenant, self.adapter))

    def remember(self, place: ReplyPlace, prompt_token_ids: tuple[int, ...], turn: EndedTurn) -> None:
        """Note a reply. Any thread; takes no time."""
        drawn = turn.message.token_ids
        self.memory.remember(EndedReply(place, prompt_token_ids, drawn, turn.end_token_id, turn.message))


@dataclasses.dataclass(frozen=True, slots=True)
class EndedTurn:
    """A reply that the model ended itself."""

    message: ChatMessage
    """As its caller read it; `token_ids` are those that were drawn, without the one that ended it."""
    end_token_id: int | None


OnEnd = Callable[[EndedTurn], None]


class ReplyNote:
    """What a reply says, in the words of its caller. Those who want it hear of it if the model ended it."""

    def __init__(self, on_end: Sequence[OnEnd], *, end_token_ids: frozenset[int]) -> None:
        self._on_end = on_end
        self._end_token_ids = end_token_ids
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._reasonings: list[str] = []
        self._calls: dict[int, tuple[CallPiece, list[str]]] = {}

    def add_tokens(self, token_ids: tuple[int, ...]) -> None:
        """Take new tokens."""
        self._token_ids += token_ids

    def add(self, piece: Piece) -> None:
        """Take a part of what the caller is sent."""
        match piece:
            case TextPiece() | MalformedPiece():
                self._texts.append(piece.text)
            case ReasoningPiece():
                self._reasonings.append(piece.text)
            case CallPiece(is_withdrawn=True):
                self._calls.pop(piece.index, None)
            case CallPiece():
                self._calls.setdefault(piece.index, (piece, []))[1].append(piece.arguments_json)

    def end(self, event: Finished) -> None:
        """Tell of the reply, unless a limit, a stop string or a token of the caller's ended it."""
        end_token_id = event.stop_token_id
        if event.reason is not FinishReason.STOP_TOKEN:
            return
        if end_token_id is not None:
            if end_token_id not in self._end_token_ids:
                return
            assert self._token_ids[-1:] == [end_token_id], "the token that ended it comes last"
            self._token_ids.pop()
        calls = tuple(
            ToolCall(first.id, first.name, "".join(arguments)) for first, arguments in self._calls.values()
        )
        message = ChatMessage(
            "assistant",
            "".join(self._texts),
            reasoning="".join(self._reasonings),
            tool_calls=calls,
            token_ids=tuple(self._token_ids),
        )
        for tell in self._on_end:
            tell(EndedTurn(message, end_token_id))
