"""Status page of one server: its rules from the configuration, and the way to the event loop's answer."""

from __future__ import annotations

import asyncio
import concurrent.futures
import secrets
from typing import TYPE_CHECKING

from icehouse_server.clock import Clock
from icehouse_server.config import Config
from icehouse_server.domain.stats import ServerStatus
from icehouse_server.rpc.address import is_loopback
from icehouse_server.rpc.monitoring.server_service import server_version
from icehouse_server.rpc.monitoring.status import StatusReader
from icehouse_server.telemetry.call_metrics import FIRST_TOKEN_BY_REUSE
from icehouse_server.telemetry.status_page.page import StatusPage
from icehouse_server.telemetry.status_page.report import ReportRules

if TYPE_CHECKING:
    # Slow to import: only who asks for metrics pays for it.
    from icehouse_server.telemetry.prometheus import PrometheusMeter

_ANSWER_TIMEOUT_S = 3.0
"""How long a thread of the endpoint waits for the event loop."""


def open_status_page(
    config: Config, status: StatusReader, *, meter: PrometheusMeter, clock: Clock
) -> StatusPage:
    """Return the page of the server whose event loop this is called on."""
    loop = asyncio.get_running_loop()
    return StatusPage(
        read=lambda: _read_on(loop, status),
        first_token=lambda: meter.series(FIRST_TOKEN_BY_REUSE),
        rules=ReportRules(
            version=server_version(),
            shows_request_ids=not config.security.authenticates,
            name_key=secrets.token_bytes(32),
        ),
        clock=clock,
        is_local=is_loopback(config.telemetry.metrics_host),
    )


def _read_on(loop: asyncio.AbstractEventLoop, status: StatusReader) -> ServerStatus | None:
    """Return what the reader says, from another thread; None when the loop is too busy, or over."""
    reading = status.read()
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
