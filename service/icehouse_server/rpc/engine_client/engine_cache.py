"""Cache commands from the event loop: single ones, and long ones that run in slices.

A slice is bounded and sent when the one before it is done. Requests decode between two slices, and a caller
that cancels or times out stops the rest.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

from icehouse_server.domain.cache_commands import (
    CacheCommand,
    EvictBlocks,
    EvictReport,
    KnownBlocks,
    ListKnown,
    ListStored,
    StoredBlocks,
    Verify,
    VerifyReport,
)
from icehouse_server.errors import IcehouseError
from icehouse_server.rpc.engine_client.engine_ports import EnginePort
from icehouse_server.rpc.engine_client.router import Router

Answer = TypeVar("Answer")

_VERIFY_SLICE_COUNT = 64
"""Blocks read per slice."""
_EVICT_SLICE_COUNT = 256
"""Blocks removed per slice."""


@dataclasses.dataclass(frozen=True, slots=True)
class CommandProgress(Generic[Answer]):
    """The progress of a long command."""

    report: Answer
    """What is done so far."""
    processed_block_count: int
    block_count: int


class EngineCache:
    """Asks the engine's cache. Owned by the event loop."""

    def __init__(self, *, engine: EnginePort, router: Router) -> None:
        self._engine = engine
        self._router = router

    async def ask(self, command: CacheCommand, answer_type: type[Answer]) -> Answer:
        """Return the answer to a command; raises the `IcehouseError` that is the answer or that ended the
        engine."""
        self._router.require_model()
        answer = await self._router.ask(functools.partial(self._engine.submit_command, command))
        if isinstance(answer, IcehouseError):
            raise answer
        assert isinstance(answer, answer_type), f"{command} was answered by {answer}"
        return answer

    async def evict(self, target: ListKnown) -> AsyncIterator[CommandProgress[EvictReport]]:
        """Remove the blocks that `target` names; yields before the first slice and after each."""
        known = (await self.ask(target, KnownBlocks)).block_hashes
        removed = EvictReport()
        yield CommandProgress(removed, 0, len(known))
        # Also one slice if nothing is known: it waits for earlier removals to finish.
        for start in range(0, max(1, len(known)), _EVICT_SLICE_COUNT):
            part = known[start : start + _EVICT_SLICE_COUNT]
            removed = removed.joined(await self.ask(EvictBlocks(part), EvictReport))
            yield CommandProgress(removed, start + len(part), len(known))

    async def verify(self, target: ListStored) -> AsyncIterator[CommandProgress[VerifyReport]]:
        """Read the blocks that `target` names; yields before the first slice and after each."""
        stored = (await self.ask(target, StoredBlocks)).block_hashes
        found = VerifyReport(verified_block_count=0, verified_bytes=0, damaged_hashes=(), duration_s=0.0)
        yield CommandProgress(found, 0, len(stored))
        for start in range(0, len(stored), _VERIFY_SLICE_COUNT):
            part = stored[start : start + _VERIFY_SLICE_COUNT]
            found = found.joined(await self.ask(Verify(part), VerifyReport))
            yield CommandProgress(found, start + len(part), len(stored))
