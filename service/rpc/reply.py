"""One output on its way to the wire: the engine's events, their text told apart, and the sum for Generate."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from icehouse.v1 import inference_service_pb2 as inference
from icehouse.v1 import logprobs_pb2, tool_pb2, usage_pb2

from service.domain.events import (
    Delta,
    Event,
    Failed,
    Finished,
    FinishReason,
    PrefillProgress,
    Started,
)
from service.domain.reply import CallPiece, MalformedPiece, Piece, ReasoningPiece, TextPiece
from service.rpc.convert import Spell, delta_proto, finished_proto, progress_proto, started_proto
from service.rpc.ports import SplitterPort


class Reply:
    """One output's events to the messages of a stream. Without a splitter everything is text."""

    def __init__(
        self, *, request_id: str, model_id: str, seed: int, splitter: SplitterPort | None, piece: Spell
    ) -> None:
        self._piece = piece
        self._request_id = request_id
        self._model_id = model_id
        self._seed = seed
        self._splitter = splitter

    def responses(self, event: Event) -> list[inference.StreamResponse]:
        """Return what is sent for an event of the engine."""
        match event:
            case Started():
                started = started_proto(
                    event, request_id=self._request_id, model_id=self._model_id, seed=self._seed
                )
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
        """Return one message at least: tokens are told even where their text has to wait."""
        whole = delta_proto(event, piece=self._piece)
        if self._splitter is None:
            return [whole]
        pieces = self._splitter.push(event.text)
        whole.text = ""
        if not pieces:
            return [whole]
        whole.MergeFrom(_piece_proto(pieces[0]))
        return [whole, *(_piece_proto(piece) for piece in pieces[1:])]

    def _end(self, event: Finished) -> list[inference.StreamResponse]:
        rest: Sequence[Piece] = ()
        if self._splitter is not None:
            rest = self._splitter.finish()
            if event.reason is FinishReason.STOP_TOKEN and self._splitter.has_calls:
                event = dataclasses.replace(event, reason=FinishReason.TOOL_CALLS)
        held = [inference.StreamResponse(delta=_piece_proto(piece)) for piece in rest]
        return [*held, inference.StreamResponse(finished=finished_proto(event))]


class ReplySum:
    """Adds a stream up to what Generate answers."""

    def __init__(self) -> None:
        self._started = inference.Started()
        self._finished = inference.Finished()
        self._texts: list[str] = []
        self._reasonings: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[logprobs_pb2.TokenLogprobs] = []
        self._prompt_logprobs: list[logprobs_pb2.TokenLogprobs] = []
        self._calls: dict[int, tool_pb2.ToolCall] = {}
        self._arguments: dict[int, list[str]] = {}
        self._malformed: list[tool_pb2.MalformedToolCall] = []

    def add(self, responses: Iterable[inference.StreamResponse]) -> None:
        """Add messages, in order."""
        for response in responses:
            match response.WhichOneof("event"):
                case "started":
                    self._started = response.started
                case "prefill_progress":
                    self._prompt_logprobs.extend(response.prefill_progress.prompt_logprobs)
                case "delta":
                    self._add_delta(response.delta)
                case "finished":
                    self._finished = response.finished

    def response(self, cache: usage_pb2.CacheReport) -> inference.GenerateResponse:
        """Return the whole, once `finished` was added."""
        for index, call in self._calls.items():
            call.arguments_json = "".join(self._arguments[index])
        finished = self._finished
        return inference.GenerateResponse(
            request_id=self._started.request_id,
            model=self._started.model,
            text="".join(self._texts),
            token_ids=self._token_ids,
            finish_reason=finished.finish_reason,
            stop_string=finished.stop_string if finished.HasField("stop_string") else None,
            usage=finished.usage,
            cache=cache,
            seed=self._started.seed,
            tool_calls=self._calls.values(),
            reasoning="".join(self._reasonings),
            malformed_tool_calls=self._malformed,
            logprobs=self._logprobs,
            prompt_logprobs=self._prompt_logprobs,
        )

    def _add_delta(self, delta: inference.Delta) -> None:
        self._texts.append(delta.text)
        self._reasonings.append(delta.reasoning)
        self._token_ids.extend(delta.token_ids)
        self._logprobs.extend(delta.logprobs)
        if delta.HasField("malformed_tool_call"):
            self._malformed.append(delta.malformed_tool_call)
        if delta.HasField("tool_call"):
            self._add_call(delta.tool_call)

    def _add_call(self, piece: tool_pb2.ToolCallDelta) -> None:
        if piece.withdrawn:
            del self._calls[piece.index]
            return
        if piece.index not in self._calls:
            self._calls[piece.index] = tool_pb2.ToolCall(id=piece.id, name=piece.name)
        self._arguments.setdefault(piece.index, []).append(piece.arguments_json)


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
            )
            return inference.Delta(tool_call=call)
