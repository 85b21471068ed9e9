"""What the full server refuses, before any response message, with numbers a caller can act on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from icehouse.v1 import inference_service_pb2_grpc

from tests.fixtures.models import tiny_model_dir
from tests.fixtures.patience import BOUND_S
from tests.fixtures.rpc.details import Refusal, refusal_of
from tests.system.crash.crashing_server import ServerProcess
from tests.system.load.live_server import is_finished, live_server, request


async def refused_stream(call: grpc.aio.UnaryStreamCall) -> tuple[grpc.aio.AioRpcError, Refusal]:
    """Read a stream that must be refused before its first message."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    return caught.value, refusal_of(caught.value)


async def test_a_full_queue_says_where_one_would_stand_and_when_to_come_back() -> None:
    async with live_server(running_limit=1, waiting_limit=1) as server:
        server.runner.is_paused = True
        running = await server.begin("running")
        waiting = server.inference.Stream(request("waiting"))
        await server.stats_when(lambda stats: stats.waiting_count == 1)
        error, refusal = await refused_stream(server.inference.Stream(request("refused")))
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        assert refusal.info.metadata["queue_position"] == "1"
        assert refusal.info.metadata["waiting_limit"] == "1"
        pushback_ms = dict(error.trailing_metadata())["grpc-retry-pushback-ms"]
        assert int(pushback_ms) == refusal.retry.retry_delay.ToMilliseconds() >= 100
        # The refusal cost those who were let in nothing.
        server.runner.is_paused = False
        for stream in (running, waiting):
            assert await is_finished(stream)


async def test_a_deadline_the_queue_cannot_meet_is_refused_at_once() -> None:
    async with live_server(running_limit=1) as server:
        server.runner.is_paused = True
        slow = await server.begin("slow")
        server.clock.ahead_s = 20.0
        server.runner.is_paused = False
        assert await is_finished(slow)
        server.runner.is_paused = True
        running = await server.begin("running")
        _, refusal = await refused_stream(server.inference.Stream(request("late"), timeout=10))
        assert (refusal.code, refusal.reason) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "DEADLINE_UNREACHABLE",
        )
        assert float(refusal.info.metadata["predicted_ttft_s"]) >= 20.0
        # gRPC rounds a timeout up, by about a hundredth, before it travels.
        assert 0 < float(refusal.info.metadata["deadline_s"]) < 10.5
        assert refusal.retry.retry_delay.ToMilliseconds() > 0
        # With enough time the same request is let in.
        patient = server.inference.Stream(request("patient"), timeout=300)
        await server.stats_when(lambda stats: stats.waiting_count == 1)
        server.runner.is_paused = False
        for stream in (running, patient):
            assert await is_finished(stream)


async def test_a_request_id_in_use_is_refused_while_it_runs_and_free_afterwards() -> None:
    async with live_server() as server:
        server.runner.is_paused = True
        first = await server.begin("same", max_output_tokens=3)
        _, refusal = await refused_stream(server.inference.Stream(request("same")))
        assert refusal.code is grpc.StatusCode.ALREADY_EXISTS
        others = request("same")
        others.cache.tenant = "another"
        second = server.inference.Stream(others)
        server.runner.is_paused = False
        assert await is_finished(first) and await is_finished(second), "another tenant's is another one"
        assert len((await server.inference.Generate(request("same"))).text) == 4


async def test_a_prompt_that_can_never_fit_is_told_the_estimate_and_the_limit(tmp_path: Path) -> None:
    model = tiny_model_dir(tmp_path, "llama")
    # Room for the weights and a few hundred tokens, not for three thousand.
    weight_bytes = (model / "model.safetensors").stat().st_size
    limit_bytes = weight_bytes + (3 << 20)
    options = ("--memory-limit-bytes", str(limit_bytes), "--no-ssd")
    with ServerProcess(
        model=model, directory=tmp_path / "blocks", log=tmp_path / "log", options=options
    ) as server:
        await asyncio.to_thread(server.wait_until_serving)
        async with grpc.aio.insecure_channel(server.address) as channel:
            stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
            _, refusal = await refused_stream(stub.Stream(request("huge", token_count=3000)))
            assert (refusal.code, refusal.reason) == (
                grpc.StatusCode.FAILED_PRECONDITION,
                "MEMORY_NEVER_FITS",
            )
            # Pages have three quarters of what the weights leave.
            assert weight_bytes < int(refusal.info.metadata["limit_bytes"]) <= limit_bytes
            assert int(refusal.info.metadata["estimated_bytes"]) > limit_bytes
            assert refusal.info.metadata["token_count"] == "3004"
            assert refusal.retry is None, "coming back later would not help"
            answer = await stub.Generate(request("small", token_count=50), timeout=BOUND_S)
            assert answer.usage.output_tokens == 4
