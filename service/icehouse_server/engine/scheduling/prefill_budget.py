"""Prefill's turns between decode steps, in seconds: how long one may last, and what fits into it.

Inference thread only. A turn lasts a slice: about as long as a decode step, so that running sequences keep
their inter-token latency and waiting prompts keep moving. A chunk that took longer than that is paid for by
the turns after it.

How long prefill chunks take, learned while they run, so that a chunk can be cut to a time.

A chunk costs something whatever its size (weights are read, the context is walked) and something for each
of its tokens, and both grow with the context: one straight line for each octave of context, fitted to the
latest chunks.

What the oldest prompt is owed while shorter ones overtake it (inference thread).

The shortest prompt runs first, so the oldest could starve. It is owed a share of all prefill time, counted in
seconds and not in turns: one turn of a long context can take as long as ten of a short one, and a prompt that
had the device to itself a moment ago has nothing to ask of those who come now.
"""

from __future__ import annotations

import dataclasses

_SMOOTHING = 0.2
_STEP_SHARE = 0.75
"""A slice's share of a decode step, where nobody set it: the gap between two tokens stays below two steps,
what joining and leaving rows cost included (bench.load, 2-core x86)."""
_LEAST_TURN_SHARE = 0.5
"""A turn that has used this share of its slice is over: what is left would be a chunk too small to pay."""
_FIXED_SHARE_BESIDE_DECODE = 0.67
_FIXED_SHARE_ALONE = 0.125
"""Most of a chunk's time that goes into what does not depend on its tokens (reading the weights above all):
cutting finer would starve the prompts. Alone, those who wait for prefill come before those who may arrive."""
_ALONE_LIMIT = 4.0
"""Most times its budget that a chunk may take for that, while nothing decodes."""
_PROBE_SHARE = 2.0 / 3.0
"""Every second chunk is this much of the other while nothing decodes: chunks of one size do not tell what is
fixed in them."""
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
        self._pace = PrefillPace()
        self._decode_step_s = 0.0
        self._spent_s = 0.0
        self._has_joined = False
        self._has_prefilled = False
        self._has_restored = False
        self._probes = False

    def note_chunk(self, *, start: int, token_count: int, elapsed_s: float) -> None:
        """Learn from a chunk that began at `start`; its time is noted with `note_prefill` besides."""
        self._probes = not self._probes
        self._pace.note(token_count=token_count, context_token_count=start, elapsed_s=elapsed_s)

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
        old = self._decode_step_s
        self._decode_step_s = elapsed_s if old == 0.0 else old + _SMOOTHING * (elapsed_s - old)
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

    def chunk_stop(self, start: int, *, is_decoding: bool, crowd: float) -> int:
        """Return the grid point at which a chunk from `start` has taken its time; never `start` itself."""
        cost = self._pace.cost(start)
        tokens: float = self._chunk_token_count
        if cost is not None:
            tokens = min(tokens, self._beside(cost, crowd) if is_decoding else self._alone(cost))
        grid = self._grid_token_count
        return max(start // grid + 1, (start + int(tokens)) // grid) * grid

    def _beside(self, cost: ChunkCost, crowd: float) -> float:
        """Return the tokens of a chunk between two decode steps."""
        left_s = self._left_s(crowd)
        if left_s is None:
            return self._chunk_token_count
        least = 0.0 if self._fixed_slice_s else cost.tokens_at_share(_FIXED_SHARE_BESIDE_DECODE)
        return max(least, cost.tokens_within(left_s))

    def _alone(self, cost: ChunkCost) -> float:
        """Return the tokens of a chunk while nothing decodes."""
        if not self._chunk_s:
            return self._chunk_token_count
        least = min(
            cost.tokens_at_share(_FIXED_SHARE_ALONE), cost.tokens_within(_ALONE_LIMIT * self._chunk_s)
        )
        return max(least, cost.tokens_within(self._chunk_s)) * (_PROBE_SHARE if self._probes else 1.0)

    def expected_s(self, start: int, token_count: int) -> float:
        """Return what a chunk from `start` is expected to take; 0 before any was measured."""
        cost = self._pace.cost(start)
        return cost.seconds(token_count) if cost else 0.0

    def _left_s(self, crowd: float) -> float | None:
        """Return what is left of the turn; None before any decode step was measured."""
        slice_s = self._slice_s(crowd)
        return max(0.0, slice_s - self._spent_s) if slice_s else None

    def _slice_s(self, crowd: float) -> float:
        slice_s = self._fixed_slice_s or _STEP_SHARE * self._decode_step_s
        # Latency between tokens is kept while that leaves the many no worse off; then the many come first.
        return slice_s * min(_CROWD_LIMIT, max(1.0, crowd / _CROWD))


_FADING = 0.9
_SETTLED_WEIGHT = 4.0
_OUTLIER_FACTOR = 2.0
"""A chunk that took longer than so many times what was expected counts as if it had taken just that, so that
one hiccup does not shrink the chunks after it; what lasts is learned in a few."""
_LEAST_SLOPE_SHARE = 0.25
"""Least share of a chunk's time that is taken to grow with its tokens."""
_LEAST_SPREAD = 0.1
"""Sizes that vary by less than this share of their mean say nothing about the slope."""


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkCost:
    """Seconds of a chunk: `fixed_s` plus `token_s` for each token."""

    fixed_s: float
    token_s: float

    def seconds(self, token_count: int) -> float:
        """Return what a chunk of this many tokens is expected to take."""
        return self.fixed_s + self.token_s * token_count

    def tokens_within(self, budget_s: float) -> float:
        """Return the tokens of a chunk that takes the budget; infinite where chunks cost nothing."""
        if self.token_s <= 0.0:
            return float("inf")
        return max(0.0, budget_s - self.fixed_s) / self.token_s

    def tokens_at_share(self, fixed_share: float) -> float:
        """Return the tokens of a chunk of whose time the fixed part is this share."""
        return self.fixed_s / self.token_s * (1.0 - fixed_share) / fixed_share if self.token_s > 0.0 else 0.0


@dataclasses.dataclass(slots=True)
class _Line:
    """Fading sums for a fit of seconds over tokens."""

    weight: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    tokens_squared: float = 0.0
    tokens_seconds: float = 0.0

    def add(self, token_count: int, elapsed_s: float) -> None:
        if self.weight >= _SETTLED_WEIGHT:
            elapsed_s = min(elapsed_s, _OUTLIER_FACTOR * self.cost().seconds(token_count))
        self.weight = self.weight * _FADING + 1.0
        self.tokens = self.tokens * _FADING + token_count
        self.seconds = self.seconds * _FADING + elapsed_s
        self.tokens_squared = self.tokens_squared * _FADING + token_count**2
        self.tokens_seconds = self.tokens_seconds * _FADING + token_count * elapsed_s

    def cost(self) -> ChunkCost:
        mean_tokens, mean_s = self.tokens / self.weight, self.seconds / self.weight
        steepest = mean_s / mean_tokens
        variance = self.tokens_squared / self.weight - mean_tokens**2
        slope = steepest
        if variance > (_LEAST_SPREAD * mean_tokens) ** 2:
            covariance = self.tokens_seconds / self.weight - mean_tokens * mean_s
            slope = min(steepest, max(_LEAST_SLOPE_SHARE * steepest, covariance / variance))
        return ChunkCost(max(0.0, mean_s - slope * mean_tokens), slope)


class PrefillPace:
    """Expects the cost of a chunk from the chunks before it."""

    def __init__(self) -> None:
        self._lines: dict[int, _Line] = {}

    def note(self, *, token_count: int, context_token_count: int, elapsed_s: float) -> None:
        """Learn from a chunk that ran on top of `context_token_count` tokens."""
        assert token_count > 0, token_count
        self._lines.setdefault(_octave(context_token_count), _Line()).add(token_count, elapsed_s)

    def cost(self, context_token_count: int) -> ChunkCost | None:
        """Return the expected cost at this context, or at the nearest one known; None when none is."""
        if not self._lines:
            return None
        wanted = _octave(context_token_count)
        # Of two equally near ones the longer context: a chunk too small does less harm than one too long.
        nearest = min(self._lines, key=lambda octave: (abs(octave - wanted), -octave))
        return self._lines[nearest].cost()


def _octave(token_count: int) -> int:
    """Contexts of up to 128 tokens share a line, as do those of each doubling after it."""
    return max(7, token_count.bit_length())


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
