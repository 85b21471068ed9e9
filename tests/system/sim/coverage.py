"""Coverage: what stories came to, and what so many of them should have come to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from tests.system.sim.stories import play

_CERTAIN = 14
"""Of so many times as many stories as it takes one on average, all miss it in one set out of a million."""

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
"""Of so many stories one comes to it, counted over 600: they prove little of what none comes to."""


class Coverage:
    """What all stories of a run came to. `check` asks for what is certain of as many as there were."""

    def __init__(self, one_in: Mapping[str, int]) -> None:
        self._one_in = one_in
        self._seen: Counter[str] = Counter()
        self._story_count = 0

    def play(self, first: int, count: int) -> Counter[str]:
        """Play so many stories, take in what they came to, and return it."""
        seen = play(range(first, first + count))
        self.add(seen, story_count=count)
        return seen

    def add(self, seen: Counter[str], *, story_count: int) -> None:
        """Take in what so many stories came to."""
        self._seen += seen
        self._story_count += story_count

    def check(self) -> None:
        """Fail if none of them came to what one should have, whatever seeds they had."""
        certain = [what for what, count in self._one_in.items() if self._story_count >= _CERTAIN * count]
        unreached = [what for what in certain if not self._seen[what]]
        assert not unreached, f"{self._story_count} stories never came to {unreached}"
