"""Service manager: notifies systemd when the server is ready, when it stops, and that it is alive.

The protocol is one datagram per message to the socket that NOTIFY_SOCKET names (sd_notify(3)); without that
variable nobody wants to know, and nothing is sent. Owned by the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable, Mapping

_log = logging.getLogger("icehouse.service_manager")

_SEND_TIMEOUT_S = 1.0
"""How long the event loop waits for a manager that does not read. Then the message is dropped."""

_PINGS_PER_INTERVAL = 4
"""Pings within the time after which systemd considers the server stuck."""


class ServiceManager:
    """The process that started the server, if it listens. Constructing it sends nothing.

    A manager that cannot be reached costs a line in the log, never the server.
    """

    def __init__(self, address: str | None, *, watchdog_s: float | None = None) -> None:
        self._address = address
        self._ping_interval_s = None if watchdog_s is None else watchdog_s / _PINGS_PER_INTERVAL

    def ready(self, status: str) -> None:
        """Say that the server is ready; `status` is shown to people."""
        self._send("READY=1", f"STATUS={' '.join(status.split())}")

    def stopping(self) -> None:
        self._send("STOPPING=1", "STATUS=finishing running calls and writing RAM's blocks to SSD")

    def ping(self, is_alive: Callable[[], bool]) -> None:
        """Say that the server is alive. If it is not, send nothing, so that it is restarted."""
        if is_alive():
            self._send("WATCHDOG=1")
        else:
            _log.warning(
                "watchdog_ping_withheld", extra={"detail": "the inference thread is stuck or in a long step"}
            )

    @contextlib.asynccontextmanager
    async def watched(self, is_alive: Callable[[], bool]) -> AsyncIterator[None]:
        """Ping while the block runs, if the manager has a watchdog."""
        if self._address is None or self._ping_interval_s is None:
            yield
            return
        pinging = asyncio.create_task(self._ping_for_ever(is_alive, self._ping_interval_s))
        try:
            yield
        finally:
            pinging.cancel()

    async def _ping_for_ever(self, is_alive: Callable[[], bool], interval_s: float) -> None:
        while True:
            self.ping(is_alive)
            await asyncio.sleep(interval_s)

    def _send(self, *lines: str) -> None:
        if self._address is None:
            return
        # A name that begins with @ has no file: its first byte is zero (unix(7)).
        address = f"\0{self._address[1:]}" if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.settimeout(_SEND_TIMEOUT_S)
                sender.sendto("\n".join(lines).encode(errors="replace"), address)
        except OSError as error:
            _log.warning("service_manager_unreachable", extra={"unsent": lines[0], "detail": str(error)})


def manager_of(environ: Mapping[str, str], *, pid: int) -> ServiceManager:
    """Return who started the process `pid` with this environment, as sd_watchdog_enabled(3) reads it."""
    address = environ.get("NOTIFY_SOCKET") or None
    if address is not None and not address.startswith(("/", "@")):
        _log.warning("service_manager_unreachable", extra={"detail": f"NOTIFY_SOCKET is {address!r}"})
        address = None
    interval_us = environ.get("WATCHDOG_USEC", "")
    is_for_us = environ.get("WATCHDOG_PID") in (None, "", str(pid))
    # No more digits than any interval has: Python refuses thousands of them.
    is_number = interval_us.isascii() and interval_us.isdigit() and len(interval_us) < 20
    watchdog_s = int(interval_us) / 1e6 if is_for_us and is_number else 0.0
    return ServiceManager(address, watchdog_s=watchdog_s or None)
