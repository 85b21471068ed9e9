"""Prometheus endpoint: the table of metrics, on a port of its own.

The scrapes are answered by threads of this endpoint. They read the counters of calls under
prometheus_client's own locks and the latest snapshot, a frozen value; they never ask the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from icehouse_server.domain.stats import Snapshot
from icehouse_server.errors import Reason, StartError
from icehouse_server.telemetry.call_metrics import CALL_METRICS
from icehouse_server.telemetry.http_server import MetricsServer
from icehouse_server.telemetry.metric import HistogramSeries, Metric, MetricKind
from icehouse_server.telemetry.table import OBSERVED_METRICS, Observed


class PrometheusMeter:
    """Counters and histograms of calls. `add` and `observe` are cheap and safe from any thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._counters: dict[str, Counter] = {}
        self._histograms: dict[str, Histogram] = {}
        for metric in CALL_METRICS:
            names = (metric.prometheus_name, metric.description, metric.prometheus_labels)
            if metric.kind is MetricKind.COUNTER:
                self._counters[metric.name] = Counter(*names, registry=self.registry)
            else:
                self._histograms[metric.name] = Histogram(
                    *names, buckets=metric.buckets, registry=self.registry
                )

    def add(self, metric: Metric, value: float, labels: tuple[str, ...] = ()) -> None:
        counter = self._counters[metric.name]
        (counter.labels(*labels) if labels else counter).inc(value)

    def series(self, metric: Metric) -> tuple[HistogramSeries, ...]:
        """Return what was recorded of a histogram, one series for each value of its labels."""
        [family] = self._histograms[metric.name].collect()
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
        histogram = self._histograms[metric.name]
        (histogram.labels(*labels) if labels else histogram).observe(value)


class SnapshotCollector(Collector):
    """Turns the latest snapshot into metrics at every scrape."""

    def __init__(self, latest: Callable[[], Snapshot]) -> None:
        self._latest = latest

    def describe(self) -> Iterator[Family]:
        """Name the families without reading anything, for the registry's check of duplicates."""
        return (_family(row) for row in OBSERVED_METRICS)

    def collect(self) -> Iterator[Family]:
        """Yield one family per row of the table."""
        snapshot = self._latest()
        for row in OBSERVED_METRICS:
            family = _family(row)
            for labels, value in row.read(snapshot):
                family.add_metric(labels, value)
            yield family


class PrometheusEndpoint:
    """An HTTP server for scrapes, from `start` to `stop`."""

    def __init__(self, meter: PrometheusMeter, *, host: str, port: int, names: Collection[str] = ()) -> None:
        self.meter = meter
        self._host = host
        self._port = port
        self._names = names
        self._server: MetricsServer | None = None

    def start(
        self, latest: Callable[[], Snapshot], pages: Mapping[str, WSGIApplication] | None = None
    ) -> str:
        """Listen and return the URL; raises StartError when the address cannot be had.

        `pages` are by path; every other path answers with the metrics.
        """
        self.meter.registry.register(SnapshotCollector(latest))
        app: WSGIApplication = make_wsgi_app(self.meter.registry)
        routed = _routed(pages, app) if pages else app
        try:
            self._server = MetricsServer(self._host, self._port, routed, names=self._names)
        except OSError as error:
            raise StartError(
                Reason.ADDRESS_IN_USE,
                f"the metrics endpoint cannot listen on {self._host}:{self._port} ({error.strerror}); "
                "choose another --metrics-port, or stop what listens there",
                metadata={"host": self._host, "port": self._port},
            ) from error
        self._server.start()
        return f"http://{self._host}:{self._server.server_port}/metrics"

    def stop(self) -> None:
        """Answer no more scrapes."""
        if self._server is not None:
            self._server.stop()


def _routed(pages: Mapping[str, WSGIApplication], metrics: WSGIApplication) -> WSGIApplication:
    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        return pages.get(environ["PATH_INFO"], metrics)(environ, start_response)

    return app


def _family(row: Observed) -> CounterMetricFamily | GaugeMetricFamily:
    metric = row.metric
    make = CounterMetricFamily if metric.kind is MetricKind.COUNTER else GaugeMetricFamily
    return make(metric.prometheus_name, metric.description, labels=metric.prometheus_labels)
