"""Silence of a group's ranks, counted in beats of one's own.

Not by the clock: a process that stood still itself, as MLX makes it do while it joins a ring, has heard
nothing either, and what came meanwhile is yet to be read.
"""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

Rank = TypeVar("Rank")

BEAT_S = 0.5
"""How often each rank says that it lives."""
SILENCE_S = 3.0
"""One that says nothing for so long is lost."""


class Silence(Generic[Rank]):
    """Who has said nothing for how long. Any thread."""

    def __init__(self, limit_s: float = SILENCE_S) -> None:
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._missed: dict[Rank, int] = {}
        """Beats without a word."""

    def hear(self, rank: Rank) -> None:
        """Note that one speaks, who is to speak again soon."""
        with self._lock:
            self._missed[rank] = 0

    def excuse(self, rank: Rank) -> None:
        """Let one be silent, until it is heard again."""
        with self._lock:
            self._missed.pop(rank, None)

    def beat(self) -> list[Rank]:
        """Count a beat; return those that have been silent for too long."""
        with self._lock:
            for rank in self._missed:
                self._missed[rank] += 1
            return [rank for rank, missed in self._missed.items() if missed * BEAT_S > self._limit_s]
