"""Outbox: events of one request between the engine and its reader. Owned by the event loop.

It has two bounds. Above `event_limit` waiting events, deltas are merged, so that little more than the
output's text waits. Above `byte_limit` the reader counts as stalled: waiting events are dropped, and the
request ends with `READER_STALLED`.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
from collections.abc import Callable

from icehouse_server.domain.events import Delta, Event, Failed, Finished, PrefillProgress
from icehouse_server.errors import Overloaded, Reason

TOKEN_ID_BYTES = 8
"""Counted size of a waiting token id."""
LOGPROB_BYTES = 16
"""Counted size of a waiting log probability."""
PIECE_COUNT = 512
"""Tokens whose log probabilities go into one message when deltas are merged: more would occupy the event loop
for longer than a decode step."""


class Outbox:
    """A queue with one writer and one reader, both on the event loop."""

    def __init__(
        self,
        *,
        event_limit: int,
        byte_limit: int,
        on_stall: Callable[[], None],
        filled: asyncio.Event | None = None,
    ) -> None:
        self._event_limit = event_limit
        self._byte_limit = byte_limit
        self._on_stall = on_stall
        self._waiting: collections.deque[Event | _MergedDelta] = collections.deque()
        self.waiting_bytes = 0
        self._filled = filled or asyncio.Event()
        self._closed_by_writer = False
        self.ended = False
        """Whether the reader has taken the last event."""

    @property
    def waiting_count(self) -> int:
        return len(self._waiting)

    def put(self, event: Event) -> None:
        """Add an event. Events after the last one are ignored."""
        if self._closed_by_writer:
            return
        self._closed_by_writer = isinstance(event, (Finished, Failed))
        self._append(event)
        self.waiting_bytes += _size_bytes(event)
        if self.waiting_bytes > self._byte_limit and not self._closed_by_writer:
            self._stall(f"{self.waiting_bytes} bytes of output wait unread, limit {self._byte_limit}")
        self._filled.set()

    async def take(self) -> Event:
        """Wait for the oldest event and return it. After `Finished` or `Failed` there is none."""
        assert not self.ended, "the last event was taken already"
        while not self._waiting:
            self._filled.clear()
            await self._filled.wait()
        waiting = self._waiting.popleft()
        event = waiting.whole() if isinstance(waiting, _MergedDelta) else waiting
        self.waiting_bytes -= _size_bytes(event)
        self.ended = isinstance(event, (Finished, Failed))
        return event

    def _stall(self, what: str) -> None:
        """Drop what waits and end with READER_STALLED. `what` says which limit was exceeded."""
        self._closed_by_writer = True
        self._waiting.clear()
        self.waiting_bytes = 0
        error = Overloaded(
            Reason.READER_STALLED,
            f"the reader is too slow: {what}; read the stream faster or ask for less",
            metadata={"byte_limit": self._byte_limit},
        )
        self._waiting.append(Failed(error))
        self._filled.set()
        self._on_stall()

    def _append(self, event: Event) -> None:
        newest = self._waiting[-1] if self._waiting else None
        is_full = len(self._waiting) >= self._event_limit
        match newest, event:
            case PrefillProgress(), PrefillProgress() if _fit_one_piece(newest, event):
                self._waiting[-1] = dataclasses.replace(event, logprobs=newest.logprobs + event.logprobs)
            case ((Delta() | _MergedDelta()), Delta()) if is_full and _fit_one_piece(newest, event):
                if isinstance(newest, Delta):
                    self._waiting[-1] = newest = _MergedDelta(newest)
                newest.add(event)
            case _:
                self._waiting.append(event)


class _MergedDelta:
    """Deltas that are joined when the reader takes them: joining each time would copy a long output once for
    each of its tokens."""

    def __init__(self, first: Delta) -> None:
        self._texts = [first.text]
        self._token_ids = list(first.token_ids)
        self.logprobs = list(first.logprobs)

    def add(self, delta: Delta) -> None:
        self._texts.append(delta.text)
        self._token_ids += delta.token_ids
        self.logprobs += delta.logprobs

    def whole(self) -> Delta:
        return Delta("".join(self._texts), tuple(self._token_ids), tuple(self.logprobs))


def _fit_one_piece(newest: PrefillProgress | Delta | _MergedDelta, event: PrefillProgress | Delta) -> bool:
    return not event.logprobs or len(newest.logprobs) + len(event.logprobs) <= PIECE_COUNT


def _size_bytes(event: Event) -> int:
    size_bytes = 0
    if isinstance(event, Delta):
        size_bytes += len(event.text.encode("utf-8")) + TOKEN_ID_BYTES * len(event.token_ids)
    if isinstance(event, Delta | PrefillProgress):
        size_bytes += LOGPROB_BYTES * sum(1 + len(entry.top) + len(entry.asked) for entry in event.logprobs)
    return size_bytes


class Outboxes:
    """The events of several requests, in turn; each request's events stay in order.

    The byte limit is shared evenly. `on_stall` gets the index of the request that exceeded its share.
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
        return all(outbox.ended for outbox in self.all)

    async def take(self) -> tuple[int, Event]:
        """Return the index of the next request that has an event, and its oldest event."""
        assert not self.ended, "all last events were taken already"
        while True:
            self._filled.clear()
            for step in range(len(self.all)):
                index = (self._turn + step) % len(self.all)
                if self.all[index].waiting_count:
                    self._turn = index + 1
                    return index, await self.all[index].take()
            await self._filled.wait()
