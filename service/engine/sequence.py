"""One request while it lives in the engine (inference thread)."""

from __future__ import annotations

import dataclasses
import enum

from service.domain.events import CacheReport, Usage
from service.domain.request import GenerationRequest
from service.engine.ids import SequenceId
from service.engine.text import TextStream


class Phase(enum.Enum):
    """Where a sequence is; it only moves down this list."""

    WAITING = enum.auto()
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
    phase: Phase = Phase.WAITING
    processed_token_count: int = 0
    """Prompt tokens whose KV exists, reused ones included."""
    output_token_ids: list[int] = dataclasses.field(default_factory=list)
    undelivered_token_ids: list[int] = dataclasses.field(default_factory=list)
    cache: CacheReport = dataclasses.field(default_factory=CacheReport)
    admitted_time: float = 0.0
    first_token_time: float | None = None

    @property
    def prefill_target(self) -> int:
        """Prompt tokens to process before decoding; the last one runs with the first decode step."""
        return len(self.request.prompt_token_ids) - 1

    @property
    def is_prefilled(self) -> bool:
        return self.processed_token_count >= self.prefill_target

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
        )
