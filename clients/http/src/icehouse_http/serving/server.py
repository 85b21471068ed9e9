"""Server: the app on its socket, with bounds on all that a caller decides, and how it ends."""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import socket
from collections.abc import Sequence
from types import FrameType

import uvicorn

from icehouse_http.app import create_app
from icehouse_http.bounds.connection import BoundedConnection
from icehouse_http.serving.certificate import CertificateWatch, TlsFiles
from icehouse_http.serving.logs import LOGGER_NAME
from icehouse_http.settings import Settings

_log = logging.getLogger(LOGGER_NAME)

_KEEP_ALIVE_S = 75
_LOOK_INTERVAL_S = 5
"""How often the certificate's files are looked at."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """Where callers connect, and how long the last ones may go on after the order to end."""

    host: str = "127.0.0.1"
    port: int = 8000
    descriptor: int | None = None
    """A socket that listens already, in the place of host and port."""
    tls: TlsFiles | None = None
    grace_s: float = 10.0
    is_supervised: bool = False
    """Whoever started it ends it at once by closing its standard input; a second signal does not."""


class FrontServer(uvicorn.Server):
    """uvicorn's server. The first SIGTERM or SIGINT drains it and it ends with code 0; another ends it at
    once, unless it is supervised: systemd signals every process, and the supervisor does so too."""

    def __init__(self, config: uvicorn.Config, listening: Listening) -> None:
        super().__init__(config)
        self._tls = listening.tls
        self._is_supervised = listening.is_supervised

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take a signal."""
        if self.should_exit and not self._is_supervised:
            os._exit(128 + sig)
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen, and say where."""
        await super().startup(sockets)
        if self._tls is not None and self.config.ssl is not None:
            self.config.callback_notify = CertificateWatch(self._tls, self.config.ssl).look
            self.config.timeout_notify = _LOOK_INTERVAL_S
        if self.started:
            _log.info("http_started", extra={"url": _url_of(self), "pid": os.getpid()})

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no new requests, and wait for those that run."""
        _log.info("http_drain_started", extra={"connections": len(self.server_state.connections)})
        await super().shutdown(sockets)
        _log.info("http_stopped")


def server_of(settings: Settings, listening: Listening) -> FrontServer:
    """Return a server for the event loop that it is run on."""
    tls = listening.tls
    config = uvicorn.Config(
        create_app(settings),
        host=listening.host,
        port=listening.port,
        log_config=None,
        access_log=False,
        http=BoundedConnection,
        ws="none",
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        # It is only waited for, and a part of a second is as good as a whole one.
        timeout_graceful_shutdown=listening.grace_s,  # type: ignore[arg-type]
        ssl_certfile=tls.certificate if tls else None,
        ssl_keyfile=tls.key if tls else None,
    )
    return FrontServer(config, listening)


def run(settings: Settings, listening: Listening) -> None:
    """Serve until a signal."""
    # What lives as long as the process is not looked through for garbage, while callers wait.
    gc.freeze()
    inherited = None if listening.descriptor is None else [socket.socket(fileno=listening.descriptor)]
    server_of(settings, listening).run(inherited)


def _url_of(server: uvicorn.Server) -> str:
    names: Sequence[object] = server.servers[0].sockets[0].getsockname()
    host = f"[{names[0]}]" if ":" in str(names[0]) else names[0]
    return f"{'https' if server.config.is_ssl else 'http'}://{host}:{names[1]}"
