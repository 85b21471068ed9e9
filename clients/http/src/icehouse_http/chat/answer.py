"""Answers of chat completions, whole and as chunks."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from icehouse_client import Completion, FinishReason, Options, Reply, StreamEvent, ToolCall
from icehouse_client.logprobs import logprobs_from
from icehouse_client.results import finish_reason_of

from icehouse_http.errors import ApiError, Dialect
from icehouse_http.exchange import COMMENT, Frame
from icehouse_http.held import HeldCalls, HeldSpace, text_beside
from icehouse_http.logprobs import chat_logprobs

_REASONS = {
    FinishReason.LENGTH: "length",
    FinishReason.CONTEXT_LENGTH: "length",
    FinishReason.TOOL_CALLS: "tool_calls",
}

_NOTHING_KEPT = ("NONE", "SWITCHED_OFF", "UNSUPPORTED")
"""Limits of reuse with which a prompt adds nothing to the cache: all of it is there, or nothing is kept."""

DONE = Frame("[DONE]")


def finish_reason(reason: FinishReason) -> str:
    """Return why an output ended, in OpenAI's word."""
    return _REASONS.get(reason, "stop")


def outputs_of(reply: Reply) -> Sequence[Completion]:
    """Return every output of a reply, the only one too."""
    return reply.completions or (reply,)


def usage_of(reply: Reply) -> dict[str, Any]:
    """Return what a reply cost: the prompt once, and the tokens of all outputs."""
    outputs = [output.usage for output in outputs_of(reply)]
    output_tokens = sum(usage.output_tokens for usage in outputs)
    return {
        "prompt_tokens": reply.usage.prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": reply.usage.prompt_tokens + output_tokens,
        "prompt_tokens_details": cache_details_of(reply),
        "completion_tokens_details": {"reasoning_tokens": sum(usage.reasoning_tokens for usage in outputs)},
    }


def cache_details_of(reply: Reply) -> dict[str, int]:
    """Return what of a prompt was in the cache, and what is there now."""
    prompt_tokens, cached_tokens = reply.usage.prompt_tokens, reply.usage.cached_tokens
    kept = kept_tokens(prompt_tokens - cached_tokens, reply.reuse_limit)
    return {"cached_tokens": cached_tokens, "cache_write_tokens": kept}


def kept_tokens(computed_tokens: int, reuse_limit: str) -> int:
    """Return how many of a prompt's computed tokens are kept in the cache."""
    return 0 if reuse_limit in _NOTHING_KEPT else computed_tokens


def call_dict(call: ToolCall) -> dict[str, Any]:
    """Return a call as chat has it."""
    function = {"name": call.name, "arguments": call.arguments_json}
    return {"id": call.id, "type": "function", "function": function}


class ChatAnswer:
    """Writes one answer of /v1/chat/completions."""

    def __init__(self, request_id: str, options: Options, *, tells_usage: bool) -> None:
        self._id = request_id
        self._created = int(time.time())
        self._has_logprobs = "logprobs" in options
        self._tells_usage = tells_usage
        self._count = options.get("completions", 1)
        self._head: dict[str, Any] = {}
        self._outputs = [_Choice(index) for index in range(self._count)]

    def whole(self, reply: Reply) -> Mapping[str, Any]:
        """Return the body of an answer that is not streamed."""
        choices = [
            {
                "index": index,
                "message": _message_of(output),
                "logprobs": chat_logprobs(output.logprobs) if self._has_logprobs else None,
                "finish_reason": finish_reason(output.finish_reason),
            }
            for index, output in enumerate(outputs_of(reply))
        ]
        return {
            "id": self._id,
            "object": "chat.completion",
            "created": self._created,
            "model": reply.model,
            "system_fingerprint": reply.system_fingerprint,
            "choices": choices,
            "usage": usage_of(reply),
        }

    def ping(self) -> bytes:
        """Return what keeps a silent stream alive."""
        return COMMENT

    def feed(self, event: StreamEvent) -> Iterable[Frame]:
        """Return the chunks for something that happened."""
        match event.WhichOneof("event"):
            case "started":
                self._head = {
                    "id": self._id,
                    "object": "chat.completion.chunk",
                    "created": self._created,
                    "model": event.started.model,
                    "system_fingerprint": event.started.system_fingerprint,
                }
                for index in range(self._count):
                    yield self._chunk(index, {"role": "assistant", "content": ""})
            case "delta":
                choice = self._outputs[event.delta.completion_index]
                if self._has_logprobs:
                    choice.logprobs += chat_logprobs(logprobs_from(event.delta.logprobs))["content"]
                for delta in choice.deltas(event):
                    yield self._chunk(choice.index, delta)
            case "finished":
                choice = self._outputs[event.finished.completion_index]
                for delta in choice.rest():
                    yield self._chunk(choice.index, delta)
                reason = finish_reason(finish_reason_of(event.finished.finish_reason))
                yield self._chunk(choice.index, {}, reason)

    def end(self, reply: Reply) -> Iterable[Frame]:
        """Return the cost, where it was asked for, and the end."""
        if self._tells_usage:
            yield Frame({**self._head, "choices": [], "usage": usage_of(reply)})
        yield DONE

    def fail(self, error: ApiError) -> Iterable[Frame]:
        """Return the error as the last event."""
        yield Frame(error.body(Dialect.OPENAI))

    def _chunk(self, index: int, delta: Mapping[str, Any], reason: str | None = None) -> Frame:
        logprobs = None
        if pending := self._outputs[index].logprobs:
            logprobs, self._outputs[index].logprobs = {"content": pending, "refusal": None}, []
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        usage: dict[str, Any] = {"usage": None} if self._tells_usage else {}
        return Frame({**self._head, "choices": [choice], **usage})


class _Choice:
    """One output as it grows: the call that is held, and log probabilities that no chunk has told yet."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._held = HeldCalls()
        self._space = HeldSpace()
        self.logprobs: list[dict[str, Any]] = []
        self._call_count = 0

    def deltas(self, event: StreamEvent) -> Iterable[dict[str, Any]]:
        delta = event.delta
        if delta.HasField("tool_call"):
            yield from self._calls(self._held.add(delta.tool_call))
        if delta.reasoning:
            yield {"reasoning_content": delta.reasoning}
        if delta.text:
            yield from self._calls(self._held.flush())
            if text := self._space.add(delta.text):
                yield {"content": text}

    def rest(self) -> Iterable[dict[str, Any]]:
        """Return what is still held at the end."""
        yield from self._calls(self._held.flush())
        if text := self._space.flush():
            yield {"content": text}

    def _calls(self, calls: Sequence[ToolCall]) -> Iterable[dict[str, Any]]:
        for call in calls:
            self._space.drop()
            yield {"tool_calls": [{"index": self._call_count, **call_dict(call)}]}
            self._call_count += 1


def _message_of(output: Completion) -> dict[str, Any]:
    text = text_beside(output.tool_calls, output.text)
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if output.reasoning:
        message["reasoning_content"] = output.reasoning
    if output.tool_calls:
        message["tool_calls"] = [call_dict(call) for call in output.tool_calls]
        message["content"] = text or None
    return message
