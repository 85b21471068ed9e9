"""Counters and answers of the cache to response messages. Pure functions.

Each tenant's numbers, from the edge's accounts and the cache's, to one message. Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from icehouse.v1 import cache_service_pb2, inference_service_pb2, tenant_stats_pb2

from icehouse_server.domain.blocks import TokenKeys, image_runs
from icehouse_server.domain.cache_commands import BlockMatch, EvictReport, Explanation, Tier, VerifyReport
from icehouse_server.domain.cache_stats import CacheStats, TenantShare
from icehouse_server.domain.stats import ServerStats
from icehouse_server.rpc.access.tenants import Account, Tenants
from icehouse_server.rpc.engine_client.cache_commands import Eviction, Verification
from icehouse_server.rpc.messages.proto_map import duration_proto, fill, to_proto
from icehouse_server.rpc.messages.responses import NO_NOTES, ReportNotes, cache_report_proto

DAMAGED_HASH_LIMIT = 1000
"""Most names in one VerifyResponse."""

_TIERS = {Tier.RAM: cache_service_pb2.CACHE_TIER_RAM, Tier.SSD: cache_service_pb2.CACHE_TIER_SSD}


def stats_response(stats: ServerStats) -> inference_service_pb2.CacheStatsResponse:
    """Return all counters but the tenants'."""
    return to_proto(stats, inference_service_pb2.CacheStatsResponse)


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
        blocks=[_block_match(block) for block in explanation.blocks],
        predicted_time_to_first_token=None if warm_s is None else duration_proto(warm_s),
        predicted_time_to_first_token_cold=None if cold_s is None else duration_proto(cold_s),
    )


def evict_response(report: EvictReport) -> cache_service_pb2.EvictResponse:
    """Return what was removed."""
    return to_proto(report, cache_service_pb2.EvictResponse)


def evict_progress(now: Eviction) -> cache_service_pb2.EvictProgress:
    """Return how far a removal is."""
    return cache_service_pb2.EvictProgress(
        processed_block_count=now.processed_block_count,
        block_count=now.block_count,
        ram_bytes=now.report.ram_bytes,
        ssd_bytes=now.report.ssd_bytes,
    )


def verify_response(report: VerifyReport) -> cache_service_pb2.VerifyResponse:
    """Return what a check found; the list of names is cut, their number is not."""
    return cache_service_pb2.VerifyResponse(
        verified_block_count=report.verified_block_count,
        verified_bytes=report.verified_bytes,
        damaged_hashes=[name.hex() for name in report.damaged_hashes[:DAMAGED_HASH_LIMIT]],
        damaged_block_count=len(report.damaged_hashes),
        duration=duration_proto(report.duration_s),
    )


def verify_progress(now: Verification) -> cache_service_pb2.VerifyProgress:
    """Return how far a check is."""
    return cache_service_pb2.VerifyProgress(
        verified_block_count=now.report.verified_block_count,
        verified_bytes=now.report.verified_bytes,
        damaged_block_count=len(now.report.damaged_hashes),
        block_count=now.block_count,
    )


def tenant_stats_protos(
    tenants: Tenants, accounts: Iterable[Account], cache: CacheStats | None
) -> Iterator[tenant_stats_pb2.TenantStats]:
    """Yield one message for each account."""
    shares = {} if cache is None else {share.tenant: share for share in cache.tenants}
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


def _block_match(block: BlockMatch) -> cache_service_pb2.BlockMatch:
    return cache_service_pb2.BlockMatch(
        hash=block.hash.hex(),
        start_token=block.start_token_index,
        token_count=block.token_count,
        size_bytes=block.size_bytes,
        tier=_TIERS[block.tier],
        has_checkpoint=block.has_checkpoint,
        pinned=block.pinned,
    )
