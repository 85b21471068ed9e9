"""The page of all metrics, made from the table: `python -m tests.telemetry.metric_page` writes it."""

from __future__ import annotations

from pathlib import Path

from icehouse_server.telemetry.table import METRICS

from tests.tidy.tree import ROOT

PAGE = ROOT / "deploy/observability/METRICS.md"

_HEAD = """# Metrics

What `icehouse serve --metrics-port 9464` answers at `/metrics`, beside the `process_*` metrics of
Prometheus's client library. Made from the server's own table by `python -m tests.telemetry.metric_page`;
a test compares them. A histogram has the usual `_bucket`, `_sum` and `_count`.
Sizes are bytes, times seconds.

| Prometheus | OpenTelemetry | kind | unit | labels | meaning |
|---|---|---|---|---|---|
"""


def page() -> str:
    """Return the page."""
    rows = (
        f"| `{m.prometheus_name}` | `{m.name}` | {m.kind.name.lower()} | {m.unit} "
        f"| {' '.join(f'`{label}`' for label in m.prometheus_labels)} | {m.description} |"
        for m in METRICS
    )
    return _HEAD + "\n".join(rows) + "\n"


def main(path: Path = PAGE) -> None:
    """Write the page."""
    path.write_text(page())


if __name__ == "__main__":
    main()
