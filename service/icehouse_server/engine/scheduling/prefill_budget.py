"""Prefill budget between decode steps, in seconds: how long a turn may last, and what fits into it.

Inference thread only. A turn lasts a slice: about as long as a decode step, so that running sequences keep
their inter-token latency and waiting prompts keep moving. A chunk that took longer than that is paid for by
the turns after it. While nothing decodes nobody's tokens wait, and a chunk is as long as the device needs to
run at nearly its best rate.

What the oldest prompt is owed while shorter ones overtake it (inference thread).

The shortest prompt runs first, so the oldest could starve. It is owed a share of all prefill time, counted in
seconds and not in turns: one turn of a long context can take as long as ten of a short one, and a prompt that
had the device to itself a moment ago has nothing to ask of those who come now.
"""

from __future__ import annotations

import math

from icehouse_server.averages import MovingAverage
from icehouse_server.engine.scheduling.pass_cost import PassCostLearner, PassSize

_STEP_SHARE = 0.75
"""A slice's share of a decode step, where nobody set it: the gap between two tokens stays below two steps,
what joining and leaving rows cost included (bench.load, 2-core x86)."""
_LEAST_TURN_SHARE = 0.5
"""A turn that has used this share of its slice is over: what is left would be a chunk too small to pay."""
_FIXED_SHARE_BESIDE_DECODE = 0.67
"""Most of a chunk's time that goes into what does not depend on its tokens (reading the weights above all):
cutting finer would starve the prompts."""
_RATE_SHARE_ALONE = 0.95
"""While nothing decodes a chunk is long enough to run at this share of the best rate known: those who wait
for prefill come before those who may arrive."""
_SOON_S = 0.1
"""A newcomer who waits for no more than this would gain little from chunks that are shorter still."""
_LEAST_LIMIT = 4.0
"""A limit on a chunk's time is at least so many times its fixed part: less would be mostly that."""
_PIECE_ROUNDING = 0.25
"""What is left behind the last whole piece makes one more from three quarters of a piece on."""
_PIECE_EXCESS = 4.0 / 3.0
"""Most times the limit that a chunk may take so that all are of one length."""
_FIRST_TOKEN_COUNT = 64
"""Tokens of the first chunk, before any was measured."""
_CROWD = 2.0
"""So many sequences that wait for their first token, for each one that draws its next, are a crowd."""
_CROWD_LIMIT = 4.0
"""Most slices of prefill between two decode steps, however large the crowd is."""


