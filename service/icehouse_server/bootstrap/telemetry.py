"""Telemetry as the configuration wants it: which watchers the edge gets, what starts and stops with it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from icehouse_server.bootstrap.status_page import check_status_page, open_status_page
from icehouse_server.clock import Clock
from icehouse_server.config import Config, TelemetryConfig
from icehouse_server.domain.call import SpillRecord
from icehouse_server.domain.request import call_of
from icehouse_server.errors import ConfigError, Reason, extra_command
from icehouse_server.rpc.calls.watchers import Telemetry
from icehouse_server.rpc.server import RpcServer
from icehouse_server.rpc.services.server_service import server_version
from icehouse_server.storage.api import Outcome, Persisted, Ticket
from icehouse_server.telemetry.call_metrics import CallMetrics

if TYPE_CHECKING:
    from icehouse_server.telemetry.prometheus import PrometheusEndpoint, PrometheusMeter
    from icehouse_server.telemetry.spans import Spans

_log = logging.getLogger("icehouse.boot")


class TelemetryParts:
    """Made before the edge, started after it is bound, stopped last."""

    def __init__(self, config: Config) -> None:
        settings = config.telemetry
        check_status_page(config)
        self._config = config
        self._endpoint: PrometheusEndpoint | None = None
        self._meter: PrometheusMeter | None = None
        metrics: tuple[CallMetrics, ...] = ()
        if settings.metrics_port is not None:
            # Slow to import: only who asks for metrics pays for it.
            from icehouse_server.telemetry.prometheus import PrometheusEndpoint, PrometheusMeter

            self._meter = meter = PrometheusMeter()
            self._endpoint = PrometheusEndpoint(
                meter, host=settings.metrics_host, port=settings.metrics_port, names=settings.own_names
            )
            metrics = (CallMetrics(meter),)
        self._spans = _open_spans(settings)
        wants_samples = (
            self._endpoint is not None or settings.load_report_enabled or config.fleet.worker_enabled
        )
        self.watchers = Telemetry(
            wire=metrics,
            calls=metrics,
            tracer=self._spans,
            has_load_report=settings.load_report_enabled,
            has_access_log=config.log.access_enabled,
            sample_interval_s=settings.sample_interval_s if wants_samples else None,
        )

    def watching(self, post: Callable[[Outcome], object]) -> Callable[[Outcome], object]:
        """Return `post`, with the spills that pass it traced. It is called on the storage thread."""
        tracer = self._spans
        if tracer is None:
            return post

        def pass_on(message: Outcome) -> None:
            post(message)
            done = message.outcome if isinstance(message, Ticket) else None
            if isinstance(done, Persisted) and done.request_id is not None:
                tracer.spilled(
                    SpillRecord(
                        request_id=call_of(done.request_id),
                        start_time=done.start_time,
                        duration_s=done.duration_s,
                        token_count=done.record.token_count,
                        size_bytes=done.record.file_bytes,
                    )
                )

        return pass_on

    def start(self, rpc: RpcServer, clock: Clock) -> None:
        """Open the metrics endpoint; raises StartError when its address cannot be had. Event loop only."""
        if self._endpoint is None or self._meter is None:
            return
        page = None
        if self._config.telemetry.status_page_enabled:
            page = open_status_page(self._config, rpc.status, meter=self._meter, clock=clock)
        poller = rpc.poller
        url = self._endpoint.start(lambda: poller.latest, None if page is None else page.pages)
        _log.info("metrics_opened", extra={"url": url})
        if page is not None:
            _log.info("status_page_opened", extra={"url": url.removesuffix("metrics")})

    def stop(self) -> None:
        """Close the endpoint, send the last spans. May wait for seconds: not for the event loop."""
        if self._endpoint is not None:
            self._endpoint.stop()
        if self._spans is not None:
            self._spans.stop()


def _open_spans(settings: TelemetryConfig) -> Spans | None:
    if settings.traces_endpoint is None:
        return None
    try:
        # Of an optional extra, and slow to import: only who asks for traces pays for it.
        from icehouse_server.telemetry.spans import Spans, otlp_exporter
    except ModuleNotFoundError as error:
        raise ConfigError(
            Reason.CONFIG_INVALID,
            f"telemetry.traces_endpoint is set, and the package {error.name} is not installed; "
            f"install the extra, {extra_command('otel')}, or leave the setting away",
            field="telemetry.traces_endpoint",
            metadata={"package": error.name or ""},
        ) from error
    return Spans(
        otlp_exporter(settings.traces_endpoint),
        sample_ratio=settings.traces_sample_ratio,
        version=server_version(),
    )
