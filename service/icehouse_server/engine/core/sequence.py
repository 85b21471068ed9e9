"""Sequence: a request during its life in the engine (inference thread)."""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Mapping
from collections.abc import Sequence as ReadSequence

import numpy as np

from icehouse_server.domain.blocks import Region, RegionKind, TokenKeys
from icehouse_server.domain.events import CacheReport, FinishReason, Started, Usage
from icehouse_server.domain.ids import BlockHash, SequenceId
from icehouse_server.domain.request import (
    NO_DRAFTS,
    DraftCounts,
    GenerationRequest,
    ImageSpan,
    Pooling,
    RopePositions,
    TokenLogprobs,
    Vector,
)
from icehouse_server.engine.core.ports import DecodeRow
from icehouse_server.text.detokenizer import Decode, TextStream


class Phase(enum.Enum):
    """A sequence's phase. It moves down this list, and back to WAITING when it is parked."""

    WAITING = enum.auto()
    FOLLOWING = enum.auto()
    """Another sequence is computing blocks that it shares; nothing to run."""
    LOADING = enum.auto()
    """Its blocks are being read from SSD; nothing to run."""
    RESTORING = enum.auto()
    """Its caches are being rebuilt from blocks."""
    PREFILLING = enum.auto()
    DECODING = enum.auto()
    ENDED = enum.auto()


