"""Coverage: what happened in the stories of a run, and what should have happened in that many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from tests.system.sim.stories import play

_CERTAIN = 14
"""An event of one story in n is missed by all of this many times n stories once in a million runs."""

ONE_IN: Mapping[str, int] = {
    "ram tokens": 2,
    "ssd tokens": 3,
    "evicted from RAM": 2,
    "evicted from SSD": 6,
    "crash": 2,
    "kill": 3,
    "restart": 1,
    "clean open": 2,
    "adopted": 25,
    "lost rows": 30,
    "shared tokens": 4,
    "Cancelled": 2,
    "DeadlineExceeded": 2,
    "Overloaded": 2,
    "parked": 27,
    "written behind": 3,
    "STOP_STRING": 2,
    "limit LOAD_FAILED": 20,
    "limit RECOMPUTE_FASTER": 70,
    "limit NO_CHECKPOINT": 11,
    "drop DISK_FULL": 30,
    "drop DAILY_BUDGET": 20,
    "drop WRITE_FAILED": 20,
    "failure header": 80,
    "failure missing": 50,
    "failure truncated": 125,
    "PinReport": 3,
    "EvictReport": 2,
    "VerifyReport": 4,
    "Explanation": 3,
    "StorageFailed": 18,
    "SessionEndReport": 2,
    "moved by the end of a session": 10,
    "dropped checkpoint": 10,
}
"""One story in this many reaches the event, counted over 600. What no story reaches is not tested."""


class Coverage:
    """All that happened in a run's stories. `check` demands the events that so many stories must reach."""

    def __init__(self, one_in: Mapping[str, int]) -> None:
        self._one_in = one_in
        self._seen: Counter[str] = Counter()
        self._story_count = 0

    def play(self, first: int, count: int) -> Counter[str]:
        """Play `count` stories, add what happened in them, and return it."""
        seen = play(range(first, first + count))
        self.add(seen, story_count=count)
        return seen

    def add(self, seen: Counter[str], *, story_count: int) -> None:
        """Add what happened in `story_count` stories."""
        self._seen += seen
        self._story_count += story_count

    def check(self) -> None:
        """Fail if no story reached an event that some story should have reached, whatever the seeds."""
        certain = [what for what, count in self._one_in.items() if self._story_count >= _CERTAIN * count]
        unreached = [what for what in certain if not self._seen[what]]
        assert not unreached, f"{self._story_count} stories never came to {unreached}"
