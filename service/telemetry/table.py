"""Every metric the server has. The endpoint, the documentation and the checks all read this table."""

from __future__ import annotations

from service.telemetry.cache_metrics import CACHE_METRICS
from service.telemetry.call_metrics import CALL_METRICS
from service.telemetry.engine_metrics import ENGINE_METRICS
from service.telemetry.metric import Metric
from service.telemetry.observed import Observed
from service.telemetry.tenant_metrics import TENANT_METRICS

OBSERVED_METRICS: tuple[Observed, ...] = (*ENGINE_METRICS, *CACHE_METRICS, *TENANT_METRICS)

METRICS: tuple[Metric, ...] = (*CALL_METRICS, *(row.metric for row in OBSERVED_METRICS))
