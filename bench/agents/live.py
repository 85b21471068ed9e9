"""Live replay: a trace's requests sent to `icehouse serve`, its blocks made into tokens, at any time scale.

A block of a trace becomes a few tokens drawn from its stream and place, so that equal blocks are equal tokens
everywhere. Each session sends its next prompt when it is due and the one before it is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import random
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc

from bench.agents.rules import Rule
from bench.agents.simulation import Outcome, Replay
from bench.agents.tiers import Limits
from bench.agents.trace import Request, Trace
from bench.grpc_clients import READ_WRITE, Client, connected, token_request
from bench.replies import quantile
from bench.server_process import ServerProcess

_CLIENT_COUNT = 16
"""Requests that are under way at once, at most."""
_TOKENS = range(10, 250)
"""Plain tokens of every model that the benches make."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sending:
    """How a trace is sent."""

    time_scale: float
    """Seconds of the trace in one of the clock."""
    duration_s: float
    """No request begins later."""
    block_token_count: int
    """Tokens that stand for a block of the trace."""
    ram_bytes: int
    ssd_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Served:
    """What a server made of a trace. Times in seconds."""

    request_count: int
    failures: tuple[str, ...]
    prompt_token_count: int
    ram_token_count: int
    ssd_token_count: int
    ttft_p50_s: float
    ttft_p95_s: float
    written_bytes: int
    """Blocks written to SSD."""
    read_bytes: int
    kv_bytes_per_token: int
    duration_s: float
    simulated: tuple[Outcome, ...]
    """The same requests in a cache that knows nothing but blocks: LRU, and Belady."""

    @property
    def hit_rate(self) -> float:
        """Prompt tokens reused, of all prompt tokens."""
        return (self.ram_token_count + self.ssd_token_count) / max(1, self.prompt_token_count)


@dataclasses.dataclass(frozen=True, slots=True)
class _Answer:
    request: Request
    ttft_s: float
    prompt_token_count: int
    ram_token_count: int
    ssd_token_count: int


def block_tokens(stream: int, place: int, *, token_count: int) -> list[int]:
    """Return the tokens of a stream's block; `place` is how many blocks of the stream lie before it."""
    source = random.Random(f"{stream}/{place}")
    return source.choices(_TOKENS, k=token_count)


class Prompts:
    """Makes the tokens of a trace's prompts."""

    def __init__(self, block_token_count: int) -> None:
        self._block_token_count = block_token_count
        self._tokens = functools.lru_cache(maxsize=1 << 16)(block_tokens)

    def tokens_of(self, request: Request) -> list[int]:
        """Return a prompt's tokens, at least one."""
        count = self._block_token_count
        found: list[int] = []
        for span in request.prompt:
            for place in range(span.block_count):
                found += self._tokens(span.stream, place, token_count=count)
        return found or [_TOKENS[0]]


async def replay_live(
    trace: Trace, sending: Sending, *, model: Path, scratch: Path, log_file: Path
) -> Served:
    """Serve the model, send what is due within the time, and return what came of it."""
    server = ServerProcess(
        model=str(model),
        cache_directory=scratch / "agents",
        log_file=log_file,
        flags=(
            *("--ram-bytes", str(sending.ram_bytes), "--ssd-bytes", str(sending.ssd_bytes)),
            *("--block-token-count", str(sending.block_token_count * _blocks_per_server_block(sending))),
            "--no-restore-or-recompute",
        ),
    )
    with server:
        async with connected(server.address, _CLIENT_COUNT) as clients:
            facts = await clients[0].model()
            sender = _Sender(trace, sending, clients, context_token_limit=facts.context_tokens)
            began = time.monotonic()
            await sender.run()
            duration_s = time.monotonic() - began
            cache = (await clients[0].stats()).cache
    answers = sender.answers
    ttfts_s = [answer.ttft_s for answer in answers]
    return Served(
        request_count=len(answers),
        failures=tuple(sender.failures),
        prompt_token_count=sum(answer.prompt_token_count for answer in answers),
        ram_token_count=sum(answer.ram_token_count for answer in answers),
        ssd_token_count=sum(answer.ssd_token_count for answer in answers),
        ttft_p50_s=quantile(ttfts_s, 0.5),
        ttft_p95_s=quantile(ttfts_s, 0.95),
        written_bytes=cache.spill.persisted_byte_total,
        read_bytes=cache.promote.read_byte_total,
        kv_bytes_per_token=facts.kv_bytes_per_token,
        duration_s=duration_s,
        simulated=_simulated(
            trace, [answer.request for answer in answers], sending, facts.kv_bytes_per_token
        ),
    )


