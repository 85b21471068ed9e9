"""Callers of a server, in processes of their own: a GPU answers faster than one Python can listen.

`python -m bench.gpu.callers ADDRESS COUNT` has so many connections. It reads one order a line from standard
input and answers with one line of what each caller saw. Times are the machine's monotonic clock, the same in
every process.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from bench.replies import Reply
from bench.server_process import ROOT, child_environment

MOST_CALLERS = 64
_CALLERS_A_PROCESS = 16
_CORES_A_PROCESS = 4
_WAIT_S = 600.0
"""Longest that one order may take."""


@dataclasses.dataclass(frozen=True, slots=True)
class Heard:
    """One reply, and what of its prompt the server had."""

    reply: Reply
    cached_token_count: int


@dataclasses.dataclass(frozen=True, slots=True)
class HeardBeside:
    """A reply, and when the tokens of rows that decoded before and meanwhile came."""

    reply: Reply
    row_token_times_s: tuple[tuple[float, ...], ...]


class Callers:
    """Processes of callers, while a `with` block lasts; each prompt of an order has a caller of its own."""

    def __init__(self, address: str, *, log_file: Path) -> None:
        cores = os.cpu_count() or 1
        count = max(1, min(MOST_CALLERS // _CALLERS_A_PROCESS, cores // _CORES_A_PROCESS))
        # One more, for the prompt beside rows.
        self._command = [sys.executable, "-m", "bench.gpu.callers", address, str(MOST_CALLERS // count + 1)]
        self._count = count
        self._log_file = log_file
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Callers:
        with self._log_file.open("ab") as log:
            for _ in range(self._count):
                process = subprocess.Popen(
                    self._command,
                    cwd=ROOT,
                    env=child_environment(),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
                self._processes.append(process)
        for process in self._processes:
            self._hear(process)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._processes.clear()

    def ask(self, prompts: Sequence[Sequence[int]], *, max_output_tokens: int) -> list[Heard]:
        """Send all prompts at the same moment and return what came."""
        busy = self._processes[: len(prompts)]
        for index, process in enumerate(busy):
            self._order(process, {"prompts": prompts[index :: len(busy)], "count": max_output_tokens})
        found: list[Heard | None] = [None] * len(prompts)
        for index, process in enumerate(busy):
            found[index :: len(busy)] = [_heard(each) for each in self._hear(process)["replies"]]
        return [each for each in found if each is not None]

    def ask_beside(
        self, rows: Sequence[Sequence[int]], prompt: Sequence[int], *, most_tokens: int, tokens_before: int
    ) -> HeardBeside:
        """Send a prompt, of which one token is wanted, once each of the rows has had `tokens_before`.

        The rows are cancelled when that token has come; they were asked for `most_tokens`.
        """
        order = {"rows": rows, "prompts": [prompt], "count": 1}
        self._order(self._processes[0], {**order, "most": most_tokens, "before": tokens_before})
        answer = self._hear(self._processes[0])
        return HeardBeside(_heard(answer["replies"][0]).reply, tuple(map(tuple, answer["rows"])))

    def _order(self, process: subprocess.Popen[str], order: dict[str, Any]) -> None:
        assert process.stdin is not None
        process.stdin.write(json.dumps(order) + "\n")
        process.stdin.flush()

    def _hear(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None
        limit = threading.Timer(_WAIT_S, process.kill)
        limit.start()
        try:
            line = process.stdout.readline()
        finally:
            limit.cancel()
        if not line:
            raise RuntimeError(f"callers ended, or waited for more than {_WAIT_S:g} s; see {self._log_file}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _heard(told: dict[str, Any]) -> Heard:
    reply = Reply(told["start_time_s"], tuple(told["token_times_s"]), tuple(told["token_ids"]))
    return Heard(reply, told["cached"])


def main() -> None:
    """Connect, say so, and carry out orders until standard input ends."""
    gc.collect()
    gc.freeze()  # no full collection between two tokens
    asyncio.run(_serve(sys.argv[1], int(sys.argv[2])))


async def _serve(address: str, count: int) -> None:
    from bench.grpc_clients import connected

    async with connected(address, count) as clients:
        print(json.dumps({"ready": True}), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            order = json.loads(line)
            make = _beside if "rows" in order else _together
            print(json.dumps(await make(clients, order)), flush=True)


async def _together(clients: Sequence[Any], order: dict[str, Any]) -> dict[str, Any]:
    calls = [
        _call(client, prompt, order["count"])
        for client, prompt in zip(clients, order["prompts"], strict=False)
    ]
    return {"replies": await asyncio.gather(*calls)}


async def _beside(clients: Sequence[Any], order: dict[str, Any]) -> dict[str, Any]:
    *row_clients, client = clients[: len(order["rows"]) + 1]
    heard: list[list[float]] = [[] for _ in row_clients]
    rows = [
        asyncio.create_task(each.stream(_request(prompt, order["most"]), heard=times))
        for each, prompt, times in zip(row_clients, order["rows"], heard, strict=True)
    ]
    try:
        while min(map(len, heard)) < order["before"]:
            assert not any(row.done() for row in rows), "a row ended before the others had begun"
            await asyncio.sleep(0.01)
        reply = await _call(client, order["prompts"][0], order["count"])
    finally:
        for row in rows:
            row.cancel()
        await asyncio.gather(*rows, return_exceptions=True)
    return {"replies": [reply], "rows": heard}


async def _call(client: Any, prompt: Sequence[int], count: int) -> dict[str, Any]:
    reply, started, _ = await client.stream(_request(prompt, count))
    return {**dataclasses.asdict(reply), "cached": started.cache.cached_tokens}


def _request(prompt: Sequence[int], count: int) -> Any:
    """Return a greedy request that keeps its prompt's KV, as callers do who say nothing of it."""
    from icehouse.v1 import inference_service_pb2, prompt_pb2, sampling_pb2

    return inference_service_pb2.GenerateRequest(
        prompt={"tokens": prompt_pb2.TokenPrompt(ids=prompt)},
        max_output_tokens=count,
        sampling=sampling_pb2.SamplingParams(ignore_end_tokens=True),
    )


if __name__ == "__main__":
    main()
