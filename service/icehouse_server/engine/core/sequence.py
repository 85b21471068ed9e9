"""Sequence: one request while it lives in the engine (inference thread)."""

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
    """Where a sequence is; it moves down this list, and back to WAITING when it is parked."""

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
    """`max_output_tokens`, or less when the context ends first."""
    input_token_ids: tuple[int, ...] = ()
    """What is prefilled: the prompt, and after being parked the output so far behind it."""
    input_keys: TokenKeys = ()
    """The same as the prefix cache knows it."""
    rope_positions: RopePositions | None = None
    """Where images are a grid to the model."""
    has_started: bool = False
    """`Started` was published; a parked sequence does not start twice."""
    park_count: int = 0
    fed_ahead_count: int = 0
    """Tokens from the last known one on that were fed already, so their KV exists."""
    drafts: DraftCounts = NO_DRAFTS
    phase: Phase = Phase.WAITING
    processed_token_count: int = 0
    """Input tokens whose KV exists and may be kept, reused ones included."""
    loading_token_count: int = 0
    """Tokens whose pages are reserved for its blocks on SSD while these are read; else 0."""
    encoded_token_count: int = 0
    """Input tokens up to which the runner has the vectors of its images."""
    capture_points: list[int] = dataclasses.field(default_factory=list)
    """Input positions where its prefill stops to leave a tail: there, those that wait for it part from it."""
    border_points: tuple[int, ...] = ()
    """Of these, borders of messages, where a checkpoint is kept."""
    overtaken_token_count: int = 0
    """Input tokens of younger sequences that ran while this one's waited."""
    passed_count: int = 0
    """How many others were let in before it, though it was their turn, because they fit and it did not."""
    output_token_ids: list[int] = dataclasses.field(default_factory=list)
    undelivered_token_ids: list[int] = dataclasses.field(default_factory=list)
    undelivered_logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    prompt_logprob_count: int = 0
    """Prompt tokens behind the first whose log probabilities were published."""
    unread_chunk_count: int = 0
    """Chunks that ran, or run, to be measured or pooled, of which that is not known yet."""
    measured_token_count: int = 0
    """Input tokens of which it is known what they say of those behind them."""
    cache: CacheReport = dataclasses.field(default_factory=CacheReport)
    chain: list[BlockHash] = dataclasses.field(default_factory=list)
    """Hashes of the full blocks behind it, reused or computed."""
    shared_chain: list[BlockHash] = dataclasses.field(default_factory=list)
    """By the names of the tenant it shares with, the blocks it began with; they may stand for its own."""
    unpromoted: collections.deque[tuple[BlockHash, Mapping[RegionKind, Region]]] = dataclasses.field(
        default_factory=collections.deque
    )
    """Regions that it read from SSD and that are not promoted to RAM yet."""
    promoted_token_count: int = 0
    """Of a warm-up: tokens that it read from SSD and that are in RAM since."""
    pooled: Vector | None = None
    """What the hidden states of its tokens so far came to, where they are asked for: a sum, or the last."""
    admitted_time: float = 0.0
    first_token_time: float | None = None
    has_finished: bool = False
    """Its end was published; what it held is about to be given back."""

    @classmethod
    def of(
        cls, request: GenerationRequest, *, sequence_id: SequenceId, decode: Decode, context_token_limit: int
    ) -> Sequence:
        """Return a sequence that waits, its output bounded by what is left of the context."""
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
        """Input tokens whose KV is stored for others: a repeated prompt runs its last one anew,
        since the next token is drawn from it."""
        return len(self.input_token_ids) - (1 if self.request.pooling is None else 0)

    @property
    def is_warm_up(self) -> bool:
        """Whether it only brings its prompt into the cache."""
        return self.request.max_output_tokens == 0 and self.request.pooling is None

    @property
    def input_end(self) -> int:
        """Where the last chunk of the input ends: behind the last token, if one is drawn from it."""
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
        """Whether nothing is drawn of it, its prompt has run and what was asked of that is known."""
        is_read = self.is_prefilled and not self.unread_chunk_count
        return is_read and self.output_token_limit == 0 and self.phase is not Phase.ENDED

    @property
    def next_image(self) -> ImageSpan | None:
        """The first image of which tokens are still to run and no vectors are there: its prefill stops before
        it."""
        reached = max(self.processed_token_count, self.encoded_token_count)
        return next((span for span in self.request.images if span.end_token_index > reached), None)

    @property
    def limit_reason(self) -> FinishReason:
        """Why an output that reached `output_token_limit` ends there."""
        asked_for_more = self.output_token_limit < self.request.max_output_tokens
        return FinishReason.CONTEXT_LENGTH if asked_for_more else FinishReason.LENGTH

    @property
    def kv_token_count(self) -> int:
        """Tokens in the sequence's caches: of the prompt, of the output, and of guesses not published yet."""
        if self.phase is not Phase.DECODING:
            return self.processed_token_count
        return self.token_count - 1 + self.fed_ahead_count

    @property
    def token_count(self) -> int:
        """Tokens of the prompt, and of the output so far."""
        return len(self.request.prompt_token_ids) + len(self.output_token_ids)

    @property
    def measures_prompt(self) -> bool:
        """Whether its next tokens run for the log probabilities of the prompt, so none may be reused."""
        wanted = self.request.logprobs
        if wanted is None or not wanted.of_prompt:
            return False
        return self.prompt_logprob_count < len(self.request.prompt_token_ids) - 1

    def take_prompt_logprobs(self, measured: ReadSequence[TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
        """Take what the next tokens say of those behind them; return what was not published before, which is
        less where the sequence was parked meanwhile and computes again."""
        self.unread_chunk_count -= 1
        new = tuple(measured[max(0, self.prompt_logprob_count - self.measured_token_count) :])
        self.measured_token_count += len(measured)
        self.prompt_logprob_count += len(new)
        return new

    def take_pooled(self, part: Vector) -> None:
        """Take what the next tokens' hidden states came to."""
        self.unread_chunk_count -= 1
        if self.pooled is None or self.request.pooling is Pooling.LAST_TOKEN:
            self.pooled = part
        else:
            self.pooled = self.pooled + part

    @property
    def embedding(self) -> Vector | None:
        """The pooled hidden states of all its tokens; None where nobody asked."""
        if self.pooled is None or self.request.pooling is not Pooling.MEAN:
            return self.pooled
        return self.pooled / np.float32(len(self.input_token_ids))

    def note_cache(self, report: CacheReport) -> None:
        """Remember what was reused of the prompt; what a parked sequence resumes from is not that."""
        if not self.has_started:
            self.cache = report

    def park(self) -> None:
        """Make everything so far the input of a later start. Its blocks were captured, its caches go."""
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
        """Return the event for when the sequence leaves the queue and its prefix is known."""
        return Started(
            prompt_token_count=len(self.request.prompt_token_ids),
            cache=self.cache,
            queue_s=self.admitted_time - self.request.arrival_time,
        )

    def usage(self, now: float) -> Usage:
        """Account for the request as of `now`."""
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
