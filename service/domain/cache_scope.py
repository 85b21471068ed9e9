"""Within which requests KV is shared."""

from __future__ import annotations

import dataclasses

from service.domain.ids import DEFAULT_TENANT, NO_ADAPTER, AdapterName, Tenant


@dataclasses.dataclass(frozen=True, slots=True)
class CacheScope:
    """Requests of one tenant with one adapter: the same tokens have the same KV, and may share it."""

    tenant: Tenant = DEFAULT_TENANT
    adapter: AdapterName = NO_ADAPTER


DEFAULT_SCOPE = CacheScope()
"""The default tenant's requests to the model by itself."""
