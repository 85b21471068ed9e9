"""Recent names: blocks of which something is remembered, the latest so many."""

from __future__ import annotations

from collections import OrderedDict

from icehouse_server.domain.ids import BlockHash

_LIMIT_COUNT = 1 << 16
"""Some 10 MB."""


class RecentNames:
    """Names, each with the time until which it is remembered. One thread adds; any thread may look."""

    def __init__(self) -> None:
        self._end_times: OrderedDict[BlockHash, float] = OrderedDict()

    def add(self, name: BlockHash, *, end_time: float = float("inf")) -> None:
        self._end_times[name] = end_time
        self._end_times.move_to_end(name)
        if len(self._end_times) > _LIMIT_COUNT:
            self._end_times.popitem(last=False)

    def discard(self, name: BlockHash) -> None:
        self._end_times.pop(name, None)

    def has(self, name: BlockHash, now: float) -> bool:
        """Whether a name is remembered at this time."""
        return self._end_times.get(name, 0.0) > now
