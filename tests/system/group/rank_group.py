"""Rank group: the processes of a tensor-parallel group over loopback, rank 0 with a server's address."""

from __future__ import annotations

import contextlib
import json
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
        control, *ring = free_ports(1 + len(self._models))
        hosts = self._folder / "hosts.json"
        hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ring]))
        self.ranks = [
            ServerProcess(
                model=model,
                directory=self.directory(rank),
                log=self._folder / f"log-{rank}",
                options=(
                    *("--group", str(hosts), "--group-rank", str(rank)),
                    *("--group-control", f"127.0.0.1:{control}"),
                    *("--block-token-count", str(BLOCK), "--memory-limit-bytes", "1GiB"),
                    *self._options,
                    *self._rank_options.get(rank, ()),
                ),
                break_it=self._break_rank.get(rank),
            )
            for rank, model in enumerate(self._models)
        ]
        for process in reversed(self.ranks):
            self._stack.enter_context(process)

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
