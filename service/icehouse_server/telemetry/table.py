"""Metrics table: every metric the server has. The endpoint, the documentation and the checks read it."""

from __future__ import annotations

from icehouse_server.telemetry.cache_metrics import CACHE_METRICS
from icehouse_server.telemetry.call_metrics import CALL_METRICS
from icehouse_server.telemetry.engine_metrics import ENGINE_METRICS
from icehouse_server.telemetry.kv_event_metrics import KV_EVENT_METRICS
from icehouse_server.telemetry.metric import Metric
from icehouse_server.telemetry.observed import Observed
from icehouse_server.telemetry.tenant_metrics import TENANT_METRICS

OBSERVED_METRICS: tuple[Observed, ...] = (*ENGINE_METRICS, *CACHE_METRICS, *TENANT_METRICS, *KV_EVENT_METRICS)

METRICS: tuple[Metric, ...] = (*CALL_METRICS, *(row.metric for row in OBSERVED_METRICS))