class Turns:
    """Counts the time of prefill against that of decode. `crowd` is how many wait for each that decodes."""

    def __init__(
        self, *, slice_s: float, chunk_s: float, chunk_token_count: int, grid_token_count: int
    ) -> None:
        self._fixed_slice_s = slice_s
        self._chunk_s = chunk_s
        self._chunk_token_count = chunk_token_count
        self._grid_token_count = grid_token_count
        self._costs = PassCostLearner()
        self._decode_step = MovingAverage()
        self._spent_s = 0.0
        self._has_joined = False
        self._has_prefilled = False
        self._has_restored = False

    def note_chunk(self, *, start: int, token_count: int, elapsed_s: float) -> None:
        """Learn from a chunk that began at `start`; its time is noted with `note_prefill` besides."""
        self._costs.note(PassSize.of_chunk(start, token_count), elapsed_s)

    def note_prefill(self, elapsed_s: float, *, is_decoding: bool) -> None:
        """Count prefill time against the turn."""
        if is_decoding:
            self._spent_s += elapsed_s
            self._has_prefilled = True
        else:
            # No decode step waits for the turn's end; nobody is owed anything.
            self._spent_s = 0.0

    def note_restore(self) -> None:
        """Loaded blocks were taken into use for a slice of time."""
        self._has_restored = True

    def note_join(self) -> None:
        """A row was added to those who decode."""
        self._has_joined = True

    def note_decode(self, elapsed_s: float, *, crowd: float) -> None:
        """End the turn with a decode step; what it took too long is left to be paid."""
        self._spent_s = max(0.0, self._spent_s - self._slice_s(crowd))
        self._decode_step.add(elapsed_s)
        self._has_joined = False
        self._has_prefilled = False
        self._has_restored = False

    def may_join(self, *, crowd: float) -> bool:
        """Whether a row may be added: that lengthens the next step, so not in a gap that had prefill."""
        return not self._has_prefilled or crowd > _CROWD

    def may_restore(self, *, crowd: float) -> bool:
        """Whether another slice may go into loaded blocks: one between two decode steps."""
        return not self._has_restored or crowd > _CROWD

    def is_over(self, *, crowd: float) -> bool:
        """Whether the next decode step is due."""
        if self._has_joined and crowd <= _CROWD:
            return True
        return self._spent_s > 0.0 and self._spent_s >= _LEAST_TURN_SHARE * self._slice_s(crowd)

    def chunk_stop(self, start: int, end: int, *, is_decoding: bool, crowd: float) -> int:
        """Return where a chunk from `start` has taken its time: at a grid point, or at `end`."""
        tokens = self._beside(start, crowd) if is_decoding else self._alone(start, end)
        if tokens >= end - start:
            return end
        grid = self._grid_token_count
        return min(end, max(start // grid + 1, (start + int(tokens)) // grid) * grid)

    def _beside(self, start: int, crowd: float) -> float:
        """Return the tokens of a chunk between two decode steps."""
        left_s = self._left_s(crowd)
        if left_s is None:
            return self._chunk_token_count
        cost = self._costs.cost()
        if cost is None:
            return _FIRST_TOKEN_COUNT
        tokens = cost.tokens_within(left_s, start)
        if not self._fixed_slice_s:
            tokens = max(tokens, cost.tokens_at_fixed_share(_FIXED_SHARE_BESIDE_DECODE, start))
        trusted = self._costs.trusted_tokens(start, budget_s=left_s)
        tokens = min(tokens, trusted)
        # A size that tells nothing new would confirm whatever is believed: once, one twice as long.
        grid = self._grid_token_count
        return tokens if self._costs.is_told_by(max(grid, tokens // grid * grid)) else trusted

    def _alone(self, start: int, end: int) -> float:
        """Return the tokens of a chunk while nothing decodes."""
        if not self._chunk_s:
            return self._chunk_token_count
        cost = self._costs.cost()
        if cost is None:
            return _FIRST_TOKEN_COUNT
        limit_s = max(self._chunk_s, _LEAST_LIMIT * cost.fixed_s)
        trusted = self._costs.trusted_tokens(start, budget_s=self._chunk_s)
        most = min(self._chunk_token_count, cost.tokens_within(limit_s, start), trusted)
        least = max(
            cost.tokens_at_rate(_RATE_SHARE_ALONE, start, limit=most),
            cost.tokens_within(min(_SOON_S, self._chunk_s), start),
        )
        length = max(1.0, min(most, least))
        if not self._costs.is_told_by(length):
            length = max(1.0, length / 2.0)
        # Pieces of that length or longer, all alike: a short one at the end would pay the fixed part again.
        piece_count = max(1, int((end - start) / length + _PIECE_ROUNDING))
        if (end - start) / piece_count > _PIECE_EXCESS * max(1.0, most):
            piece_count += 1
        return math.ceil((end - start) / piece_count / self._grid_token_count) * self._grid_token_count

    def expected_s(self, start: int, token_count: int) -> float:
        """Return what a chunk from `start` is expected to take; 0 before any was measured."""
        cost = self._costs.cost()
        return cost.seconds(PassSize.of_chunk(start, token_count)) if cost else 0.0

    def _left_s(self, crowd: float) -> float | None:
        """Return what is left of the turn; None before any decode step was measured."""
        slice_s = self._slice_s(crowd)
        return max(0.0, slice_s - self._spent_s) if slice_s else None

    def _slice_s(self, crowd: float) -> float:
        slice_s = self._fixed_slice_s or _STEP_SHARE * self._decode_step.value
        # Latency between tokens is kept while that leaves the many no worse off; then the many come first.
        return slice_s * min(_CROWD_LIMIT, max(1.0, crowd / _CROWD))


_SHARE = 0.25
"""Of the time of prefill, while shorter prompts wait."""
_CREDIT_LIMIT_S = 1.0
"""Most time of its own that is held against the oldest: shorter ones may go first for three times as long."""


class OldestShare:
    """A balance of seconds between the oldest prompt and all that overtake it."""

    def __init__(self) -> None:
        self._owed_s = 0.0

    def note(self, elapsed_s: float, *, was_oldest: bool) -> None:
        """Count a chunk of the oldest prompt, or of one that overtook it."""
        if was_oldest:
            self._owed_s = max(-_CREDIT_LIMIT_S, self._owed_s - elapsed_s)
        else:
            self._owed_s += elapsed_s * _SHARE / (1.0 - _SHARE)

    def is_due(self, cost_s: float) -> bool:
        """Whether a chunk of this cost is covered by what is owed."""
        return self._owed_s > 0.0 and self._owed_s >= cost_s
