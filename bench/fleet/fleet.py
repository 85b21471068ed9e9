"""Fleet of workers behind one gateway, each a process on loopback with a cache directory of its own."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from icehouse.v1 import server_service_pb2 as messages
from icehouse.v1 import server_service_pb2_grpc

from bench.fleet.gateway import GatewayProcess
from bench.fleet.process import ChildProcess
from bench.server_process import free_ports

_BOUND_S = 180.0
_STOP_BOUND_S = 150.0
"""Longer than the server's own grace and what it takes to write its RAM tier."""
_LOOK_EVERY_S = 0.05
_CALL_TIMEOUT_S = 30.0


class WorkerProcess(ChildProcess):
    """`icehouse serve --worker`. Started again on its port it finds what it had on SSD."""

    def __init__(self, *, name: str, port: int, model: Path, folder: Path, flags: Sequence[str] = ()) -> None:
        self.name = name
        self.port = port
        self.address = f"127.0.0.1:{port}"
        self.directory = folder / f"blocks-{name}"
        arguments = [
            *("serve", "--worker", "--host", "127.0.0.1", "--port", str(port), "--model", str(model)),
            *("--cache-directory", str(self.directory), *flags),
        ]
        super().__init__(
            "icehouse_server.cli.main",
            arguments,
            log=folder / f"worker-{name}.log",
            stop_bound_s=_STOP_BOUND_S,
        )

    def is_serving(self) -> bool:
        """Ask whether it takes requests. Raises RuntimeError where it has ended."""
        if not self.is_alive:
            raise RuntimeError(f"worker {self.name} has ended:\n{self.log_tail()}")
        with grpc.insecure_channel(self.address) as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            try:
                answer = health.Check(health_pb2.HealthCheckRequest(), timeout=_CALL_TIMEOUT_S)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def stats(self) -> Any:
        """Return its counters, a `ServerStats`."""
        with grpc.insecure_channel(self.address) as channel:
            stub = server_service_pb2_grpc.ServerServiceStub(channel)
            return stub.GetStats(messages.GetStatsRequest(), timeout=_CALL_TIMEOUT_S).stats


class Fleet:
    """`async with` starts workers and gateway, and ends them all."""

    def __init__(
        self,
        *,
        model: Path,
        folder: Path,
        worker_count: int,
        flags: Sequence[str] = (),
        gateway_options: Sequence[str] = (),
    ) -> None:
        ports = free_ports(worker_count)
        self.workers = [
            WorkerProcess(name=chr(ord("A") + index), port=port, model=model, folder=folder, flags=flags)
            for index, port in enumerate(ports)
        ]
        self.gateway = GatewayProcess(worker_ports=ports, log=folder / "gateway.log", options=gateway_options)
        self.model_id = ""
        self._stack = contextlib.ExitStack()

    async def __aenter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            for worker in self.workers:
                stack.enter_context(worker)
            for worker in self.workers:
                await until(worker.is_serving, f"worker {worker.name} does not serve")
            stack.enter_context(self.gateway)
            await until(lambda: self._is_routing(len(self.workers)), "the gateway does not find its workers")
            # They end together, not one after the other.
            stack.callback(lambda: [worker.terminate() for worker in self.workers])
            self._stack = stack.pop_all()
        self.model_id = self.gateway.get("/v1/models")["data"][0]["id"]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    async def restart(self, worker: WorkerProcess) -> float:
        """Start a worker that was killed, on its port and directory; return the seconds until it serves."""
        began = time.monotonic()
        worker.__enter__()
        await until(worker.is_serving, f"worker {worker.name} does not serve again")
        return time.monotonic() - began

    def _is_routing(self, worker_count: int) -> bool:
        if not self.gateway.is_alive:
            raise RuntimeError(f"the gateway has ended:\n{self.gateway.log_tail()}")
        return self.gateway.is_ready(worker_count)


async def until(holds: Callable[[], bool], complaint: str, *, bound_s: float = _BOUND_S) -> None:
    """Return when it holds. Raises TimeoutError with the complaint."""
    end_time = time.monotonic() + bound_s
    while not holds():
        if time.monotonic() > end_time:
            raise TimeoutError(f"{complaint} within {bound_s:g} s")
        await asyncio.sleep(_LOOK_EVERY_S)
