"""Another tenant is answered, health is checked and the process ends while one caller does its worst.

Default settings but for the grace, a real server process, each attack for a moment; `make bench CASE=attacks`
measures them for a minute each, times included.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from icehouse.v1 import inference_service_pb2 as messages
from icehouse.v1 import inference_service_pb2_grpc
from icehouse_server.rpc.access.caller import CallerRole
from icehouse_server.rpc.access.tokens import line_of, new_token

from bench.hostile import ATTACKS, Hostile
from bench.server_process import free_port
from tests.fixtures.models import tiny_model_dir
from tests.fixtures.patience import BOUND_S
from tests.fixtures.rpc.worker import HAS_PROTOCOL
from tests.system.crash.crashing_server import ServerProcess

OPTIONS = ("--drain-grace-s", "1", *(("--worker",) if HAS_PROTOCOL else ()))
ANSWER_COUNT = 5
HELD = ("unread_health_watches", "zero_windows")
"""What lasts as long as nothing at all is done about it: calls that are begun and never taken."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("models"), "llama")


def token_file(folder: Path, tokens: dict[str, str]) -> Path:
    file = folder / "tokens"
    lines = [
        line_of(token, tenant=tenant, role=CallerRole.TENANT, expire_date=None)
        for tenant, token in tokens.items()
    ]
    file.write_text("".join(f"{line}\n" for line in lines))
    file.chmod(0o600)
    return file


@contextlib.asynccontextmanager
async def attacked(address: str, token: str, names: tuple[str, ...]) -> AsyncIterator[None]:
    """Attack until the block ends; it begins when the attacks have."""
    hostile = [Hostile(address, token) for _ in names]
    attacking = [
        asyncio.ensure_future(getattr(each, name)()) for each, name in zip(hostile, names, strict=True)
    ]
    try:
        async with asyncio.timeout(BOUND_S):
            await asyncio.gather(*(each.begun.wait() for each in hostile))
        yield
    finally:
        for task in attacking:
            task.cancel()
        await asyncio.gather(*attacking, return_exceptions=True)


async def is_served(address: str, token: str) -> None:
    """Get some answers, each with a check of health before it."""
    request = messages.GenerateRequest(prompt={"text": "Hello"}, max_output_tokens=2)
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        inference: Any = inference_service_pb2_grpc.InferenceServiceStub(channel)
        health: Any = health_pb2_grpc.HealthStub(channel)
        for _ in range(ANSWER_COUNT):
            check = await health.Check(health_pb2.HealthCheckRequest(), timeout=BOUND_S)
            assert check.status == health_pb2.HealthCheckResponse.SERVING
            metadata = (("authorization", f"Bearer {token}"),)
            answer = await inference.Generate(request, metadata=metadata, timeout=BOUND_S)
            assert answer.usage.output_tokens == 2


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(HELD, id="held"),
        *(pytest.param((name,), id=name, marks=pytest.mark.slow) for name in ATTACKS if name not in HELD),
    ],
)
async def test_another_tenant_is_served_and_the_end_comes(
    model: Path, tmp_path: Path, names: tuple[str, ...]
) -> None:
    tokens = {"hostile": new_token(), "good": new_token()}
    options = ("--token-file", str(token_file(tmp_path, tokens)), *OPTIONS)
    with ServerProcess(
        model=model, directory=tmp_path / "blocks", log=tmp_path / "log", options=options, port=free_port()
    ) as server:
        await asyncio.to_thread(server.wait_until_serving)
        async with attacked(server.address, tokens["hostile"], names):
            await is_served(server.address, tokens["good"])
            server.terminate()
            assert await asyncio.to_thread(server.wait) == 0
