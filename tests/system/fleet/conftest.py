"""Two workers behind a real gateway, shared by the tests of one file."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from icehouse.v1 import server_service_pb2 as native
from icehouse.v1 import server_service_pb2_grpc

from bench.fleet.gateway import PACKAGES, GatewayProcess, missing_packages
from tests.fixtures.chat.scripted_replies import Script, scripted
from tests.fixtures.models import tiny_model_dir
from tests.system.crash.crashing_server import ServerProcess
from tests.system.mesh.envoy import free_ports

BLOCK = 16
MODEL = "tiny"
LONG = 3000
_OPTIONS = (
    *("--worker", "--model-name", MODEL, "--block-token-count", str(BLOCK)),
    *("--min-prefix-token-count", "0", "--no-restore-or-recompute"),
)
_BOUND_S = 120.0


@dataclasses.dataclass
class Fleet:
    """A gateway and its workers, by port."""

    model: Path
    gateway: GatewayProcess
    workers: dict[int, ServerProcess]
    start_worker: Callable[[int], ServerProcess]

    def restart(self, port: int) -> None:
        """Start a worker that has ended again, on what it left, and return when the gateway has it back."""
        self.workers[port] = self.start_worker(port)
        self.workers[port].wait_until_serving()
        self.gateway.wait_until_healthy(len(self.workers))

    def stats(self, port: int) -> Any:
        """Return a worker's counters of its engine."""
        return self._all_stats(port).engine

    def cache_stats(self, port: int) -> Any:
        """Return a worker's counters of its prefix cache."""
        return self._all_stats(port).cache

    def written_blocks(self, port: int) -> int:
        """Return how many whole blocks a worker has on SSD."""
        ssd = self.cache_stats(port).ssd
        return int(ssd.block_count - ssd.tail_count)

    def _all_stats(self, port: int) -> Any:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = server_service_pb2_grpc.ServerServiceStub(channel)
            return stub.GetStats(native.GetStatsRequest(), timeout=_BOUND_S).stats

    def known_blocks(self) -> float:
        """Return how many blocks of all workers the gateway knows."""
        return sum(self.gateway.metric("smg_kv_index_blocks", worker_port=port) for port in self.workers)

    def accepted(self) -> dict[int, int]:
        """Return how many requests each worker has taken."""
        return {port: self.stats(port).accepted_total for port in self.workers}

    def openai(self) -> Any:
        """Return OpenAI's own client, which tries nothing twice."""
        import openai

        return openai.OpenAI(
            base_url=f"{self.gateway.url}/v1", api_key="none", timeout=_BOUND_S, max_retries=0
        )

    def anthropic(self) -> Any:
        """Return Anthropic's own client, which tries nothing twice."""
        import anthropic

        return anthropic.Anthropic(base_url=self.gateway.url, api_key="none", timeout=_BOUND_S, max_retries=0)

    def chat(self, text: str, **options: Any) -> Any:
        """Return the answer to one user's turn, greedy unless `options` say otherwise."""
        said = [{"role": "user", "content": text}]
        return self.openai().chat.completions.create(
            model=MODEL, messages=said, **{"temperature": 0, "max_tokens": 8, **options}
        )

    def streamed(self, text: str) -> Any:
        """Begin a stream of `LONG` tokens and return it behind its first one."""
        stream = self.chat(text, stream=True, max_tokens=LONG, extra_body={"ignore_eos": True})
        while not (chunk := next(stream)).choices or not chunk.choices[0].delta.content:
            pass
        return stream

    def complete(self, text: str, **options: Any) -> Any:
        """Return what follows a text, greedy, and what was told of its cost."""
        return self.openai().completions.create(
            model=MODEL, prompt=text, **{"temperature": 0, "max_tokens": 4, **options}
        )


def until(is_so: Callable[[], bool]) -> None:
    """Return when it is so; each look waits for an answer of the engine."""
    end_time = time.monotonic() + _BOUND_S
    while not is_so():
        assert time.monotonic() < end_time, "it never came to be so"


def is_served(port: int) -> bool:
    """Whether anybody listens on a port of loopback."""
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def _llama(folder: Path) -> Path:
    return tiny_model_dir(folder, "llama")


@contextlib.contextmanager
def fleet_of(
    folder: Path,
    *,
    worker_options: tuple[str, ...] = (),
    gateway_options: tuple[str, ...] = (),
    make_model: Callable[[Path], Path] = _llama,
    script: Script | None = None,
) -> Iterator[Fleet]:
    """Start two workers and the gateway, and stop them. With a `script` that is what the model writes."""
    if missing := missing_packages((*PACKAGES, "openai", "anthropic")):
        pytest.skip(f"not in this environment: {', '.join(missing)} (extra `dev`)")
    model = make_model(folder)
    with contextlib.ExitStack() as stack:

        def start_worker(port: int) -> ServerProcess:
            worker = ServerProcess(
                model=model,
                directory=folder / f"blocks-{port}",
                log=folder / f"{port}.log",
                options=(*_OPTIONS, *worker_options),
                break_it=None if script is None else scripted(model, script),
                port=port,
            )
            return stack.enter_context(worker)

        workers = {port: start_worker(port) for port in free_ports(2)}
        for worker in workers.values():
            worker.wait_until_serving()
        gateway = GatewayProcess(
            worker_ports=list(workers), log=folder / "gateway.log", options=gateway_options
        )
        stack.enter_context(gateway)
        # Asked to end, it takes seconds.
        stack.callback(gateway.kill)
        gateway.wait_until_healthy(len(workers))
        yield Fleet(model, gateway, workers, start_worker)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with fleet_of(tmp_path_factory.mktemp("fleet")) as started:
        yield started
