"""The real server as a child process on a free loopback port, for the length of a `with` block."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from icehouse_server.bootstrap.imports.openblas import find_openblas, runs_on_cpu

ROOT = Path(__file__).resolve().parent.parent
"""The project's folder: children run here, so that they import the same modules as the parent."""

_CONNECT_POLL_S = 0.005


class ServerProcess:
    """`icehouse serve` with extra flags; ready when `__enter__` returns, stopped with SIGTERM.

    Without a `model` the flags name a file that does. `cache_directory` keeps the bench out of the user's own
    cache. `command` is another tree's, up to and
    without `serve`; it runs in the cache directory's parent and with this process's own environment, so that
    neither side imports the other's tree; `module` is what this tree's command line is run by. Without a
    `port` it is a free one.
    """

    def __init__(
        self,
        *,
        model: str | None = None,
        cache_directory: Path,
        log_file: Path,
        flags: Sequence[str] = (),
        command: Sequence[str] = (),
        module: str = "icehouse_server.cli.main",
        port: int | None = None,
        environment: Mapping[str, str] | None = None,
        boot_timeout_s: float = 180.0,
        stop_timeout_s: float = 90.0,
    ) -> None:
        models = [] if model is None else ["--model", model]
        self._arguments = [*models, "--cache-directory", str(cache_directory), *flags]
        self._command = list(command) or [sys.executable, "-m", module]
        self._folder = cache_directory.parent if command else ROOT
        self._environment = (
            {**os.environ, **(environment or {})} if command else child_environment(environment)
        )
        self._log_file = log_file
        self._port = port
        self._boot_timeout_s = boot_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self.address = ""
        self.boot_s = 0.0

    @property
    def process_id(self) -> int:
        """The child's pid, for profilers."""
        assert self._process is not None, "the server does not run"
        return self._process.pid

    def __enter__(self) -> ServerProcess:
        port = self._port or free_port()
        self.address = f"127.0.0.1:{port}"
        command = [*self._command, "serve", "--port", str(port), *self._arguments]
        began = time.monotonic()
        with self._log_file.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # A group of its own: Ctrl-C reaches the parent alone, which stops the server in order. In the
                # same session: Linux schedules each one as a whole, and callers in another one waited up to
                # 80 ms for a core, where the engine in process is in theirs.
                process_group=0,
            )
        try:
            wait_until_serving(
                self._process, port, deadline=began + self._boot_timeout_s, log_file=self._log_file
            )
        except BaseException:
            self.kill()
            raise
        self.boot_s = time.monotonic() - began
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the child cleanly and wait for it; does nothing if it has ended."""
        assert self._process is not None, "the server was never started"
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(self._stop_timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise RuntimeError(
                f"the server did not stop in {self._stop_timeout_s} s; {self._log_file}"
            ) from None

    def kill(self) -> None:
        """End the child at once."""
        assert self._process is not None, "the server was never started"
        self._process.kill()
        self._process.wait()


def wait_until_serving(
    process: subprocess.Popen[bytes], port: int, *, deadline: float, log_file: Path
) -> None:
    """Wait until the health service says SERVING; raise RuntimeError if the server ends or is late."""
    # A channel would wait a second after its first failure, and its threads would use the server's cores.
    while not _is_bound(port):
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}; see {log_file}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"nothing listened at port {port} in time; see {log_file}")
        time.sleep(_CONNECT_POLL_S)
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        left_s = max(1.0, deadline - time.monotonic())
        try:
            for answer in health.Watch(health_pb2.HealthCheckRequest(), timeout=left_s, wait_for_ready=True):
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
        except grpc.RpcError as error:
            raise RuntimeError(
                f"the server did not come to serve: {error.code().name}; see {log_file}"
            ) from error
    raise RuntimeError(f"the health service ended its stream before it said SERVING; see {log_file}")


def _is_bound(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_port() -> int:
    """Return a loopback port that was free a moment ago."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Return different loopback ports that were free a moment ago."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def child_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment, set so that children import the project from here."""
    paths = [str(ROOT), str(ROOT / "service"), str(ROOT / "gen" / "python"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p), **(extra or {})}


def other_server_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which another program starts with OpenBLAS, as Icehouse does, and offline."""
    library = find_openblas() if runs_on_cpu() else None
    preload = " ".join(str(part) for part in (library, environ.get("LD_PRELOAD")) if part)
    return {**environ, **({"LD_PRELOAD": preload} if preload else {}), "HF_HUB_OFFLINE": "1"}
