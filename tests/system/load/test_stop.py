"""SIGTERM while streams run: a real server on a tiny real model, and its last words."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from icehouse.v1 import inference_service_pb2_grpc

from tests.fixtures.models import tiny_model_dir
from tests.fixtures.patience import BOUND_S
from tests.system.crash.crashing_server import ServerProcess
from tests.system.load.live_server import request

_OPTIONS = ("--block-token-count", "16", "--min-prefix-token-count", "0")
_STREAM_COUNT = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("models"), "llama")


@dataclasses.dataclass
class Ending:
    """How one stream ended: its last event, or the status instead."""

    last_event: str
    code: grpc.StatusCode


async def read_on(stream: Any) -> Ending:
    """Read from the first text to the end."""
    last_event = "delta"
    try:
        while (response := await stream.read()) is not grpc.aio.EOF:
            last_event = response.WhichOneof("event")
    except grpc.aio.AioRpcError as error:
        return Ending(last_event, error.code())
    return Ending(last_event, grpc.StatusCode.OK)


class Loaded:
    """A server with streams that run, and a watch on its health."""

    def __init__(self, server: ServerProcess, channel: grpc.aio.Channel) -> None:
        self._server = server
        self._stub: Any = inference_service_pb2_grpc.InferenceServiceStub(channel)
        self._health: Any = health_pb2_grpc.HealthStub(channel)

    async def begin(self, *, max_output_tokens: int) -> list[asyncio.Task[Ending]]:
        """Open the streams and return what reads them, once each has begun to answer."""
        streams = [
            self._stub.Stream(
                request(f"load-{i}", token_count=40 + i, max_output_tokens=max_output_tokens),
                timeout=BOUND_S,
            )
            for i in range(_STREAM_COUNT)
        ]
        for stream in streams:
            assert (await stream.read()).WhichOneof("event") == "started"
            while (await stream.read()).WhichOneof("event") != "delta":
                pass
        return [asyncio.create_task(read_on(stream)) for stream in streams]

    async def terminate(self) -> None:
        """Send SIGTERM and return when health has told of it."""
        watch = self._health.Watch(health_pb2.HealthCheckRequest(), timeout=BOUND_S)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        self._server.terminate()
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.mark.parametrize("grace_s", [BOUND_S, 0.2], ids=["time to finish", "no time"])
async def test_streams_end_with_a_finish_or_a_status_and_blocks_are_flushed(
    model: Path, tmp_path: Path, grace_s: float
) -> None:
    log = tmp_path / "log"
    options = (*_OPTIONS, "--drain-grace-s", str(grace_s))
    with ServerProcess(model=model, directory=tmp_path / "blocks", log=log, options=options) as server:
        await asyncio.to_thread(server.wait_until_serving)
        async with grpc.aio.insecure_channel(server.address) as channel:
            loaded = Loaded(server, channel)
            reading = await loaded.begin(max_output_tokens=300 if grace_s > 1 else 3900)
            await loaded.terminate()
            assert not any(task.done() for task in reading), "NOT_SERVING came after the streams' end"
            endings = await asyncio.gather(*reading)
        assert await asyncio.to_thread(server.wait) == 0
    if grace_s > 1:
        assert endings == [Ending("finished", grpc.StatusCode.OK)] * _STREAM_COUNT
    else:
        assert endings == [Ending("delta", grpc.StatusCode.UNAVAILABLE)] * _STREAM_COUNT
    words = log.read_text()
    assert "flush_started" in words and "flush_ended" in words
    assert list((tmp_path / "blocks").rglob("*.safetensors"))


async def test_a_second_signal_ends_at_once(model: Path, tmp_path: Path) -> None:
    options = (*_OPTIONS, "--drain-grace-s", "600")
    log = tmp_path / "log"
    with ServerProcess(model=model, directory=tmp_path / "blocks", log=log, options=options) as server:
        await asyncio.to_thread(server.wait_until_serving)
        async with grpc.aio.insecure_channel(server.address) as channel:
            loaded = Loaded(server, channel)
            reading = await loaded.begin(max_output_tokens=3900)
            await loaded.terminate()
            server.terminate()
            assert await asyncio.to_thread(server.wait) == 128 + 15
            endings = await asyncio.gather(*reading)
    assert {ending.code for ending in endings} == {grpc.StatusCode.UNAVAILABLE}
