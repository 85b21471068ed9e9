"""The lanes in which sequences decode (inference thread).

Sequences whose cache classes batch share lanes of at most `row_limit` rows; each of the others, and
each that speculates, decodes in a lane of its own beside them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from service.domain.speculation import DraftCounts, SpeculationLimit
from service.engine import upstream
from service.engine.decode_batch import DecodeBatch, JoiningRow
from service.engine.ids import SequenceId
from service.engine.ports import Drawn
from service.engine.speculative_lane import SpeculativeLane, speculation_limit


class Lanes:
    """All rows that decode, and those that take their seat in the next step."""

    def __init__(self, *, row_limit: int, is_pipelined: bool) -> None:
        self._row_limit = row_limit
        self._is_pipelined = is_pipelined
        self._joining: list[JoiningRow] = []
        self._lanes: list[DecodeBatch | SpeculativeLane] = []

    def join(self, row: JoiningRow) -> None:
        """Let a prefilled sequence draw from the next step on."""
        self._joining.append(row)

    def decode(self, model: Any) -> list[Drawn]:
        """Run one step of every lane; one token for every row."""
        self._seat(model)
        for lane in self._lanes:
            lane.dispatch()
        for lane in self._lanes:
            lane.draw()
        return [drawn for lane in self._lanes for drawn in lane.collect()]

    def remove(self, sequence_ids: Collection[SequenceId]) -> None:
        """Forget rows; ids that are not here are ignored."""
        gone = set(sequence_ids)
        self._joining = [row for row in self._joining if row.sequence_id not in gone]
        for lane in self._lanes:
            lane.remove(gone)
        self._lanes = [lane for lane in self._lanes if len(lane)]

    def clear(self) -> None:
        """Drop every row."""
        self._joining.clear()
        self._lanes.clear()

    def locate(self, sequence_id: SequenceId) -> tuple[list[upstream.Cache], int]:
        """Return the caches that hold a decoding sequence, and its row in them."""
        for row in self._joining:
            if row.sequence_id == sequence_id:
                return row.caches, 0
        lane = next(lane for lane in self._lanes if sequence_id in lane.sequence_ids)
        return lane.locate(sequence_id)

    def _seat(self, model: Any) -> None:
        """Put the joining rows into lanes: full lanes stay as they are, new lanes open as needed."""
        joining = [row for row in self._joining if not self._seat_speculating(row, model)]
        shared = [row for row in joining if upstream.can_batch(row.caches)]
        alone = [row for row in joining if not upstream.can_batch(row.caches)]
        self._joining = []
        for lane in self._lanes:
            room = self._row_limit - len(lane)
            if shared and room > 0 and not lane.is_solitary:
                lane.join(shared[:room])
                shared = shared[room:]
        for start in range(0, len(shared), self._row_limit):
            lane = DecodeBatch(model, is_pipelined=self._is_pipelined)
            lane.join(shared[start : start + self._row_limit])
            self._lanes.append(lane)
        for row in alone:
            lane = DecodeBatch(model, is_pipelined=self._is_pipelined, is_solitary=True)
            lane.join([row])
            self._lanes.append(lane)

    def _seat_speculating(self, row: JoiningRow, model: Any) -> bool:
        """Give a row that speculates its own lane; False for one that did not ask or cannot."""
        if row.speculation is None:
            return False
        limit = speculation_limit(row)
        if limit is not SpeculationLimit.NONE:
            row.sampling.drafts = DraftCounts(limit=limit)
            return False
        self._lanes.append(SpeculativeLane(model, row, row.speculation))
        return True
