"""Tenant metrics: what each runs, what it used, what it keeps in the tiers.

The edge keeps a bounded number of accounts, so there are never more tenants here than that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from icehouse_server.domain.stats import Snapshot, TenantUse
from icehouse_server.telemetry.observed import Observed, Value, counter, gauge

_TENANT = "icehouse.tenant"
_PHASE = "icehouse.request.phase"
_KIND = "icehouse.token.kind"
_TIER = "icehouse.tier"

_Read = Callable[[Snapshot], Iterable[Value]]


def _each(read: Callable[[TenantUse], float]) -> _Read:
    return lambda s: (((use.tenant,), read(use)) for use in s.tenants)


def _requests(s: Snapshot) -> Iterable[Value]:
    for use in s.tenants:
        yield (use.tenant, "waiting"), use.waiting_count
        yield (use.tenant, "running"), use.running_count


def _tokens(s: Snapshot) -> Iterable[Value]:
    for use in s.tenants:
        yield (use.tenant, "prompt"), use.prompt_token_total
        yield (use.tenant, "cached"), use.cached_token_total
        yield (use.tenant, "output"), use.output_token_total


def _stored(s: Snapshot) -> Iterable[Value]:
    known = {use.tenant for use in s.tenants}
    for share in s.cache.tenants if s.cache is not None else ():
        # The cache remembers as many tenants again; those without an account are left out, to keep the bound.
        if share.tenant in known:
            yield (share.tenant, "ram"), share.ram_bytes
            yield (share.tenant, "ssd"), share.ssd_bytes


TENANT_METRICS: tuple[Observed, ...] = (
    gauge(
        "icehouse.tenant.requests", "{request}", "Requests that wait or run now.", _requests, _TENANT, _PHASE
    ),
    counter(
        "icehouse.tenant.accepted",
        "{request}",
        "Requests that were let into the queue.",
        _each(lambda use: use.accepted_total),
        _TENANT,
    ),
    counter(
        "icehouse.tenant.refused",
        "{request}",
        "Requests refused because the tenant had its share.",
        _each(lambda use: use.refused_total),
        _TENANT,
    ),
    counter(
        "icehouse.tenant.tokens",
        "{token}",
        "Tokens of prompts, tokens of them that were reused, and tokens drawn.",
        _tokens,
        _TENANT,
        _KIND,
    ),
    gauge("icehouse.tenant.stored", "By", "Bytes of its blocks.", _stored, _TENANT, _TIER),
)
