"""Lanes in which sequences decode (inference thread).

Sequences of one adapter whose cache classes batch share lanes of at most `row_limit` rows; each of the
others, and each that speculates, decodes in a lane of its own beside them. A sequence whose guesses come
to nothing moves into the batch; one that looks its guesses up goes back when they would come true again.
"""

from __future__ import annotations

from collections.abc import Collection

from icehouse_server.domain.ids import SequenceId
from icehouse_server.domain.request import DraftCounts, Drafting, Speculation, SpeculationLimit
from icehouse_server.engine.core.ports import Drawn
from icehouse_server.engine.kv_cache import batching, cache_classes
from icehouse_server.engine.runner.decode_batch import DecodeBatch, JoiningRow
from icehouse_server.engine.runner.draft_model import DraftModel
from icehouse_server.engine.runner.prompt_lookup import LookupWatch, PromptLookup
from icehouse_server.engine.runner.speculative_lane import Drafter, SpeculativeLane, Trial, speculation_limit

_LOOKUP_TRIAL = Trial(step_count=4, least_accepted_count=2)
"""Short: a row that leaves too early comes back. A pass over nine tokens takes twice as long as over one
(Gemma 3 270M, float32, 2 x86 cores), so with few right guesses there is nothing to gain even alone."""
_DRAFT_TRIAL = Trial(step_count=24, least_accepted_count=6)
"""Long: nobody looks on afterwards, for that would cost as much as guessing."""


class Lanes:
    """All rows that decode, and those that take their seat in the next step."""

    def __init__(self, *, row_limit: int, is_pipelined: bool) -> None:
        self._row_limit = row_limit
        self._is_pipelined = is_pipelined
        self._joining: list[JoiningRow] = []
        self._lanes: list[DecodeBatch | SpeculativeLane] = []
        self._watches: dict[SequenceId, LookupWatch] = {}
        """Of every sequence that speculates by prompt lookup, in its own lane or not."""
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
        collected = [
            (drawn, isinstance(lane, DecodeBatch)) for lane in self._lanes for drawn in lane.collect()
        ]
        for drawn, is_plain in collected:
            if is_plain and (watch := self._watches.get(drawn.sequence_id)):
                watch.note(drawn.token_id)
        self._end_fruitless_lanes()
        self._return_to_speculation()
        return [drawn for drawn, _ in collected]

    def remove(self, sequence_ids: Collection[SequenceId]) -> None:
        """Forget rows; ids that are not here are ignored."""
        gone = set(sequence_ids)
        self._joining = [row for row in self._joining if row.sequence_id not in gone]
        for sequence_id in gone & self._watches.keys():
            del self._watches[sequence_id]
        for lane in self._lanes:
            lane.remove(gone)
        self._lanes = [lane for lane in self._lanes if len(lane)]

    def clear(self) -> None:
        """Drop every row."""
        self._joining.clear()
        self._lanes.clear()
        self._watches.clear()

    def locate(self, sequence_id: SequenceId) -> tuple[list[cache_classes.Cache], int]:
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
            if batching.can_batch(row.caches):
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
        if row.speculation.drafting is Drafting.PROMPT_LOOKUP:
            lookup = PromptLookup(row.token_ids, ngram_token_limit=row.speculation.ngram_token_limit)
            self._watches[row.sequence_id] = LookupWatch(lookup, row.speculation)
            self._open_lane(row, row.speculation, lookup, _LOOKUP_TRIAL)
            return True
        if self.draft_model is None:
            row.sampling.drafts = DraftCounts(limit=SpeculationLimit.NO_DRAFT_MODEL)
            return False
        # The last token is fed by the lane; what the draft model is to continue ends with it.
        self._open_lane(row, row.speculation, self.draft_model.open(row.token_ids), _DRAFT_TRIAL)
        return True

    def _open_lane(
        self,
        row: JoiningRow,
        speculation: Speculation,
        drafter: Drafter,
        trial: Trial,
        *,
        untold: Drawn | None = None,
    ) -> None:
        limit = speculation.draft_token_limit
        self._lanes.append(
            SpeculativeLane(row, drafter=drafter, draft_token_limit=limit, trial=trial, untold=untold)
        )

    def _end_fruitless_lanes(self) -> None:
        """Let rows whose guesses come to nothing decode with the others from the next step on."""
        for lane in self._lanes:
            if isinstance(lane, SpeculativeLane) and lane.is_fruitless:
                accepted_count = lane.accepted_total
                row = lane.leave()
                row.sampling.drafts = DraftCounts(limit=SpeculationLimit.ACCEPTANCE)
                self._joining.append(row)
                if watch := self._watches.get(row.sequence_id):
                    watch.begin(accepted_count=accepted_count)
        self._lanes = [lane for lane in self._lanes if len(lane)]

    def _return_to_speculation(self) -> None:
        """Give rows their own lanes back whose tokens have been what a lookup would have guessed."""
        for lane in [lane for lane in self._lanes if isinstance(lane, DecodeBatch)]:
            for sequence_id in lane.sequence_ids:
                watch = self._watches.get(sequence_id)
                if watch is None or not watch.is_convinced:
                    continue
                row, untold = lane.leave(sequence_id)
                if untold is not None:
                    watch.drafter.extend([untold.token_id])
                row.sampling.drafts = None
                self._open_lane(row, watch.speculation, watch.drafter, _LOOKUP_TRIAL, untold=untold)
        self._lanes = [lane for lane in self._lanes if len(lane)]
