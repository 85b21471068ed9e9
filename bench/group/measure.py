"""`make bench CASE=group`: a group of two processes beside one, on the same machine, in turns.

On one machine a group has no more cores than one process, and MLX's ring goes over loopback: what is
measured is what a group costs, not what it brings. Beside the tokens per second it shows what rank 0 spends
on its orders, and how many bytes they have.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
from icehouse.v1 import inference_service_pb2 as messages
from icehouse.v1 import inference_service_pb2_grpc
from rich.table import Table

from bench.group.ranks import RankProcesses
from bench.model_folder import model_path
from bench.report import console
from bench.server_process import ServerProcess

_FLAGS = ("--dtype", "float32", "--memory-limit-bytes", "4GiB", "--no-ssd")
_TIMEOUT_S = 600.0


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(prog="make bench CASE=group", description=__doc__)
    parser.add_argument("--model", default="random", help="a folder, or as for icehouse serve")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    table = Table(
        "round", "clients", "one process, tokens/s", "group, tokens/s", "orders, ms a pass", "bytes a pass"
    )
    with tempfile.TemporaryDirectory(prefix="icehouse-group-") as name:
        folder = Path(name)
        model = str(model_path(arguments.model, folder))
        for number in range(arguments.rounds):
            for clients in arguments.clients:
                shape = (clients, arguments.prompt, arguments.tokens)
                with _one(model, folder) as address:
                    alone = _tokens_per_s(address, *shape)
                with RankProcesses(model=model, folder=folder, world=arguments.ranks, flags=_FLAGS) as group:
                    together = _tokens_per_s(group.address, *shape)
                orders_ms, size = _orders(folder / "rank-0.log")
                table.add_row(
                    str(number + 1),
                    str(clients),
                    f"{alone:.1f}",
                    f"{together:.1f}",
                    f"{orders_ms:.3f}",
                    f"{size:.0f}",
                )
    console.print(table)


@contextlib.contextmanager
def _one(model: str, folder: Path) -> Iterator[str]:
    server = ServerProcess(
        model=model, cache_directory=folder / "one", log_file=folder / "one.log", flags=_FLAGS
    )
    with server:
        yield server.address


def _tokens_per_s(address: str, clients: int, prompt: int, tokens: int) -> float:
    """Return tokens per second from the first request to the last token, prompts included."""
    with grpc.insecure_channel(address) as channel:
        stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
        stub.Generate(_request(0, prompt, 4), timeout=_TIMEOUT_S)
        threads = [
            threading.Thread(
                target=stub.Generate,
                args=(_request(1 + number, prompt, tokens),),
                kwargs={"timeout": _TIMEOUT_S},
            )
            for number in range(clients)
        ]
        began = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return clients * tokens / (time.monotonic() - began)


def _request(number: int, prompt: int, tokens: int) -> messages.GenerateRequest:
    request = messages.GenerateRequest(max_output_tokens=tokens)
    request.prompt.tokens.ids.extend((number * 37 + place * 11) % 200 + 50 for place in range(prompt))
    request.sampling.ignore_end_tokens = True
    return request


def _orders(log: Path) -> tuple[float, float]:
    """Return what rank 0 spent on a pass's order, in milliseconds, and the bytes of a pass's orders."""
    line = [line for line in log.read_text("utf-8").splitlines() if "group_ended" in line][-1]
    facts = {key: float(value) for key, value in re.findall(r"(\w+)=([\d.]+)", line)}
    return 1000 * facts["orders_s"] / facts["passes"], facts["bytes"] / facts["passes"]


if __name__ == "__main__":
    main()
