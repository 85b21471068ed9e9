"""Answers of messages, whole and as events."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from icehouse.v1.cache_service_pb2 import WarmResult
from icehouse_client import FinishReason, Reply, StreamEvent, ToolCall
from icehouse_client.results import started_from

from icehouse_http.chat.answer import kept_tokens
from icehouse_http.errors import ApiError, Dialect
from icehouse_http.exchange import Frame
from icehouse_http.held import HeldCalls, HeldSpace, text_beside

_REASONS = {
    FinishReason.STOP_STRING: "stop_sequence",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.CONTEXT_LENGTH: "model_context_window_exceeded",
    FinishReason.TOOL_CALLS: "tool_use",
}
_SIGNATURE = "unsigned"
"""Where Anthropic signs: clients drop thinking without a signature."""

PING = Frame({"type": "ping"}, "ping")


def usage_of(
    *, prompt_tokens: int, cached_tokens: int, reuse_limit: str, output_tokens: int
) -> dict[str, Any]:
    """Return a cost. Prompt tokens are read from the cache, computed and kept in it, or only computed."""
    return _cost(
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        kept=kept_tokens(prompt_tokens - cached_tokens, reuse_limit),
        output_tokens=output_tokens,
    )


def _cost(*, prompt_tokens: int, cached_tokens: int, kept: int, output_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": prompt_tokens - cached_tokens - kept,
        "cache_creation_input_tokens": kept,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": output_tokens,
    }


class MessageAnswer:
    """Writes one answer of /v1/messages."""

    def __init__(self, request_id: str, ended: Callable[[], object]) -> None:
        """`ended` is called when all of the answer is known."""
        self._id = request_id
        self._ended = ended
        self._held = HeldCalls()
        self._space = HeldSpace()
        self._block_index = -1
        self._open = ""

    def whole(self, reply: Reply) -> Mapping[str, Any]:
        """Return the body of an answer that is not streamed."""
        self._ended()
        content: list[dict[str, Any]] = []
        if reply.reasoning:
            content.append({"type": "thinking", "thinking": reply.reasoning, "signature": _SIGNATURE})
        if text := text_beside(reply.tool_calls, reply.text):
            content.append({"type": "text", "text": text})
        for call in reply.tool_calls:
            arguments = json.loads(call.arguments_json)
            content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": arguments})
        stop = _stop_of(reply.finish_reason, reply.stop_string or "")
        return {**self._message(reply.model, _reply_usage(reply)), "content": content, **stop}

    def warmed(self, model: str, result: WarmResult) -> Mapping[str, Any]:
        """Return the body of the answer where the prompt was only brought into the cache."""
        self._ended()
        usage = _cost(
            prompt_tokens=result.usage.prompt_tokens,
            cached_tokens=result.usage.cached_tokens,
            kept=result.computed_tokens,
            output_tokens=0,
        )
        return {**self._message(model, usage), **_stop_of(FinishReason.LENGTH, "")}

    def ping(self) -> bytes:
        """Return what keeps a silent stream alive."""
        return PING.encode()

    def feed(self, event: StreamEvent) -> Iterable[Frame]:
        """Return the events for something that happened."""
        match event.WhichOneof("event"):
            case "started":
                began = started_from(event.started)
                usage = usage_of(
                    prompt_tokens=began.prompt_tokens,
                    cached_tokens=began.cached_tokens,
                    reuse_limit=began.reuse_limit,
                    output_tokens=0,
                )
                yield _typed("message_start", message=self._message(began.model, usage))
                yield PING
            case "delta":
                delta = event.delta
                if delta.HasField("tool_call"):
                    yield from self._calls(self._held.add(delta.tool_call))
                if delta.reasoning:
                    yield from self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                    yield self._delta({"type": "thinking_delta", "thinking": delta.reasoning})
                if delta.text:
                    yield from self._calls(self._held.flush())
                    yield from self._say(self._space.add(delta.text))
            case "finished":
                yield from self._calls(self._held.flush())
                yield from self._say(self._space.flush())
                yield from self._end_block()

    def end(self, reply: Reply) -> Iterable[Frame]:
        """Return why it ended and what it cost."""
        self._ended()
        stop = _stop_of(reply.finish_reason, reply.stop_string or "")
        yield _typed("message_delta", delta=stop, usage=_reply_usage(reply))
        yield _typed("message_stop")

    def fail(self, error: ApiError) -> Iterable[Frame]:
        """Return the error as the last event."""
        yield Frame(error.body(Dialect.ANTHROPIC), "error")

    def _message(self, model: str, usage: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def _say(self, text: str) -> Iterable[Frame]:
        if text:
            yield from self._begin("text", {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": text})

    def _begin(self, kind: str, block: Mapping[str, Any]) -> Iterable[Frame]:
        """Begin a block, unless one of its kind is open."""
        if self._open == kind:
            return
        yield from self._end_block()
        self._open = kind
        self._block_index += 1
        yield _typed("content_block_start", index=self._block_index, content_block=block)

    def _end_block(self) -> Iterable[Frame]:
        if not self._open:
            return
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": _SIGNATURE})
        self._open = ""
        yield _typed("content_block_stop", index=self._block_index)

    def _delta(self, delta: Mapping[str, Any]) -> Frame:
        return _typed("content_block_delta", index=self._block_index, delta=delta)

    def _calls(self, calls: Sequence[ToolCall]) -> Iterable[Frame]:
        for call in calls:
            self._space.drop()
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            yield from self._begin("tool_use", block)
            yield self._delta({"type": "input_json_delta", "partial_json": call.arguments_json})
            yield from self._end_block()


def _typed(kind: str, **fields: Any) -> Frame:
    return Frame({"type": kind, **fields}, kind)


def _reply_usage(reply: Reply) -> dict[str, Any]:
    return usage_of(
        prompt_tokens=reply.usage.prompt_tokens,
        cached_tokens=reply.usage.cached_tokens,
        reuse_limit=reply.reuse_limit,
        output_tokens=reply.usage.output_tokens,
    )


def _stop_of(reason: FinishReason, stop: str) -> dict[str, Any]:
    return {"stop_reason": _REASONS.get(reason, "end_turn"), "stop_sequence": stop or None}
