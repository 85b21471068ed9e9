"""Inference thread: gives engines turns, one at a time, first to the one that has had the least time.

Engines come and leave at any time. The thread sleeps only when no engine has anything to do, on one condition
that all of them share. It ends when told to, once no engine is left.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator

from icehouse_server.clock import Clock
from icehouse_server.engine.core.device_clock import DeviceClock
from icehouse_server.engine.core.mailbox import Mailbox, Message

_WAIT_S = 0.5
"""How long the thread sleeps at most, so that its heartbeat stays fresh."""
_STUCK_FACTOR = 4.0
_FADING = 0.99
_LOADING_COST = 3.0
"""The time of an engine that loads its model counts this many times: it gets a third as much as an engine
with requests. With equal time, the gaps between their tokens would double."""

Turns = Iterator[float | None]
"""An engine's life, a turn at a time. Each turn yields for how many seconds nothing will be ready unless a
message comes, or None if it can go on at once."""


@dataclasses.dataclass(slots=True, eq=False)
class _Member:
    """An engine as the thread sees it. Times are `Clock.monotonic` readings."""

    turns: Turns
    mailbox: Mailbox[Message]
    charged_s: float
    """The time it was given, counted from where the others stood when it was last idle."""
    is_loading: Callable[[], bool] = lambda: False
    """Whether it is loading: then its time costs more and messages do not wake it."""
    ready_time: float | None = None
    """When to step it even without a message; None for at once."""

    def is_ready(self, now: float) -> bool:
        if self.ready_time is None or now >= self.ready_time:
            return True
        return len(self.mailbox) > 0 and not self.is_loading()


class InferenceThread:
    """Owns the thread. Public methods may be called from any thread; only this thread writes the attributes.

    Turns follow start-time fair queueing (Goyal, 1996): an engine that was idle goes next, but gets no credit
    for its idle time.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.changed = threading.Condition()
        """Shared by the mailboxes of all engines; the thread waits on it."""
        self.device_clock = DeviceClock()
        """Shared by all engines."""
        self._thread = threading.Thread(target=self._run, name="inference", daemon=True)
        self._members: list[_Member] = []
        self._is_ending = False
        self._served_s = 0.0
        """What the last chosen engine had been charged when its turn began."""
        self.is_contended = False
        """Whether more than one engine had something to do when the current turn began."""
        self.heartbeat_time = clock.monotonic()
        """`Clock.monotonic` of the last turn's start; if stale, the thread is stuck or dead."""
        self.step_allowance_s = 0.0
        """How long a turn may take before the thread looks stuck: a few times the longest recent one."""
        self.release: Callable[[], None] = lambda: None
        """Called at the thread's end; set by the engine that ended last."""

    def start(self) -> None:
        self._thread.start()

    @property
    def engine_count(self) -> int:
        """How many engines still have turns to come."""
        return len(self._members)

    def add(
        self, turns: Turns, mailbox: Mailbox[Message], *, is_loading: Callable[[], bool] = lambda: False
    ) -> None:
        """Give an engine turns until it has no more. Its mailbox must share `changed`.

        While `is_loading`, it gets a third as much time as others that have work, and no message wakes it.
        """
        assert mailbox.changed is self.changed, "nothing would wake the thread for this mailbox"
        with self.changed:
            self._members.append(_Member(turns, mailbox, charged_s=self._served_s, is_loading=is_loading))
            self.changed.notify()

    def end(self) -> None:
        """End the thread once no engine is left."""
        with self.changed:
            self._is_ending = True
            self.changed.notify()

    def join(self, *, timeout_s: float | None = None) -> bool:
        """Wait for the thread to end; return False if it still runs after `timeout_s`."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (member := self._next()) is not None:
            self._take_turn(member)
        self.release()

    def _next(self) -> _Member | None:
        """Wait until an engine is ready, and return whose turn it is; None at the end."""
        with self.changed:
            while self._members or not self._is_ending:
                self.heartbeat_time = now = self.clock.monotonic()
                ready = [member for member in self._members if member.is_ready(now)]
                if ready:
                    self.is_contended = len(ready) > 1
                    return min(ready, key=self._start_s)
                times = (member.ready_time for member in self._members if member.ready_time is not None)
                self.changed.wait(min(_WAIT_S, min(times, default=now + _WAIT_S) - now))
        return None

    def _start_s(self, member: _Member) -> float:
        return max(member.charged_s, self._served_s)

    def _take_turn(self, member: _Member) -> None:
        began, cost = self.heartbeat_time, _LOADING_COST if member.is_loading() else 1.0
        self._served_s = self._start_s(member)
        try:
            wait_s = next(member.turns)
        except StopIteration:
            with self.changed:
                self._members.remove(member)
            return
        now = self.clock.monotonic()
        member.ready_time = None if wait_s is None else now + wait_s
        member.charged_s = self._served_s + cost * (now - began)
        self._note_turn(now - began)

    def _note_turn(self, elapsed_s: float) -> None:
        # The longest turn fades, so that one slow chunk long ago does not hide a stuck turn for ever.
        self.step_allowance_s = max(_STUCK_FACTOR * elapsed_s, self.step_allowance_s * _FADING)
