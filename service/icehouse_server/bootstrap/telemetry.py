"""Telemetry as the configuration wants it: what watches calls, metrics endpoint, status page, KV events."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING

from icehouse_server.clock import Clock
from icehouse_server.config import Config, TelemetryConfig
from icehouse_server.domain.call import SpillRecord
from icehouse_server.domain.ids import DEFAULT_TENANT, Tenant
from icehouse_server.domain.request import call_of
from icehouse_server.domain.stats import ServerStatus
from icehouse_server.engine.core.block_log import BlockLog
from icehouse_server.errors import Reason, StartError, imports_of_extra
from icehouse_server.rpc.calls.watchers import Telemetry
from icehouse_server.rpc.engine_client.engine_ports import EnginePort
from icehouse_server.rpc.engine_client.router import Router
from icehouse_server.rpc.kv_events.kv_event_source import CONNECT_PREFIX, KvEventSource
from icehouse_server.rpc.listen_address import is_loopback
from icehouse_server.rpc.rpc_server import RpcServer
from icehouse_server.rpc.services.observation import Observation
from icehouse_server.rpc.services.server_service import server_version
from icehouse_server.storage.api import Outcome, Persisted, Ticket
from icehouse_server.telemetry.call_metrics import FIRST_TOKEN_BY_REUSE, CallMetrics
from icehouse_server.telemetry.status_page.page import ReportRules, StatusPage

if TYPE_CHECKING:
    from icehouse_server.rpc.kv_events.zmq_publisher import ZmqPublisher

    # Slow to import: only who asks for metrics or traces pays for it.
    from icehouse_server.telemetry.call_spans import CallSpans
    from icehouse_server.telemetry.prometheus import MetricsServer, PrometheusMeter

_log = logging.getLogger("icehouse.boot")

_ANSWER_TIMEOUT_S = 3.0
"""How long a thread of the endpoint waits for the event loop."""


class TelemetryParts:
    """Made before the RPC server, started when that listens, stopped last."""

    def __init__(self, config: Config) -> None:
        settings = config.telemetry
        check_status_page(config)
        self._config = config
        self._meter: PrometheusMeter | None = None
        self._server: MetricsServer | None = None
        metrics: tuple[CallMetrics, ...] = ()
        if settings.metrics_port is not None:
            from icehouse_server.telemetry.prometheus import PrometheusMeter

            self._meter = PrometheusMeter()
            metrics = (CallMetrics(self._meter),)
        self._spans = _open_spans(settings)
        wants_samples = self._meter is not None or settings.load_report_enabled or config.fleet.worker_enabled
        self.watchers = Telemetry(
            wire=metrics,
            calls=metrics,
            tracer=self._spans,
            has_load_report=settings.load_report_enabled,
            has_access_log=config.log.access_enabled,
            sample_interval_s=settings.sample_interval_s if wants_samples else None,
        )

    def watching(self, post: Callable[[Outcome], object]) -> Callable[[Outcome], object]:
        """Return `post`, wrapped so that spills are traced. It is called on the storage thread."""
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
        settings, meter = self._config.telemetry, self._meter
        if settings.metrics_port is None or meter is None:
            return
        from icehouse_server.telemetry.prometheus import serve_metrics

        shows_page, observation = settings.status_page_enabled, rpc.observation
        page = open_status_page(self._config, observation, meter=meter, clock=clock) if shows_page else None
        self._server = serve_metrics(
            meter,
            lambda: observation.latest,
            host=settings.metrics_host,
            port=settings.metrics_port,
            names=settings.own_names,
            pages=None if page is None else page.pages,
        )
        _log.info("metrics_opened", extra={"url": f"{self._server.url}metrics"})
        if shows_page:
            _log.info("status_page_opened", extra={"url": self._server.url})

    def stop(self) -> None:
        """Close the endpoint and send the last spans. May block for seconds, so not on the event loop."""
        if self._server is not None:
            self._server.stop()
        if self._spans is not None:
            self._spans.stop()


def _open_spans(settings: TelemetryConfig) -> CallSpans | None:
    if settings.traces_endpoint is None:
        return None
    with imports_of_extra("otel", setting="telemetry.traces_endpoint"):
        # Slow to import, too: only who asks for traces pays for it.
        from icehouse_server.telemetry.call_spans import CallSpans, otlp_exporter
    return CallSpans(
        otlp_exporter(settings.traces_endpoint),
        sample_ratio=settings.traces_sample_ratio,
        version=server_version(),
    )


def check_status_page(config: Config) -> None:
    """Raise StartError where the page would show text to other machines."""
    settings = config.telemetry
    is_guarded = config.security.allow_insecure_public or is_loopback(settings.metrics_host)
    if settings.status_page_text_enabled and not is_guarded:
        raise StartError(
            Reason.ADDRESS_INSECURE,
            f"telemetry.metrics_host = {settings.metrics_host!r} can be reached from other machines, and "
            "telemetry.status_page_text_enabled shows parts of every tenant's prompts and outputs there, in "
            "the clear and to whoever asks (TLS and credentials are of the API's port alone); use 127.0.0.1, "
            "leave the text out, or say --allow-insecure-public if something else protects it",
            metadata={"host": settings.metrics_host},
        )


def open_status_page(
    config: Config, observation: Observation, *, meter: PrometheusMeter, clock: Clock
) -> StatusPage:
    """Return the page of the server on this event loop."""
    loop = asyncio.get_running_loop()
    settings = config.telemetry
    shows_text = settings.status_page_text_enabled
    if shows_text and not is_loopback(settings.metrics_host):
        _log.warning("status_page_text_left_open", extra={"host": settings.metrics_host})
    return StatusPage(
        read=lambda: _read_on(loop, observation, with_tokens=shows_text),
        first_token=lambda: meter.series(FIRST_TOKEN_BY_REUSE),
        rules=ReportRules(
            version=server_version(),
            shows_request_ids=not config.security.authenticates,
            name_key=secrets.token_bytes(32),
            decode=observation.decode if shows_text else None,
        ),
        clock=clock,
    )


def _read_on(
    loop: asyncio.AbstractEventLoop, observation: Observation, *, with_tokens: bool
) -> ServerStatus | None:
    """Read the status from another thread; None when the loop is too busy, or closed."""
    reading = observation.read_status(with_tokens=with_tokens)
    try:
        future = asyncio.run_coroutine_threadsafe(reading, loop)
    except RuntimeError:  # the loop is closed
        reading.close()
        return None
    try:
        return future.result(timeout=_ANSWER_TIMEOUT_S)
    except (TimeoutError, concurrent.futures.CancelledError):
        future.cancel()
        return None


class KvEventParts:
    """Started when the RPC server listens. Raises ConfigError without the extra for ZeroMQ."""

    def __init__(
        self, config: Config, log: BlockLog, *, engine: EnginePort, router: Router, clock: Clock
    ) -> None:
        self._config = config
        self._router = router
        self._address = ""
        self.source = KvEventSource(
            log,
            settings=config.kv_events,
            block_token_count=config.cache.block_token_count,
            engine=engine,
            router=router,
            clock=clock,
        )
        self._publisher = self._make_publisher(clock)

    def start(self, address: str) -> None:
        """Publish for the server at this address; raises StartError when the endpoint cannot be had."""
        self._address = address
        if self._publisher is not None:
            _log.info("kv_events_opened", extra={"endpoint": self._publisher.start()})

    async def stop(self) -> None:
        await self.source.stop()
        if self._publisher is not None:
            await self._publisher.stop()

    def _make_publisher(self, clock: Clock) -> ZmqPublisher | None:
        settings = self._config.kv_events
        if settings.zmq_endpoint is None:
            return None
        if not (self._config.security.allow_insecure_public or _is_private(settings.zmq_endpoint)):
            raise StartError(
                Reason.ADDRESS_INSECURE,
                f"kv_events.zmq_endpoint = {settings.zmq_endpoint!r} reaches other machines, in the clear "
                "and whoever they are; use one on 127.0.0.1, or say --allow-insecure-public if something "
                "else protects it",
                metadata={"endpoint": settings.zmq_endpoint},
            )
        with imports_of_extra("fleet", setting="kv_events.zmq_endpoint"):
            from icehouse_server.rpc.kv_events.zmq_publisher import ZmqPublisher
        return ZmqPublisher(
            self.source,
            endpoint=settings.zmq_endpoint,
            topic=self._topic,
            tenant=DEFAULT_TENANT if settings.zmq_tenant is None else Tenant(settings.zmq_tenant),
            clock=clock,
        )

    def _topic(self) -> str:
        """Return the topic. Called when there are events, so there is a model."""
        model, topic = self._router.model, self._config.kv_events.zmq_topic
        assert model is not None, "events before a model"
        return topic or f"kv@{self._address}@{model.info.model_id}"


def _is_private(endpoint: str) -> bool:
    """Whether only this machine can reach what is sent to a ZeroMQ endpoint."""
    scheme, _, address = endpoint.removeprefix(CONNECT_PREFIX).partition("://")
    if scheme in ("ipc", "inproc"):
        return True
    return is_loopback(address.rpartition(":")[0].strip("[]"))
