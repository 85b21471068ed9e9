"""Storage waits: who waits for which ticket of the cold tier and for how long (inference thread).

A disk can hang: a read does not return, a directory does not open. A wait is given up after a multiple of
the time that computing the prompt would take, and nothing more is read until the abandoned reads have
returned. Slow is not hung: a load may take longer if it makes progress.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, NamedTuple, TypeVar

from icehouse_server.averages import MovingAverage
from icehouse_server.clock import Clock
from icehouse_server.storage.api import (
    STALL_LIMIT_S,
    ChainFound,
    ColdTier,
    LearnedRates,
    StorageFailure,
    StorageTrouble,
    Ticket,
    hang_detail,
)

_log = logging.getLogger("icehouse.engine")

_Result = TypeVar("_Result")

_PREFILL_FACTOR = 2.0
_LEAST_S = 1.0
_MOST_S = 5.0
"""A wait without progress is given up after twice the prompt's predicted prefill, within these bounds."""
_SLOW_S = 10.0
"""A wait that makes progress is given up this many seconds after the predicted prefill."""
_CHECK_INTERVAL_S = 0.1
_ADOPT_WEIGHT = 0.3
_LEAST_LOADS = 3
"""Rates of fewer loads are not trusted: the first load after a start may meet cold files and fresh pages."""
_UNTRIED = 0.99
"""Factor on the predicted restore time for each prompt that was computed instead, so that restores are tried
again after a slow phase: after 10 prompts if they took a tenth longer than computing, after 230 if ten times
as long."""
_UNTRIED_RECALLED = 0.9
"""The same if only an earlier run, whose disk may have hung, found restores slow: after 1 and 22 prompts."""


@dataclasses.dataclass(slots=True)
class Rates:
    """Moving averages of measured rates; they begin with those of an earlier run on this machine, or 0."""

    measured_on: str = ""
    """As in `LearnedRates`."""
    read_bytes_per_s: float = 0.0
    adopt_tokens_per_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    load_count: int = 0
    """Loads of this run."""
    reads_hang: bool = False
    """Whether an abandoned read has not returned from the disk: no more reads are planned until it has."""
    untried_count: int = 0
    """Prompts since the last load that were computed because that seemed faster."""
    unfetched_count: int = 0
    """The same for blocks that other servers have stored, since the last fetch."""
    _recalled_bytes_per_s: float = dataclasses.field(default=0.0, init=False)
    """The read rate of an earlier run."""
    _adopt: MovingAverage = dataclasses.field(
        default_factory=lambda: MovingAverage(weight=_ADOPT_WEIGHT), init=False, repr=False, compare=False
    )
    _prefill: MovingAverage = dataclasses.field(
        default_factory=MovingAverage, init=False, repr=False, compare=False
    )

    def recall(self, learned: LearnedRates) -> None:
        """Begin with an earlier run's rates if they were measured here and this run has not read yet."""
        if learned.measured_on != self.measured_on or self.read_bytes_per_s:
            return
        self._recalled_bytes_per_s = self.read_bytes_per_s = learned.read_bytes_per_s
        self._adopt.value = self.adopt_tokens_per_s = learned.adopt_tokens_per_s
        self._prefill.value = self.prefill_tokens_per_s = learned.prefill_tokens_per_s
        self.untried_count = learned.untried_count

    @property
    def learned(self) -> LearnedRates | None:
        """The rates that the next run may begin with; None while too little is known."""
        made = LearnedRates(
            self.measured_on,
            self.read_bytes_per_s,
            self.adopt_tokens_per_s,
            self.prefill_tokens_per_s,
            self.untried_count if self._is_recalled else 0,
        )
        return made if self._is_known and made.is_plausible else None

    @property
    def _is_recalled(self) -> bool:
        """Whether this run has loaded too little to contradict an earlier one."""
        return self._recalled_bytes_per_s > 0.0 and self.load_count < _LEAST_LOADS

    @property
    def _is_known(self) -> bool:
        return self._is_recalled or self.load_count >= _LEAST_LOADS

    def note_read(self, bytes_per_s: float) -> None:
        """Record the average speed of loads after another load."""
        self.load_count += 1
        self.untried_count = 0
        # A load may be slow by accident, but never fast by accident.
        recalled = self._recalled_bytes_per_s if self._is_recalled else 0.0
        self.read_bytes_per_s = max(bytes_per_s, recalled)

    def note_adopt(self, tokens_per_s: float) -> None:
        """Record how fast a restore rebuilt its caches."""
        self.adopt_tokens_per_s = self._adopt.add(tokens_per_s)

    def note_prefill(self, tokens_per_s: float) -> None:
        """Record how fast a pass computed prompts."""
        self.prefill_tokens_per_s = self._prefill.add(tokens_per_s)

    def restore_s(self, *, ssd_bytes: int, token_count: int) -> float:
        """Predict how long a restore takes, in seconds."""
        read_s = ssd_bytes / self.read_bytes_per_s if self.read_bytes_per_s else 0.0
        adopt_s = token_count / self.adopt_tokens_per_s if self.adopt_tokens_per_s else 0.0
        factor = _UNTRIED_RECALLED if self._is_recalled else _UNTRIED
        return _believed_s(read_s + adopt_s, self.untried_count, factor=factor)

    def prefill_s(self, token_count: int) -> float:
        """Predict how long computing so many tokens takes, in seconds; 0 before anything was measured."""
        return token_count / self.prefill_tokens_per_s if self.prefill_tokens_per_s else 0.0

    def recompute_is_faster(self, *, ssd_bytes: int, token_count: int) -> bool:
        """Predict whether computing is faster than restoring; False while too little is known."""
        is_measured = self._is_known and self.read_bytes_per_s and self.prefill_tokens_per_s
        restore_s = self.restore_s(ssd_bytes=ssd_bytes, token_count=token_count)
        return bool(is_measured) and restore_s > self.prefill_s(token_count)

    def fetch_is_slower(self, found: ChainFound, *, token_count: int) -> bool:
        """Predict whether computing is faster than fetching and restoring the found blocks; False while too
        little was measured."""
        if not (found.fetch_bytes_per_s and self.prefill_tokens_per_s):
            return False
        fetch_s = _believed_s(found.size_bytes / found.fetch_bytes_per_s, self.unfetched_count)
        restore_s = self.restore_s(ssd_bytes=found.size_bytes, token_count=token_count)
        return fetch_s + restore_s > self.prefill_s(token_count)


