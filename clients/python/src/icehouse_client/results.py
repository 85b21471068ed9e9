"""From response messages to plain results, and the sum of a stream."""

from __future__ import annotations

import dataclasses
import enum
import json
from typing import Any

from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.duration_pb2 import Duration
from icehouse.v1 import inference_service_pb2 as inference
from icehouse.v1 import usage_pb2

from icehouse_client.chat import CallSum, MalformedToolCall, Message, ToolCall


class FinishReason(enum.StrEnum):
    """Why the output ended."""

    STOP_TOKEN = "STOP_TOKEN"
    STOP_STRING = "STOP_STRING"
    LENGTH = "LENGTH"
    CONTEXT_LENGTH = "CONTEXT_LENGTH"
    TOOL_CALLS = "TOOL_CALLS"
    UNKNOWN = "UNKNOWN"
    """A reason newer than this client."""


@dataclasses.dataclass(frozen=True, slots=True)
class Usage:
    """What a request cost. Durations in seconds, measured on the server."""

    prompt_tokens: int
    cached_tokens: int
    ram_tokens: int
    ssd_tokens: int
    output_tokens: int
    queue_s: float
    restore_s: float
    prefill_s: float
    decode_s: float
    ttft_s: float
    total_s: float
    draft_tokens: int = 0
    """Guesses of speculation; `accepted_draft_tokens` of them saved a step each."""
    accepted_draft_tokens: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Reply:
    """A complete output. `reuse_limit` tells why not more of the prompt came from the cache."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_string: str | None
    usage: Usage
    reuse_limit: str
    request_id: str
    model: str
    seed: int
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    malformed_tool_calls: tuple[MalformedToolCall, ...] = ()

    def json(self) -> Any:
        """Return the value of an output in a JSON format; raises ValueError when a limit cut it."""
        if self.finish_reason is not FinishReason.STOP_TOKEN:
            raise ValueError(f"the output ended with {self.finish_reason} before it was complete")
        return json.loads(self.text)

    def message(self) -> Message:
        """Return the assistant's turn, for the next request of the conversation."""
        return Message(
            "assistant",
            self.text,
            reasoning=self.reasoning,
            tool_calls=self.tool_calls,
            token_ids=self.token_ids,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Started:
    """The request left the queue; `cached_tokens` of its `prompt_tokens` are reused."""

    request_id: str
    model: str
    prompt_tokens: int
    cached_tokens: int
    reuse_limit: str
    seed: int


@dataclasses.dataclass(frozen=True, slots=True)
class Token:
    """One token: its id and the vocabulary's spelling."""

    id: int
    piece: str


def reply_from(response: inference.GenerateResponse) -> Reply:
    """Return the answer of Generate."""
    return Reply(
        text=response.text,
        token_ids=tuple(response.token_ids),
        finish_reason=_finish_reason(response.finish_reason),
        stop_string=response.stop_string if response.HasField("stop_string") else None,
        usage=_usage(response.usage),
        reuse_limit=_reuse_limit(response.cache),
        request_id=response.request_id,
        model=response.model,
        seed=response.seed,
        reasoning=response.reasoning,
        tool_calls=tuple(ToolCall(c.id, c.name, c.arguments_json) for c in response.tool_calls),
        malformed_tool_calls=tuple(
            MalformedToolCall(found.text, found.problem) for found in response.malformed_tool_calls
        ),
    )


def tokens_from(response: inference.TokenizeResponse) -> list[Token]:
    """Return the answer of Tokenize."""
    return [Token(token.id, token.piece) for token in response.tokens]


class StreamSum:
    """Adds up the events of a stream; both kinds of streams share it."""

    def __init__(self) -> None:
        self.started: Started | None = None
        self.reply: Reply | None = None
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._reasonings: list[str] = []
        self._calls = CallSum()
        self._malformed: list[MalformedToolCall] = []

    def add(self, response: inference.StreamResponse) -> str:
        """Take one event and return its text, empty for events that have none."""
        kind = response.WhichOneof("event")
        if kind == "started":
            self.started = _started(response.started)
        elif kind == "finished":
            self.reply = self._reply(response.finished)
        elif kind == "delta":
            self._add_delta(response.delta)
            return response.delta.text
        return ""

    def _add_delta(self, delta: inference.Delta) -> None:
        self._texts.append(delta.text)
        self._token_ids.extend(delta.token_ids)
        self._reasonings.append(delta.reasoning)
        if delta.HasField("tool_call"):
            self._calls.add(delta.tool_call)
        if delta.HasField("malformed_tool_call"):
            found = delta.malformed_tool_call
            self._malformed.append(MalformedToolCall(found.text, found.problem))

    def _reply(self, finished: inference.Finished) -> Reply:
        started = self.started
        assert started is not None, "a stream finished that never started"
        return Reply(
            text="".join(self._texts),
            token_ids=tuple(self._token_ids),
            finish_reason=_finish_reason(finished.finish_reason),
            stop_string=finished.stop_string if finished.HasField("stop_string") else None,
            usage=_usage(finished.usage),
            reuse_limit=started.reuse_limit,
            request_id=started.request_id,
            model=started.model,
            seed=started.seed,
            reasoning="".join(self._reasonings),
            tool_calls=self._calls.calls,
            malformed_tool_calls=tuple(self._malformed),
        )


def _started(started: inference.Started) -> Started:
    return Started(
        request_id=started.request_id,
        model=started.model,
        prompt_tokens=started.prompt_tokens,
        cached_tokens=started.cache.cached_tokens,
        reuse_limit=_reuse_limit(started.cache),
        seed=started.seed,
    )


def _usage(usage: usage_pb2.Usage) -> Usage:
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        ram_tokens=usage.ram_tokens,
        ssd_tokens=usage.ssd_tokens,
        output_tokens=usage.output_tokens,
        queue_s=_seconds(usage.queue_duration),
        restore_s=_seconds(usage.restore_duration),
        prefill_s=_seconds(usage.prefill_duration),
        decode_s=_seconds(usage.decode_duration),
        ttft_s=_seconds(usage.time_to_first_token),
        total_s=_seconds(usage.total_duration),
        draft_tokens=usage.draft_tokens,
        accepted_draft_tokens=usage.accepted_draft_tokens,
    )


def _seconds(duration: Duration) -> float:
    return duration.ToNanoseconds() / 1e9


def _finish_reason(value: int) -> FinishReason:
    name = _enum_name(usage_pb2.FinishReason.DESCRIPTOR, value).removeprefix("FINISH_REASON_")
    return FinishReason(name) if name in FinishReason.__members__ else FinishReason.UNKNOWN


def _reuse_limit(report: usage_pb2.CacheReport) -> str:
    return _enum_name(usage_pb2.ReuseLimit.DESCRIPTOR, report.limit).removeprefix("REUSE_LIMIT_")


def _enum_name(descriptor: EnumDescriptor, value: int) -> str:
    known = descriptor.values_by_number.get(value)
    return "UNKNOWN" if known is None else known.name
