"""What is known of the whole house at one moment."""

from __future__ import annotations

import dataclasses

from service.domain.cache_stats import CacheStats
from service.domain.model import EngineState, ModelInfo
from service.domain.stats import EngineStats
from service.domain.tenant_use import TenantUse


@dataclasses.dataclass(frozen=True, slots=True)
class Rates:
    """Per second, between the last two samples."""

    finished_per_s: float = 0.0
    failed_per_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """One sample. `engine` and `cache` are the last that the engine told, None before the first."""

    state: EngineState
    heartbeat_age_s: float
    """Since the inference loop last turned; grows when it is stuck."""
    sample_time: float
    """`Clock.monotonic` of the engine's last answer."""
    model: ModelInfo | None = None
    engine: EngineStats | None = None
    cache: CacheStats | None = None
    rates: Rates = Rates()
    tenants: tuple[TenantUse, ...] = ()
    """As the edge counts them, in the order of their latest requests."""
