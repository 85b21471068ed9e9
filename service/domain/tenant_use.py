"""What one tenant runs and has used, as the edge counts it."""

from __future__ import annotations

import dataclasses

from service.domain.ids import Tenant


@dataclasses.dataclass(frozen=True, slots=True)
class TenantUse:
    """One tenant's numbers: `*_count` are now, `*_total` since it was first heard of."""

    tenant: Tenant
    waiting_count: int = 0
    running_count: int = 0
    accepted_total: int = 0
    refused_total: int = 0
    prompt_token_total: int = 0
    cached_token_total: int = 0
    output_token_total: int = 0
