"""Campaign: a range of requests against one server, many at once; counts, problems, memory.

The range is cut into chunks. Each chunk's counts are one line of the report, so that a campaign that was
stopped goes on where it was.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import grpc
from icehouse.v1 import inference_service_pb2 as messages
from icehouse.v1 import inference_service_pb2_grpc

from tests.fixtures.patience import BOUND_S
from tests.system.fuzz.caller import Caller
from tests.system.fuzz.requests import FuzzRequest, image_request_of, request_of
from tests.system.fuzz.server import Fuzzed

IN_FLIGHT_COUNT = 64
FAILURE_LIMIT = 20
"""A campaign ends early with as many problems: they have one cause, mostly."""

_GOOD = messages.GenerateRequest(prompt={"text": "the rain in the south"}, max_output_tokens=8)

Row = tuple[str, str, str]
"""Method, code and reason."""


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """A request that should have been answered otherwise."""

    name: str
    request: FuzzRequest
    problem: str


@dataclasses.dataclass(slots=True)
class Chunk:
    """What a range of requests came to."""

    first: int
    count: int
    duration_s: float = 0.0
    rss_bytes: int = 0
    slowest: tuple[float, str] = (0.0, "")
    """Seconds of the longest call, and which one it was."""
    rows: collections.Counter[Row] = dataclasses.field(default_factory=collections.Counter)
    failures: list[Failure] = dataclasses.field(default_factory=list)

    def to_json(self) -> str:
        """Return one line for the report; failures are told by name, their bytes are files."""
        return json.dumps(
            {
                "first": self.first,
                "count": self.count,
                "duration_s": round(self.duration_s, 3),
                "rss_bytes": self.rss_bytes,
                "slowest": self.slowest,
                "rows": [[*row, count] for row, count in sorted(self.rows.items())],
                "failures": [f"{failure.name}: {failure.problem}" for failure in self.failures],
            }
        )


class Campaign:
    """Requests of one seed against one server, of every kind or with images alone."""

    def __init__(self, server: Fuzzed, caller: Caller, *, seed: int, has_images: bool = False) -> None:
        self._server = server
        self._caller = caller
        self._seed = seed
        self._has_images = has_images

    async def play(self, first: int, count: int) -> Chunk:
        """Send a range of requests and return what came of it."""
        kind, make = ("image", image_request_of) if self._has_images else ("request", request_of)
        named = ((f"seed {self._seed} {kind} {i}", make(self._seed, i)) for i in range(first, first + count))
        return await self.send(named, first=first, count=count)

    async def send(
        self, named: Iterable[tuple[str, FuzzRequest]], *, first: int = 0, count: int = 0
    ) -> Chunk:
        """Send requests, `IN_FLIGHT_COUNT` at a time."""
        chunk = Chunk(first, count)
        began = time.monotonic()
        before = len(self._server.complaints())
        source = iter(named)
        await asyncio.gather(*(self._work(source, chunk) for _ in range(IN_FLIGHT_COUNT)))
        chunk.duration_s = time.monotonic() - began
        chunk.rss_bytes = self._server.rss_bytes()
        for line in self._server.complaints()[before:]:
            chunk.failures.append(
                Failure(f"chunk from {first}", FuzzRequest("", (), ""), f"the log says {line}")
            )
        return chunk

    async def good_tokens(self) -> Sequence[int]:
        """Return what a good request is answered."""
        token = self._server.tokens["operator"]
        async with grpc.aio.insecure_channel(self._server.process.address) as channel:
            stub: Any = inference_service_pb2_grpc.InferenceServiceStub(channel)
            answer = await stub.Generate(
                _GOOD, timeout=BOUND_S, metadata=(("authorization", f"Bearer {token}"),)
            )
        return tuple(answer.token_ids)

    async def _work(self, source: Iterator[tuple[str, FuzzRequest]], chunk: Chunk) -> None:
        for name, request in source:
            if len(chunk.failures) >= FAILURE_LIMIT:
                return
            began = time.monotonic()
            outcome = await self._caller.send(request)
            chunk.slowest = max(chunk.slowest, (round(time.monotonic() - began, 3), name))
            chunk.rows[request.path, outcome.code, outcome.reason] += 1
            if outcome.problem is not None:
                chunk.failures.append(Failure(name, request, outcome.problem))
