"""Preemption: the RAM tier gives way first, then the youngest sequence is parked.

Inference thread only. Consulted before a sequence is let in and before every forward pass.
"""

from __future__ import annotations

from collections.abc import Callable

from icehouse_server.engine.core.ports import Runner
from icehouse_server.engine.core.sequence import Phase, Sequence
from icehouse_server.engine.prefix_cache.cache import PrefixCache
from icehouse_server.engine.scheduling.memory_guard import MemoryGuard
from icehouse_server.engine.scheduling.scheduler import Join, PrefillChunk, Scheduler, Work
from icehouse_server.errors import Overloaded


class Preemption:
    """Watches the device's memory for the loop."""

    def __init__(
        self,
        *,
        guard: MemoryGuard,
        runner: Runner,
        scheduler: Scheduler,
        cache: PrefixCache,
        park: Callable[[Sequence], None],
    ) -> None:
        self.guard = guard
        self._runner = runner
        self._scheduler = scheduler
        self._cache = cache
        self._park = park

    def may_start(self, sequence: Sequence) -> bool:
        """Whether there is memory for a waiting sequence, after the RAM tier gave way."""
        running = self._scheduler.running
        needed = self.guard.start_bytes(sequence) + self.guard.growth_bytes(running)
        needed += self.guard.lane_growth_bytes([*running, sequence], decoding=self._scheduler.decoding)
        return self._excess_after_yield(needed) == 0

    def hopeless(self, sequence: Sequence) -> Overloaded | None:
        """Return the refusal of a sequence that does not fit although nothing runs that could end."""
        if self._scheduler.running:
            return None
        return self.guard.short(
            needed_bytes=self.guard.start_bytes(sequence), active_bytes=self._runner.memory().active_bytes
        )

    def relieve(self, work: Work) -> Overloaded | None:
        """Make room for a unit of work, parking sequences if need be.

        Returns the status of the one request that must go because even so it does not fit.
        """
        if not self.guard.limit_bytes:
            return None
        if isinstance(work, Join):
            self._make_a_seat(work.sequence)
            return None
        if not isinstance(work, PrefillChunk):
            return None
        chunk = work.stop - work.start
        needed = self.guard.chunk_bytes(chunk, work.stop, is_measured=work.sequence.measures_prompt)
        while self._excess_after_yield(needed):
            victim = self._youngest(work.sequence)
            if victim is None:
                return self.guard.short(needed_bytes=needed, active_bytes=self._runner.memory().active_bytes)
            self._park(victim)
        return None

    def _make_a_seat(self, joining: Sequence) -> None:
        """Make room for the copy of the lane, until nobody else decodes: then there is nothing to copy."""
        while decoding := self._scheduler.decoding:
            if not self._excess_after_yield(self.guard.join_bytes(joining, decoding=decoding)):
                return
            victim = self._youngest(joining)
            assert victim is not None, "those who decode can be parked"
            self._park(victim)

    def watch_growth(self) -> None:
        """Park the youngest while decoding alone has passed the limit and somebody is left to go on."""
        if not self.guard.limit_bytes:
            return
        while self._scheduler.decoding_count > 1 and self._excess_after_yield(0):
            victim = self._youngest(None)
            if victim is None:
                return
            self._park(victim)

    def _excess_after_yield(self, needed_bytes: int) -> int:
        active_bytes = self._runner.memory().active_bytes
        excess = self.guard.excess_bytes(active_bytes=active_bytes, needed_bytes=needed_bytes)
        if not excess:
            return 0
        # What is let go here is free for new arrays whether or not the allocator returned it yet.
        return max(0, excess - self._cache.yield_ram(excess))

    def _youngest(self, spared: Sequence | None) -> Sequence | None:
        """Return the last comer that holds caches and is not `spared`."""
        holding = [
            s
            for s in self._scheduler.running
            if s is not spared and s.phase in (Phase.PREFILLING, Phase.DECODING)
        ]
        return holding[-1] if holding else None
