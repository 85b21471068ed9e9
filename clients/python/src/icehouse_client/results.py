"""From response messages to plain results."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import json
from typing import Any, TypeVar, overload

from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.duration_pb2 import Duration
from icehouse.v1 import completion_pb2, speculation_pb2, usage_pb2
from icehouse.v1 import inference_service_pb2 as inference

from icehouse_client.chat import MalformedToolCall, Message, ToolCall
from icehouse_client.logprobs import TokenLogprobs, logprobs_from
from icehouse_client.output_types import Mismatch, name_of, read_json

Value = TypeVar("Value")


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
    image_tokens: int = 0
    """Of `prompt_tokens`, those that stand for images."""
    reasoning_tokens: int = 0
    """Of the output tokens, those that the model thought with."""
    speculation_limit: str = ""
    """Why less was guessed than was asked for, in the API's word; empty where all of it was."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One output. `logprobs` has an entry for each of `token_ids` where asked for."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_string: str | None
    usage: Usage
    seed: int
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    malformed_tool_calls: tuple[MalformedToolCall, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    stop_token_id: int | None = None
    """The token that ended it, where one did: the model's own or one of `stop_token_ids`."""

    def json(self) -> Any:
        """Return the value of an output in a JSON format; raises OutputError when a limit cut it."""
        self._check_complete()
        try:
            return json.loads(self.text)
        except ValueError as error:
            raise OutputError(f"the output is not JSON: {error}", completion=self) from error

    @overload
    def decode(self, output_type: type[Value]) -> Value: ...

    @overload
    def decode(self, output_type: object) -> Any: ...

    def decode(self, output_type: object) -> Any:
        """Return the value of an output that was held to `schema_of(output_type)`.

        Raises OutputError where a limit cut it or it does not fit, and TypeError for a type without a schema.
        """
        self._check_complete()
        try:
            return read_json(self.text, output_type)
        except Mismatch as error:
            problem = f"the output does not fit {name_of(output_type)}: {error}"
            raise OutputError(problem, completion=self) from error

    def _check_complete(self) -> None:
        if self.finish_reason is not FinishReason.STOP_TOKEN:
            problem = f"the output ended with {self.finish_reason} before it was complete"
            raise OutputError(problem, completion=self)

    def message(self) -> Message:
        """Return the assistant's turn, for the next request of the conversation."""
        return Message(
            "assistant",
            self.text,
            reasoning=self.reasoning,
            tool_calls=self.tool_calls,
            token_ids=self.token_ids,
        )


class OutputError(ValueError):
    """An output cannot be read as what was asked for: a limit cut it, or it does not fit.

    `completion` is the output, with its text and its cost.
    """

    def __init__(self, message: str, *, completion: Completion) -> None:
        super().__init__(message)
        self.completion = completion

    @property
    def text(self) -> str:
        """The output as it came."""
        return self.completion.text


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reply(Completion):
    """The answer to a request: its first output, and in `completions` all of them where several could come.

    `reuse_limit` tells why not more of the prompt came from the cache; `prompt_logprobs` has an entry for
    each prompt token but the first where asked for.
    """

    reuse_limit: str
    request_id: str
    model: str
    receive_time: datetime.datetime
    """When the server received the request, by its clock, in UTC."""
    system_fingerprint: str
    """Changes when the same request may give another output."""
    max_output_tokens: int = 0
    """What was asked for, or less where the server's limit or the context is less; 0 of an older server."""
    unenforced_keywords: tuple[str, ...] = ()
    """JSON pointers of what of the schema the output was not held to, such as `uniqueItems`."""
    load_s: float = 0.0
    """How long it waited for its model to be loaded; 0 where that was there."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    completions: tuple[Completion, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Started:
    """The request left the queue; `cached_tokens` of its `prompt_tokens` are reused."""

    request_id: str
    model: str
    prompt_tokens: int
    cached_tokens: int
    reuse_limit: str
    seed: int
    receive_time: datetime.datetime
    system_fingerprint: str
    max_output_tokens: int = 0
    """What was asked for, or less where the server's limit or the context is less; 0 of an older server."""
    unenforced_keywords: tuple[str, ...] = ()
    load_s: float = 0.0
    """How long it waited for its model to be loaded; 0 where that was there."""
    queue_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Token:
    """One token: its id and the vocabulary's spelling."""

    id: int
    piece: str


def reply_from(response: inference.GenerateResponse) -> Reply:
    """Return the answer of Generate."""
    return reply_of(
        _completion(response),
        begun=response,
        completions=tuple(_completion(completion) for completion in response.completions),
        prompt_logprobs=logprobs_from(response.prompt_logprobs),
    )


def reply_of(
    first: Completion,
    *,
    begun: inference.Started | inference.GenerateResponse,
    completions: tuple[Completion, ...],
    prompt_logprobs: tuple[TokenLogprobs, ...],
) -> Reply:
    """Return an answer whose own output is `first`; `begun` has what is known from its beginning on."""
    return Reply(
        **{field.name: getattr(first, field.name) for field in dataclasses.fields(Completion)},
        **_beginning(begun),
        prompt_logprobs=prompt_logprobs,
        completions=completions,
    )


def _beginning(message: inference.Started | inference.GenerateResponse) -> dict[str, Any]:
    """Return the fields of `Reply` and of `Started` that both messages have."""
    return {
        "reuse_limit": reuse_limit_name(message.cache),
        "request_id": message.request_id,
        "model": message.model,
        "receive_time": message.receive_time.ToDatetime(datetime.UTC),
        "system_fingerprint": message.system_fingerprint,
        "max_output_tokens": message.max_output_tokens,
        "unenforced_keywords": tuple(message.unenforced_keywords),
        "load_s": seconds(message.load_duration),
    }


def _completion(output: inference.GenerateResponse | completion_pb2.Completion) -> Completion:
    return Completion(
        text=output.text,
        token_ids=tuple(output.token_ids),
        finish_reason=finish_reason_of(output.finish_reason),
        stop_string=output.stop_string or None,
        usage=usage_from(output.usage),
        seed=output.seed,
        reasoning=output.reasoning,
        tool_calls=tuple(ToolCall(c.id, c.name, c.arguments_json, c.repaired) for c in output.tool_calls),
        malformed_tool_calls=tuple(
            MalformedToolCall(found.text, found.problem) for found in output.malformed_tool_calls
        ),
        logprobs=logprobs_from(output.logprobs),
        stop_token_id=output.stop_token_id if output.HasField("stop_token_id") else None,
    )


def tokens_from(response: inference.TokenizeResponse) -> list[Token]:
    """Return the answer of Tokenize."""
    return [Token(token.id, token.piece) for token in response.tokens]


def started_from(started: inference.Started) -> Started:
    """Return the first event of a stream."""
    return Started(
        **_beginning(started),
        prompt_tokens=started.prompt_tokens,
        cached_tokens=started.cache.cached_tokens,
        seed=started.seed,
        queue_s=seconds(started.queue_duration),
    )


def usage_from(usage: usage_pb2.Usage) -> Usage:
    """Return a cost as plain data."""
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        ram_tokens=usage.ram_tokens,
        ssd_tokens=usage.ssd_tokens,
        output_tokens=usage.output_tokens,
        queue_s=seconds(usage.queue_duration),
        restore_s=seconds(usage.restore_duration),
        prefill_s=seconds(usage.prefill_duration),
        decode_s=seconds(usage.decode_duration),
        ttft_s=seconds(usage.time_to_first_token),
        total_s=seconds(usage.total_duration),
        draft_tokens=usage.draft_tokens,
        accepted_draft_tokens=usage.accepted_draft_tokens,
        image_tokens=usage.image_tokens,
        reasoning_tokens=usage.reasoning_tokens,
        speculation_limit=_speculation_limit_name(usage.speculation_limit),
    )


def seconds(duration: Duration) -> float:
    """Return a duration in seconds."""
    return duration.ToNanoseconds() / 1e9


def finish_reason_of(value: int) -> FinishReason:
    """Return why an output ended."""
    name = _enum_name(usage_pb2.FinishReason.DESCRIPTOR, value).removeprefix("FINISH_REASON_")
    return FinishReason(name) if name in FinishReason.__members__ else FinishReason.UNKNOWN


def reuse_limit_name(report: usage_pb2.CacheReport) -> str:
    """Return why no more was reused, in the API's word."""
    return _enum_name(usage_pb2.ReuseLimit.DESCRIPTOR, report.limit).removeprefix("REUSE_LIMIT_")


def _speculation_limit_name(value: int) -> str:
    if not value:
        return ""
    name = _enum_name(speculation_pb2.SpeculationLimit.DESCRIPTOR, value)
    return name.removeprefix("SPECULATION_LIMIT_")


def _enum_name(descriptor: EnumDescriptor, value: int) -> str:
    known = descriptor.values_by_number.get(value)
    return "UNKNOWN" if known is None else known.name
