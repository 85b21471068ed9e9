"""Rank group: the processes of a tensor-parallel group over loopback, rank 0 with a server's address."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import multiprocessing.connection
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

import grpc
from icehouse.v1 import inference_service_pb2 as messages
from icehouse.v1 import inference_service_pb2_grpc

from tests.fixtures.patience import BOUND_S
from tests.system.crash.crashing_server import ServerProcess
from tests.system.mesh.envoy import free_ports

BLOCK = 16
_RESTART_LIMIT = 20


class RankGroup:
    """A group whose directories outlive it, so that it can be started again. `with` starts it."""

    def __init__(
        self,
        model: Path | Sequence[Path],
        folder: Path,
        *,
        world: int = 2,
        options: tuple[str, ...] = (),
        rank_options: Mapping[int, tuple[str, ...]] | None = None,
        break_rank: Mapping[int, Callable[[], None]] | None = None,
    ) -> None:
        """`model` is every rank's, or one for each. `break_rank` is called in that rank before it serves."""
        self._models = [model] * world if isinstance(model, Path) else list(model)
        self._folder = folder
        self._options = options
        self._rank_options = rank_options or {}
        self._break_rank = break_rank or {}
        self._stack = contextlib.ExitStack()
        self._control = 0
        self.ranks: list[ServerProcess] = []

    def directory(self, rank: int) -> Path:
        """Return where a rank keeps its blocks."""
        return self._folder / f"blocks-{rank}"

    def log(self, rank: int) -> str:
        """Return what a rank has logged, over all its starts."""
        return (self._folder / f"log-{rank}").read_text()

    def __enter__(self) -> Self:
        self.start()
        return self

    def start(self) -> None:
        """Start all ranks, the followers first."""
        self._control, *ring = free_ports(1 + len(self._models))
        hosts = [[f"127.0.0.1:{port}"] for port in ring]
        (self._folder / "hosts.json").write_text(json.dumps(hosts))
        self.ranks = [self._process(rank, self._break_rank.get(rank)) for rank in range(len(self._models))]
        for process in reversed(self.ranks):
            self._stack.enter_context(process)

    def _process(self, rank: int, break_it: Callable[[], None] | None = None) -> ServerProcess:
        hosts = self._folder / "hosts.json"
        return ServerProcess(
            model=self._models[rank],
            directory=self.directory(rank),
            log=self._folder / f"log-{rank}",
            options=(
                *("--group", str(hosts), "--group-rank", str(rank)),
                *("--group-control", f"127.0.0.1:{self._control}"),
                *("--block-token-count", str(BLOCK), "--memory-limit-bytes", "1GiB"),
                *self._options,
                *self._rank_options.get(rank, ()),
            ),
            break_it=break_it,
        )

    def start_again_until_serving(self) -> int:
        """Start each rank that ends again, unbroken, as a service manager does, until the group serves;
        return how often."""
        serving, told = multiprocessing.Pipe(duplex=False)
        self._look(self.serving, told)
        for restart_count in range(_RESTART_LIMIT):
            ended = [serving, *(process.sentinel for process in self.ranks)]
            happened = multiprocessing.connection.wait(ended, timeout=BOUND_S)
            assert happened, f"the group neither serves nor ends: {self.log(0)}"
            if serving in happened:
                return restart_count
            rank = next(r for r, process in enumerate(self.ranks) if process.sentinel in happened)
            self.ranks[rank] = self._stack.enter_context(self._process(rank))
            if rank == 0:
                self._look(self.serving, told)
        raise AssertionError(f"the group does not come back: {self.log(0)}")

    def _look(self, process: ServerProcess, told: multiprocessing.connection.Connection) -> None:
        def look() -> None:
            with contextlib.suppress(AssertionError):
                process.wait_until_serving()
                told.send(None)

        threading.Thread(target=look, daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def serving(self) -> ServerProcess:
        """Rank 0."""
        return self.ranks[0]

    def stop(self) -> None:
        """End the group in order."""
        self.serving.terminate()
        for process in self.ranks:
            process.wait()
        self._stack.close()

    def restart(self) -> None:
        """End the group in order and start it again, over the same directories."""
        self.stop()
        self.start()
        self.serving.wait_until_serving()

    @contextlib.contextmanager
    def stub(self) -> Iterator[inference_service_pb2_grpc.InferenceServiceStub]:
        """Yield a client of rank 0."""
        with grpc.insecure_channel(self.serving.address) as channel:
            yield inference_service_pb2_grpc.InferenceServiceStub(channel)

    def ask(self, prompt: Sequence[int], *, count: int = 12) -> messages.GenerateResponse:
        """Return the answer to a prompt of token ids."""
        with self.stub() as stub:
            return stub.Generate(question(prompt, count=count), timeout=BOUND_S)


def question(prompt: Sequence[int], *, count: int = 12) -> messages.GenerateRequest:
    """Return a greedy request for so many tokens."""
    request = messages.GenerateRequest(max_output_tokens=count)
    request.prompt.tokens.ids.extend(prompt)
    return request
