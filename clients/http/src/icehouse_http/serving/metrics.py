"""Metrics of the front in Prometheus's text form: requests, what runs, time to the first byte, bodies held.

Written by hand: the client library costs more memory than the rest of this page together.
"""

from __future__ import annotations

import bisect
import collections
from collections.abc import Iterator, Sequence

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Histogram:
    """Counts of durations by how long they were."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_BOUNDS_S) + 1)
        self._sum_s = 0.0

    def add(self, duration_s: float) -> None:
        """Count one."""
        self._counts[bisect.bisect_left(_BOUNDS_S, duration_s)] += 1
        self._sum_s += duration_s

    def lines(self, name: str, labels: str) -> Iterator[str]:
        """Yield its series."""
        total = 0
        for bound, count in zip((*map(str, _BOUNDS_S), "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{{labels},le="{bound}"}} {total}'
        yield f"{name}_sum{{{labels}}} {self._sum_s:.6f}"
        yield f"{name}_count{{{labels}}} {total}"


class Metrics:
    """What is counted. Labels have few values, whatever callers send. Belongs to the event loop."""

    def __init__(self) -> None:
        self.in_flight_count = 0
        self._requests: collections.Counter[tuple[str, str, int]] = collections.Counter()
        self._first_bytes: dict[str, Histogram] = collections.defaultdict(Histogram)

    def request_ended(self, *, path: str, protocol: str, status: int) -> None:
        """Count a request by its path, as the front knows it, its protocol and its status."""
        self._requests[path, protocol, status] += 1

    def first_byte(self, *, path: str, duration_s: float) -> None:
        """Count how long a caller waited for the first byte of an answer's body."""
        self._first_bytes[path].add(duration_s)

    def text(self, *, held_bytes: int, limit_bytes: int) -> str:
        """Return the page; what bodies hold, and may hold, is counted elsewhere."""
        requests = [
            f'icehouse_http_requests_total{{path="{path}",protocol="{protocol}",status="{status}"}} {count}'
            for (path, protocol, status), count in sorted(self._requests.items())
        ]
        name = "icehouse_http_first_byte_seconds"
        waits = [
            line
            for path, histogram in sorted(self._first_bytes.items())
            for line in histogram.lines(name, f'path="{path}"')
        ]
        families: Sequence[tuple[str, str, str, Sequence[str]]] = (
            ("icehouse_http_requests_total", "counter", "Requests ended.", requests),
            (
                "icehouse_http_in_flight_requests",
                "gauge",
                "Requests running.",
                (_line("in_flight_requests", self.in_flight_count),),
            ),
            (name, "histogram", "From a request's headers to the first byte of its answer's body.", waits),
            (
                "icehouse_http_body_bytes",
                "gauge",
                "Memory for the bodies of running requests.",
                (_line("body_bytes", held_bytes),),
            ),
            (
                "icehouse_http_body_limit_bytes",
                "gauge",
                "Maximum memory for these bodies.",
                (_line("body_limit_bytes", limit_bytes),),
            ),
        )
        lines: list[str] = []
        for family, kind, help_text, series in families:
            lines += [f"# HELP {family} {help_text}", f"# TYPE {family} {kind}", *series]
        return "\n".join(lines) + "\n"


def _line(name: str, value: int) -> str:
    return f"icehouse_http_{name} {value}"
