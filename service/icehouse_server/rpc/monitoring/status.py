"""Status of the server for its status page: what is known already, and the blocks that were used last."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence

from icehouse_server.clock import Clock
from icehouse_server.domain.cache_commands import CacheAnswer, ListRecent, RecentBlock, RecentBlocks
from icehouse_server.domain.stats import ServerStatus
from icehouse_server.errors import IcehouseError
from icehouse_server.rpc.calls.slow_requests import SlowRequests
from icehouse_server.rpc.engine_client.ports import EnginePort
from icehouse_server.rpc.engine_client.router import Router
from icehouse_server.rpc.monitoring.stats_poller import StatsPoller

BLOCK_LIMIT = 1024
"""Blocks that are asked for: a millisecond of the engine's (2-core x86)."""

_PATIENCE_S = 1.0


class StatusReader:
    """Owned by the event loop. Whoever calls bounds how often: a read is a command to the engine."""

    def __init__(
        self, *, engine: EnginePort, router: Router, poller: StatsPoller, slow: SlowRequests, clock: Clock
    ) -> None:
        self._engine = engine
        self._router = router
        self._poller = poller
        self._slow = slow
        self._clock = clock

    async def read(self, *, with_tokens: bool = False) -> ServerStatus:
        """Return the status; an engine that does not answer in time leaves the blocks out.

        `with_tokens` brings those of the blocks, as far as the engine has them at hand.
        """
        blocks = await self._recent_blocks(ListRecent(BLOCK_LIMIT, with_tokens))
        return ServerStatus(
            collect_time=self._clock.wall(),
            snapshot=self._poller.latest,
            slowest_requests=self._slow.slowest(tenant=None),
            recent_blocks=blocks,
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens that a status brought. Any thread: the model stays once it is there."""
        model = self._router.model
        assert model is not None, "tokens before a model"
        return model.tokenizer.decode(token_ids)

    async def _recent_blocks(self, command: ListRecent) -> tuple[RecentBlock, ...] | None:
        try:
            self._router.require_model()
            async with asyncio.timeout(_PATIENCE_S):
                answer = await self._router.ask(functools.partial(self._send, command))
        except (TimeoutError, IcehouseError):
            return None
        return answer.blocks if isinstance(answer, RecentBlocks) else None

    def _send(self, command: ListRecent, reply: Callable[[CacheAnswer | IcehouseError], None]) -> None:
        self._engine.submit_command(command, reply)
