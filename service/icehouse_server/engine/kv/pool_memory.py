"""Pool memory: what the pools of a model that shares the device with others hold, grow by and give back.

A pool is one array. It grows by copying all of it, and shrinks by copying the pages in use. Both need extra
memory for a moment. It shrinks only while no row has pages, since rows know their pages by number. Pools of a
fixed size are not counted. Inference thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from icehouse_server.engine.attention.port import PagedAttention
from icehouse_server.engine.kv.backend_choice import shapes_are_costly
from icehouse_server.engine.kv.page_groups import GroupFacts
from icehouse_server.engine.kv.page_table import PageGroup
from icehouse_server.engine.kv.pool import PagePool, PassClock


def make_groups(
    chosen: Sequence[tuple[GroupFacts, PagedAttention]], sizes: Sequence[int], *, passes: PassClock
) -> tuple[PageGroup, ...]:
    """Make the pools of a model's groups, of these sizes in bytes; one of size 0 may grow."""
    return tuple(
        PageGroup(
            PagePool(facts.shape, passes=passes, size_bytes=size_bytes),
            attention,
            facts.layers,
            facts.window,
            shapes_are_costly(facts.shape),
        )
        for (facts, attention), size_bytes in zip(chosen, sizes, strict=True)
    )


class PoolMemory:
    """Implements the engine's Pages. Sizes in bytes."""

    def __init__(
        self, groups: Sequence[PageGroup] = (), *, has_rows: Callable[[], bool] = lambda: False
    ) -> None:
        self._groups = [group for group in groups if not group.pool.is_bounded]
        self._has_rows = has_rows

    def bound(self, room_bytes: Callable[[], int]) -> None:
        for group in self._groups:
            group.pool.room_bytes = room_bytes

    @property
    def held_bytes(self) -> int:
        return sum(group.pool.held_bytes for group in self._groups)

    @property
    def used_bytes(self) -> int:
        return sum(group.pool.held_bytes - group.pool.free_bytes for group in self._groups)

    @property
    def can_move(self) -> bool:
        return not self._has_rows()

    def missing_bytes(self, kv_bytes: int) -> int:
        return sum(max(0, wanted - pool.free_bytes) for pool, wanted in self._parts(kv_bytes))

    def copied_bytes(self, kv_bytes: int) -> int:
        growing = [pool for pool, wanted in self._parts(kv_bytes) if wanted > pool.free_bytes]
        # A pool whose pages can move shrinks before it grows.
        return sum(pool.held_bytes - self.can_move * pool.free_bytes for pool in growing)

    def reserve(self, kv_bytes: int) -> None:
        self.give_back(self.missing_bytes(kv_bytes))
        for pool, wanted in self._parts(kv_bytes):
            missing_bytes = wanted - pool.free_bytes
            if missing_bytes > 0:
                pool.grow(-(-missing_bytes // pool.shape.page_bytes))

    def give_back(self, size_bytes: int) -> int:
        freed_bytes = 0
        if self.can_move:
            for group in sorted(self._groups, key=lambda group: -group.pool.free_bytes):
                if freed_bytes < size_bytes:
                    group.attention.settle(group.pool)
                    freed_bytes += group.pool.shrink()
        return freed_bytes

    def _parts(self, kv_bytes: int) -> list[tuple[PagePool, int]]:
        """Return how much of the KV goes into each pool."""
        whole = sum(group.pool.shape.page_bytes for group in self._groups)
        return [(group.pool, kv_bytes * group.pool.shape.page_bytes // whole) for group in self._groups]
