"""Waits for the cold tier: who is told what became of a ticket, and how long they wait (inference thread).

A disk can hang: a read that does not return, a directory that does not open. Whoever waits for it gives up
after a multiple of what computing the prompt would take, and nothing more is read until the disk has come
back from what it was asked. Slow is not hung: a load may take long as long as it comes on.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from icehouse_server.clock import Clock
from icehouse_server.engine.prefix_cache.planner import Rates
from icehouse_server.storage.api import STALL_LIMIT_S, ColdTier, Failure, Ticket, Trouble

_log = logging.getLogger("icehouse.engine")

_Result = TypeVar("_Result")

_PREFILL_FACTOR = 2.0
_LEAST_S = 1.0
_MOST_S = 5.0
"""A wait without progress is given up after twice the prompt's predicted prefill, within these bounds."""
_SLOW_S = 10.0
"""A wait that makes progress, after the predicted prefill and so many seconds more."""
_LOOK_S = 0.1
"""How often it is looked whether a wait has lasted too long."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Wait:
    """Somebody who waits since a reading of `Clock.monotonic`."""

    then: Callable[[Any], object]
    since: float
    token_count: int | None
    limit_s: float | None


class Waits:
    """All that was asked of the cold tier, and whom to tell. Each is told once, in the order they asked."""

    def __init__(self, storage: ColdTier | None, rates: Rates, clock: Clock) -> None:
        self.storage = storage
        """The tier; None without one, and when it is lost."""
        self.inventory: Ticket[Any] = Ticket()
        """Of what the tier holds when it begins: nobody asks for it, and some wait for it."""
        self._rates = rates
        self._clock = clock
        self._waiting: dict[Ticket[Any], list[_Wait]] = {}
        self._look_time = 0.0
        self._told_detail = ""

    def add(
        self,
        ticket: Ticket[_Result],
        then: Callable[[_Result | Failure], object],
        *,
        token_count: int | None = None,
        limit_s: float | None = None,
    ) -> None:
        """Call `then` with a ticket's outcome. It is a `Failure` for `Trouble.TIMED_OUT` after `limit_s`, or
        when what is read does not come on and computing `token_count` tokens would be faster (0: what nobody
        would compute); with neither the wait has no end of its own."""
        wait = _Wait(then, self._clock.monotonic(), token_count, limit_s)
        self._waiting.setdefault(ticket, []).append(wait)

    def settle(self, ticket: Ticket[Any]) -> None:
        """A ticket has come: tell whoever still waits for it."""
        for wait in self._waiting.pop(ticket, ()):
            wait.then(ticket.outcome)

    def settle_inventory(self) -> None:
        """It is known what the tier holds."""
        for wait in self._waiting.pop(self.inventory, ()):
            wait.then(None)

    def lose_storage(self) -> None:
        """The tier is gone for good: it holds nothing, and nothing that was asked of it comes."""
        self.storage = None
        for ticket in [each for each in self._waiting if each is not self.inventory]:
            for wait in self._waiting.pop(ticket, ()):
                wait.then(Failure(Trouble.LOST))
        self.settle_inventory()

    def look(self) -> None:
        """Tell those who have waited too long, and log that the disk hangs or that it answers again."""
        now = self._clock.monotonic()
        if self.storage is None or now < self._look_time:
            return
        self._look_time = now + _LOOK_S
        for ticket in list(self._waiting):
            waits = self._waiting.get(ticket, ())
            if expired := [wait for wait in waits if self._has_expired(ticket, wait, now)]:
                self._leave(ticket, expired)
        self._note_hang()

    @property
    def is_stalled(self) -> bool:
        """Whether the storage thread hangs, so that nothing is written, removed or counted."""
        return self.storage is not None and self.storage.stall_s >= STALL_LIMIT_S

    def hang_detail(self) -> str:
        """Say which part of the tier does not answer, and what follows; empty where all is well."""
        if self.storage is None:
            return ""
        parts = []
        if self.storage.hung_read_count:
            parts.append(f"{self.storage.hung_read_count} reads hang; prompts are computed until they return")
        if self.is_stalled:
            parts.append(
                f"the storage thread hangs for {self.storage.stall_s:.0f} s; nothing is written meanwhile"
            )
        return f"The disk does not answer: {'; '.join(parts)}" if parts else ""

    def _has_expired(self, ticket: Ticket[Any], wait: _Wait, now: float) -> bool:
        waited_s = now - wait.since
        if wait.token_count is None:
            return wait.limit_s is not None and waited_s >= wait.limit_s
        prefill_s = self._rates.prefill_s(wait.token_count)
        limit_s = min(max(_PREFILL_FACTOR * prefill_s, _LEAST_S), _MOST_S) if prefill_s else _MOST_S
        can_see = self.storage is not None and ticket is not self.inventory
        silent_s = self.storage.silence_s(ticket) if self.storage is not None and can_see else waited_s
        return min(waited_s, silent_s) >= limit_s or waited_s >= _SLOW_S + prefill_s

    def _leave(self, ticket: Ticket[Any], expired: list[_Wait]) -> None:
        left = [wait for wait in self._waiting[ticket] if wait not in expired]
        if left:
            self._waiting[ticket] = left
        else:
            del self._waiting[ticket]
            if self.storage is not None:
                self.storage.abandon(ticket)
            self._note_reads()
        for wait in expired:
            wait.then(Failure(Trouble.TIMED_OUT))

    def _note_reads(self) -> None:
        """Nothing more is read until the disk has come back from what was abandoned."""
        self._rates.reads_hang = self.storage is not None and self.storage.hung_read_count > 0

    def _note_hang(self) -> None:
        self._note_reads()
        detail = self.hang_detail()
        if bool(detail) is not bool(self._told_detail):
            if detail:
                _log.error("ssd_hangs", extra={"detail": detail})
            else:
                _log.warning("ssd_answers_again")
        self._told_detail = detail
