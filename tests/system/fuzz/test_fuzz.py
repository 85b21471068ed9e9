"""Mutated requests over every RPC against a real server: each gets a documented status, and it serves on.

FUZZ_REQUESTS and FUZZ_SEED choose another range for the long test; `make fuzz` plays any. The server refuses
variables of the ICEHOUSE_ family that it does not know, so these are none of them.
"""

from __future__ import annotations

import asyncio
import collections
import os
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from icehouse.v1 import prompt_pb2

from tests.fixtures.rpc.worker import needs_protocol
from tests.system.fuzz import mutations
from tests.system.fuzz.caller import calling, judged
from tests.system.fuzz.campaign import Campaign, Chunk
from tests.system.fuzz.requests import METHODS, FuzzRequest, request_of, tensor_request_of
from tests.system.fuzz.server import Fuzzed, fuzzed, fuzzed_with_images
from tests.system.fuzz.shrink import shrunk

_SHORT_COUNT = 2_000
_IMAGE_COUNT = 250
_FAMILIES = ("smolvlm", "qwen2_5_vl", "pixtral", "gemma3", "lfm2_vl")
"""Each cuts and scales images in another way."""
_LONG_COUNT = int(os.environ.get("FUZZ_REQUESTS", "20000"))
_SEED = int(os.environ.get("FUZZ_SEED", "1"))
_LEAST_RATE_PER_S = 20
"""Of a machine that is busy with other things."""

_GROWTH_LIMIT_BYTES = 150 << 20
"""The tiers, buffers of requests, compiled forms: what one that has worked has more than before."""

_FOUND = sorted((Path(__file__).parent / "found").glob("*.json"))
_GENERATE = "/icehouse.v1.InferenceService/Generate"

reads_proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzzed]:
    with fuzzed(tmp_path_factory.mktemp("fuzz")) as running:
        yield running


async def play(server: Fuzzed, *, seed: int, count: int, has_images: bool = False) -> Chunk:
    """Play the first requests of a seed; the server says the same before and after."""
    async with calling(server.process.address, server.tokens) as caller:
        campaign = Campaign(server, caller, seed=seed, has_images=has_images)
        before = await campaign.good_tokens()
        chunk = await campaign.play(0, count)
        assert await campaign.good_tokens() == before
    return chunk


def problems_of(chunk: Chunk) -> list[str]:
    """Say what failed, and how it is seen again."""
    return [f"{failure.name}: {failure.problem}" for failure in chunk.failures]


def answered(chunk: Chunk) -> int:
    """Return how many requests were answered with OK."""
    return sum(count for (_, code, _), count in chunk.rows.items() if code == "OK")


@reads_proc
def test_every_answer_is_a_documented_status(server: Fuzzed) -> None:
    chunk = asyncio.run(play(server, seed=0, count=_SHORT_COUNT))
    assert problems_of(chunk) == []
    assert {path for path, _, _ in chunk.rows} >= set(METHODS)


@reads_proc
def test_every_image_is_answered_with_a_documented_status(tmp_path: Path) -> None:
    pytest.importorskip("mlx_vlm", reason="the extra `vision` is not installed")
    with fuzzed_with_images(tmp_path) as server:
        chunk = asyncio.run(play(server, seed=0, count=_IMAGE_COUNT, has_images=True))
    assert problems_of(chunk) == []
    assert {"IMAGE_INVALID", "CHAT_INVALID"} <= {reason for _, _, reason in chunk.rows}
    assert answered(chunk) > _IMAGE_COUNT / 20


@reads_proc
@needs_protocol
def test_every_tensor_of_a_gateway_is_answered_with_a_documented_status(tmp_path: Path) -> None:
    pytest.importorskip("mlx_vlm", reason="the extra `vision` is not installed")

    async def played(server: Fuzzed) -> Chunk:
        async with calling(server.process.address, server.tokens) as caller:
            campaign = Campaign(server, caller, seed=0)
            before = await campaign.good_tokens()
            sent = ((f"tensors {i}", tensor_request_of(0, i)) for i in range(_IMAGE_COUNT))
            chunk = await campaign.send(sent)
            assert await campaign.good_tokens() == before
        return chunk

    with fuzzed_with_images(tmp_path) as server:
        chunk = asyncio.run(played(server))
    assert problems_of(chunk) == []
    assert "IMAGE_INVALID" in {reason for _, _, reason in chunk.rows}
    assert answered(chunk) > 0


