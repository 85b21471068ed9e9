"""Prometheus endpoint: the table of metrics, on a port of its own.

Each connection has a thread, up to CONNECTION_LIMIT. A scrape reads the counters of calls under
prometheus_client's own locks, and the latest snapshot, a frozen value; it never asks the engine. Anybody who
reaches the port may open connections and send nothing. So the oldest connection makes room for a new one:
threads and open files stay bounded, and a scraper is always answered.

A browser can be led here by a name that somebody else points at this address (DNS rebinding), and would then
let their page read the answers. So requests to any name that is not known to be this server's are refused on
every path. Addresses are safe: nobody can point them elsewhere.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
import sys
import threading
import urllib.parse
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from icehouse_server.domain.stats import StatsSnapshot
from icehouse_server.errors import Reason, StartError
from icehouse_server.telemetry.call_metrics import CALL_METRICS
from icehouse_server.telemetry.metric import HistogramSeries, Metric, MetricKind
from icehouse_server.telemetry.metrics_table import OBSERVED_METRICS, ObservedMetric


class PrometheusMeter:
    """Counters and histograms of calls. `add` and `observe` are cheap and safe from any thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._counters: dict[Metric, Counter] = {}
        self._histograms: dict[Metric, Histogram] = {}
        for metric in CALL_METRICS:
            names = (metric.prometheus_name, metric.description, metric.prometheus_labels)
            if metric.kind is MetricKind.COUNTER:
                self._counters[metric] = Counter(*names, registry=self.registry)
            else:
                self._histograms[metric] = Histogram(*names, buckets=metric.buckets, registry=self.registry)

    def add(self, metric: Metric, value: float, labels: tuple[str, ...] = ()) -> None:
        counter = self._counters[metric]
        (counter.labels(*labels) if labels else counter).inc(value)

    def series(self, metric: Metric) -> tuple[HistogramSeries, ...]:
        """Return a histogram's counts, one series for each value of its labels."""
        [family] = self._histograms[metric].collect()
        counts: dict[tuple[str, ...], list[float]] = {}
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                labels = tuple(sample.labels[label] for label in metric.prometheus_labels)
                counts.setdefault(labels, []).append(sample.value)
        return tuple(
            HistogramSeries(labels, metric.buckets, tuple(int(count) for count in cumulative))
            for labels, cumulative in counts.items()
        )

    def observe(self, metric: Metric, value: float, labels: tuple[str, ...] = ()) -> None:
        histogram = self._histograms[metric]
        (histogram.labels(*labels) if labels else histogram).observe(value)


class SnapshotCollector(Collector):
    """Turns the latest snapshot into metrics at every scrape, with one more label if there may be several
    models."""

    def __init__(self, latest: Callable[[], StatsSnapshot]) -> None:
        self._latest = latest

    def describe(self) -> Iterator[Family]:
        """Name the families without reading anything, so that the registry can check for duplicates."""
        return (_family(row) for row in OBSERVED_METRICS)

    def collect(self) -> Iterator[Family]:
        snapshot = self._latest()
        for row in OBSERVED_METRICS:
            if snapshot.models is None or not row.is_of_model:
                family = _family(row)
                for labels, value in row.read(snapshot):
                    family.add_metric(labels, value)
            else:
                family = _family(row, MODEL_LABEL)
                for name, part in snapshot.models.items():
                    for labels, value in row.read(part):
                        family.add_metric((name, *labels), value)
            yield family


def serve_metrics(
    meter: PrometheusMeter,
    latest: Callable[[], StatsSnapshot],
    *,
    host: str,
    port: int,
    names: Collection[str] = (),
    pages: Mapping[str, WSGIApplication] | None = None,
) -> MetricsServer:
    """Answer scrapes from now on; raises StartError if it cannot listen on the address.

    `pages` maps paths to applications; every other path answers with the metrics.
    """
    meter.registry.register(SnapshotCollector(latest))
    metrics: WSGIApplication = make_wsgi_app(meter.registry)

    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        return (pages or {}).get(environ["PATH_INFO"], metrics)(environ, start_response)

    try:
        server = MetricsServer(host, port, app, names=names)
    except OSError as error:
        raise StartError(
            Reason.ADDRESS_IN_USE,
            f"the metrics endpoint cannot listen on {host}:{port} ({error.strerror}); choose another "
            "--metrics-port, or stop what listens there",
            metadata={"host": host, "port": port},
        ) from error
    server.start()
    return server


