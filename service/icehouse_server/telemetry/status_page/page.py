"""Page and report over HTTP: what a browser gets, at most one report a second however many look.

Called on the threads of the metrics endpoint. Nothing is made, asked or kept while nobody looks.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import json
import threading
from collections.abc import Callable, Iterable, Mapping
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from icehouse_server.clock import Clock
from icehouse_server.domain.stats import ServerStatus
from icehouse_server.telemetry.metric import HistogramSeries
from icehouse_server.telemetry.status_page.report import ReportRules, report_of

PAGE_PATH = "/"
REPORT_PATH = "/status.json"

_WRONG_METHOD = "405 Method Not Allowed"
_REPORT_INTERVAL_S = 1.0
_WAITING_LIMIT = 16
"""Requests that wait for a report together; more are sent away."""


class StatusPage:
    """Answers for two paths of the metrics endpoint.

    `read` asks the server, and returns None when it does not answer in time.
    """

    def __init__(
        self,
        *,
        read: Callable[[], ServerStatus | None],
        first_token: Callable[[], Iterable[HistogramSeries]],
        rules: ReportRules,
        clock: Clock,
    ) -> None:
        self._read = read
        self._first_token = first_token
        self._rules = rules
        self._clock = clock
        self._page = importlib.resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
        self._policy = content_security_policy(self._page)
        self._waiting_slots = threading.BoundedSemaphore(_WAITING_LIMIT)
        self._lock = threading.Lock()
        self._report: bytes | None = None
        """None when the server did not answer."""
        self._due_time = clock.monotonic()

    @property
    def pages(self) -> Mapping[str, WSGIApplication]:
        return {PAGE_PATH: self._answer_page, REPORT_PATH: self._answer_report}

    def _answer_page(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] != "GET":
            return _send(start_response, _WRONG_METHOD)
        headers = {"Content-Type": "text/html; charset=utf-8", "Content-Security-Policy": self._policy}
        return _send(start_response, "200 OK", self._page.encode(), headers)

    def _answer_report(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] != "GET":
            return _send(start_response, _WRONG_METHOD)
        report = self._latest_report()
        if report is None:
            return _send(start_response, "503 Service Unavailable", headers={"Retry-After": "1"})
        return _send(start_response, "200 OK", report, {"Content-Type": "application/json"})

    def _latest_report(self) -> bytes | None:
        """Return a report of the last second; None when the server does not answer, or too many wait."""
        if not self._waiting_slots.acquire(blocking=False):
            return None
        try:
            with self._lock:
                if self._clock.monotonic() >= self._due_time:
                    self._report = self._new_report()
                    self._due_time = self._clock.monotonic() + _REPORT_INTERVAL_S
                return self._report
        finally:
            self._waiting_slots.release()

    def _new_report(self) -> bytes | None:
        status = self._read()
        if status is None:
            return None
        report = report_of(status, self._first_token(), rules=self._rules)
        return json.dumps(report, allow_nan=False, separators=(",", ":")).encode()


def content_security_policy(page: str) -> str:
    """Return a policy under which the page's own script and style run, and nothing else at all."""
    script, style = (_source_hash(page, element) for element in ("script", "style"))
    return (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    )


def _source_hash(page: str, element: str) -> str:
    content = page.partition(f"<{element}>")[2].partition(f"</{element}>")[0]
    assert content, f"the page has no <{element}>"
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def _send(
    start_response: StartResponse, status: str, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> Iterable[bytes]:
    always = {
        "Cache-Control": "no-store",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    start_response(status, [*always.items(), *(headers or {}).items()])
    return [body]
