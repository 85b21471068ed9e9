"""SMG, the gateway, as a process of its own on loopback, which ends with the one that started it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import multiprocessing
import os
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.fixtures.parent_watch import end_with_parent
from tests.system.mesh.envoy import free_ports

_context = multiprocessing.get_context("forkserver")
_BOUND_S = 120.0
_LOOK_EVERY_S = 0.05


def missing_packages() -> list[str]:
    """Return what these tests need and this environment lacks."""
    wanted = ("smg", "smg_grpc_proto", "openai", "anthropic")
    return [name for name in wanted if importlib.util.find_spec(name) is None]


def _route(arguments: list[str], log: str) -> None:
    """Be the gateway's command line: the body of the forked process."""
    end_with_parent()
    from smg import cli

    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    cli.main(arguments)


class GatewayProcess:
    """One gateway. `with` starts it; leaving kills it."""

    def __init__(self, *, worker_ports: Sequence[int], log: Path, options: Sequence[str] = ()) -> None:
        self.port, metrics_port = free_ports(2)
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        arguments = [
            *("launch", "--host", "127.0.0.1", "--port", str(self.port)),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
            *("--worker-startup-check-interval", "1", "--health-check-interval-secs", "1"),
            *("--health-failure-threshold", "1", "--health-success-threshold", "1"),
            *("--worker-urls", *(f"grpc://127.0.0.1:{worker}" for worker in worker_ports)),
            *options,
        ]
        self._process = _context.Process(target=_route, args=(arguments, str(log)), daemon=True)

    def __enter__(self) -> Self:
        self._process.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.join()

    def get(self, path: str) -> Any:
        """Return what the gateway answers, from JSON."""
        with urllib.request.urlopen(f"{self.url}{path}", timeout=30) as answer:
            return json.load(answer)

    def wait_until_healthy(self, count: int) -> None:
        """Block until so many workers are healthy, and the tokenizer of their model is there."""
        end_time = time.monotonic() + _BOUND_S
        while time.monotonic() < end_time:
            assert self._process.exitcode is None, self._log.read_text()
            # Not up yet, or without a worker: then asked again.
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                workers = self.get("/workers")["workers"]
                healthy = [worker for worker in workers if worker["is_healthy"]]
                if len(healthy) == count and self.get("/v1/tokenizers")["tokenizers"]:
                    return
            time.sleep(_LOOK_EVERY_S)
        raise AssertionError(f"the gateway found no {count} workers: {self._log.read_text()}")
