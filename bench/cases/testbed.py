"""Testbed: a server that stays up, the engine in process beside it, servers that a case starts for itself.

Only one side computes at a time. All belongs to one event loop; every wait for a reply has an end.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from icehouse.v1 import cache_policy_pb2, model_service_pb2

from bench.cases.sizes import Sizes
from bench.engine_process import EngineProcess, EngineSizes
from bench.grpc_clients import NO_CACHE, READ_WRITE, Client, stream_together, token_request
from bench.prompts import FreshPrompts, short_prompts
from bench.replies import Reply
from bench.server_process import ServerProcess

ENGINE_SIZES = EngineSizes(completion_batch_size=64, prefill_batch_size=8, prefill_step_size=512)
REPLY_TIMEOUT_S = 600.0
"""Longest that the replies of one case in one round may take before the run fails."""
_CONNECT_TIMEOUT_S = 30.0
_REST_TIMEOUT_S = 30.0
_REST_POLL_S = 0.1
_WARM_UP_PROMPTS = (40, 40, 40, 40, 300)
_WARM_UP_OUTPUT_COUNT = 8
_TEXT_COUNT = 64
"""Texts whose tokens the prompts are drawn from."""


class Testbed:
    """Sides of the comparison, while `open_testbed`'s block lasts."""

    def __init__(
        self,
        *,
        model_path: Path,
        scratch: Path,
        log_file: Path,
        flags: Sequence[str],
        baseline: Sequence[str],
        sizes: Sizes,
    ) -> None:
        self.sizes = sizes
        self.baseline = tuple(baseline)
        self.flags = tuple(flags)
        self._model_path = model_path
        self._scratch = scratch
        self._log_file = log_file
        self.prompts: FreshPrompts
        self.model: model_service_pb2.Model
        self.clients: list[Client] = []
        """Of the server that stays up."""
        self.engine: EngineProcess

    @contextlib.asynccontextmanager
    async def opened(self, *, seed: int) -> AsyncIterator[Testbed]:
        """Start the server and the engine, and warm both up."""
        most = max(*self.sizes.client_counts, 16)
        async with self.server(folder="blocks", client_count=most) as clients:
            self.clients = clients
            self.model = await clients[0].model()
            texts = short_prompts(_TEXT_COUNT, seed=seed)
            ordinary = [i for text in texts for i in (await clients[0].tokenize(text))[1:]]
            self.prompts = FreshPrompts(ordinary, seed=seed)
            engine = EngineProcess(
                model_path=self._model_path,
                dtype=self.model.dtype,
                log_file=self._log_file,
                sizes=ENGINE_SIZES,
                answer_timeout_s=REPLY_TIMEOUT_S,
            )
            with engine:
                self.engine = engine
                for use in (NO_CACHE, READ_WRITE):
                    await self.warm_up(clients, use=use)
                await self.call(self.prompts.take_each(_WARM_UP_PROMPTS), _WARM_UP_OUTPUT_COUNT)
                yield self

    @contextlib.asynccontextmanager
    async def server(
        self,
        *,
        folder: str,
        client_count: int,
        flags: Sequence[str] = (),
        command: Sequence[str] = (),
    ) -> AsyncIterator[list[Client]]:
        """Give the clients of a server that runs as long as the block; `folder` is its cache's."""
        process = ServerProcess(
            model=str(self._model_path),
            cache_directory=self._scratch / folder,
            log_file=self._log_file,
            flags=(*self.flags, *flags),
            command=command,
        )
        with process:
            clients = [Client(process.address) for _ in range(client_count)]
            try:
                async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                    await asyncio.gather(*(client.ready() for client in clients))
                yield clients
            finally:
                await asyncio.gather(*(client.close() for client in clients))

    async def warm_up(
        self, clients: Sequence[Client], *, use: cache_policy_pb2.CachePolicy = NO_CACHE
    ) -> None:
        """Let a server compute a few prompts that nobody measures."""
        prompts = self.prompts.take_each(_WARM_UP_PROMPTS[-len(clients) :])
        await self.ask(clients, prompts, _WARM_UP_OUTPUT_COUNT, use=use)

    async def ask(
        self,
        clients: Sequence[Client],
        prompts: Sequence[Sequence[int]],
        max_output_tokens: int,
        *,
        use: cache_policy_pb2.CachePolicy = NO_CACHE,
    ) -> list[Reply]:
        """Send all prompts at the same moment, each from its own client; return when the server rests."""
        requests = [token_request(p, max_output_tokens=max_output_tokens, cache=use) for p in prompts]
        async with asyncio.timeout(REPLY_TIMEOUT_S):
            replies = await stream_together(clients[: len(requests)], requests)
        await self._rest(clients[0])
        return replies

    async def call(self, prompts: Sequence[Sequence[int]], max_output_tokens: int) -> list[Reply]:
        """Give all prompts to the engine in process."""
        return await asyncio.to_thread(self.engine.generate, prompts, max_output_tokens=max_output_tokens)

    async def ttft_s(
        self, client: Client, prompt: Sequence[int], *, use: cache_policy_pb2.CachePolicy = NO_CACHE
    ) -> float:
        """Return the seconds to the first token of one prompt by itself."""
        (reply,) = await self.ask([client], [prompt], 1, use=use)
        return reply.ttft_s

    def drop(self, folder: str) -> None:
        """Delete the cache of a server that was stopped."""
        shutil.rmtree(self._scratch / folder)

    async def _rest(self, client: Client) -> None:
        """Wait until nothing is on its way to SSD any more: that would take from the next side's cores."""
        deadline = time.monotonic() + _REST_TIMEOUT_S
        while (await client.stats()).cache.spill.queue_count and time.monotonic() < deadline:
            await asyncio.sleep(_REST_POLL_S)