def _believed_s(predicted_s: float, untried_count: int, *, factor: float = _UNTRIED) -> float:
    # A product, since `pow` differs between processors in the last bit.
    return predicted_s * math.prod(itertools.repeat(factor, untried_count))


class Awaited(NamedTuple):
    """A ticket to wait for, and the limits of the wait. The outcome is a `StorageFailure` for
    `Trouble.TIMED_OUT` after `limit_s`, or, with a `token_count`, when a read makes no progress for a
    multiple of the time that computing so many tokens would take (0: nobody would compute them). With neither
    there is no limit."""

    ticket: Ticket[Any]
    token_count: int | None = None
    limit_s: float | None = None


Steps = Generator[Awaited, Any, _Result]
"""Work that needs the cold tier: it yields each ticket that it waits for, and is sent the outcome."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Wait:
    """One wait; `began_time` is a reading of `Clock.monotonic`."""

    then: Callable[[Any], object]
    began_time: float
    token_count: int | None
    limit_s: float | None


class StorageWaits:
    """The open tickets of the cold tier and their waits; each wait is called back once, in order."""

    def __init__(self, storage: ColdTier | None, rates: Rates, clock: Clock) -> None:
        self.storage = storage
        """The tier; None without one, and once it is lost."""
        self.inventory: Ticket[Any] = Ticket()
        """A ticket for the tier's first inventory, which comes without an order."""
        self._rates = rates
        self._clock = clock
        self._waiting: dict[Ticket[Any], list[_Wait]] = {}
        self._check_time = 0.0
        self._logs_hang = False

    def add(
        self,
        ticket: Ticket[_Result],
        then: Callable[[_Result | StorageFailure], object],
        *,
        token_count: int | None = None,
        limit_s: float | None = None,
    ) -> None:
        """Call `then` with a ticket's outcome, within the limits that `Awaited` explains."""
        wait = _Wait(then, self._clock.monotonic(), token_count, limit_s)
        self._waiting.setdefault(ticket, []).append(wait)

    def follow(self, steps: Steps[_Result], then: Callable[[_Result], object] = lambda result: None) -> bool:
        """Run work that needs the tier and call `then` with its result; return whether it has to wait."""
        return self._go_on(steps, then, None)

    def _go_on(self, steps: Steps[_Result], then: Callable[[_Result], object], outcome: object) -> bool:
        try:
            awaited = steps.send(outcome)
        except StopIteration as end:
            then(end.value)
            return False
        go_on = partial(self._go_on, steps, then)
        self.add(awaited.ticket, go_on, token_count=awaited.token_count, limit_s=awaited.limit_s)
        return True

    def complete(self, ticket: Ticket[Any]) -> None:
        """Pass a ticket's outcome to those that still wait for it."""
        self._end(ticket, ticket.outcome)

    def complete_inventory(self) -> None:
        """Note that the content of the tier is known."""
        self._end(self.inventory, None)

    def give_up_inventory(self) -> None:
        """Note that the content of the tier will not be known: the engine ends."""
        self._end(self.inventory, StorageFailure(StorageTrouble.LOST))

    def lose_storage(self) -> None:
        """Note that the tier is lost for good: it contains nothing, and no ticket will be answered."""
        self.storage = None
        for ticket in [each for each in self._waiting if each is not self.inventory]:
            self._end(ticket, StorageFailure(StorageTrouble.LOST))
        self.complete_inventory()

    def expire(self) -> None:
        """Give up the waits that last too long, and log when the disk hangs and when it answers again."""
        now = self._clock.monotonic()
        if self.storage is None or now < self._check_time:
            return
        self._check_time = now + _CHECK_INTERVAL_S
        for ticket in list(self._waiting):
            waits = self._waiting.get(ticket, ())
            if expired := [wait for wait in waits if self._has_expired(ticket, wait, now)]:
                self._give_up(ticket, expired)
        self._note_reads()
        if detail := self.hang_detail():
            if not self._logs_hang:
                _log.error("ssd_hangs", extra={"detail": detail})
        elif self._logs_hang:
            _log.warning("ssd_answers_again")
        self._logs_hang = bool(detail)

    @property
    def is_stalled(self) -> bool:
        """Whether the storage thread hangs, so that it writes, removes and counts nothing."""
        return self.storage is not None and self.storage.stall_s >= STALL_LIMIT_S

    def hang_detail(self) -> str:
        """Return which part of the tier does not answer, and what follows from that; "" if all is well."""
        return "" if self.storage is None else hang_detail(self.storage)

    def _end(self, ticket: Ticket[Any], outcome: object) -> None:
        for wait in self._waiting.pop(ticket, ()):
            wait.then(outcome)

    def _has_expired(self, ticket: Ticket[Any], wait: _Wait, now: float) -> bool:
        waited_s = now - wait.began_time
        if wait.token_count is None:
            return wait.limit_s is not None and waited_s >= wait.limit_s
        prefill_s = self._rates.prefill_s(wait.token_count)
        limit_s = min(max(_PREFILL_FACTOR * prefill_s, _LEAST_S), _MOST_S) if prefill_s else _MOST_S
        silent_s = waited_s
        if self.storage is not None and ticket is not self.inventory:
            silent_s = self.storage.silence_s(ticket)
        return min(waited_s, silent_s) >= limit_s or waited_s >= _SLOW_S + prefill_s

    def _give_up(self, ticket: Ticket[Any], expired: list[_Wait]) -> None:
        left = [wait for wait in self._waiting[ticket] if wait not in expired]
        if left:
            self._waiting[ticket] = left
        else:
            del self._waiting[ticket]
            if self.storage is not None:
                self.storage.abandon(ticket)
            self._note_reads()
        for wait in expired:
            wait.then(StorageFailure(StorageTrouble.TIMED_OUT))

    def _note_reads(self) -> None:
        self._rates.reads_hang = self.storage is not None and self.storage.hung_read_count > 0
