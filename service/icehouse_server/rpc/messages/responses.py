"""Responses: domain data to response messages of generation and models. Pure functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from icehouse.v1 import adapter_pb2, logprobs_pb2, model_service_pb2, usage_pb2
from icehouse.v1 import inference_service_pb2 as inference

from icehouse_server.domain.chat import PromptChange, PromptChangeKind
from icehouse_server.domain.events import (
    CacheReport,
    Delta,
    Divergence,
    Finished,
    FinishReason,
    PrefillProgress,
    ReuseLimit,
    Started,
    Usage,
)
from icehouse_server.domain.model import AdapterInfo, ModelInfo, PassSplit, ReplyFormatInfo
from icehouse_server.domain.request import TokenLogprobs
from icehouse_server.rpc.messages.options import LIMITS
from icehouse_server.rpc.messages.proto_map import duration_proto, timestamp_proto

Spell = Callable[[int], str]
"""A token id's own spelling."""

_FINISH_REASONS = {
    FinishReason.STOP_TOKEN: usage_pb2.FINISH_REASON_STOP_TOKEN,
    FinishReason.STOP_STRING: usage_pb2.FINISH_REASON_STOP_STRING,
    FinishReason.LENGTH: usage_pb2.FINISH_REASON_LENGTH,
    FinishReason.CONTEXT_LENGTH: usage_pb2.FINISH_REASON_CONTEXT_LENGTH,
    FinishReason.TOOL_CALLS: usage_pb2.FINISH_REASON_TOOL_CALLS,
}

_PASS_SPLITS = {
    PassSplit.ATTENTION: model_service_pb2.PASS_SPLIT_ATTENTION,
    PassSplit.MODULE: model_service_pb2.PASS_SPLIT_MODULE,
    PassSplit.ALONE: model_service_pb2.PASS_SPLIT_ALONE,
}

REUSE_LIMITS = {
    ReuseLimit.NONE: usage_pb2.REUSE_LIMIT_NONE,
    ReuseLimit.NO_MATCH: usage_pb2.REUSE_LIMIT_NO_MATCH,
    ReuseLimit.DIVERGED: usage_pb2.REUSE_LIMIT_DIVERGED,
    ReuseLimit.NO_CHECKPOINT: usage_pb2.REUSE_LIMIT_NO_CHECKPOINT,
    ReuseLimit.RECOMPUTE_FASTER: usage_pb2.REUSE_LIMIT_RECOMPUTE_FASTER,
    ReuseLimit.LOAD_FAILED: usage_pb2.REUSE_LIMIT_LOAD_FAILED,
    ReuseLimit.SWITCHED_OFF: usage_pb2.REUSE_LIMIT_SWITCHED_OFF,
    ReuseLimit.UNSUPPORTED: usage_pb2.REUSE_LIMIT_UNSUPPORTED,
    ReuseLimit.PROMPT_LOGPROBS: usage_pb2.REUSE_LIMIT_PROMPT_LOGPROBS,
}


_CHANGE_KINDS = {
    PromptChangeKind.BILLING_LINE_DROPPED: usage_pb2.PROMPT_CHANGE_KIND_BILLING_LINE_DROPPED,
    PromptChangeKind.TOOL_KEYS_SORTED: usage_pb2.PROMPT_CHANGE_KIND_TOOL_KEYS_SORTED,
    PromptChangeKind.TOOLS_SORTED: usage_pb2.PROMPT_CHANGE_KIND_TOOLS_SORTED,
}


@dataclasses.dataclass(frozen=True, slots=True)
class ReportNotes:
    """What goes into a cache report beside what the engine tells."""

    text: Spell | None = None
    """A token id's text; None where the caller may not be told of the cached prompts of this tenant."""
    changes: tuple[PromptChange, ...] = ()


NO_NOTES = ReportNotes()


def cache_report_proto(report: CacheReport, notes: ReportNotes = NO_NOTES) -> usage_pb2.CacheReport:
    """Return what was reused."""
    return usage_pb2.CacheReport(
        divergence=_divergence_proto(report.divergence, notes.text),
        prompt_changes=[
            usage_pb2.PromptChange(kind=_CHANGE_KINDS[change.kind], count=change.count)
            for change in notes.changes
        ],
        cached_tokens=report.cached_token_count,
        ram_tokens=report.ram_token_count,
        ssd_tokens=report.ssd_token_count,
        restore_duration=duration_proto(report.restore_s),
        limit=REUSE_LIMITS[report.limit],
    )


