"""Responses: domain data to response messages, for generation, models, the cache and its counters. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator

from icehouse.v1 import (
    cache_service_pb2,
    logprobs_pb2,
    speculation_pb2,
    tenant_stats_pb2,
    usage_pb2,
)
from icehouse.v1 import inference_service_pb2 as inference

from icehouse_server.domain.blocks import TokenKeys, image_runs
from icehouse_server.domain.cache_commands import EvictReport, Explanation, VerifyReport
from icehouse_server.domain.cache_stats import CacheStats, TenantShare
from icehouse_server.domain.chat import PromptChange
from icehouse_server.domain.events import (
    CacheReport,
    Delta,
    Event,
    Finished,
    PrefillProgress,
    PromptDivergence,
    Started,
    Usage,
)
from icehouse_server.domain.ids import Tenant
from icehouse_server.domain.request import SpeculationLimit, TokenLogprobs
from icehouse_server.rpc.access.tenants import TenantAccount, Tenants
from icehouse_server.rpc.engine_client.engine_cache import CommandProgress
from icehouse_server.rpc.messages.proto_map import duration_proto, enum_proto, fill, to_proto

Spell = Callable[[int], str]
"""Returns a token id's own spelling."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReportNotes:
    """What a cache report contains besides the engine's report."""

    text: Spell | None = None
    """Returns a token id's text; None if the caller must not see this tenant's cached prompts."""
    changes: tuple[PromptChange, ...] = ()


NO_NOTES = ReportNotes()


def cache_report_proto(report: CacheReport, notes: ReportNotes = NO_NOTES) -> usage_pb2.CacheReport:
    """Return what was reused."""
    return usage_pb2.CacheReport(
        divergence=_divergence_proto(report.divergence, notes.text),
        prompt_changes=[
            usage_pb2.PromptChange(
                kind=enum_proto(change.kind, usage_pb2.PromptChangeKind), count=change.count
            )
            for change in notes.changes
        ],
        cached_tokens=report.cached_token_count,
        ram_tokens=report.ram_token_count,
        ssd_tokens=report.ssd_token_count,
        restore_duration=duration_proto(report.restore_s),
        limit=enum_proto(report.limit, usage_pb2.ReuseLimit),
    )


def _divergence_proto(
    divergence: PromptDivergence | None, text: Spell | None
) -> usage_pb2.PrefixDivergence | None:
    if divergence is None or text is None:
        return None
    prompt_id, cached_id = divergence.prompt_token_id, divergence.cached_token_id
    return usage_pb2.PrefixDivergence(
        token_index=divergence.token_index,
        prompt_token=usage_pb2.DivergentToken(id=prompt_id, text=text(prompt_id)),
        cached_token=usage_pb2.DivergentToken(id=cached_id, text=text(cached_id)),
    )


def usage_proto(usage: Usage) -> usage_pb2.Usage:
    """Return what a request cost."""
    return usage_pb2.Usage(
        prompt_tokens=usage.prompt_token_count,
        cached_tokens=usage.cache.cached_token_count,
        ram_tokens=usage.cache.ram_token_count,
        ssd_tokens=usage.cache.ssd_token_count,
        output_tokens=usage.output_token_count,
        queue_duration=duration_proto(usage.queue_s),
        restore_duration=duration_proto(usage.cache.restore_s),
        prefill_duration=duration_proto(usage.prefill_s),
        decode_duration=duration_proto(usage.decode_s),
        time_to_first_token=duration_proto(usage.ttft_s),
        total_duration=duration_proto(usage.total_s),
        image_tokens=usage.image_token_count,
        draft_tokens=usage.drafts.proposed_count,
        accepted_draft_tokens=usage.drafts.accepted_count,
        speculation_limit=speculation_pb2.SPECULATION_LIMIT_UNSPECIFIED
        if usage.drafts.limit is SpeculationLimit.NONE
        else enum_proto(usage.drafts.limit, speculation_pb2.SpeculationLimit),
        reasoning_tokens=usage.reasoning_token_count,
    )


def finished_proto(event: Finished) -> inference.Finished:
    """Return the last event of a stream."""
    return inference.Finished(
        finish_reason=enum_proto(event.reason, usage_pb2.FinishReason),
        stop_string=event.stop_string or "",
        stop_token_id=event.stop_token_id,
        usage=usage_proto(event.usage),
    )


def delta_proto(event: Delta, *, piece: Spell) -> inference.Delta:
    """Return new output, all of it as plain text."""
    logprobs = [logprobs_proto(entry, piece=piece) for entry in event.logprobs]
    return inference.Delta(text=event.text, token_ids=event.token_ids, logprobs=logprobs)


def progress_proto(event: PrefillProgress, *, piece: Spell) -> inference.PrefillProgress:
    """Return how much of the prompt has been computed."""
    return inference.PrefillProgress(
        processed_tokens=event.processed_token_count,
        prompt_tokens=event.prompt_token_count,
        prompt_logprobs=[logprobs_proto(entry, piece=piece) for entry in event.logprobs],
    )