MODEL_LABEL = "icehouse_model"
"""The label of one model's metrics, on a server that may have several."""


def _family(row: ObservedMetric, *labels: str) -> CounterMetricFamily | GaugeMetricFamily:
    metric = row.metric
    make = CounterMetricFamily if metric.kind is MetricKind.COUNTER else GaugeMetricFamily
    return make(metric.prometheus_name, metric.description, labels=(*labels, *metric.prometheus_labels))


_log = logging.getLogger("icehouse.metrics")

CONNECTION_LIMIT = 32
_READ_TIMEOUT_S = 30.0
"""Time limit for a caller that sends nothing, if nobody needs its slot earlier."""
ANY_NAME = "*"
_MISNAMED = (
    b"The server does not know itself by that name. Ask by its address, or list the name in "
    b"telemetry.metrics_names.\n"
)


class MetricsServer(ThreadingMixIn, WSGIServer):
    """Answers GET requests of scrapers and browsers with one application, from `start` to `stop`."""

    daemon_threads = True
    request_queue_size = 128
    block_on_close = False

    def __init__(self, host: str, port: int, app: WSGIApplication, *, names: Collection[str] = ()) -> None:
        """Listen on `host` and `port`, 0 for any; raises OSError if the address is not available.

        It answers to addresses, to localhost, to `host` and to `names`.
        """
        family, *_, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        self.address_family = family
        self._open: dict[int, socket.socket] = {}
        """Connections by identity, the oldest first."""
        self._lock = threading.Lock()
        super().__init__((str(address[0]), port), _Handler)
        self.set_app(app if ANY_NAME in names else _answering_to(("localhost", host, *names), app))
        self._thread = threading.Thread(target=self.serve_forever, name="metrics", daemon=True)
        self.url = f"http://{host}:{self.server_port}/"

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Accept no more connections, and end the open ones."""
        self.shutdown()
        self.server_close()
        self._thread.join()
        with self._lock:
            for connection in self._open.values():
                _end(connection)

    def server_bind(self) -> None:
        """Bind without asking the resolver for this machine's name, which may take seconds."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            while len(self._open) >= CONNECTION_LIMIT:
                _end(self._open.pop(next(iter(self._open))))
            self._open[id(request)] = request
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(id(request), None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log unexpected errors; callers that leave in the middle of an answer are not one."""
        if not isinstance(sys.exception(), OSError):
            _log.exception("metrics_connection_broke")


class _Handler(WSGIRequestHandler):
    timeout = _READ_TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: scrapes come every few seconds."""


def _answering_to(names: Collection[str], app: WSGIApplication) -> WSGIApplication:
    """Return the application, restricted to requests to an address or to one of these names."""
    known = {name.lower() for name in names}

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        host = environ.get("HTTP_HOST")
        # An HTTP/1.0 probe may leave it out; no browser does.
        if host is None or _is_known(host, known):
            return app(environ, start_response)
        start_response("421 Misdirected Request", [("Content-Type", "text/plain")])
        return [_MISNAMED]

    return answer


def _is_known(host: str, names: Collection[str]) -> bool:
    """Whether a Host header is an address or one of these names."""
    try:
        name = urllib.parse.urlsplit(f"//{host}").hostname or ""
        return name in names or bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def _end(connection: socket.socket) -> None:
    """Wake the thread that reads or writes on the connection; it closes it."""
    with contextlib.suppress(OSError):  # the caller was faster
        connection.shutdown(socket.SHUT_RDWR)
