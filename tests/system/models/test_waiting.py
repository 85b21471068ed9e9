"""Waiting for a model that is being loaded: what a terminal shows of it, and how callers of HTTP are kept."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import select
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from icehouse.v1 import server_service_pb2

from clients.http.tests.fronts import front_of
from tests.fixtures.models import tiny_model_dir
from tests.fixtures.patience import BOUND_S
from tests.system.models.pool_server import PoolServer, entry, pool_server, question

COMMAND = "from icehouse_client.cli.main import main; main()"


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[PoolServer]:
    entries = [entry(tiny_model_dir(tmp_path, name)) for name in ("llama", "qwen3")]
    async with pool_server(tmp_path / "blocks", [*entries, entry(tmp_path / "absent")]) as started:
        yield started


class Watched:
    """A command whose standard error is a terminal."""

    def __init__(self, *arguments: str) -> None:
        self._descriptor, theirs = pty.openpty()
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        environ |= {"TERM": "xterm", "COLUMNS": "200"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=theirs,
            env=environ,
        )
        os.close(theirs)
        self.shown = ""

    def wait_for(self, text: str) -> None:
        """Return when the terminal shows a text."""
        while text not in self.shown:
            ready, _, _ = select.select([self._descriptor], [], [], BOUND_S)
            assert ready, f"{text!r} does not come: {self.shown}"
            self.shown += os.read(self._descriptor, 4096).decode()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        os.close(self._descriptor)


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (("generate", "w5 w6", "--model", "qwen3", "--max-output-tokens", "2"), "model loaded in"),
        (("models", "load", "qwen3"), ""),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
async def test_a_terminal_shows_how_far_the_model_is(
    served: PoolServer, command: tuple[str, ...], told: str
) -> None:
    found = served.hold("qwen3")

    def watch() -> str:
        watched = Watched(*command, "--address", served.address)
        try:
            watched.wait_for("fetching qwen3, ")
            found.set()
            if told:
                watched.wait_for(told)
            out, _ = watched.process.communicate(timeout=BOUND_S)
            assert watched.process.returncode == 0, watched.shown
            return out.decode()
        finally:
            watched.close()

    shown = await asyncio.to_thread(watch)
    assert shown


async def test_a_stream_over_http_is_kept_alive_while_its_model_is_loaded(served: PoolServer) -> None:
    found = served.hold("qwen3")
    asked = {"model": "qwen3", "prompt": "w5 w6", "max_tokens": 2, "stream": True}
    async with (
        front_of(served.address, ping_interval_s=0.02) as front,
        front.http.stream("POST", "/v1/completions", json=asked) as answer,
    ):
        lines: list[str] = []
        async for line in answer.aiter_lines():
            lines.append(line)
            if line == ": ping":
                found.set()
    told = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert lines[0] == ": ping" and told[0]["model"] == "qwen3"


async def test_a_model_that_cannot_be_loaded_has_its_own_status_over_http(served: PoolServer) -> None:
    found = served.hold("absent")
    asked = {"model": "absent", "prompt": "w5", "max_tokens": 2, "stream": True}
    async with front_of(served.address, ping_interval_s=BOUND_S) as front:
        asking = asyncio.create_task(front.http.post("/v1/completions", json=asked))
        # The front has been told that the model is not there yet.
        await until_told(served)
        found.set()
        refused = await asking
    assert refused.status_code == 503 and "MODEL_NOT_LOADED" in refused.text


async def until_told(served: PoolServer) -> None:
    """Return when a stream for the same model was told twice that it is being loaded, and so was an earlier
    one once."""
    call = served.inference.Stream(question("absent", (5, 6)))
    async with asyncio.timeout(BOUND_S):
        for _ in range(2):
            assert (await call.read()).HasField("loading_model")
    call.cancel()


async def test_who_waits_for_a_model_is_listed_and_can_be_ended(served: PoolServer) -> None:
    found = served.hold("qwen3")
    request = question("qwen3", (5, 6))
    request.request_id, request.session_id = "mine", "talk"
    ended = served.inference.Generate(request)
    await listed(served, 1)
    other = served.inference.Generate(question("qwen3", (5, 6)))
    first, second = await listed(served, 2)
    phase = server_service_pb2.REQUEST_PHASE_LOADING_MODEL
    assert (first.request_id, first.session_id, first.model, first.phase) == ("mine", "talk", "qwen3", phase)
    assert first.method == "icehouse.v1.InferenceService/Generate" and first.HasField("age")
    assert second.phase == phase and not (first.prompt_tokens or second.prompt_tokens)
    told = await served.serving.CancelRequest(server_service_pb2.CancelRequestRequest(request_id="mine"))
    assert told.request.phase == phase
    with pytest.raises(grpc.aio.AioRpcError, match="ended by CancelRequest") as caught:
        await ended
    assert caught.value.code() is grpc.StatusCode.CANCELLED
    assert [each.request_id for each in await listed(served, 1)] == [second.request_id]
    found.set()
    assert (await other).model == "qwen3", "it goes on"
    await listed(served, 0)


async def listed(served: PoolServer, count: int) -> list[server_service_pb2.RequestInfo]:
    """Return the requests once there are so many."""
    async with asyncio.timeout(BOUND_S):
        while True:
            answer = await served.serving.ListRequests(server_service_pb2.ListRequestsRequest())
            if len(answer.requests) == count:
                return list(answer.requests)
