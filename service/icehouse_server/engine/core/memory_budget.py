"""Memory budget: one limit for all engines of a process, and what each of them holds of it. Sizes in bytes.

Inference thread only.
"""

from __future__ import annotations

import math
from collections.abc import Callable


class MemoryBudget:
    """A `limit_bytes` of 0 is no limit."""

    def __init__(self, limit_bytes: int = 0) -> None:
        self.limit_bytes = limit_bytes
        self._shares: list[BudgetShare] = []

    def enter(self) -> BudgetShare:
        """Return the share of an engine that begins to load."""
        self._shares.append(BudgetShare(self))
        return self._shares[-1]

    def leave(self, share: BudgetShare) -> None:
        """Forget an engine that holds nothing any more."""
        self._shares.remove(share)

    def others(self, share: BudgetShare) -> list[BudgetShare]:
        """Return the shares of all other engines, idle ones first."""
        return sorted(
            (each for each in self._shares if each is not share), key=lambda each: not each.is_idle()
        )


class BudgetShare:
    """What one engine holds, as it tells, and what that leaves to it of the others'."""

    def __init__(self, budget: MemoryBudget) -> None:
        self.budget = budget
        self.fixed_bytes = 0
        """Weights and pages: until the model goes."""
        self.reserved_bytes = 0
        """What is still to be loaded."""
        self.varying_bytes: Callable[[], int] = lambda: 0
        """KV of sequences and blocks that is not in pages, and images' vectors."""
        self.promised_bytes: Callable[[], int] = lambda: 0
        """KV that its running sequences were admitted for and do not hold yet."""
        self.is_idle: Callable[[], bool] = lambda: False
        self.yield_pages: Callable[[int], int] = lambda size_bytes: 0
        """Gives back pages that nobody refers to, of this size if there are so many; returns how much."""
        self.yield_ram: Callable[[int], int] = lambda size_bytes: 0
        """Drops blocks of at least this size, the oldest first; returns the bytes that are free for other
        engines then."""

        self.waits_since: float | None = None
        """Since when nothing runs here for want of memory; None while that is not so. `Clock.monotonic`."""

    @property
    def others_promised_bytes(self) -> int:
        """What the running sequences of all other engines may still take."""
        return sum(other.promised_bytes() for other in self.budget.others(self))

    @property
    def others_work(self) -> bool:
        """Whether another engine is at work, which will give memory back."""
        return any(not other.is_idle() for other in self.budget.others(self))

    @property
    def must_wait(self) -> bool:
        """Whether what comes free is another engine's, which has waited longer and can run nothing. This one
        starts nothing new until then, or whoever is always at work would keep all."""
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
        """What is left to this engine by what the others hold and load; 0 is no limit."""
        if not self.budget.limit_bytes:
            return 0
        return max(1, self.budget.limit_bytes - self._loading_bytes - self.others_bytes)

    @property
    def most_bytes(self) -> int:
        """What it could have if the others had but their models; 0 is no limit."""
        if not self.budget.limit_bytes:
            return 0
        fixed = sum(other.fixed_bytes + other.reserved_bytes for other in self.budget.others(self))
        return max(1, self.budget.limit_bytes - fixed)

    def excess_bytes(self, used_bytes: int) -> int:
        """Return by how much the limit would be passed if all engines together used so much, once others have
        given back free pages, and idle ones blocks in RAM."""
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
        """Return what may be allocated at once where all engines use so much, and none gives way."""
        return max(0, self.budget.limit_bytes - self._loading_bytes - active_bytes)

    def yield_others(self, size_bytes: int) -> int:
        """Have other engines that are at work give up blocks in RAM; return the bytes that are free then."""
        freed_bytes = 0
        for other in self.budget.others(self):
            if freed_bytes < size_bytes:
                freed_bytes += other.yield_ram(size_bytes - freed_bytes)
        return freed_bytes

    @property
    def _loading_bytes(self) -> int:
        return sum(other.reserved_bytes for other in self.budget.others(self))
