"""HTTP server of the metrics port: a thread for each connection, and so many of them at once.

Whoever reaches the port may open connections and say nothing. The oldest one makes room for a newcomer, so
that neither threads nor open files grow, and a scraper is always answered.

A browser can be led here by a name that somebody else points at this address (DNS rebinding), and would then
take what is answered for theirs. So whoever asks by a name that is not known to be this server's is told
nothing, on every path; addresses cannot be pointed elsewhere.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
import sys
import threading
import urllib.parse
from collections.abc import Collection, Iterable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

_log = logging.getLogger("icehouse.metrics")

CONNECTION_LIMIT = 32
_READ_TIMEOUT_S = 30.0
"""Time for a caller that says nothing, where nobody else wants its place."""
ANY_NAME = "*"
_MISNAMED = (
    b"The server does not know itself by that name. Ask by its address, or list the name in "
    b"telemetry.metrics_names.\n"
)


class MetricsServer(ThreadingMixIn, WSGIServer):
    """Answers GET requests of scrapers and browsers by one application, from `start` to `stop`."""

    daemon_threads = True
    request_queue_size = 128
    block_on_close = False

    def __init__(self, host: str, port: int, app: WSGIApplication, *, names: Collection[str] = ()) -> None:
        """Listen on `host` and `port`, 0 for any; raises OSError when the address cannot be had.

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

    def start(self) -> None:
        """Accept connections."""
        self._thread.start()

    def stop(self) -> None:
        """Accept no more, and end those that are open."""
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
        """Log what broke, in one line; callers that leave in the middle of an answer are none of it."""
        if not isinstance(sys.exception(), OSError):
            _log.exception("metrics_connection_broke")


class _Handler(WSGIRequestHandler):
    timeout = _READ_TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: scrapes come every few seconds."""


def _answering_to(names: Collection[str], app: WSGIApplication) -> WSGIApplication:
    """Return the application for those who ask by an address or one of these names."""
    known = {name.lower() for name in names}

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        host = environ.get("HTTP_HOST")
        # A probe of HTTP/1.0 may leave it out; no browser does.
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
    """Wake the thread that reads or writes there; it closes the connection."""
    with contextlib.suppress(OSError):  # the caller was faster
        connection.shutdown(socket.SHUT_RDWR)
