"""What one caller asks of the engine, after validation and tokenization."""

from __future__ import annotations

import dataclasses
import enum

from service.domain.ids import DEFAULT_TENANT, RequestId, Tenant


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn. Filters follow mlx-lm's order: top_p, min_p, top_k, then temperature."""

    temperature: float = 0.0
    """>= 0; 0 is greedy."""
    top_p: float = 1.0
    """(0, 1]; 1 switches the filter off."""
    top_k: int = 0
    """>= 0; 0 switches the filter off."""
    min_p: float = 0.0
    """[0, 1); 0 switches the filter off."""
    seed: int = 0
    """Any 64-bit value; the same seed gives the same text in any batch position."""


class CacheUse(enum.Enum):
    """What a request may do with the prefix cache."""

    READ_WRITE = enum.auto()
    READ_ONLY = enum.auto()
    WRITE_ONLY = enum.auto()
    OFF = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt to continue. Token ids are inside the vocabulary, limits already checked."""

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    max_output_tokens: int
    """>= 1, or 0 for a warm-up that computes and keeps the prompt only."""
    sampling: SamplingParams
    stop: tuple[str, ...]
    arrival_time: float
    """`Clock.monotonic` when the call reached the edge; TTFT counts from here."""
    deadline_time: float | None = None
    """`Clock.monotonic` after which nobody waits for the answer."""
    cache_use: CacheUse = CacheUse.READ_WRITE
    tenant: Tenant = DEFAULT_TENANT
    priority: int = 0
    """Higher runs first."""
