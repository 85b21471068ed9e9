"""`icehouse serve` as a real process that starts in a moment. None outlives whoever started it."""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
from grpc_health.v1 import health_pb2
from icehouse_server.cli import main as command_line

from tests.fixtures.forked import CONTEXT
from tests.fixtures.parent_watch import end_with_parent
from tests.fixtures.patience import BOUND_S

_WATCH_LIMIT = 5


def _serve(arguments: list[str], log: str, break_it: Callable[[], None] | None) -> None:
    """Be the command line: the body of the forked process."""
    end_with_parent()
    if break_it is not None:
        break_it()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    for name in [name for name in os.environ if name.startswith("ICEHOUSE_KILL_")]:
        # Meant for the tests; the server refuses variables of its own prefix that it does not know.
        del os.environ[name]
    sys.argv = ["icehouse", "serve", *arguments]
    command_line.main()


class ServerProcess:
    """One server on a Unix socket, or on a port of loopback. `with` starts it; leaving kills it."""

    def __init__(
        self,
        *,
        model: Path | Sequence[Path],
        directory: Path,
        log: Path,
        options: tuple[str, ...] = (),
        break_it: Callable[[], None] | None = None,
        port: int | None = None,
    ) -> None:
        """`break_it`, a module's function, is called in the new process before it serves."""
        # A socket's path may have a hundred characters only, fewer than a test's own folder.
        self._scratch = tempfile.TemporaryDirectory(prefix="icehouse-")
        socket = f"{self._scratch.name}/socket"
        self.address = f"unix:{socket}" if port is None else f"127.0.0.1:{port}"
        self._log = log
        listen = ["--uds", socket] if port is None else ["--port", str(port)]
        models = ["--model", str(model)] if isinstance(model, Path) else [str(each) for each in model]
        arguments = [*models, *listen, "--cache-directory", str(directory)]
        arguments += ["--no-preload", "--free-space-floor-bytes", "0", *options]
        self._process = CONTEXT.Process(target=_serve, args=(arguments, str(log), break_it), daemon=True)

    def __enter__(self) -> Self:
        self._process.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.exitcode is None:
            self.kill()
        self._scratch.cleanup()

    def wait_until_serving(self, credentials: grpc.ChannelCredentials | None = None) -> None:
        """Block until health says SERVING; `credentials` are a secured server's."""
        # The socket is not there yet when the first connection is tried; the next try comes soon.
        soon = [("grpc.initial_reconnect_backoff_ms", 20), ("grpc.max_reconnect_backoff_ms", 20)]
        soon.append(("grpc.min_reconnect_backoff_ms", 20))
        with self._channel(credentials, soon) as channel:
            # While it starts on a busy machine it may find that a call's message came late, and end the call.
            for _ in range(_WATCH_LIMIT):
                if self._has_said_serving(channel):
                    return
                if not self._process.is_alive():
                    break
        raise AssertionError(f"the server does not serve, or has ended: {self._log.read_text()}")

    def _has_said_serving(self, channel: grpc.Channel) -> bool:
        """Watch health until it says SERVING, or until the call ends."""
        watch = channel.unary_stream(
            "/grpc.health.v1.Health/Watch",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )(health_pb2.HealthCheckRequest(), timeout=BOUND_S, wait_for_ready=True)
        threading.Thread(target=self._call_off_at_end, args=(watch,), daemon=True).start()
        with contextlib.suppress(grpc.RpcError):
            for answer in watch:
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    watch.cancel()
                    return True
        return False

    def _channel(
        self, credentials: grpc.ChannelCredentials | None, options: list[tuple[str, int]]
    ) -> grpc.Channel:
        if credentials is None:
            return grpc.insecure_channel(self.address, options=options)
        return grpc.secure_channel(self.address, credentials, options=options)

    def _call_off_at_end(self, watch: grpc.Call) -> None:
        """Let nobody wait for a process that has ended: a refused setting is told at once."""
        multiprocessing.connection.wait([self._process.sentinel], timeout=BOUND_S)
        watch.cancel()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None, "not started"
        return self._process.pid

    @property
    def sentinel(self) -> int:
        """What `multiprocessing.connection.wait` takes to wait for the process's end."""
        return self._process.sentinel

    def kill(self) -> None:
        """Take the process away at once, as a crash would."""
        self._process.kill()
        self.wait()

    def terminate(self) -> None:
        """Ask the process to end; `wait` tells how it did."""
        self._process.terminate()

    def wait(self) -> int:
        """Wait for the end and return the exit code, negative for a signal."""
        self._process.join(BOUND_S)
        assert self._process.exitcode is not None, f"the server does not end: {self._log.read_text()}"
        return self._process.exitcode
