"""Answers that nobody reads count against whoever asked for them, however they are made, until the call is
over."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import grpc
import pytest
from icehouse.v1 import inference_service_pb2 as messages
from icehouse_server.domain.call import CallRecord
from icehouse_server.domain.events import Delta, Event
from icehouse_server.domain.request import GenerationRequest, Logprob, TokenLogprobs
from icehouse_server.errors import CannotFit, Overloaded, Reason
from icehouse_server.rpc.access.shares import FairShare
from icehouse_server.rpc.calls.watchers import Telemetry
from icehouse_server.rpc.calls.wire import EncodedResponse
from icehouse_server.rpc.engine_client import answers
from icehouse_server.rpc.engine_client.answers import FREE_BYTES, CallAnswers

from tests.fixtures.rpc.details import refused
from tests.fixtures.rpc.fake_engine import finished, started
from tests.fixtures.rpc.http2 import Peer, framed, peer_of
from tests.fixtures.rpc.worker import METHODS_HERE, needs_protocol, worker_parts
from tests.unit.rpc.access.test_tokens import ADS, SEARCH, bearer, guarded_server
from tests.unit.rpc.conftest import RunningServer, running

BOUND_S = 30.0
MEMORY_BYTES = 1 << 20
"""The least there may be."""
TEXT = "a" * 12_000
"""A text whose tokens are an answer of some 100 kB."""
TOKENIZE = "icehouse.v1.InferenceService/Tokenize"
STREAM = "icehouse.v1.InferenceService/Stream"
WORKER = "vllm.grpc.engine.VllmEngine"
EXHAUSTED = str(grpc.StatusCode.RESOURCE_EXHAUSTED.value[0])


class Connection:
    """Takes a message when it is told to."""

    def __init__(self) -> None:
        self.may_take = asyncio.Event()

    async def write(self, message: Any) -> None:
        await self.may_take.wait()


def memory(limit: int = 100_000) -> FairShare:
    return FairShare(limit=limit, factor=1.0, what="bytes")


async def test_what_is_written_counts_until_it_is_taken() -> None:
    share, connection = memory(), Connection()
    answers.current.set(CallAnswers(share, origin="a"))
    writing = asyncio.ensure_future(answers.write(connection, EncodedResponse(bytes(20_000))))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        share.take("a", 40_000)
    connection.may_take.set()
    await writing
    share.take("a", 40_000)


async def test_what_was_broken_off_counts_until_the_call_is_over() -> None:
    share, connection = memory(), Connection()
    held = CallAnswers(share, origin="a")
    answers.current.set(held)
    writing = asyncio.ensure_future(answers.write(connection, EncodedResponse(bytes(20_000))))
    await asyncio.sleep(0)
    writing.cancel()
    await asyncio.wait([writing])
    with pytest.raises(Overloaded):
        share.take("a", 40_000)
    held.close()
    share.take("a", 40_000)


def test_what_a_caller_could_never_have_is_refused_for_good() -> None:
    held = CallAnswers(memory(), origin="a")
    with pytest.raises(CannotFit, match=r"server\.answer_memory_bytes"):
        held.buffer(50_001)
    held.close()
    held.buffer(50_000)


def test_short_answers_are_never_refused() -> None:
    share = memory()
    share.take("a", 50_000)
    held = CallAnswers(share, origin="a")
    held.buffer(FREE_BYTES)
    with pytest.raises(Overloaded):
        held.buffer(FREE_BYTES + 1)


class Ends:
    """Calls that have ended."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self._changed = asyncio.Event()

    def call_ended(self, record: CallRecord) -> None:
        self.reasons.append(record.reason)
        self._changed.set()

    async def until(self, is_there: Callable[[list[str]], bool]) -> None:
        async with asyncio.timeout(BOUND_S):
            while not is_there(self.reasons):
                self._changed.clear()
                await self._changed.wait()


@contextlib.asynccontextmanager
async def served_to(tmp_path: Path, ends: Ends, **settings: Any) -> AsyncIterator[RunningServer]:
    server = {"answer_memory_bytes": MEMORY_BYTES, "telemetry": Telemetry(calls=(ends,)), **settings}
    async with guarded_server(tmp_path, server=server) as served:
        yield served


