"""Counters as the engine publishes them: frozen snapshots, taken between steps."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine's own counters. `*_count` are now, `*_total` since start; bytes and seconds."""

    uptime_s: float = 0.0
    mailbox_count: int = 0
    mailbox_limit: int = 0
    waiting_count: int = 0
    waiting_limit: int = 0
    loading_count: int = 0
    prefilling_count: int = 0
    decoding_count: int = 0
    decoding_limit: int = 0
    step_total: int = 0
    decode_step_p50_s: float = 0.0
    decode_step_p99_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    accepted_total: int = 0
    rejected_total: int = 0
    finished_total: int = 0
    cancelled_total: int = 0
    failed_total: int = 0
    prompt_token_total: int = 0
    cached_token_total: int = 0
    prefilled_token_total: int = 0
    output_token_total: int = 0
    active_memory_bytes: int = 0
    peak_memory_bytes: int = 0
    memory_limit_bytes: int = 0
    parked_total: int = 0
    """Times a sequence gave way to memory pressure and went on later."""