@dataclasses.dataclass(slots=True, eq=False)
class Sequence:
    """Mutable, owned by the inference thread. Times are `Clock.monotonic` readings."""

    sequence_id: SequenceId
    request: GenerationRequest
    text: TextStream
    output_token_limit: int
    """`max_output_tokens`, or less if the context ends first."""
    input_token_ids: tuple[int, ...] = ()
    """The tokens to prefill: the prompt, and after parking also the output so far."""
    input_keys: TokenKeys = ()
    """The same tokens as the prefix cache knows them."""
    rope_positions: RopePositions | None = None
    """Set if the model places images on a grid."""
    has_started: bool = False
    """Whether `Started` was published; a parked sequence does not start twice."""
    park_count: int = 0
    fed_ahead_count: int = 0
    """How many tokens, from the last known one on, were already fed, so that their KV exists."""
    drafts: DraftCounts = NO_DRAFTS
    phase: Phase = Phase.WAITING
    processed_token_count: int = 0
    """Input tokens whose KV exists and may be kept, reused ones included."""
    loading_token_count: int = 0
    """Tokens whose pages are reserved while its blocks are read from SSD; else 0."""
    encoded_token_count: int = 0
    """Input tokens up to which the runner has the vectors of its images."""
    capture_points: list[int] = dataclasses.field(default_factory=list)
    """Input positions where prefill stops to keep a tail, since followers branch off there."""
    border_points: tuple[int, ...] = ()
    """Those of them that are message borders, where a checkpoint is kept."""
    overtaken_token_count: int = 0
    """Input tokens of younger sequences that ran while this one's waited."""
    passed_count: int = 0
    """How many others were admitted ahead of it, out of turn, because they fit in memory and it did not."""
    output_token_ids: list[int] = dataclasses.field(default_factory=list)
    undelivered_token_ids: list[int] = dataclasses.field(default_factory=list)
    undelivered_logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    prompt_logprob_count: int = 0
    """Prompt tokens after the first whose log probabilities were published."""
    unread_chunk_count: int = 0
    """Chunks dispatched to be measured or pooled whose results are not in yet."""
    measured_token_count: int = 0
    """Input tokens whose measurements are known."""
    cache: CacheReport = dataclasses.field(default_factory=CacheReport)
    chain: list[BlockHash] = dataclasses.field(default_factory=list)
    """Hashes of its full blocks so far, reused or computed."""
    shared_chain: list[BlockHash] = dataclasses.field(default_factory=list)
    """The blocks it began with, by the names of the tenant that shares them; they may stand for its own."""
    unpromoted: collections.deque[tuple[BlockHash, Mapping[RegionKind, Region]]] = dataclasses.field(
        default_factory=collections.deque
    )
    """Regions that it read from SSD and that are not promoted to RAM yet."""
    promoted_token_count: int = 0
    """For a warm-up: tokens that it read from SSD and that are now in RAM."""
    pooled: Vector | None = None
    """Pooled hidden states of its tokens so far, if asked for: a sum, or the last token's."""
    admitted_time: float = 0.0
    first_token_time: float | None = None
    has_finished: bool = False
    """Its end was published; what it holds is about to be given back."""

    @classmethod
    def of(
        cls, request: GenerationRequest, *, sequence_id: SequenceId, decode: Decode, context_token_limit: int
    ) -> Sequence:
        """Return a waiting sequence, whose output is limited by the rest of the context."""
        prompt = request.prompt_token_ids
        return cls(
            sequence_id=sequence_id,
            request=request,
            text=TextStream(
                decode=decode,
                prompt_token_ids=prompt,
                stops=request.stop,
                unsearched_token_count=request.sampling.min_output_token_count,
                reasoning=None if request.reasoning is None else request.reasoning.meter(),
            ),
            output_token_limit=min(request.max_output_tokens, context_token_limit - len(prompt)),
        )

    def __post_init__(self) -> None:
        if not self.input_token_ids:
            self.input_token_ids = self.request.prompt_token_ids
        self.input_keys = self.request.keys(self.input_token_ids)
        self.rope_positions = self.request.rope_positions() if self.request.images else None

    @property
    def prefill_target(self) -> int:
        """How many input tokens get KV that is stored for others. Even a repeated prompt runs its last token
        again, since the next one is drawn from it."""
        return len(self.input_token_ids) - (1 if self.request.pooling is None else 0)

    @property
    def is_warm_up(self) -> bool:
        """Whether it only brings its prompt into the cache."""
        return self.request.max_output_tokens == 0 and self.request.pooling is None

    @property
    def input_end(self) -> int:
        """Where the input's last chunk ends: after the last token, if an output token is drawn from it."""
        draws = self.output_token_limit > 0 and self.request.pooling is None
        return len(self.input_token_ids) if draws else self.prefill_target

    @property
    def remaining_token_count(self) -> int:
        """Input tokens that are still to run."""
        return self.input_end - self.processed_token_count

    @property
    def is_prefilled(self) -> bool:
        return self.processed_token_count >= self.prefill_target

    @property
    def is_all_reported(self) -> bool:
        """Whether it draws no tokens, its prompt has run and everything asked of the prompt is known."""
        is_read = self.is_prefilled and not self.unread_chunk_count
        return is_read and self.output_token_limit == 0 and self.phase is not Phase.ENDED

    @property
    def next_image(self) -> ImageSpan | None:
        """The first image with tokens still to run and no vectors yet; prefill stops before it."""
        reached = max(self.processed_token_count, self.encoded_token_count)
        return next((span for span in self.request.images if span.end_token_index > reached), None)

    @property
    def limit_reason(self) -> FinishReason:
        """Why an output that reached `output_token_limit` ends there."""
        asked_for_more = self.output_token_limit < self.request.max_output_tokens
        return FinishReason.CONTEXT_LENGTH if asked_for_more else FinishReason.LENGTH

    @property
    def kv_token_count(self) -> int:
        """Tokens in the sequence's caches: prompt, output, and guesses that are not published yet."""
        if self.phase is not Phase.DECODING:
            return self.processed_token_count
        return self.token_count - 1 + self.fed_ahead_count

    @property
    def token_count(self) -> int:
        """Tokens of the prompt and of the output so far."""
        return len(self.request.prompt_token_ids) + len(self.output_token_ids)

    @property
    def measures_prompt(self) -> bool:
        """Whether its next tokens run to get the prompt's log probabilities, so that none may be reused."""
        wanted = self.request.logprobs
        if wanted is None or not wanted.of_prompt:
            return False
        return self.prompt_logprob_count < len(self.request.prompt_token_ids) - 1

    def take_prompt_logprobs(self, measured: ReadSequence[TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
        """Take the log probabilities of the next tokens. Return those not published before: fewer if the
        sequence was parked and computes some again."""
        self.unread_chunk_count -= 1
        new = tuple(measured[max(0, self.prompt_logprob_count - self.measured_token_count) :])
        self.measured_token_count += len(measured)
        self.prompt_logprob_count += len(new)
        return new

    def take_pooled(self, part: Vector) -> None:
        """Take the pooled hidden states of the next tokens."""
        self.unread_chunk_count -= 1
        if self.pooled is None or self.request.pooling is Pooling.LAST_TOKEN:
            self.pooled = part
        else:
            self.pooled = self.pooled + part

    @property
    def embedding(self) -> Vector | None:
        """The pooled hidden states of all its tokens; None if nobody asked for them."""
        if self.pooled is None or self.request.pooling is not Pooling.MEAN:
            return self.pooled
        return self.pooled / np.float32(len(self.input_token_ids))

    def note_cache(self, report: CacheReport) -> None:
        """Remember how much of the prompt was reused. What a parked sequence resumes from does not count."""
        if not self.has_started:
            self.cache = report

    def park(self) -> None:
        """Make all tokens so far the input of a later start. Its blocks were captured; its caches go."""
        self.input_token_ids = (*self.request.prompt_token_ids, *self.output_token_ids)
        self.input_keys = self.request.keys(self.input_token_ids)
        self.processed_token_count = self.encoded_token_count = 0
        self.capture_points.clear()
        self.chain.clear()
        self.shared_chain.clear()
        self.pooled = None
        self.unread_chunk_count = self.measured_token_count = 0
        self.fed_ahead_count = 0
        self.park_count += 1

    def decode_row(self) -> DecodeRow:
        return DecodeRow(
            sampling=self.request.sampling,
            prompt_token_ids=self.request.prompt_token_ids,
            output_token_ids=tuple(self.output_token_ids),
            constraint=self.request.grammar.start() if self.request.grammar is not None else None,
            logprobs=self.request.logprobs,
            speculation=self.request.speculation,
        )

    def keys(self, start: int, stop: int) -> TokenKeys:
        """Return tokens [start, stop) of prompt and output together, as the prefix cache knows them."""
        prompt = self.input_keys[: len(self.request.prompt_token_ids)]
        if stop <= len(prompt):
            return prompt[start:stop]
        head = prompt[start:] if start < len(prompt) else ()
        return (*head, *self.output_token_ids[max(0, start - len(prompt)) : stop - len(prompt)])

    def started(self) -> Started:
        """Return the event for leaving the queue, when the cached prefix is known."""
        return Started(
            prompt_token_count=len(self.request.prompt_token_ids),
            cache=self.cache,
            queue_s=self.admitted_time - self.request.arrival_time,
        )

    def usage(self, now: float) -> Usage:
        """Return the request's usage as of `now`."""
        first = self.first_token_time if self.first_token_time is not None else now
        return Usage(
            prompt_token_count=len(self.request.prompt_token_ids),
            output_token_count=len(self.output_token_ids),
            cache=self.cache,
            queue_s=self.admitted_time - self.request.arrival_time,
            prefill_s=first - self.admitted_time - self.cache.restore_s,
            decode_s=now - first,
            ttft_s=first - self.request.arrival_time,
            total_s=now - self.request.arrival_time,
            drafts=self.drafts,
            image_token_count=sum(span.token_count for span in self.request.images),
            reasoning_token_count=self.text.reasoning_token_count,
            promoted_token_count=self.promoted_token_count,
        )