async def ask(peer: Peer, method: str, request: Any, *, count: int) -> list[int]:
    """Ask so often for what is not read, and return the streams."""
    streams = []
    for _ in range(count):
        streams.append(await peer.open_call(f"/{method}", token=SEARCH))
        await peer.send(streams[-1], framed(request.SerializeToString()), end=True)
    return streams


async def is_tokenized(served: RunningServer, token: str) -> bool:
    request = messages.TokenizeRequest(prompt={"text": TEXT})
    with contextlib.suppress(grpc.aio.AioRpcError):
        answer = await served.inference.Tokenize(request, metadata=bearer(token), timeout=BOUND_S)
        return bool(answer.token_count == len(TEXT))
    return False


async def is_let_go_of(served: RunningServer) -> None:
    """Return once the tenant's answers have room again."""
    async with asyncio.timeout(BOUND_S):
        while not await is_tokenized(served, SEARCH):
            await asyncio.sleep(0)


async def test_unread_answers_are_refused_beyond_their_callers_part(tmp_path: Path) -> None:
    ends, request = Ends(), messages.TokenizeRequest(prompt={"text": TEXT})
    async with served_to(tmp_path, ends) as served:
        async with peer_of(served.server.address, window_bytes=0) as peer:
            await ask(peer, TOKENIZE, request, count=40)
            await ends.until(lambda reasons: reasons.count(Reason.QUEUE_FULL) >= 30)
            assert await is_tokenized(served, ADS), "another tenant's are its own matter"
            assert not await is_tokenized(served, SEARCH)
        await is_let_go_of(served)


def many_logprobs(request: GenerationRequest) -> Iterable[Event]:
    entry = TokenLogprobs(1, -1.0, 1, tuple(Logprob(n, -1.0) for n in range(20)))
    yield started(request)
    yield from [Delta("x" * 100, (1,) * 100, (entry,) * 100)] * 100
    yield finished(request)


async def test_an_answer_counts_while_it_is_made(tmp_path: Path) -> None:
    # Nobody waits for the whole of what cannot be told in the end.
    async with running(answer_memory_bytes=MEMORY_BYTES, outbox_byte_limit=1 << 30) as served:
        served.engine.script = many_logprobs
        request = messages.GenerateRequest(
            prompt={"text": "Hi"}, max_output_tokens=10_000, logprobs={"top_count": 20}
        )
        refusal = await refused(served.inference.Generate(request))
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "MEMORY_NEVER_FITS")
        told = [response async for response in served.inference.Stream(request)]
        assert told[-1].HasField("finished"), "a stream keeps nothing"


@needs_protocol
async def test_a_worker_s_answer_counts_while_it_is_made() -> None:
    from smg_grpc_proto.generated import vllm_engine_pb2 as worker

    parts = {"worker": worker_parts(), "outbox_byte_limit": 1 << 30}
    async with running(answer_memory_bytes=MEMORY_BYTES, **parts) as served:
        served.engine.script = many_logprobs
        request = worker.GenerateRequest(
            tokenized={"input_ids": [1, 2]}, sampling_params={"max_tokens": 10_000, "logprobs": 20}
        )
        refusal = await refused(served.worker.Generate(request).read())
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "MEMORY_NEVER_FITS")
        request.stream = True
        told = [response async for response in served.worker.Generate(request)]
        assert told[-1].HasField("complete")


@needs_protocol
async def test_unread_archives_count_until_their_reader_leaves(tmp_path: Path) -> None:
    from smg_grpc_proto.generated import common_pb2 as common

    method, request, ends = f"{WORKER}/GetTokenizer", common.GetTokenizerRequest(), Ends()
    settings = {"worker": worker_parts(), "stall_timeout_s": 0.1}
    limit = METHODS_HERE[method].caller_limit
    assert limit is not None
    async with served_to(tmp_path, ends, **settings) as served:
        async with peer_of(served.server.address, window_bytes=0) as peer:
            await ask(peer, method, request, count=limit - 1)
            # Their handlers have ended, and what they wrote is still with gRPC.
            await ends.until(lambda reasons: reasons.count(Reason.READER_STALLED) == limit - 1)
            refusal = await refused(served.worker.GetTokenizer(request, metadata=bearer(SEARCH)).read())
            assert refusal.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "bytes of unread answers" in refusal.message and refusal.retry is not None
            first = await served.worker.GetTokenizer(request, metadata=bearer(ADS)).read()
            assert len(first.data) == 64 << 10
        await is_let_go_of(served)