@reads_proc
@pytest.mark.slow
@pytest.mark.parametrize("family", _FAMILIES)
@pytest.mark.timeout(_LONG_COUNT / _LEAST_RATE_PER_S + 300)
def test_every_image_is_answered_with_a_documented_status_at_length(family: str, tmp_path: Path) -> None:
    pytest.importorskip("mlx_vlm", reason="the extra `vision` is not installed")
    with fuzzed_with_images(tmp_path, family) as server:
        asyncio.run(play(server, seed=0, count=_IMAGE_COUNT, has_images=True))
        warm_rss_bytes = server.rss_bytes()
        chunk = asyncio.run(play(server, seed=_SEED, count=_LONG_COUNT // len(_FAMILIES), has_images=True))
    assert problems_of(chunk) == []
    assert chunk.rss_bytes - warm_rss_bytes < _GROWTH_LIMIT_BYTES
    assert answered(chunk) > _LONG_COUNT // len(_FAMILIES) / 20


@reads_proc
@pytest.mark.slow
@pytest.mark.timeout(_LONG_COUNT / _LEAST_RATE_PER_S + 300)
def test_every_answer_is_a_documented_status_at_length(server: Fuzzed) -> None:
    asyncio.run(play(server, seed=0, count=_SHORT_COUNT))
    warm_rss_bytes = server.rss_bytes()
    chunk = asyncio.run(play(server, seed=_SEED, count=_LONG_COUNT))
    assert problems_of(chunk) == []
    assert chunk.rss_bytes - warm_rss_bytes < _GROWTH_LIMIT_BYTES
    looked_into = {
        path for path, code, _ in chunk.rows if code in ("OK", "LEFT", "NOT_FOUND", "UNIMPLEMENTED")
    }
    assert looked_into >= set(METHODS), "others refuse everything at the first look"


def test_what_was_found_is_mended(server: Fuzzed) -> None:
    async def problems() -> dict[str, str]:
        async with calling(server.process.address, server.tokens) as caller:
            outcomes = {file.stem: await caller.send(FuzzRequest.load(file)) for file in _FOUND}
        return {name: outcome.problem for name, outcome in outcomes.items() if outcome.problem is not None}

    assert asyncio.run(problems()) == {}


def test_a_request_is_the_same_again_also_from_its_file(tmp_path: Path) -> None:
    for index in range(300):
        request = request_of(5, index)
        assert request == request_of(5, index)
        file = tmp_path / "request.json"
        file.write_text(request.to_json(), encoding="utf-8")
        assert FuzzRequest.load(file) == request


def test_requests_are_of_every_kind() -> None:
    requests = [request_of(3, index) for index in range(3_000)]
    assert {request.path for request in requests} >= set(METHODS)
    assert {request.credentials for request in requests} == {"operator", "red", "blue", "none", "wrong"}
    assert {request.leave_after for request in requests} >= {0, 1, None}
    assert any(request.frame for request in requests) and any(request.is_compressed for request in requests)
    parsed = collections.Counter(_is_parsed(request) for request in requests)
    assert min(parsed[True], parsed[False]) > 300, "the parser takes some, and others not"


def _is_parsed(request: FuzzRequest) -> bool:
    method = METHODS.get(request.path)
    return method is not None and all(mutations.parsed(method.input_type, data) for data in request.messages)


class _Told(grpc.aio.AioRpcError):
    """A status as a server sends it."""

    def __init__(self, code: grpc.StatusCode, words: str = "words") -> None:
        super().__init__(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=words)


@pytest.mark.parametrize("code", [c for c in grpc.StatusCode if c is not grpc.StatusCode.OK])
def test_a_status_without_a_reason_is_a_problem(code: grpc.StatusCode) -> None:
    assert judged(FuzzRequest(_GENERATE, (b"",), "operator"), _Told(code)).problem is not None


def test_what_the_caller_did_itself_is_none() -> None:
    hasty = FuzzRequest(_GENERATE, (b"",), "operator", timeout_s=0.01)
    assert judged(hasty, _Told(grpc.StatusCode.DEADLINE_EXCEEDED)).problem is None
    assert judged(hasty, _Told(grpc.StatusCode.INTERNAL)).problem is not None


async def test_a_failing_request_is_made_small() -> None:
    async def fails(request: FuzzRequest) -> bool:
        return b"needle" in b"".join(request.messages)

    method = METHODS[_GENERATE]
    big = mutations.parsed(method.input_type, b"")
    assert big is not None
    for index in range(6):
        big.prompt.chat.messages.add(role=prompt_pb2.ROLE_USER, content=f"hay {index}")
    big.prompt.chat.messages[4].name = "a needle"
    big.sampling.temperature = 2.0
    request = FuzzRequest(_GENERATE, (big.SerializeToString(),), "red", metadata=(("x-a", "b"),))
    small = await shrunk(request, fails)
    assert small.metadata == () and len(small.messages[0]) < 20
    assert await fails(small)
