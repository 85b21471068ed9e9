"""Mailbox: the only way into an engine, and the messages that may come through it.

Any thread puts messages in; only the inference thread takes them out. New work is bounded by count. Control
messages (cancel, a query, a storage outcome) always fit, because accepted work bounds how many there can be.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from icehouse_server.clock import Clock
from icehouse_server.domain.cache_commands import CacheAnswer, CacheCommand
from icehouse_server.domain.cache_stats import CacheStats
from icehouse_server.domain.ids import RequestId
from icehouse_server.domain.request import GenerationRequest
from icehouse_server.domain.stats import EngineStats
from icehouse_server.errors import IcehouseError
from icehouse_server.storage.api import Outcome

Item = TypeVar("Item")

_FIRST_GAP_S = 0.002
_BURST_GAP_S = 0.003
_BURST_S = 0.02
"""How long an idle engine waits after a request for a second one, after that for each further one, and for a
whole burst. The event loop takes about 0.5 ms per call: a pass begun at once would hold one prompt alone, and
the others would wait for it. With waits of 1 ms and 10 ms in all, five of 64 bursts of 16 calls were split,
and their last first token came half again as late (2-core x86)."""


class Mailbox(Generic[Item]):
    """A queue with one reader. At most `limit` new-work messages wait in it. Mailboxes with the same reader
    share `changed`, which is notified of each message."""

    def __init__(self, *, limit: int, changed: threading.Condition | None = None) -> None:
        self.limit = limit
        self.changed = changed or threading.Condition()
        self._messages: collections.deque[tuple[bool, Item]] = collections.deque()
        self._work_count = 0
        self._closed = False

    def offer(self, message: Item, *, work_count: int = 1) -> bool:
        """Put new work in, which counts as `work_count`. Return False and store nothing if it is closed or
        more than `limit` would wait."""
        with self.changed:
            if self._closed or self._work_count + work_count > self.limit:
                return False
            self._work_count += work_count
            self._messages.append((True, message))
            self.changed.notify()
            return True

    def post(self, message: Item) -> bool:
        """Put a control message in; return False if the mailbox is closed."""
        with self.changed:
            if self._closed:
                return False
            self._messages.append((False, message))
            self.changed.notify()
            return True

    def take_all(self, *, timeout_s: float) -> list[Item]:
        """Return the waiting messages, oldest first; if there are none, wait up to `timeout_s` for one."""
        with self.changed:
            if not self._messages and timeout_s > 0:
                self.changed.wait(timeout_s)
            return self._drain()

    def close(self) -> list[Item]:
        """Close the mailbox for good and return what was left in it."""
        with self.changed:
            self._closed = True
            return self._drain()

    def __len__(self) -> int:
        return len(self._messages)

    def _drain(self) -> list[Item]:
        messages = [message for _, message in self._messages]
        self._messages.clear()
        self._work_count = 0
        return messages


class BurstWait:
    """How an idle engine waits for more requests after the first, so that one pass takes them all.

    After more than `alone_limit` requests in a row that ran alone it stops waiting: no others are expected.
    """

    def __init__(self, alone_limit: int | None) -> None:
        self._alone_limit = math.inf if alone_limit is None else alone_limit
        self._alone_count = 0
        """Requests in a row that no other request followed."""

    def rest(self, mailbox: Mailbox[Item], clock: Clock, is_idle: bool, work_count: int) -> list[Item]:
        """Return what arrives right after `work_count` work messages; nothing if the engine was not idle."""
        self._alone_count = self._alone_count + 1 if is_idle and work_count == 1 else 0
        if not is_idle or self._alone_count > self._alone_limit:
            return []
        arrived: list[Item] = []
        end_time = clock.monotonic() + _BURST_S
        gap_s = _FIRST_GAP_S
        while (left_s := end_time - clock.monotonic()) > 0:
            more = mailbox.take_all(timeout_s=min(gap_s, left_s))
            if not more:
                break
            arrived += more
            gap_s = _BURST_GAP_S
        if arrived:
            self._alone_count = 0
        return arrived


@dataclasses.dataclass(frozen=True, slots=True)
class Submit:
    """New work: a request, and others for the same prompt; all are accepted, or none."""

    request: GenerationRequest
    siblings: tuple[GenerationRequest, ...] = ()

    @property
    def requests(self) -> tuple[GenerationRequest, ...]:
        return (self.request, *self.siblings)


@dataclasses.dataclass(frozen=True, slots=True)
class Cancel:
    """End a request that nobody waits for any more; its caller gets `error`."""

    request_id: RequestId
    error: IcehouseError


@dataclasses.dataclass(frozen=True, slots=True)
class QueryStats:
    """Call `reply` with a snapshot, on the inference thread; it must not block."""

    reply: Callable[[EngineStats, CacheStats | None], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Command:
    """Run a command on the prefix cache and call `reply` once; it must not block."""

    command: CacheCommand
    reply: Callable[[CacheAnswer | IcehouseError], None]


@dataclasses.dataclass(frozen=True, slots=True)
class DrainEngine:
    """Refuse new work, let running requests go on until `deadline_time` (`Clock.monotonic`), then stop."""

    deadline_time: float


Message = Submit | Cancel | QueryStats | Command | DrainEngine | Outcome
