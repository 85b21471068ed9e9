"""The outboxes of requests that one reader waits for. Owned by the event loop."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable

from service.domain.events import Event
from service.rpc.outbox import Outbox


class Outboxes:
    """Hands out the events of several requests, each one's in order, none before its turn comes round.

    The byte limit is for all of them together: it is shared out evenly. `on_stall` is told whose share was
    passed.
    """

    def __init__(
        self, *, count: int, event_limit: int, byte_limit: int, on_stall: Callable[[int], None]
    ) -> None:
        assert count >= 1, count
        self._filled = asyncio.Event()
        self.all = tuple(
            Outbox(
                event_limit=event_limit,
                byte_limit=max(1, byte_limit // count),
                on_stall=functools.partial(on_stall, index),
                filled=self._filled,
            )
            for index in range(count)
        )
        self._turn = 0

    @property
    def ended(self) -> bool:
        """Whether the reader has taken the last event of each."""
        return all(outbox.ended for outbox in self.all)

    async def take(self) -> tuple[int, Event]:
        """Return the oldest event of the next request that has one, and which request that is."""
        assert not self.ended, "all last events were taken already"
        while True:
            self._filled.clear()
            for step in range(len(self.all)):
                index = (self._turn + step) % len(self.all)
                if self.all[index].waiting_count:
                    self._turn = index + 1
                    return index, await self.all[index].take()
            await self._filled.wait()
