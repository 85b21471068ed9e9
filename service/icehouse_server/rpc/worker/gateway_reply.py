"""Worker reply: the engine's events as a gateway's chunks and completions. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from smg_grpc_proto.generated import vllm_engine_pb2 as worker

from icehouse_server.domain.events import Delta, Event, Finished, FinishReason, PrefillProgress, Started
from icehouse_server.domain.request import GenerationRequest, Logprob, TokenLogprobs
from icehouse_server.rpc.worker.gateway_request import LogprobsShown

FINISH_REASONS = {
    FinishReason.STOP_TOKEN: "stop",
    FinishReason.STOP_STRING: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CONTEXT_LENGTH: "length",
    FinishReason.TOOL_CALLS: "stop",
}
ABORTED = "abort"
_LOGPROB_BYTES = 120
"""About the memory that one takes as an object."""


class WorkerReply:
    """One output of a request. When streamed, new tokens are sent in chunks; otherwise all of them at the
    end."""

    def __init__(
        self,
        request: GenerationRequest,
        *,
        index: int,
        is_streamed: bool,
        shown: LogprobsShown,
        eos_token_ids: Sequence[int],
    ) -> None:
        self._request = request
        self._index = index
        self._is_streamed = is_streamed
        self._shown = shown
        self._eos_token_ids = frozenset(eos_token_ids)
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._cached_token_count = 0
        self._has_chunk = False
        self.buffered_bytes = 0
        """About the memory that it takes until its last message."""
        self.is_complete = False
        """Whether the last message was made."""

    def responses(self, event: Event) -> list[worker.GenerateResponse]:
        match event:
            case Started():
                self._cached_token_count = event.cache.cached_token_count
            case PrefillProgress():
                self._buffer(self._prompt_logprobs, event.logprobs)
            case Delta():
                self._token_ids += event.token_ids
                if not self._is_streamed:
                    self._buffer(self._logprobs, event.logprobs)
                else:
                    return [worker.GenerateResponse(chunk=self._chunk(event))]
            case Finished():
                self._cached_token_count = event.usage.cache.cached_token_count
                return [worker.GenerateResponse(complete=self._finished(event))]
        return []

    def aborted(self) -> worker.GenerateResponse:
        return worker.GenerateResponse(complete=self._complete(ABORTED))

    def _buffer(self, buffer: list[TokenLogprobs], entries: Sequence[TokenLogprobs]) -> None:
        buffer += entries
        self.buffered_bytes += _LOGPROB_BYTES * sum(
            1 + len(entry.top) + len(entry.asked) for entry in entries
        )

    def _chunk(self, delta: Delta) -> worker.GenerateStreamChunk:
        is_first, self._has_chunk = not self._has_chunk, True
        return worker.GenerateStreamChunk(
            token_ids=delta.token_ids,
            prompt_tokens=len(self._request.prompt_token_ids),
            # Of this chunk: the gateway adds them up.
            completion_tokens=len(delta.token_ids),
            cached_tokens=self._cached_token_count,
            output_logprobs=self._output_logprobs(delta.logprobs),
            input_logprobs=self._input_logprobs() if is_first else None,
            index=self._index,
        )

    def _finished(self, event: Finished) -> worker.GenerateComplete:
        complete = self._complete(FINISH_REASONS[event.reason])
        complete.spec_accepted_tokens = event.usage.drafts.accepted_count
        complete.spec_draft_tokens = event.usage.drafts.proposed_count
        if event.stop_string is not None:
            complete.matched_stop_str = event.stop_string
        elif event.stop_token_id is not None and event.stop_token_id not in self._eos_token_ids:
            # As in vLLM, the model's own end tokens are not reported.
            complete.matched_token_id = event.stop_token_id
        return complete

    def _complete(self, finish_reason: str) -> worker.GenerateComplete:
        self.is_complete = True
        return worker.GenerateComplete(
            output_ids=self._token_ids,
            finish_reason=finish_reason,
            prompt_tokens=len(self._request.prompt_token_ids),
            completion_tokens=len(self._token_ids),
            cached_tokens=self._cached_token_count,
            output_logprobs=None if self._is_streamed else self._output_logprobs(self._logprobs),
            input_logprobs=None if self._has_chunk else self._input_logprobs(),
            index=self._index,
        )

    def _output_logprobs(self, entries: Sequence[TokenLogprobs]) -> worker.OutputLogProbs | None:
        count = self._shown.output_top_count
        if count is None or not entries:
            return None
        return worker.OutputLogProbs(
            token_logprobs=[entry.logprob for entry in entries],
            token_ids=[entry.token_id for entry in entries],
            top_logprobs=[_top(entry.top[:count]) for entry in entries] if count else (),
        )

    def _input_logprobs(self) -> worker.InputLogProbs | None:
        count = self._shown.prompt_top_count
        if count is None:
            return None
        # Nothing comes before the first token, so it has no log probability.
        first = self._request.prompt_token_ids[0]
        entries = self._prompt_logprobs
        return worker.InputLogProbs(
            token_logprobs=[
                worker.InputTokenLogProb(),
                *(worker.InputTokenLogProb(value=entry.logprob) for entry in entries),
            ],
            token_ids=[first, *(entry.token_id for entry in entries)],
            top_logprobs=[worker.TopLogProbs(), *(_top(entry.top[:count]) for entry in entries)]
            if count
            else (),
        )


def _top(entries: Sequence[Logprob]) -> worker.TopLogProbs:
    return worker.TopLogProbs(
        values=[entry.logprob for entry in entries], token_ids=[entry.token_id for entry in entries]
    )
