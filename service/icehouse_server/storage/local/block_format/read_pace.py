"""Read pace: how much of the time readers take while sequences decode on the same cores.

A forward pass on the CPU waits for the slowest of its threads, so whatever else runs for 10 ms makes that
step 10 ms longer. Spread over several steps, a piece in each, the same reading is hardly felt; what is read
waits longer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from icehouse_server.clock import Clock

_PIECE_S = 0.003
"""A reader works about so long without a pause: more of them wake up more often than decode likes."""


class ReadTurns:
    """When readers may work, so that all of them together take a share of the time and one works at once.

    Any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next_time = 0.0

    def take(self, now: float, *, share: float) -> float:
        """Take the next turn, for a piece of work; return how many seconds it is away."""
        with self._lock:
            begin_time = max(now, self._next_time)
            self._next_time = begin_time + _PIECE_S / share
        return begin_time - now

    def settle(self, worked_s: float, *, share: float) -> None:
        """Note how long the piece of a turn was: those who come after wait for more, or less."""
        with self._lock:
            self._next_time += (worked_s - _PIECE_S) / share

    def clear(self) -> None:
        """Let the next one work at once: nobody leaves cores to others now."""
        with self._lock:
            self._next_time = 0.0


class ReadPace:
    """Has one reader wait for its turns while readers leave cores to others; a share of 1 is no waiting."""

    def __init__(
        self,
        clock: Clock,
        turns: ReadTurns,
        *,
        share: Callable[[], float],
        pause: Callable[[float], object],
        note_piece: Callable[[float], None] = lambda pause_s: None,
    ) -> None:
        """Readers that share the time have the same `turns`. `share` is asked each time, and `note_piece` is
        told before each piece how long the reader pauses for it."""
        self._clock = clock
        self._turns = turns
        self._share = share
        self._pause = pause
        self._note_piece = note_piece
        self._piece: tuple[float, float] | None = None
        """When the piece under way was begun, and with which share."""
        self.paused_s = 0.0
        """Altogether."""

    def keep(self) -> None:
        """Wait for a turn, unless a piece of work is under way and short yet."""
        share = self._share()
        assert 0.0 < share <= 1.0, share
        if share == 1.0:
            self._piece = None
            self._turns.clear()
            self._note_piece(0.0)
            return
        now = self._clock.monotonic()
        if self._piece is not None and now - self._piece[0] < _PIECE_S:
            self._note_piece(0.0)
            return
        self.end()
        wait_s = self._turns.take(now, share=share)
        self._note_piece(wait_s)
        if wait_s > 0.0:
            self._pause(wait_s)
        began_time = self._clock.monotonic()
        self._piece = (began_time, share)
        self.paused_s += began_time - now

    def end(self) -> None:
        """Account for the piece under way."""
        piece, self._piece = self._piece, None
        if piece is not None:
            self._turns.settle(self._clock.monotonic() - piece[0], share=piece[1])
