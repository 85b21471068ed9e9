"""The lanes in which sequences decode (inference thread).

Sequences of one adapter whose cache classes batch share lanes of at most `row_limit` rows; each of the
others, and each that speculates, decodes in a lane of its own beside them.
"""

from __future__ import annotations

from collections.abc import Collection

from service.domain.speculation import DraftCounts, Drafting, Speculation, SpeculationLimit
from service.engine import upstream
from service.engine.decode_batch import DecodeBatch, JoiningRow
from service.engine.draft_model import DraftModel
from service.engine.ids import SequenceId
from service.engine.ports import Drawn
from service.engine.prompt_lookup import PromptLookup
from service.engine.speculative_lane import Drafter, SpeculativeLane, speculation_limit


class Lanes:
    """All rows that decode, and those that take their seat in the next step."""

    def __init__(self, *, row_limit: int, is_pipelined: bool) -> None:
        self._row_limit = row_limit
        self._is_pipelined = is_pipelined
        self._joining: list[JoiningRow] = []
        self._lanes: list[DecodeBatch | SpeculativeLane] = []
        self.draft_model: DraftModel | None = None
        """Set once it is loaded, where the server has one."""

    def join(self, row: JoiningRow) -> None:
        """Let a prefilled sequence draw from the next step on."""
        self._joining.append(row)

    def decode(self) -> list[Drawn]:
        """Run one step of every lane; one token for every row."""
        self._seat()
        for lane in self._lanes:
            lane.dispatch()
        for lane in self._lanes:
            lane.draw()
        collected = [drawn for lane in self._lanes for drawn in lane.collect()]
        self._end_fruitless_lanes()
        return collected

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

    def _seat(self) -> None:
        """Put the joining rows into lanes: full lanes stay as they are, new lanes open as needed."""
        joining, self._joining = self._joining, []
        by_model: dict[int, list[JoiningRow]] = {}
        for row in joining:
            if self._seat_speculating(row):
                continue
            if upstream.can_batch(row.caches):
                by_model.setdefault(id(row.model), []).append(row)
            else:
                lane = DecodeBatch(row.model, is_pipelined=self._is_pipelined, is_solitary=True)
                lane.join([row])
                self._lanes.append(lane)
        for rows in by_model.values():
            self._seat_together(rows)

    def _seat_together(self, rows: list[JoiningRow]) -> None:
        """Put rows of one module tree beside others of it."""
        model = rows[0].model
        for lane in self._lanes:
            room = self._row_limit - len(lane)
            if rows and room > 0 and lane.model is model and not lane.is_solitary:
                lane.join(rows[:room])
                rows = rows[room:]
        for start in range(0, len(rows), self._row_limit):
            lane = DecodeBatch(model, is_pipelined=self._is_pipelined)
            lane.join(rows[start : start + self._row_limit])
            self._lanes.append(lane)

    def _seat_speculating(self, row: JoiningRow) -> bool:
        """Give a row that speculates its own lane; False for one that did not ask or cannot."""
        if row.speculation is None:
            return False
        limit = speculation_limit(row)
        if limit is not SpeculationLimit.NONE:
            row.sampling.drafts = DraftCounts(limit=limit)
            return False
        drafter = self._drafter(row, row.speculation)
        if drafter is None:
            row.sampling.drafts = DraftCounts(limit=SpeculationLimit.NO_DRAFT_MODEL)
            return False
        limit_count = row.speculation.draft_token_limit
        self._lanes.append(SpeculativeLane(row, drafter=drafter, draft_token_limit=limit_count))
        return True

    def _end_fruitless_lanes(self) -> None:
        """Let rows whose guesses come to nothing decode with the others from the next step on."""
        for lane in self._lanes:
            if isinstance(lane, SpeculativeLane) and lane.is_fruitless:
                row = lane.leave()
                row.sampling.drafts = DraftCounts(limit=SpeculationLimit.ACCEPTANCE)
                self._joining.append(row)
        self._lanes = [lane for lane in self._lanes if len(lane)]

    def _drafter(self, row: JoiningRow, speculation: Speculation) -> Drafter | None:
        if speculation.drafting is Drafting.PROMPT_LOOKUP:
            return PromptLookup(row.token_ids, ngram_token_limit=speculation.ngram_token_limit)
        # The last token is fed by the lane; what the draft model is to continue ends with it.
        return self.draft_model.open(row.token_ids) if self.draft_model is not None else None
