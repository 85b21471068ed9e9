"""Engine stats: the snapshot, put together from what each part counts."""

from __future__ import annotations

from icehouse_server.domain.stats import EngineStats
from icehouse_server.engine.core.counters import Counters
from icehouse_server.engine.core.ports import MemoryUse
from icehouse_server.engine.scheduling.scheduler import Scheduler


def engine_stats(
    *,
    counters: Counters,
    scheduler: Scheduler,
    memory: MemoryUse,
    mailbox_count: int,
    mailbox_limit: int,
    waiting_limit: int,
    uptime_s: float,
) -> EngineStats:
    """Return the counters as of now."""
    return EngineStats(
        uptime_s=uptime_s,
        mailbox_count=mailbox_count,
        mailbox_limit=mailbox_limit,
        waiting_count=scheduler.waiting_count,
        waiting_limit=waiting_limit,
        loading_count=scheduler.loading_count,
        prefilling_count=scheduler.prefilling_count,
        decoding_count=scheduler.decoding_count,
        decoding_limit=scheduler.limits.running_limit,
        step_total=counters.step_total,
        decode_step_p50_s=counters.decode_step_quantile_s(0.5),
        decode_step_p99_s=counters.decode_step_quantile_s(0.99),
        prefill_tokens_per_s=counters.prefill_tokens_per_s,
        accepted_total=counters.accepted_total,
        rejected_total=counters.rejected_total,
        finished_total=counters.finished_total,
        cancelled_total=counters.cancelled_total,
        failed_total=counters.failed_total,
        parked_total=counters.parked_total,
        prompt_token_total=counters.prompt_token_total,
        cached_token_total=counters.cached_token_total,
        prefilled_token_total=counters.prefilled_token_total,
        output_token_total=counters.output_token_total,
        active_memory_bytes=memory.active_bytes,
        peak_memory_bytes=memory.peak_bytes,
        memory_limit_bytes=memory.limit_bytes,
    )
