"""Telemetry as configured: call watchers, metrics endpoint, status page; and what gateways learn about each
model and its blocks."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import functools
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from icehouse_server.clock import Clock
from icehouse_server.config import Config, TelemetryConfig
from icehouse_server.domain.call import SpillRecord
from icehouse_server.domain.ids import DEFAULT_TENANT, Tenant
from icehouse_server.domain.request import call_of
from icehouse_server.domain.stats import KvEventStats, ServerStatus
from icehouse_server.engine.core.block_log import BlockLog
from icehouse_server.engine.runner.model_loader import ModelSource, read_config, read_generation_config
from icehouse_server.errors import Reason, StartError, imports_of_extra
from icehouse_server.rpc.calls.watchers import Telemetry
from icehouse_server.rpc.engine_client.engine_ports import EnginePort
from icehouse_server.rpc.engine_client.router import Router
from icehouse_server.rpc.kv_events.kv_event_source import CONNECT_PREFIX, KvEventSource
from icehouse_server.rpc.listen_address import is_loopback
from icehouse_server.rpc.rpc_server import RpcServer
from icehouse_server.rpc.services.observation import CallObservation
from icehouse_server.rpc.services.server_service import server_version
from icehouse_server.storage.api import BlockPersisted, Outcome, Ticket
from icehouse_server.telemetry.call_metrics import FIRST_TOKEN_BY_REUSE, CallMetrics
from icehouse_server.telemetry.status_page.page import ReportRules, StatusPage
from icehouse_server.text.tokenizer_archive import read_tokenizer_archive

if TYPE_CHECKING:
    # These need an optional extra.
    from icehouse_server.rpc.kv_events.zmq_publisher import ZmqPublisher
    from icehouse_server.rpc.worker.worker_info import WorkerModels, WorkerParts

    # Slow to import: only users of metrics or traces pay for it.
    from icehouse_server.telemetry.call_spans import CallSpans
    from icehouse_server.telemetry.prometheus import MetricsServer, PrometheusMeter

_log = logging.getLogger("icehouse.boot")

_ANSWER_TIMEOUT_S = 3.0
"""How long a thread of the endpoint waits for the event loop."""


class TelemetryParts:
    """Created before the RPC server, started once that listens, stopped last."""

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
            if isinstance(done, BlockPersisted) and done.request_id is not None:
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
        """Open the metrics endpoint; raises StartError if its address is not available. Event loop only."""
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
        # Slow to import, too: only users of traces pay for it.
        from icehouse_server.telemetry.call_spans import CallSpans, otlp_exporter
    return CallSpans(
        otlp_exporter(settings.traces_endpoint),
        sample_ratio=settings.traces_sample_ratio,
        version=server_version(),
    )


def check_status_page(config: Config) -> None:
    """Raise StartError if the page would show text to other machines."""
    settings = config.telemetry
    is_guarded = config.security.allow_insecure_public or is_loopback(settings.metrics_host)
    if settings.status_page_text_enabled and not is_guarded:
        raise StartError(
            Reason.ADDRESS_INSECURE,
            f"telemetry.metrics_host = {settings.metrics_host!r} can be reached from other machines, and "
            "telemetry.status_page_text_enabled shows parts of every tenant's prompts and outputs there, in "
            "the clear and to anyone (TLS and credentials protect only the API's port); use 127.0.0.1, "
            "turn the text off, or pass --allow-insecure-public if something else protects it",
            metadata={"host": settings.metrics_host},
        )


def open_status_page(
    config: Config, observation: CallObservation, *, meter: PrometheusMeter, clock: Clock
) -> StatusPage:
    """Return the status page of the server on this event loop."""
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
    loop: asyncio.AbstractEventLoop, observation: CallObservation, *, with_tokens: bool
) -> ServerStatus | None:
    """Read the status from another thread; None if the loop is too busy, or closed."""
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


def kv_event_source(
    config: Config, log: BlockLog, *, engine: EnginePort, router: Router, clock: Clock
) -> KvEventSource:
    """Return the source of a model's KV events, which follows its blocks once somebody asks."""
    return KvEventSource(
        log,
        settings=config.kv_events,
        block_token_count=config.cache.block_token_count,
        engine=engine,
        router=router,
        clock=clock,
    )