def _divergence_proto(divergence: Divergence | None, text: Spell | None) -> usage_pb2.PrefixDivergence | None:
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
        speculation_limit=LIMITS[usage.drafts.limit],
        reasoning_tokens=usage.reasoning_token_count,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class ReplyFacts:
    """What is known of a reply before it begins."""

    request_id: str
    model_id: str
    seed: int
    create_time: float
    """`Clock.wall` when the request reached the edge."""
    system_fingerprint: str
    max_output_token_count: int
    """The least of what was asked for, what the server allows and what the context leaves."""
    unenforced: tuple[str, ...] = ()
    """Keywords of its schemas that the output is not held to."""


def started_proto(event: Started, facts: ReplyFacts, notes: ReportNotes = NO_NOTES) -> inference.Started:
    """Return the first event of a stream."""
    return inference.Started(
        request_id=facts.request_id,
        model=facts.model_id,
        prompt_tokens=event.prompt_token_count,
        cache=cache_report_proto(event.cache, notes),
        queue_duration=duration_proto(event.queue_s),
        seed=facts.seed,
        create_time=timestamp_proto(facts.create_time),
        system_fingerprint=facts.system_fingerprint,
        max_output_tokens=facts.max_output_token_count,
        unenforced_keywords=facts.unenforced,
    )


def finished_proto(event: Finished) -> inference.Finished:
    """Return the last event of a stream."""
    return inference.Finished(
        finish_reason=_FINISH_REASONS[event.reason],
        stop_string=event.stop_string,
        stop_token_id=event.stop_token_id,
        usage=usage_proto(event.usage),
    )


def delta_proto(event: Delta, *, piece: Spell) -> inference.Delta:
    """Return new output, all of it as text."""
    logprobs = [logprobs_proto(entry, piece=piece) for entry in event.logprobs]
    return inference.Delta(text=event.text, token_ids=event.token_ids, logprobs=logprobs)


def progress_proto(event: PrefillProgress, *, piece: Spell) -> inference.PrefillProgress:
    """Return how far the prompt is computed."""
    return inference.PrefillProgress(
        processed_tokens=event.processed_token_count,
        prompt_tokens=event.prompt_token_count,
        prompt_logprobs=[logprobs_proto(entry, piece=piece) for entry in event.logprobs],
    )


def logprobs_proto(entry: TokenLogprobs, *, piece: Spell) -> logprobs_pb2.TokenLogprobs:
    """Return what the model thought of one token; `piece` spells a token."""
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


def model_proto(info: ModelInfo) -> model_service_pb2.Model:
    """Return a model's facts."""
    return model_service_pb2.Model(
        id=info.model_id,
        architecture=info.architecture,
        vocabulary_size=info.vocabulary_size,
        context_tokens=info.context_token_limit,
        dtype=info.dtype,
        quantization=info.quantization,
        parameter_count=info.parameter_count,
        weight_bytes=info.weight_bytes,
        kv_bytes_per_token=info.kv_bytes_per_token,
        cache_classes=info.cache_classes,
        fingerprint=info.fingerprint_hex,
        has_chat_template=info.has_chat_template,
        eos_token_ids=info.eos_token_ids,
        device=info.device,
        embedding_dimensions=info.embedding_size,
        reads_images=info.sees_images,
        runs_images_whole=info.runs_images_whole,
        pass_splits=[_PASS_SPLITS[split] for split in info.pass_splits],
        adapters=[adapter_proto(adapter) for adapter in info.adapters],
        reply_format=None if info.reply_format is None else _reply_format_proto(info.reply_format),
    )


def _reply_format_proto(info: ReplyFormatInfo) -> model_service_pb2.ReplyFormat:
    return model_service_pb2.ReplyFormat(
        calls=info.calls,
        reasoning_start=info.reasoning_start,
        reasoning_end=info.reasoning_end,
        evidence=info.evidence,
        unread_markers=info.unread_markers,
    )


def adapter_proto(adapter: AdapterInfo) -> adapter_pb2.Adapter:
    """Return an adapter's facts."""
    return adapter_pb2.Adapter(
        name=adapter.name,
        kind=adapter.kind,
        digest=adapter.digest.hex(),
        parameter_count=adapter.parameter_count,
        weight_bytes=adapter.weight_bytes,
    )
