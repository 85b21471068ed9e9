"""`icehouse serve --http-port` as a real process, and what a caller of its HTTP front needs."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2

from tests.fixtures.patience import BOUND_S
from tests.system.crash.crashing_server import ServerProcess
from tests.system.mesh.envoy import free_ports

CHAT = "/v1/chat/completions"


class ServedFront:
    """A server and its HTTP front on a free port of loopback."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        *options: str,
        scheme: str = "http",
        break_it: Callable[[], None] | None = None,
    ) -> None:
        (self.port,) = free_ports(1)
        self.url = f"{scheme}://127.0.0.1:{self.port}"
        self._log = folder / "log"
        self.server = ServerProcess(
            model=model,
            directory=folder / "blocks",
            log=self._log,
            options=("--block-token-count", "16", "--http-port", str(self.port), *options),
            break_it=break_it,
        )

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def child_pid(self) -> int:
        """The newest child that has begun to serve."""
        return int(re.findall(r"http_started.+\bpid\D+(\d+)", self.log)[-1])

    def is_listening(self) -> bool:
        try:
            self.connect().close()
        except (ConnectionRefusedError, ConnectionResetError):
            # Reset: the last one who had the port has gone between the connection and its acceptance.
            return False
        return True

    def wait_until_listening(self) -> None:
        """Return when the port can be connected to, which is long before the server serves."""
        self._wait_until(is_listening=True)

    def wait_until_closed(self) -> None:
        """Return when nobody has the port any more."""
        self._wait_until(is_listening=False)

    def _wait_until(self, *, is_listening: bool) -> None:
        deadline = time.monotonic() + BOUND_S
        while self.is_listening() is not is_listening:
            assert time.monotonic() < deadline, self.log

    def connect(self) -> socket.socket:
        """Return a connection to the front, on which nothing was said."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=BOUND_S)

    def kill_child(self) -> int:
        """Kill the child, return its pid once it is gone. It has served."""
        with self.connect() as witness:
            # Taken up, and so closed with the process.
            witness.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert witness.recv(1024).startswith(b"HTTP/1.1 200")
            pid = self.child_pid
            os.kill(pid, 9)
            wait_for_end(witness)
        return pid


def wait_for_end(connection: socket.socket) -> None:
    """Return when the other side of a connection is gone."""
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(4096):
            pass


def body(*, max_tokens: int = 8, **fields: object) -> dict[str, object]:
    """Return the JSON of a chat."""
    return {
        "model": "any",
        "max_tokens": max_tokens,
        "messages": [{"role": "user", "content": "What is ice?"}],
        **fields,
    }


@contextlib.contextmanager
def streaming(front: ServedFront, *, max_tokens: int) -> Iterator[Iterator[str]]:
    """Begin a stream; yield its remaining lines once the first one is here."""
    with (
        httpx2.Client(base_url=front.url, timeout=BOUND_S) as http,
        http.stream("POST", CHAT, json=body(max_tokens=max_tokens, stream=True)) as response,
    ):
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        yield lines
