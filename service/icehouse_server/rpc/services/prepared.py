"""Prepared request: what is sent to the engine, and its events as messages for the caller."""

from __future__ import annotations

import array
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence

from icehouse.v1 import inference_service_pb2 as inference
from icehouse.v1 import tool_pb2

from icehouse_server.domain.chat import (
    CallPiece,
    ChatMessage,
    Conversation,
    MalformedPiece,
    Piece,
    ReasoningPiece,
    RenderedChat,
    TextPiece,
    ToolCall,
)
from icehouse_server.domain.events import (
    Delta,
    Event,
    Failed,
    Finished,
    FinishReason,
    PrefillProgress,
    Started,
)
from icehouse_server.domain.model import ModelInfo
from icehouse_server.domain.request import GenerationRequest
from icehouse_server.rpc.engine_client.engine_ports import ServedModel
from icehouse_server.rpc.messages.proto_map import duration_proto, timestamp_proto
from icehouse_server.rpc.messages.responses import (
    NO_NOTES,
    ReportNotes,
    Spell,
    cache_report_proto,
    delta_proto,
    finished_proto,
    progress_proto,
)
from icehouse_server.text.replies.reply_splitter import ReplySplitter
from icehouse_server.text.reply_memory import ReplyMemory, ReplyPlace, ReplyScope


@dataclasses.dataclass(frozen=True, slots=True)
class RenderedConversation:
    """A conversation and its prompt."""

    conversation: Conversation
    rendered: RenderedChat
    replies: KnownReplies | None = None
    """Where the reply is remembered, if it is."""
    place: ReplyPlace | None = None
    """The key under which the reply is remembered."""

    def new_note(self, info: ModelInfo, on_end: OnEnd | None) -> ReplyNote | None:
        """Return the note that records a reply, or None if nobody wants it or it continues a turn."""
        wanted = [] if on_end is None else [on_end]
        if self.replies is not None and self.place is not None:
            wanted.append(
                functools.partial(self.replies.memory.remember, self.place, self.rendered.token_ids)
            )
        if not wanted or not self.conversation.adds_generation_prompt:
            return None
        return ReplyNote(wanted, end_token_ids=frozenset(info.eos_token_ids))


@dataclasses.dataclass(frozen=True, slots=True)
class Prepared:
    """A request that is ready to run. `chat` is None if the prompt was text or tokens: its output is not
    split into parts."""

    model: ServedModel
    request: GenerationRequest
    chat: RenderedConversation | None
    receive_time: float
    """`Clock.wall` when the server received the request."""
    completion_count: int = 1
    notes: ReportNotes = NO_NOTES
    """What its cache reports say in addition to the engine's."""
    on_end: OnEnd | None = None
    """Called with the reply if the model ended it itself."""
    load_s: float = 0.0
    """How long the request waited for its model to load."""

    @property
    def completions(self) -> tuple[GenerationRequest, ...]:
        return tuple(self.request.completion(index) for index in range(self.completion_count))

    @property
    def requests(self) -> tuple[GenerationRequest, ...]:
        """The requests for the engine: one for each completion, or a single one if all are alike."""
        return self.completions[:1] if self._is_greedy else self.completions

    def completions_of(self, index: int) -> Sequence[int]:
        """Return the completions that receive the events of `requests[index]`."""
        return range(self.completion_count) if self._is_greedy else (index,)

    @property
    def _is_greedy(self) -> bool:
        return self.request.sampling.temperature == 0.0

    def new_replies(self) -> ReplyStream:
        return ReplyStream([self._new_reply(request) for request in self.completions])

    def _new_reply(self, request: GenerationRequest) -> ReplyMessages:
        info = self.model.info
        splitter = None
        if self.chat is not None:
            make_call_id = call_id_maker(request.name, request.prompt_token_ids)
            splitter = self.model.tokenizer.reply_splitter(
                self.chat.conversation, self.chat.rendered, make_call_id=make_call_id
            )
        started = inference.Started(
            request_id=request.name,
            model=info.model_id,
            seed=request.sampling.seed,
            receive_time=timestamp_proto(self.receive_time),
            system_fingerprint=info.system_fingerprint(request.adapter),
            # The smallest of what was asked for, what the server allows and what the context leaves.
            max_output_tokens=min(
                request.max_output_tokens, info.context_token_limit - len(request.prompt_token_ids)
            ),
            unenforced_keywords=() if request.grammar is None else request.grammar.unenforced,
            load_duration=duration_proto(self.load_s) if self.load_s else None,
        )
        return ReplyMessages(
            started=started,
            splitter=splitter,
            piece=self.model.tokenizer.piece,
            notes=self.notes,
            note=None if self.chat is None else self.chat.new_note(info, self.on_end),
        )


_CUT = (FinishReason.LENGTH, FinishReason.CONTEXT_LENGTH)
"""Reasons that mean an output was cut off."""


class ReplyStream:
    """Turns the events of all completions of a request into the messages of one stream."""

    def __init__(self, replies: Sequence[ReplyMessages]) -> None:
        self._replies = replies
        self._has_started = False

    def responses(self, index: int, event: Event) -> list[inference.StreamResponse]:
        """Return the messages to send for an event of completion `index`."""
        if isinstance(event, Started):
            is_first, self._has_started = not self._has_started, True
            return self._replies[0].responses(event) if is_first else []
        if isinstance(event, PrefillProgress) and index > 0:
            # All completions share the prefill of the first one, or nearly.
            return []
        responses = self._replies[index].responses(event)
        for response in responses:
            if response.HasField("delta"):
                response.delta.completion_index = index
            elif response.HasField("finished"):
                response.finished.completion_index = index
        return responses


