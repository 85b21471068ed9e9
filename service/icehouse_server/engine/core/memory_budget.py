"""Memory budget: one limit for all engines of a process, and what each of them uses of it. Sizes in bytes.

Inference thread only.
"""

from __future__ import annotations

import math
from collections.abc import Callable


class MemoryBudget:
    """A `limit_bytes` of 0 means no limit."""

    def __init__(self, limit_bytes: int = 0) -> None:
        self.limit_bytes = limit_bytes
        self._shares: list[BudgetShare] = []

    def enter(self) -> BudgetShare:
        """Return a share for an engine that begins to load."""
        self._shares.append(BudgetShare(self))
        return self._shares[-1]

    def leave(self, share: BudgetShare) -> None:
        """Forget an engine that no longer holds anything."""
        self._shares.remove(share)

    def others(self, share: BudgetShare) -> list[BudgetShare]:
        """Return the shares of all other engines, idle ones first."""
        return sorted(
            (each for each in self._shares if each is not share), key=lambda each: not each.is_idle()
        )


class BudgetShare:
    """What one engine holds, by its own account, and what the others leave to it."""

    def __init__(self, budget: MemoryBudget) -> None:
        self.budget = budget
        self.fixed_bytes = 0
        """Weights and fixed pools: held until the model goes."""
        self.reserved_bytes = 0
        """What is still to be loaded."""
        self.varying_bytes: Callable[[], int] = lambda: 0
        """KV of sequences and of cached blocks, and image vectors."""
        self.promised_bytes: Callable[[], int] = lambda: 0
        """KV that running sequences were admitted for but do not hold yet."""
        self.is_idle: Callable[[], bool] = lambda: False
        self.yield_pages: Callable[[int], int] = lambda size_bytes: 0
        """Gives back free pages, of this size if there are enough; returns how many bytes."""
        self.yield_ram: Callable[[int], int] = lambda size_bytes: 0
        """Drops cached blocks of at least this size, oldest first; returns the bytes that other engines
        gain."""

        self.waits_since: float | None = None
        """Since when nothing has run here for lack of memory (`Clock.monotonic`); None otherwise."""

    @property
    def others_promised_bytes(self) -> int:
        """What the running sequences of all other engines may still take."""
        return sum(other.promised_bytes() for other in self.budget.others(self))

    @property
    def others_work(self) -> bool:
        """Whether another engine is working, and so will give memory back."""
        return any(not other.is_idle() for other in self.budget.others(self))

    @property
    def must_wait(self) -> bool:
        """Whether freed memory belongs to another engine, which has waited longer and can run nothing. Until
        then this one starts nothing new, or an engine that never pauses would keep it all."""
        since = math.inf if self.waits_since is None else self.waits_since
        return any(
            other.waits_since is not None and other.waits_since < since and other.is_idle()
            for other in self.budget.others(self)
        )

    @property
    def others_bytes(self) -> int:
        """What all other engines hold now."""
        return sum(other.fixed_bytes + other.varying_bytes() for other in self.budget.others(self))

    @property
    def limit_bytes(self) -> int:
        """What the others, with what they are still loading, leave to this engine; 0 means no limit."""
        if not self.budget.limit_bytes:
            return 0
        return max(1, self.budget.limit_bytes - self._loading_bytes - self.others_bytes)

    @property
    def most_bytes(self) -> int:
        """What this engine could have if the others held only their models; 0 means no limit."""
        if not self.budget.limit_bytes:
            return 0
        fixed = sum(other.fixed_bytes + other.reserved_bytes for other in self.budget.others(self))
        return max(1, self.budget.limit_bytes - fixed)

    def excess_bytes(self, used_bytes: int) -> int:
        """Return by how much `used_bytes` of all engines would exceed the limit, after the others have given
        back free pages, and idle ones their blocks in RAM."""
        if not self.budget.limit_bytes:
            return 0
        excess = used_bytes + self._loading_bytes - self.budget.limit_bytes
        if excess <= 0:
            return 0
        others = self.budget.others(self)
        givers = [other.yield_pages for other in others]
        for give in (*givers, *(other.yield_ram for other in others if other.is_idle())):
            if excess > 0:
                excess -= give(excess)
        return max(0, excess)

    def room_bytes(self, active_bytes: int) -> int:
        """Return how much may be allocated while all engines use `active_bytes` and none gives way."""
        return max(0, self.budget.limit_bytes - self._loading_bytes - active_bytes)

    def yield_others(self, size_bytes: int) -> int:
        """Have other engines, busy ones too, drop blocks in RAM; return how many bytes that freed."""
        freed_bytes = 0
        for other in self.budget.others(self):
            if freed_bytes < size_bytes:
                freed_bytes += other.yield_ram(size_bytes - freed_bytes)
        return freed_bytes

    @property
    def _loading_bytes(self) -> int:
        return sum(other.reserved_bytes for other in self.budget.others(self))
