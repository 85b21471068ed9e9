"""HTTP front: `icehouse-http` as a child of the server, restarted when it dies and drained at the end.

The child inherits a socket that was opened before the model was located, so a taken port is reported at once,
and callers that connect during a restart wait in the socket's queue. It reaches the server through a Unix
socket in a private folder. Its standard input is a pipe that nothing is written to: when the pipe closes,
even because the server was killed, the child ends. Owned by the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from icehouse_server.config import Config
from icehouse_server.rpc.listen_address import listen_for_http, speaks_tls

_log = logging.getLogger("icehouse.http")

_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 30.0
_STEADY_S = 60.0
"""A child that lived this long did not fail at its start, so the next delay is the shortest again."""

LAST_WORDS_S = 2.0
"""In addition to the grace, for the last events of streams that the server has ended."""


class RestartDelays:
    """How long to wait before each restart: twice as long each time, up to a limit."""

    def __init__(self) -> None:
        self._next_s = _FIRST_DELAY_S

    def after(self, *, lived_s: float) -> float:
        """Return the delay before the restart of a child that lived this long."""
        if lived_s >= _STEADY_S:
            self._next_s = _FIRST_DELAY_S
        delay_s = self._next_s
        self._next_s = min(2 * delay_s, _LONGEST_DELAY_S)
        return delay_s


class HttpChild:
    """The child, and the sockets on both of its sides."""

    def __init__(self, config: Config, *, listening: socket.socket, folder: Path) -> None:
        self._listening = listening
        self.private_socket = folder / "rpc"
        """Where the server must listen for the child."""
        host, port = listening.getsockname()[:2]
        scheme = "https" if speaks_tls(config.http, config.security) else "http"
        self.url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
        self._command = _command(config, descriptor=listening.fileno(), private_socket=self.private_socket)
        self._child: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Run the child from now on. The first child exists when this returns."""
        await self._spawn()
        self._running = asyncio.create_task(self._run(), name="http child")

    def begin_stop(self) -> None:
        """Accept no new connections, and have the child end after its running requests."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        # The child closes its copy, and then nobody can connect.
        self._listening.close()
        self._terminate()

    async def stop(self, *, timeout_s: float) -> None:
        """Wait for the child's end, and kill it if that takes longer."""
        self.begin_stop()
        if self._running is None:
            return
        _, late = await asyncio.wait({self._running}, timeout=timeout_s)
        if late and timeout_s:
            _log.error("stuck_http_killed", extra={"waited_s": timeout_s})
        self._running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._running

    async def _run(self) -> None:
        """Watch the child and restart it when it dies; end it when cancelled."""
        loop, delays = asyncio.get_running_loop(), RestartDelays()
        start_time = loop.time()
        try:
            while True:
                code = None if self._child is None else await self._child.wait()
                self._child = None
                if self._stopping.is_set():
                    return
                delay_s = delays.after(lived_s=loop.time() - start_time)
                _log.error("http_died", extra={"code": code, "restart_in_s": delay_s})
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), delay_s)
                    return
                start_time = loop.time()
                await self._spawn()
        finally:
            if self._child is not None and self._child.returncode is None:
                self._child.kill()
                await self._child.wait()

    async def _spawn(self) -> None:
        try:
            self._child = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                pass_fds=(self._listening.fileno(),),
                # Ctrl-C is only for the server, which then drains the child.
                start_new_session=True,
            )
        except OSError as error:
            _log.error("http_not_started", extra={"detail": str(error)})
        if self._stopping.is_set():
            # The stop began while the child was being started.
            self._terminate()

    def _terminate(self) -> None:
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                self._child.terminate()


@contextlib.asynccontextmanager
async def http_child(config: Config) -> AsyncIterator[HttpChild | None]:
    """Run the child while the block runs; None without a port. Raises StartError for a taken address.

    Stop it inside the block to wait for its streams; otherwise it is killed at the end of the block.
    """
    if config.http.port is None:
        yield None
        return
    with (
        contextlib.closing(listen_for_http(config.http, config.security)) as listening,
        tempfile.TemporaryDirectory(prefix="icehouse-") as folder,
    ):
        child = HttpChild(config, listening=listening, folder=Path(folder))
        await child.start()
        try:
            yield child
        finally:
            await child.stop(timeout_s=0)


def _command(config: Config, *, descriptor: int, private_socket: Path) -> list[str]:
    http, security = config.http, config.security
    options = [
        ("--address", f"unix:{private_socket}"),
        ("--fd", descriptor),
        ("--log-format", config.log.format),
        ("--log-level", config.log.level),
        ("--grace-s", config.server.drain_grace_s + LAST_WORDS_S),
        ("--max-body-bytes", http.max_body_bytes),
        ("--body-memory-bytes", http.body_memory_bytes),
        ("--host", http.host),
        *(("--alias", f"{name}={model}") for name, model in http.alias_pairs),
        *(("--allow-origin", origin) for origin in http.origins),
        *(("--name", name) for name in http.own_names),
    ]
    if http.temperature is not None:
        options.append(("--temperature", http.temperature))
    if speaks_tls(http, security):
        assert security.tls_certificate and security.tls_key, "TLS has a certificate and its key"
        options.append(("--tls-certificate", security.tls_certificate))
        options.append(("--tls-key", security.tls_key))
    switches = {
        "--ends-with-stdin": True,
        "--strict-models": http.strict_models,
        "--exact-prompts": http.exact_prompts,
        "--no-access-log": not config.log.access_enabled,
        "--no-health-watch": not security.health_open,
    }
    return [
        # Without -P, a file of the working folder could be imported instead of a library.
        *(sys.executable, "-P", "-m", "icehouse_http.command"),
        *(switch for switch, is_on in switches.items() if is_on),
        *(word for option, value in options for word in (option, str(value))),
    ]
