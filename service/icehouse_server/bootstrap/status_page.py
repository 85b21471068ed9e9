"""Status page of one server: its rules from the configuration, and the way to the event loop's answer."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import secrets
from typing import TYPE_CHECKING

from icehouse_server.clock import Clock
from icehouse_server.config import Config
from icehouse_server.domain.stats import ServerStatus
from icehouse_server.errors import ConfigError, Reason, StartError
from icehouse_server.rpc.listen_address import is_loopback
from icehouse_server.rpc.services.observation import StatusReader
from icehouse_server.rpc.services.server_service import server_version
from icehouse_server.telemetry.call_metrics import FIRST_TOKEN_BY_REUSE
from icehouse_server.telemetry.status_page.page import StatusPage
from icehouse_server.telemetry.status_page.report import ReportRules

if TYPE_CHECKING:
    # Slow to import: only who asks for metrics pays for it.
    from icehouse_server.telemetry.prometheus import PrometheusMeter

_log = logging.getLogger("icehouse.boot")

_ANSWER_TIMEOUT_S = 3.0
"""How long a thread of the endpoint waits for the event loop."""


def check_status_page(config: Config) -> None:
    """Raise what stands against the page as it is configured, before anything is opened."""
    settings = config.telemetry
    if settings.status_page_enabled and settings.metrics_port is None:
        raise ConfigError(
            Reason.CONFIG_INVALID,
            "telemetry.status_page_enabled is on, and the page has no port; set telemetry.metrics_port",
            field="telemetry.metrics_port",
        )
    if not settings.status_page_text_enabled:
        return
    if not settings.status_page_enabled:
        raise ConfigError(
            Reason.CONFIG_INVALID,
            "telemetry.status_page_text_enabled is on, and the page that would show text is off; set "
            "telemetry.status_page_enabled",
            field="telemetry.status_page_enabled",
        )
    if not (config.security.allow_insecure_public or is_loopback(settings.metrics_host)):
        raise StartError(
            Reason.ADDRESS_INSECURE,
            f"telemetry.metrics_host = {settings.metrics_host!r} can be reached from other machines, and "
            "telemetry.status_page_text_enabled shows parts of every tenant's prompts and outputs there, in "
            "the clear and to whoever asks (TLS and credentials are of the API's port alone); use 127.0.0.1, "
            "leave the text out, or say --allow-insecure-public if something else protects it",
            metadata={"host": settings.metrics_host},
        )


def open_status_page(
    config: Config, status: StatusReader, *, meter: PrometheusMeter, clock: Clock
) -> StatusPage:
    """Return the page of the server whose event loop this is called on."""
    loop = asyncio.get_running_loop()
    settings = config.telemetry
    shows_text = settings.status_page_text_enabled
    if shows_text and not is_loopback(settings.metrics_host):
        _log.warning("status_page_text_left_open", extra={"host": settings.metrics_host})
    return StatusPage(
        read=lambda: _read_on(loop, status, with_tokens=shows_text),
        first_token=lambda: meter.series(FIRST_TOKEN_BY_REUSE),
        rules=ReportRules(
            version=server_version(),
            shows_request_ids=not config.security.authenticates,
            name_key=secrets.token_bytes(32),
            decode=status.decode if shows_text else None,
        ),
        clock=clock,
    )


def _read_on(
    loop: asyncio.AbstractEventLoop, status: StatusReader, *, with_tokens: bool
) -> ServerStatus | None:
    """Return what the reader says, from another thread; None when the loop is too busy, or over."""
    reading = status.read(with_tokens=with_tokens)
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