class ReplyMessages:
    """Turns the events of one completion into messages. Without a splitter all output is text."""

    def __init__(
        self,
        *,
        started: inference.Started,
        splitter: ReplySplitter | None,
        piece: Spell,
        notes: ReportNotes = NO_NOTES,
        note: ReplyNote | None = None,
    ) -> None:
        self._notes = notes
        self._note = note
        self._piece = piece
        self._started = started
        """What is known before the reply begins."""
        self._splitter = splitter

    def responses(self, event: Event) -> list[inference.StreamResponse]:
        match event:
            case Started():
                started = inference.Started(
                    prompt_tokens=event.prompt_token_count,
                    cache=cache_report_proto(event.cache, self._notes),
                    queue_duration=duration_proto(event.queue_s),
                )
                started.MergeFrom(self._started)
                return [inference.StreamResponse(started=started)]
            case PrefillProgress():
                return [inference.StreamResponse(prefill_progress=progress_proto(event, piece=self._piece))]
            case Delta():
                return [inference.StreamResponse(delta=delta) for delta in self._deltas(event)]
            case Finished():
                return self._end(event)
            case Failed():
                raise AssertionError("a failure is raised, not handed out")

    def _deltas(self, event: Delta) -> list[inference.Delta]:
        """Return at least one message: tokens are sent even while their text is held back."""
        whole = delta_proto(event, piece=self._piece)
        if self._note is not None:
            self._note.add_tokens(event.token_ids)
        if self._splitter is None:
            self._take([TextPiece(event.text)])
            return [whole]
        pieces = self._splitter.push(event.text)
        self._take(pieces)
        whole.text = ""
        if not pieces:
            return [whole]
        whole.MergeFrom(_piece_proto(pieces[0]))
        return [whole, *(_piece_proto(piece) for piece in pieces[1:])]

    def _end(self, event: Finished) -> list[inference.StreamResponse]:
        rest: Sequence[Piece] = ()
        if self._splitter is not None:
            rest = self._splitter.finish(is_cut=event.reason in _CUT)
        self._take(rest)
        if self._note is not None:
            self._note.end(event)
        has_calls = self._splitter is not None and self._splitter.has_calls
        if has_calls and event.reason is FinishReason.STOP_TOKEN:
            event = dataclasses.replace(event, reason=FinishReason.TOOL_CALLS)
        held = [inference.StreamResponse(delta=_piece_proto(piece)) for piece in rest]
        return [*held, inference.StreamResponse(finished=finished_proto(event))]

    def _take(self, pieces: Sequence[Piece]) -> None:
        if self._note is not None:
            for piece in pieces:
                self._note.add(piece)


def _piece_proto(piece: Piece) -> inference.Delta:
    match piece:
        case TextPiece():
            return inference.Delta(text=piece.text)
        case ReasoningPiece():
            return inference.Delta(reasoning=piece.text)
        case MalformedPiece():
            malformed = tool_pb2.MalformedToolCall(text=piece.text, problem=piece.problem)
            return inference.Delta(text=piece.text, malformed_tool_call=malformed)
        case CallPiece():
            call = tool_pb2.ToolCallDelta(
                index=piece.index,
                id=piece.id,
                name=piece.name,
                arguments_json=piece.arguments_json,
                withdrawn=piece.is_withdrawn,
                repaired=piece.is_repaired,
            )
            return inference.Delta(tool_call=call)


CALL_ID_LENGTH = 9
"""Mistral's templates accept only ids of nine letters and digits."""


def call_id_maker(request_id: str, token_ids: Sequence[int]) -> Callable[[int], str]:
    """Return a function from a call's index to its id.

    The same request gives the same ids, from Generate and from Stream. A later turn of the conversation has a
    longer prompt, so its ids differ even under the same request id.
    """
    digest = hashlib.sha256(
        request_id.encode("utf-8") + b"\0" + array.array("q", token_ids).tobytes()
    ).digest()

    def make(index: int) -> str:
        return hashlib.sha256(digest + index.to_bytes(8, "big")).hexdigest()[:CALL_ID_LENGTH]

    return make


@dataclasses.dataclass(frozen=True, slots=True)
class KnownReplies:
    """The replies of one model to one tenant, with one adapter."""

    memory: ReplyMemory
    scope: ReplyScope


OnEnd = Callable[[ChatMessage, int | None], None]
"""Takes a reply that the model ended itself, as its caller read it, and the token that ended it. `token_ids`
of the reply are the drawn tokens without that one."""


class ReplyNote:
    """Collects a reply as its caller reads it, and passes it to `on_end` if the model ended it."""

    def __init__(self, on_end: Sequence[OnEnd], *, end_token_ids: frozenset[int]) -> None:
        self._on_end = on_end
        self._end_token_ids = end_token_ids
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._reasonings: list[str] = []
        self._calls: dict[int, tuple[CallPiece, list[str]]] = {}

    def add_tokens(self, token_ids: tuple[int, ...]) -> None:
        """Add new tokens."""
        self._token_ids += token_ids

    def add(self, piece: Piece) -> None:
        """Add a part of what is sent to the caller."""
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
        """Pass the reply on, unless a limit, a stop string or the caller's stop token ended it."""
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
            tell(message, end_token_id)
