"""Telemetry as the configuration wants it: which watchers the edge gets, what starts and stops with it."""

from __future__ import annotations

import logging

from service.config import Config
from service.rpc.sampler import Sampler
from service.rpc.telemetry import Telemetry
from service.telemetry.call_metrics import CallMetrics
from service.telemetry.prometheus import PrometheusEndpoint, PrometheusMeter

_log = logging.getLogger("icehouse.boot")


class TelemetryRoom:
    """Made before the edge, started after it is bound, stopped last."""

    def __init__(self, config: Config) -> None:
        settings = config.telemetry
        self._endpoint: PrometheusEndpoint | None = None
        metrics: tuple[CallMetrics, ...] = ()
        if settings.metrics_port is not None:
            meter = PrometheusMeter()
            self._endpoint = PrometheusEndpoint(meter, host=settings.metrics_host, port=settings.metrics_port)
            metrics = (CallMetrics(meter),)
        wants_samples = self._endpoint is not None or settings.load_report_enabled
        self.watchers = Telemetry(
            wire=metrics,
            calls=metrics,
            has_load_report=settings.load_report_enabled,
            has_access_log=config.log.access_enabled,
            sample_interval_s=settings.sample_interval_s if wants_samples else None,
        )

    def start(self, sampler: Sampler) -> None:
        """Open the metrics endpoint; raises StartError when its address cannot be had."""
        if self._endpoint is not None:
            url = self._endpoint.start(lambda: sampler.latest)
            _log.info("metrics", extra={"url": url})

    def stop(self) -> None:
        """Close the endpoint. May wait for scrapes: not for the event loop."""
        if self._endpoint is not None:
            self._endpoint.stop()