class KvEventParts:
    """KV events over ZeroMQ, as configured. Raises StartError for an endpoint that other machines can reach,
    and ConfigError without the extra."""

    def __init__(self, config: Config, clock: Clock) -> None:
        self._settings = config.kv_events
        self._address_of: Callable[[str], str] | None = None
        """Set while it publishes."""
        self._sources: dict[str, KvEventSource] = {}
        """Of the models that have an engine."""
        self._past = KvEventStats()
        """Totals of engines that have ended."""
        self._publisher = _zmq_publisher(config, clock)

    def start(self, address_of: Callable[[str], str]) -> None:
        """Publish for the server at these addresses of its models; raises StartError if the endpoint is not
        available."""
        if self._publisher is not None:
            _log.info("kv_events_opened", extra={"endpoint": self._publisher.start()})
            self._address_of = address_of
            for model, source in self._sources.items():
                self._publisher.add(self._topic(model), source)

    def add(self, model: str, source: KvEventSource) -> None:
        """Publish the events of a model with a new engine. Event loop only."""
        self._sources[model] = source
        if self._publisher is not None and self._address_of is not None:
            self._publisher.add(self._topic(model), source)

    async def remove(self, model: str) -> None:
        """Stop following a model whose engine ends."""
        source = self._sources.pop(model, None)
        if source is None:
            return
        if self._publisher is not None and self._address_of is not None:
            self._publisher.remove(self._topic(model))
        await source.stop()
        self._past = dataclasses.replace(_sum((self._past, source.stats())), block_count=0, replay_bytes=0)

    def stats(self) -> KvEventStats:
        """Return the counters of all models."""
        return _sum((self._past, *(source.stats() for source in self._sources.values())))

    async def stop(self) -> None:
        for source in self._sources.values():
            await source.stop()
        if self._publisher is not None:
            await self._publisher.stop()

    def _topic(self, model: str) -> str:
        assert self._address_of is not None, "a topic has the server's address"
        return self._settings.zmq_topic or f"kv@{self._address_of(model)}@{model}"


def _sum(stats: Sequence[KvEventStats]) -> KvEventStats:
    return KvEventStats(*map(sum, zip(*map(dataclasses.astuple, stats), strict=True)))


def _zmq_publisher(config: Config, clock: Clock) -> ZmqPublisher | None:
    settings = config.kv_events
    if settings.zmq_endpoint is None:
        return None
    if not (config.security.allow_insecure_public or _is_private(settings.zmq_endpoint)):
        raise StartError(
            Reason.ADDRESS_INSECURE,
            f"kv_events.zmq_endpoint = {settings.zmq_endpoint!r} is open to other machines, unencrypted "
            "and without credentials; use one on 127.0.0.1, or pass --allow-insecure-public if something "
            "else protects it",
            metadata={"endpoint": settings.zmq_endpoint},
        )
    with imports_of_extra("fleet", setting="kv_events.zmq_endpoint"):
        from icehouse_server.rpc.kv_events.zmq_publisher import ZmqPublisher
    return ZmqPublisher(
        endpoint=settings.zmq_endpoint,
        tenant=DEFAULT_TENANT if settings.zmq_tenant is None else Tenant(settings.zmq_tenant),
        interval_s=settings.interval_ms / 1000,
        clock=clock,
    )


def _is_private(endpoint: str) -> bool:
    """Whether only this machine can reach a ZeroMQ endpoint."""
    scheme, _, address = endpoint.removeprefix(CONNECT_PREFIX).partition("://")
    if scheme in ("ipc", "inproc"):
        return True
    return is_loopback(address.rpartition(":")[0].strip("[]"))


_SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def worker_models(config: Config, *, ports: Mapping[str, int]) -> WorkerModels | None:
    """Return what gateways may use; None if the worker protocol is off. Raises ConfigError without its
    extra."""
    if not config.fleet.worker_enabled:
        return None
    with imports_of_extra("fleet", setting="fleet.worker_enabled"):
        from icehouse_server.rpc.worker.worker_info import WorkerModels
    return WorkerModels(ports)


def worker_parts(
    config: Config, source: ModelSource, *, running_limit: int, kv_events: KvEventSource
) -> WorkerParts:
    """Return a model's parts of the worker protocol."""
    # These need an optional extra.
    from icehouse_server.rpc.worker.kv_event_streams import KvEventStreams
    from icehouse_server.rpc.worker.worker_info import WorkerParts

    model = read_config(source.path)
    generation = read_generation_config(source.path)
    return WorkerParts(
        path=str(source.path),
        architectures=tuple(str(name) for name in model.get("architectures") or ()),
        bos_token_id=_token_id(model, "bos_token_id"),
        pad_token_id=_token_id(model, "pad_token_id"),
        block_token_count=config.cache.block_token_count,
        running_limit=running_limit,
        default_sampling={
            key: float(generation[key])
            for key in _SAMPLING_KEYS
            if isinstance(generation.get(key), int | float)
        },
        read_archive=functools.partial(read_tokenizer_archive, source.path),
        kv_events=KvEventStreams(kv_events, operators_see_tokens=config.fleet.operator_kv_tokens_enabled),
    )


def _token_id(model: Mapping[str, Any], key: str) -> int:
    """Return a token id from the model's configuration; 0 if it has none, as the protocol requires."""
    found = model.get(key)
    first = found[0] if isinstance(found, list) and found else found
    return first if isinstance(first, int) and first >= 0 else 0
