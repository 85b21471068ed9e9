"""Reply sum: what Generate answers, the events of a stream added up by completion.

Log probabilities, by far the most of it, are kept as they go over the wire, which takes a quarter of what the
messages do, and the answer is put together of bytes: the event loop touches each of them once, as it comes.
"""

from __future__ import annotations

from collections.abc import Iterable

from icehouse.v1 import completion_pb2, tool_pb2, usage_pb2
from icehouse.v1 import inference_service_pb2 as inference

from icehouse_server.domain.sampling import SEED_RANGE
from icehouse_server.rpc.calls.wire import Encoded

_LENGTH_DELIMITED = 2
"""The wire type of messages in messages."""


class ReplySum:
    """Adds the messages of a request up."""

    def __init__(self, *, completion_count: int) -> None:
        self._started = inference.Started()
        self._logprobs = bytearray()
        """Those of the prompt and of the first completion, as fields of the answer."""
        self._outputs = [_OutputSum() for _ in range(completion_count)]
        self.size_bytes = 0
        """What was added, as it goes over the wire."""

    def add(self, responses: Iterable[inference.StreamResponse]) -> None:
        """Add messages, in order."""
        for response in responses:
            self.size_bytes += response.ByteSize()
            match response.WhichOneof("event"):
                case "started":
                    self._started = response.started
                case "prefill_progress":
                    told = response.prefill_progress.prompt_logprobs
                    if told:
                        self._logprobs += inference.GenerateResponse(prompt_logprobs=told).SerializeToString()
                case "delta":
                    self._add(response.delta)
                case "finished":
                    self._outputs[response.finished.completion_index].finished = response.finished

    def response(self, caches: Iterable[usage_pb2.CacheReport], *, lists_completions: bool) -> Encoded:
        """Return the whole, a GenerateResponse, once each `finished` was added; `caches` is what each
        completion reused."""
        completions = [
            output.completion(index, seed=(self._started.seed + index) % SEED_RANGE, cache=cache)
            for index, (output, cache) in enumerate(zip(self._outputs, caches, strict=True))
        ]
        first = completions[0]
        answer = inference.GenerateResponse(
            request_id=self._started.request_id,
            model=self._started.model,
            text=first.text,
            token_ids=first.token_ids,
            finish_reason=first.finish_reason,
            stop_string=first.stop_string if first.HasField("stop_string") else None,
            stop_token_id=first.stop_token_id if first.HasField("stop_token_id") else None,
            usage=first.usage,
            cache=first.cache,
            seed=first.seed,
            tool_calls=first.tool_calls,
            reasoning=first.reasoning,
            malformed_tool_calls=first.malformed_tool_calls,
            create_time=self._started.create_time,
            system_fingerprint=self._started.system_fingerprint,
            max_output_tokens=self._started.max_output_tokens,
            unenforced_keywords=self._started.unenforced_keywords,
        )
        parts = [answer.SerializeToString(), bytes(self._logprobs)]
        if lists_completions:
            for completion, output in zip(completions, self._outputs, strict=True):
                parts += _completion_field(completion.SerializeToString(), bytes(output.logprobs))
        return Encoded(b"".join(parts))

    def _add(self, delta: inference.Delta) -> None:
        self._outputs[delta.completion_index].add(delta)
        if delta.logprobs and delta.completion_index == 0:
            self._logprobs += inference.GenerateResponse(logprobs=delta.logprobs).SerializeToString()


class _OutputSum:
    """One completion."""

    def __init__(self) -> None:
        self.finished = inference.Finished()
        self._texts: list[str] = []
        self._reasonings: list[str] = []
        self._token_ids: list[int] = []
        self.logprobs = bytearray()
        """As fields of a completion."""
        self._calls: dict[int, tool_pb2.ToolCall] = {}
        self._arguments: dict[int, list[str]] = {}
        self._malformed: list[tool_pb2.MalformedToolCall] = []

    def add(self, delta: inference.Delta) -> None:
        self._texts.append(delta.text)
        self._reasonings.append(delta.reasoning)
        self._token_ids.extend(delta.token_ids)
        if delta.logprobs:
            self.logprobs += completion_pb2.Completion(logprobs=delta.logprobs).SerializeToString()
        if delta.HasField("malformed_tool_call"):
            self._malformed.append(delta.malformed_tool_call)
        if delta.HasField("tool_call"):
            self._add_call(delta.tool_call)

    def completion(self, index: int, *, seed: int, cache: usage_pb2.CacheReport) -> completion_pb2.Completion:
        for call_index, call in self._calls.items():
            call.arguments_json = "".join(self._arguments[call_index])
        finished = self.finished
        return completion_pb2.Completion(
            index=index,
            text="".join(self._texts),
            token_ids=self._token_ids,
            finish_reason=finished.finish_reason,
            stop_string=finished.stop_string if finished.HasField("stop_string") else None,
            stop_token_id=finished.stop_token_id if finished.HasField("stop_token_id") else None,
            usage=finished.usage,
            cache=cache,
            seed=seed,
            tool_calls=self._calls.values(),
            reasoning="".join(self._reasonings),
            malformed_tool_calls=self._malformed,
        )

    def _add_call(self, piece: tool_pb2.ToolCallDelta) -> None:
        if piece.withdrawn:
            del self._calls[piece.index]
            return
        if piece.index not in self._calls:
            self._calls[piece.index] = tool_pb2.ToolCall(id=piece.id, name=piece.name)
        self._calls[piece.index].repaired |= piece.repaired
        self._arguments.setdefault(piece.index, []).append(piece.arguments_json)


def _completion_field(*parts: bytes) -> tuple[bytes, ...]:
    """Return one of the answer's `completions`, made of these parts, as it goes over the wire."""
    tag = inference.GenerateResponse.COMPLETIONS_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
    return (_varint(tag), _varint(sum(len(part) for part in parts)), *parts)


def _varint(value: int) -> bytes:
    groups = bytearray()
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    groups.append(value)
    return bytes(groups)
