"""SMG, the gateway, as a process of its own on loopback."""

from __future__ import annotations

import importlib.util
import json
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.fleet.process import ChildProcess
from bench.server_process import free_ports

PACKAGES = ("smg", "smg_grpc_proto")
"""The gateway itself, and the messages that it speaks with workers."""

_BOUND_S = 120.0
_STOP_BOUND_S = 5.0
_LOOK_EVERY_S = 0.05


def missing_packages(wanted: Sequence[str] = PACKAGES) -> list[str]:
    """Return those of the packages that this environment lacks."""
    return [name for name in wanted if importlib.util.find_spec(name) is None]


class GatewayProcess(ChildProcess):
    """One gateway. `with` starts it; leaving ends it."""

    def __init__(self, *, worker_ports: Sequence[int], log: Path, options: Sequence[str] = ()) -> None:
        self.port, metrics_port = free_ports(2)
        self.url = f"http://127.0.0.1:{self.port}"
        self._metrics_url = f"http://127.0.0.1:{metrics_port}/metrics"
        arguments = [
            *("launch", "--host", "127.0.0.1", "--port", str(self.port)),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
            *("--worker-startup-check-interval", "1", "--health-check-interval-secs", "1"),
            *("--health-failure-threshold", "1", "--health-success-threshold", "1"),
            *("--worker-urls", *(worker_url(port) for port in worker_ports)),
            *options,
        ]
        super().__init__("smg", arguments, log=log, stop_bound_s=_STOP_BOUND_S)

    def get(self, path: str) -> Any:
        """Return what the gateway answers, from JSON."""
        with urllib.request.urlopen(f"{self.url}{path}", timeout=30) as answer:
            return json.load(answer)

    def healthy_urls(self) -> set[str]:
        """Return the workers that it sends requests to; none while it is not up."""
        try:
            return {worker["url"] for worker in self.get("/workers")["workers"] if worker["is_healthy"]}
        except (urllib.error.URLError, ConnectionError):
            return set()

    def is_ready(self, worker_count: int) -> bool:
        """Whether so many workers are healthy, and the tokenizer of their model is there."""
        return len(self.healthy_urls()) == worker_count and bool(self.get("/v1/tokenizers")["tokenizers"])

    def wait_until_healthy(self, count: int) -> None:
        """Block until so many workers are healthy, and the tokenizer of their model is there."""
        end_time = time.monotonic() + _BOUND_S
        while time.monotonic() < end_time:
            assert self.is_alive, self.log_tail()
            if self.is_ready(count):
                return
            time.sleep(_LOOK_EVERY_S)
        raise AssertionError(f"the gateway found no {count} workers: {self.log_tail()}")

    def metric(self, name: str, *, worker_port: int | None = None, branch: str = "") -> float:
        """Return the sum of its own samples of a name, of one worker or kind of decision where it is given; 0
        while there are none."""
        with urllib.request.urlopen(self._metrics_url, timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        wanted = [] if worker_port is None else [f'worker="{worker_url(worker_port)}"']
        wanted += [f'branch="{branch}"'] if branch else []
        return sum(
            float(line.rpartition(" ")[2])
            for line in lines
            if line.startswith((f"{name}{{", f"{name} ")) and all(label in line for label in wanted)
        )


def worker_url(port: int) -> str:
    """Return the name that the gateway has for the worker on a port of loopback."""
    return f"grpc://127.0.0.1:{port}"
