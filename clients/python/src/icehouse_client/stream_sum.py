"""The sum of a stream; both kinds of streams share it."""

from __future__ import annotations

from icehouse.v1 import inference_service_pb2 as inference

from icehouse_client.chat import CallSum, MalformedToolCall
from icehouse_client.logprobs import TokenLogprobs, logprobs_from
from icehouse_client.results import (
    Completion,
    Reply,
    Started,
    finish_reason_of,
    reply_of,
    started_from,
    usage_from,
)

StreamEvent = inference.StreamResponse
"""What happened to a running request, in the API's own message."""

_SEED_RANGE = 1 << 64


class StreamSum:
    """Adds up the events of a request for so many completions; 0 is one that is not listed."""

    def __init__(self, completion_count: int) -> None:
        self.started: Started | None = None
        self._begun: inference.Started | None = None
        self._lists_completions = completion_count > 0
        self._outputs = [_OutputSum() for _ in range(max(1, completion_count))]
        self._prompt_logprobs: list[TokenLogprobs] = []

    def add(self, response: StreamEvent) -> None:
        """Take one event."""
        kind = response.WhichOneof("event")
        if kind == "started":
            self._begun = response.started
            self.started = started_from(response.started)
        elif kind == "prefill_progress":
            self._prompt_logprobs += logprobs_from(response.prefill_progress.prompt_logprobs)
        elif kind == "finished":
            self._outputs[response.finished.completion_index].finished = response.finished
        elif kind == "delta":
            self._outputs[response.delta.completion_index].add(response.delta)

    @property
    def reply(self) -> Reply | None:
        """The whole answer; None before each completion has ended."""
        begun = self._begun
        if begun is None:
            return None
        completions: list[Completion] = []
        for index, output in enumerate(self._outputs):
            if output.finished is None:
                return None
            seed = (begun.seed + index) % _SEED_RANGE
            completions.append(output.completion(output.finished, seed=seed))
        return reply_of(
            completions[0],
            begun=begun,
            completions=tuple(completions) if self._lists_completions else (),
            prompt_logprobs=tuple(self._prompt_logprobs),
        )


class _OutputSum:
    """One completion."""

    def __init__(self) -> None:
        self.finished: inference.Finished | None = None
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._reasonings: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._calls = CallSum()
        self._malformed: list[MalformedToolCall] = []

    def add(self, delta: inference.Delta) -> None:
        self._texts.append(delta.text)
        self._token_ids.extend(delta.token_ids)
        self._reasonings.append(delta.reasoning)
        self._logprobs += logprobs_from(delta.logprobs)
        if delta.HasField("tool_call"):
            self._calls.add(delta.tool_call)
        if delta.HasField("malformed_tool_call"):
            found = delta.malformed_tool_call
            self._malformed.append(MalformedToolCall(found.text, found.problem))

    def completion(self, finished: inference.Finished, *, seed: int) -> Completion:
        return Completion(
            text="".join(self._texts),
            token_ids=tuple(self._token_ids),
            finish_reason=finish_reason_of(finished.finish_reason),
            stop_string=finished.stop_string or None,
            usage=usage_from(finished.usage),
            seed=seed,
            reasoning="".join(self._reasonings),
            tool_calls=self._calls.calls,
            malformed_tool_calls=tuple(self._malformed),
            logprobs=tuple(self._logprobs),
            stop_token_id=finished.stop_token_id if finished.HasField("stop_token_id") else None,
        )