def _blocks_per_server_block(sending: Sending) -> int:
    """Return how many of the trace's blocks make a block of the server, which has 32 tokens or a few more."""
    return max(1, 32 // sending.block_token_count)


def _simulated(
    trace: Trace, requests: Sequence[Request], sending: Sending, kv_bytes_per_token: int
) -> tuple[Outcome, ...]:
    replay = Replay(dataclasses.replace(trace, requests=tuple(requests)))
    size_bytes = kv_bytes_per_token * sending.block_token_count
    ram_count = max(1, sending.ram_bytes // size_bytes)
    limits = Limits(ram_count + sending.ssd_bytes // size_bytes, ram_count)
    return tuple(replay.play(rule, limits) for rule in (Rule.LRU, Rule.BELADY))


class _Sender:
    """Sends each session's requests in turn, all sessions beside each other."""

    def __init__(
        self, trace: Trace, sending: Sending, clients: Sequence[Client], *, context_token_limit: int
    ) -> None:
        self._trace = trace
        self._sending = sending
        self._limit = context_token_limit
        self._prompts = Prompts(sending.block_token_count)
        self._free: asyncio.Queue[Client] = asyncio.Queue()
        for client in clients:
            self._free.put_nowait(client)
        self._began_s = 0.0
        self.answers: list[_Answer] = []
        """In the trace's order once all have come."""
        self.failures: list[str] = []

    async def run(self) -> None:
        """Send all that is due in time."""
        sessions: dict[int, list[Request]] = {}
        for request in self._trace.requests:
            if request.time_s / self._sending.time_scale < self._sending.duration_s:
                sessions.setdefault(request.session, []).append(request)
        self._began_s = time.monotonic()
        await asyncio.gather(*(self._play(requests) for requests in sessions.values()))
        self.answers.sort(key=lambda answer: answer.request.time_s)

    async def _play(self, requests: Sequence[Request]) -> None:
        for request in requests:
            due_s = self._began_s + request.time_s / self._sending.time_scale
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            async with self._client() as client:
                if time.monotonic() - self._began_s > self._sending.duration_s:
                    return
                try:
                    await self._ask(client, request)
                except grpc.aio.AioRpcError as error:
                    self.failures.append(f"session {request.session}: {error.code().name}: {error.details()}")
                    return

    async def _ask(self, client: Client, request: Request) -> None:
        """Send one request; nothing where the model's context is too short for it."""
        tokens = self._prompts.tokens_of(request)
        scale = self._sending.block_token_count / self._trace.block_token_count
        output_count = max(1, round(request.output_token_count * scale))
        if len(tokens) + output_count > self._limit:
            return
        asked = token_request(tokens, max_output_tokens=output_count, cache=READ_WRITE)
        reply, started, finished = await client.stream(asked)
        if not reply.token_times_s:
            return
        usage = finished.usage
        self.answers.append(
            _Answer(request, reply.ttft_s, started.prompt_tokens, usage.ram_tokens, usage.ssd_tokens)
        )

    @contextlib.asynccontextmanager
    async def _client(self) -> AsyncIterator[Client]:
        client = await self._free.get()
        try:
            yield client
        finally:
            self._free.put_nowait(client)
