"""States of several decoding rows, stacked: the rows of one group run a layer that is not attention together.

A group lasts from pass to pass while the same rows decode, so that nothing is copied meanwhile; a row that
is looked at or leaves gets its slice put back into its own caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from icehouse_server.engine.kv_cache.cache_classes import class_of, leaves
from icehouse_server.engine.runner.forward.row import Row


class StateGroup:
    """Rows whose states are stacked; their own hold what was put back last, or what they came with."""

    def __init__(self, rows: Sequence[Row], places: Sequence[int]) -> None:
        """`places` are those of the states among the leaves of a row's caches; no row may have none yet."""
        self.rows = tuple(rows)
        self._places = tuple(places)
        self._number = {id(row): number for number, row in enumerate(self.rows)}
        states = [self._states_of(row) for row in self.rows]
        self.stacked: dict[int, Any] = {
            place: class_of(column[0]).stacked(column)
            for place, column in zip(places, zip(*states, strict=True), strict=True)
        }
        for row in self.rows:
            row.keeper = self

    def is_of(self, rows: Sequence[Row]) -> bool:
        """Tell whether these rows, in this order, are the group."""
        return len(rows) == len(self._number) == len(self.rows) and all(
            a is b for a, b in zip(self.rows, rows, strict=True)
        )

    def settle(self, row: Row) -> None:
        """Put a row's slice of the stacked states into its caches, lazily."""
        number = self._number[id(row)]
        for place, state in zip(self._places, self._states_of(row), strict=True):
            state.cache = [array[number : number + 1] for array in self.stacked[place].cache]

    def leave(self, row: Row) -> None:
        """Put a row's slice into its caches; the group does not know it any more."""
        self.settle(row)
        del self._number[id(row)]
        row.keeper = None

    def has(self, row: Row) -> bool:
        """Tell whether a row is in the group still."""
        return id(row) in self._number

    def dissolve(self) -> None:
        """Have all rows leave."""
        for row in self.rows:
            if id(row) in self._number:
                self.leave(row)

    @property
    def arrays(self) -> list[mx.array]:
        """What a pass must evaluate, lest its graph grow with the next one."""
        return [array for state in self.stacked.values() for array in state.cache if array is not None]

    def _states_of(self, row: Row) -> list[Any]:
        found = list(leaves(row.raw_caches))
        return [found[place] for place in self._places]
