"""Choice between attending row by row and by slab, from what passes took either way (inference thread).

For so many rows of such a length: a few passes by row are measured, then a few by slab, and the cheaper way
is kept for whoever comes next. After many passes both are measured again, so that no early sample decides
for ever.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Sequence

from icehouse_server.engine.core.length_class import length_class
from icehouse_server.engine.runner.forward import LEAST_ROW_COUNT

_SAMPLE_COUNT = 5
"""Passes of each way whose median decides."""
_WORTH_SHARE = 0.95
"""A slab must take at most this share of the time: it moves KV, and has slots that are not full."""
_LIFE = 4096
"""Passes after which the other way is measured again."""


@dataclasses.dataclass(slots=True)
class _Trial:
    """Seconds for each row of a pass, the latest ones of each way."""

    by_row: collections.deque[float] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=_SAMPLE_COUNT)
    )
    by_slab: collections.deque[float] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=_SAMPLE_COUNT)
    )
    left_count: int = _LIFE
    is_due: bool = False
    """Measured one way for so long that the other one's turn has come."""

    @property
    def is_begun(self) -> bool:
        return bool(self.by_row) or self.is_due

    @property
    def is_decided(self) -> bool:
        return min(len(self.by_row), len(self.by_slab)) >= _SAMPLE_COUNT

    @property
    def prefers_slab(self) -> bool:
        if len(self.by_row) < _SAMPLE_COUNT:
            return False
        if len(self.by_slab) < _SAMPLE_COUNT:
            return True
        return statistics.median(self.by_slab) < _WORTH_SHARE * statistics.median(self.by_row)

    def note(self, row_s: float, *, in_slab: bool) -> None:
        mine, other = (self.by_slab, self.by_row) if in_slab else (self.by_row, self.by_slab)
        mine.append(row_s)
        self.left_count -= 1
        if self.left_count <= 0:
            self.left_count = _LIFE
            self.is_due = True
            other.clear()


class SlabChoice:
    """Learns from passes of decoding rows alone."""

    def __init__(self) -> None:
        self._trials: dict[tuple[int, int], _Trial] = {}

    def prefers_slab(self, lengths: Sequence[int]) -> bool:
        """Whether decoding rows that hold so many tokens should be in a slab, or be tried there."""
        if len(lengths) < LEAST_ROW_COUNT:
            return False
        count, length = _kind(lengths)
        trial = self._trials.get((count, length))
        if trial is not None and trial.is_begun:
            return trial.prefers_slab
        # What fewer rows of that length prefer, more do too.
        fewer = (self._trials.get((c, length)) for c in range(count - 1, 0, -1))
        known = next((trial for trial in fewer if trial is not None and trial.is_decided), None)
        return known is not None and known.prefers_slab

    def note(self, lengths: Sequence[int], elapsed_s: float, *, in_slab: bool) -> None:
        """Learn from a pass that held one token for each of these rows, and nothing else."""
        if len(lengths) >= LEAST_ROW_COUNT and elapsed_s > 0.0:
            trial = self._trials.setdefault(_kind(lengths), _Trial())
            trial.note(elapsed_s / len(lengths), in_slab=in_slab)


def _kind(lengths: Sequence[int]) -> tuple[int, int]:
    return len(lengths).bit_length(), length_class(int(statistics.median(lengths)))
