"""A real server process under attack on loopback: good callers are served, and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from hyperframe.frame import RstStreamFrame
from icehouse.v1 import inference_service_pb2 as messages
from icehouse.v1 import inference_service_pb2_grpc

from bench.server_process import free_port
from tests.fixtures.models import tiny_model_dir
from tests.fixtures.patience import BOUND_S
from tests.fixtures.rpc.http2 import peer_of
from tests.system.crash.crashing_server import ServerProcess
from tests.system.load import attacks

_DEADLINE_EXCEEDED = grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
_RESOURCE_EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
_REFUSED_STREAM = 7
"""HTTP/2's error code."""

_STREAM_LIMIT = 50
_CALL_LIMIT = 120
_OPTIONS: tuple[str, ...] = (
    "--handshake-timeout-s",
    "1",
    "--message-timeout-s",
    "1",
    "--stream-limit",
    str(_STREAM_LIMIT),
)
_OPTIONS += ("--max-concurrent-calls", str(_CALL_LIMIT), "--no-cache")

_GROWTH_LIMIT_BYTES = 150 << 20

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("attacks")
    process = ServerProcess(
        model=tiny_model_dir(folder, "llama"),
        directory=folder / "blocks",
        log=folder / "log",
        options=_OPTIONS,
        port=free_port(),
    )
    with process:
        process.wait_until_serving()
        yield process
        # It ends as any other: with 0, on request.
        process.terminate()
        assert process.wait() == 0


class GoodCaller:
    """Asks again and again, on one connection, while others attack."""

    def __init__(self, channel: Any) -> None:
        self._stub: Any = inference_service_pb2_grpc.InferenceServiceStub(channel)
        self.answer_count = 0

    async def ask(self) -> None:
        """Get one answer."""
        request = messages.GenerateRequest(prompt={"text": "Hi"}, max_output_tokens=2)
        answer = await self._stub.Generate(request, timeout=BOUND_S)
        assert answer.usage.output_tokens == 2
        self.answer_count += 1

    async def is_answered(self, count: int) -> None:
        """Return after so many more answers."""
        wanted = self.answer_count + count
        async with asyncio.timeout(BOUND_S):
            while self.answer_count < wanted:
                await asyncio.sleep(0)

    async def go_on(self) -> None:
        """Ask until cancelled; raises when one call fails."""
        while True:
            await self.ask()


def rss_bytes(process: ServerProcess) -> int:
    lines = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


def descriptor_count(process: ServerProcess) -> int:
    return len(list(Path(f"/proc/{process.pid}/fd").iterdir()))


@contextlib.asynccontextmanager
async def under_attack(server: ServerProcess) -> AsyncIterator[GoodCaller]:
    """Hold the attack inside against a good caller, memory and open files."""
    async with grpc.aio.insecure_channel(server.address) as channel:
        caller = GoodCaller(channel)
        await caller.ask()
        rss_before, files_before = rss_bytes(server), descriptor_count(server)
        calling = asyncio.ensure_future(caller.go_on())
        try:
            yield caller
            answers_during = caller.answer_count - 1
        finally:
            calling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await calling
        assert answers_during > 0
        await caller.ask()
        async with asyncio.timeout(BOUND_S):
            while descriptor_count(server) > files_before:
                await caller.ask()
        assert rss_bytes(server) - rss_before < _GROWTH_LIMIT_BYTES


async def test_greetings_that_trickle_in_are_cut(server: ServerProcess) -> None:
    async with under_attack(server):
        assert await attacks.trickle_greetings(server.address, count=200) == 200


async def test_messages_that_trickle_in_get_their_status(server: ServerProcess) -> None:
    async with under_attack(server):
        codes = await attacks.trickle_messages(server.address, connection_count=3, stream_count=30)
        # Those whose turn at the memory for requests did not come in time are told so.
        assert len(codes) == 90 and _DEADLINE_EXCEEDED in codes
        assert set(codes) <= {_DEADLINE_EXCEEDED, _RESOURCE_EXHAUSTED}


async def test_calls_taken_back_at_once_cost_little(server: ServerProcess) -> None:
    async with under_attack(server):
        assert await attacks.reset_rapidly(server.address, connection_count=8, reset_count=400) > 400


async def test_headers_without_an_end_are_not_kept(server: ServerProcess) -> None:
    async with under_attack(server) as caller:
        code = await attacks.never_end_headers(server.address, size_bytes=3 * _GROWTH_LIMIT_BYTES)
        assert code == _RESOURCE_EXHAUSTED
        await caller.is_answered(1)


async def test_streams_beyond_the_limit_are_refused(server: ServerProcess) -> None:
    async with under_attack(server) as caller, peer_of(server.address) as peer:
        await attacks.exceed_streams(peer, stream_count=_STREAM_LIMIT + 20)
        refused = await peer.first(RstStreamFrame)
        assert refused.error_code == _REFUSED_STREAM and refused.stream_id > 2 * _STREAM_LIMIT - 1
        # While all of the others hang open.
        await caller.is_answered(3)
