"""Each tenant's numbers, from the edge's accounts and the cache's, to one message. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from icehouse.v1 import tenant_stats_pb2

from service.domain.cache_stats import CacheStats, TenantShare
from service.rpc.tenants import Account, Tenants


def tenant_stats_protos(tenants: Tenants, cache: CacheStats | None) -> Sequence[tenant_stats_pb2.TenantStats]:
    """Return one message for each account."""
    shares = {} if cache is None else {share.tenant: share for share in cache.tenants}
    messages = []
    for account in tenants:
        message = _account_proto(account)
        message.waiting_limit = tenants.limits.waiting_limit
        message.running_limit = tenants.running_limit
        message.ram_limit_bytes = tenants.limits.ram_bytes
        message.ssd_limit_bytes = tenants.limits.ssd_bytes
        share = shares.get(account.tenant, TenantShare(account.tenant))
        message.ram_bytes = share.ram_bytes
        message.ssd_bytes = share.ssd_bytes
        messages.append(message)
    return messages


def _account_proto(account: Account) -> tenant_stats_pb2.TenantStats:
    return tenant_stats_pb2.TenantStats(
        tenant=account.tenant,
        waiting_count=account.waiting_count,
        running_count=account.running_count,
        accepted_total=account.accepted_total,
        refused_total=account.refused_total,
        prompt_token_total=account.prompt_token_total,
        cached_token_total=account.cached_token_total,
        output_token_total=account.output_token_total,
        tokens_per_minute=0 if account.budget is None else account.budget.limit,
        tokens_left=0 if account.budget is None else account.budget.level,
    )
