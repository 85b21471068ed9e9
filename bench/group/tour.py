"""`make group`: one model over several processes of this machine, as it would be over several Macs.

A question is asked twice, a rank is killed while it is answered, and the group comes back with what its ranks
have on SSD. The answers must be the same each time.
"""

from __future__ import annotations

import argparse
import importlib.resources
import sys
import tempfile
import time
from pathlib import Path

import grpc
from icehouse.v1 import inference_service_pb2 as messages
from icehouse.v1 import inference_service_pb2_grpc
from icehouse.v1.prompt_pb2 import ChatMessage, Role
from icehouse_client.cli.console import complain, err, out

from bench.group.ranks import RankProcesses
from bench.model_folder import model_path

_QUESTION = "Who built the icehouse? Answer in one short sentence."
_OUTPUT_TOKEN_COUNT = 24
_TIMEOUT_S = 300.0
_FLAGS = (
    *("--block-token-count", "64", "--min-prefix-token-count", "0", "--memory-limit-bytes", "2GiB"),
    *("--dtype", "float32", "--no-restore-or-recompute"),
)


def main() -> None:
    """Run the tour; exit code 1 where something was not as it should be."""
    parser = argparse.ArgumentParser(prog="make group", description=__doc__)
    parser.add_argument("--model", default="demo", help="a folder, or as for icehouse serve")
    parser.add_argument(
        "--ranks", type=int, default=3, help="processes; 3, because the demo's model has 9 heads and 3 of KV"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="icehouse-group-") as name:
        try:
            wrong = _shown(arguments.model, Path(name), world=arguments.ranks)
        except (RuntimeError, grpc.RpcError) as error:
            complain(str(error))
            sys.exit(1)
    for each in wrong:
        complain(each)
    sys.exit(1 if wrong else 0)


def _shown(model: str, folder: Path, *, world: int) -> list[str]:
    """Show all of it; return what was not as it should be."""
    path = model_path(model, folder)
    err.print(f"[dim]starting {world} ranks for {path.name}[/]")
    with RankProcesses(model=str(path), folder=folder, world=world, flags=_FLAGS) as group:
        out.print(f"rank 0 serves at {group.address}; the others follow it")
        first = _ask(group, "the question")
        again = _ask(group, "the same question again")
        out.print("[bold]rank 1 is killed while the group answers[/]")
        told_s = _told_after(group)
        out.print(
            f"  the caller was told after {told_s:.1f} s: UNAVAILABLE; every rank has ended: {group.wait()}"
        )
        boot_s = group.start()
        out.print(f"the group is back after {boot_s:.1f} s")
        warm = _ask(group, "the same question again")
    wrong = []
    if not first.text == again.text == warm.text:
        wrong.append("the answers differ")
    if not again.cache.ram_tokens or not warm.cache.ssd_tokens:
        wrong.append("the cache was not used")
    return wrong


def _request() -> messages.GenerateRequest:
    story = importlib.resources.files("icehouse_server.demo").joinpath("story.txt").read_text("utf-8")
    request = messages.GenerateRequest(max_output_tokens=_OUTPUT_TOKEN_COUNT)
    page = story.split("\n\n")[1]
    request.prompt.chat.messages.append(ChatMessage(role=Role.ROLE_SYSTEM, content=page))
    request.prompt.chat.messages.append(ChatMessage(role=Role.ROLE_USER, content=_QUESTION))
    return request


def _ask(group: RankProcesses, what: str) -> messages.GenerateResponse:
    with grpc.insecure_channel(group.address) as channel:
        stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
        began = time.monotonic()
        answer = stub.Generate(_request(), timeout=_TIMEOUT_S)
    cache = answer.cache
    out.print(
        f"{what}: {time.monotonic() - began:.1f} s, of {answer.usage.prompt_tokens} tokens "
        f"{cache.ram_tokens} from RAM, {cache.ssd_tokens} from SSD"
    )
    out.print(f"  {answer.text.strip()}")
    return answer


def _told_after(group: RankProcesses) -> float:
    """Kill rank 1 in the middle of an answer; return after how many seconds its caller is told."""
    request = _request()
    request.max_output_tokens = 1000
    request.sampling.ignore_end_tokens = True
    with grpc.insecure_channel(group.address) as channel:
        stream = inference_service_pb2_grpc.InferenceServiceStub(channel).Stream(request, timeout=_TIMEOUT_S)
        for event in stream:
            if event.WhichOneof("event") == "delta":
                break
        group.processes[1].kill()
        began = time.monotonic()
        try:
            for _ in stream:
                pass
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return time.monotonic() - began
    raise RuntimeError("the answer went on without a rank")


if __name__ == "__main__":
    main()