def logprobs_proto(entry: TokenLogprobs, *, piece: Spell) -> logprobs_pb2.TokenLogprobs:
    """Return one token's log probabilities; `piece` spells a token."""
    top, asked = (
        [
            logprobs_pb2.TopLogprob(token_id=t.token_id, logprob=t.logprob, piece=piece(t.token_id))
            for t in listed
        ]
        for listed in (entry.top, entry.asked)
    )
    return logprobs_pb2.TokenLogprobs(
        token_id=entry.token_id,
        logprob=entry.logprob,
        rank=entry.rank,
        piece=piece(entry.token_id),
        top=top,
        asked=asked,
        text_offset=entry.text_offset,
    )


DAMAGED_HASH_LIMIT = 1000
"""Most names in one VerifyResult."""


def explain_response(
    explanation: Explanation, *, prompt: TokenKeys, notes: ReportNotes = NO_NOTES
) -> cache_service_pb2.ExplainResponse:
    """Return what would be reused."""
    warm_s, cold_s = explanation.predicted_ttft_s, explanation.predicted_cold_ttft_s
    return cache_service_pb2.ExplainResponse(
        prompt_tokens=len(prompt),
        images=[
            cache_service_pb2.ImageSpan(
                digest=run.digest.hex(), start_token=run.start, token_count=run.token_count
            )
            for run in image_runs(prompt)
        ],
        cache=cache_report_proto(explanation.cache, notes),
        blocks=[to_proto(block, cache_service_pb2.BlockMatch) for block in explanation.blocks],
        predicted_time_to_first_token=None if warm_s is None else duration_proto(warm_s),
        predicted_time_to_first_token_cold=None if cold_s is None else duration_proto(cold_s),
    )


def warm_response(
    event: Event, *, request_id: str, notes: ReportNotes
) -> cache_service_pb2.WarmResponse | None:
    """Return the response of a warm-up to an event of the engine; None if nothing is sent."""
    match event:
        case Started():
            token_count = event.cache.cached_token_count
        case PrefillProgress():
            token_count = event.processed_token_count
        case Finished():
            done = cache_service_pb2.WarmResult(
                request_id=request_id,
                cache=cache_report_proto(event.usage.cache, notes),
                usage=usage_proto(event.usage),
                promoted_tokens=event.usage.promoted_token_count,
                computed_tokens=event.usage.prompt_token_count - 1 - event.usage.cache.cached_token_count,
            )
            return cache_service_pb2.WarmResponse(done=done)
        case _:
            return None
    progress = cache_service_pb2.WarmProgress(
        request_id=request_id, processed_tokens=token_count, prompt_tokens=event.prompt_token_count
    )
    return cache_service_pb2.WarmResponse(progress=progress)


def evict_progress(now: CommandProgress[EvictReport]) -> cache_service_pb2.EvictProgress:
    """Return the progress of a removal."""
    return cache_service_pb2.EvictProgress(
        processed_block_count=now.processed_block_count,
        block_count=now.block_count,
        ram_bytes=now.report.ram_bytes,
        ssd_bytes=now.report.ssd_bytes,
    )


def verify_result(report: VerifyReport) -> cache_service_pb2.VerifyResult:
    """Return the result of a check; the list of names is cut, the count is not."""
    return cache_service_pb2.VerifyResult(
        verified_block_count=report.verified_block_count,
        verified_bytes=report.verified_bytes,
        damaged_hashes=[name.hex() for name in report.damaged_hashes[:DAMAGED_HASH_LIMIT]],
        damaged_block_count=len(report.damaged_hashes),
        duration=duration_proto(report.duration_s),
    )


def verify_progress(now: CommandProgress[VerifyReport]) -> cache_service_pb2.VerifyProgress:
    """Return the progress of a check."""
    return cache_service_pb2.VerifyProgress(
        verified_block_count=now.report.verified_block_count,
        verified_bytes=now.report.verified_bytes,
        damaged_block_count=len(now.report.damaged_hashes),
        block_count=now.block_count,
    )


def tenant_stats_protos(
    tenants: Tenants, accounts: Iterable[TenantAccount], caches: Iterable[CacheStats]
) -> Iterator[tenant_stats_pb2.TenantStats]:
    """Yield one message for each account, with its share of the caches of all models."""
    shares: dict[Tenant, TenantShare] = {}
    for share in (share for cache in caches for share in cache.tenants):
        shares[share.tenant] = share.joined(shares.get(share.tenant, TenantShare(share.tenant)))
    for account in accounts:
        tenant = account.use.tenant
        message = tenant_stats_pb2.TenantStats(
            waiting_limit=tenants.limits.waiting_limit,
            running_limit=tenants.running_limit,
            ram_limit_bytes=tenants.limits.ram_bytes,
            ssd_limit_bytes=tenants.limits.ssd_bytes,
            tokens_per_minute=0 if account.budget is None else account.budget.limit,
            tokens_left=0 if account.budget is None else account.budget.level,
        )
        yield fill(fill(message, account.use), shares.get(tenant, TenantShare(tenant)))
