"""A real engine in this process, without the edge, whose rows decode for as long as somebody watches."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from icehouse_server.bootstrap.composition import EngineParts, build_server
from icehouse_server.clock import SystemClock
from icehouse_server.config import load_config
from icehouse_server.device import Device
from icehouse_server.domain.ids import RequestId
from icehouse_server.domain.model import EngineState
from icehouse_server.domain.request import CacheUse, GenerationRequest
from icehouse_server.domain.sampling import SamplingParams
from icehouse_server.engine.runner.model_loader import ModelSource
from icehouse_server.rpc.engine_client.router import Router

from bench.prompts import FreshPrompts

WAIT_S = 600.0
_POLL_S = 0.05


class DecodingEngine:
    """The engine while `running_engine`'s block lasts."""

    def __init__(self, engine: Any, *, vocabulary_size: int) -> None:
        self._engine = engine
        # Plain words lie in the middle of a vocabulary, special tokens at its ends.
        self._prompts = FreshPrompts(range(vocabulary_size // 4, vocabulary_size // 2), seed=1)
        self._row_count = 0

    @contextlib.asynccontextmanager
    async def rows(self, count: int, *, prompt_token_count: int, output_limit: int) -> AsyncIterator[None]:
        """Have so many rows decode, and none be prefilled, while the block lasts."""
        ids = [RequestId(f"row-{self._row_count + number}") for number in range(count)]
        self._row_count += count
        for request_id in ids:
            request = GenerationRequest(
                request_id,
                tuple(self._prompts.take(prompt_token_count)),
                max_output_tokens=output_limit,
                sampling=SamplingParams(ignores_end_tokens=True),
                stop=(),
                arrival_time=time.monotonic(),
                cache_use=CacheUse.OFF,
            )
            self._engine.submit(request)
        try:
            await self._until_decoding(count)
            yield
        finally:
            for request_id in ids:
                self._engine.cancel(request_id)
            await self._until_decoding(0)

    async def _until_decoding(self, row_count: int) -> None:
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            if await self._decoding_count() == row_count:
                return
            await asyncio.sleep(_POLL_S)
        raise TimeoutError(f"{row_count} rows did not decode together within {WAIT_S:g} s")

    async def _decoding_count(self) -> int:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[int] = loop.create_future()
        self._engine.request_stats(
            lambda stats, _: loop.call_soon_threadsafe(answer.set_result, stats.decoding_count)
        )
        return await asyncio.wait_for(answer, WAIT_S)


@contextlib.asynccontextmanager
async def running_engine(
    path: Path, *, device: Device, flags: Mapping[str, Any] | None = None
) -> AsyncIterator[DecodingEngine]:
    """Give an engine that serves the folder, composed as `icehouse serve` composes it, cache off."""
    router = Router(asyncio.get_running_loop())
    config = load_config(flags={"cache.enabled": False, "server.port": 0, **(flags or {})}, environ={}).config
    parts = EngineParts.of(config, device, SystemClock())
    server = build_server(config, parts, model=ModelSource(path, path.name), router=router)
    server.inference.start()
    server.only.engine.start()
    try:
        await until(lambda: router.state is not EngineState.LOADING)
        size = router.require_model().info.vocabulary_size
        yield DecodingEngine(server.only.engine, vocabulary_size=size)
    finally:
        server.only.engine.drain(grace_s=0.0)
        server.inference.end()
        await asyncio.to_thread(server.inference.join, timeout_s=WAIT_S)


async def until(is_true: Callable[[], bool]) -> None:
    """Wait until something is so; raise TimeoutError when it takes too long."""
    async with asyncio.timeout(WAIT_S):
        while not is_true():
            await asyncio.sleep(_POLL_S)
