"""Silence of a group's ranks, counted in this rank's own beats.

Not measured by the clock: a process that was itself stopped, as when MLX joins a ring, has heard nothing
either, and what came meanwhile is still to be read.
"""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

Rank = TypeVar("Rank")

BEAT_S = 0.5
"""How often each rank sends a heartbeat."""
SILENCE_S = 3.0
"""A rank that is silent for longer is lost."""


class Silence(Generic[Rank]):
    """Which ranks have been silent, and for how long. Any thread."""

    def __init__(self, limit_s: float = SILENCE_S) -> None:
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._missed: dict[Rank, int] = {}
        """Beats since the rank was last heard."""

    def hear(self, rank: Rank) -> None:
        """Note that a rank was heard; it must be heard again soon."""
        with self._lock:
            self._missed[rank] = 0

    def excuse(self, rank: Rank) -> None:
        """Let a rank be silent until it is heard again."""
        with self._lock:
            self._missed.pop(rank, None)

    def beat(self) -> list[Rank]:
        """Count a beat; return the ranks that have been silent for too long."""
        with self._lock:
            for rank in self._missed:
                self._missed[rank] += 1
            return [rank for rank, missed in self._missed.items() if missed * BEAT_S > self._limit_s]
