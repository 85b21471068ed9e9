"""Prefill budget: how long a pass may last, in seconds, and how many prompt tokens fit into it.

Inference thread only. Beside rows that decode, a pass and the restores of its step last at most twice as
long as the rows would alone, so that running sequences keep their latency between tokens; four times where a
crowd waits for its first token. Behind a pass that others' work made longer the next one holds less: that
work seldom ends with it. While nothing decodes nobody's tokens wait, and a pass is as long as the device
needs to run at nearly its best rate.

Beside rows a pass has room for a few tokens of a prompt, and each chunk of it reads all that it holds. So a
long prompt's chunk has many tokens instead, and goes through a few layers in each pass. Rows grow meanwhile:
twice as long means twice what they took when they were last alone.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics

from icehouse_server.engine.scheduling.layer_pace import LayerPace
from icehouse_server.engine.scheduling.pass_cost import PassCostLearner, PassSize

_FACTOR_BESIDE_DECODE = 2.0
_FACTOR_FOR_CROWD = 4.0
"""Longest pass, in passes of the decoding rows alone."""
_CROWD = 0.2
"""More sequences than this that wait for their first token, for each one that draws its next, are a crowd."""
_USED_SHARE = 0.78
"""Of the time that a pass may take beyond that of its rows: what is expected is not always what it takes, the
rows grow meanwhile, and publishing and capturing take some too."""
_USED_SHARE_FOR_CROWD = 0.8
"""The same for a crowd, where first tokens come before an even pace."""
_USED_SHARE_LAYERED = 0.55
"""The same where a chunk goes through some layers: it comes on as fast in less time."""
_USED_SHARE_IN_TIME = 0.8
"""The same where a chunk goes through layers until the time is over: slow rows leave it less."""
_LAYERS_AT_ONCE = 2
"""Of a chunk that begins: how many layers a pass has room for. Fewer leave nothing to choose where the room
changes on its way, and more are shorter chunks, which read more."""
_MOST_LAYERED_TOKENS = 256
_LAYERED_GAIN = 2.0
"""A chunk goes through the layers a few at a time where it has so many times the tokens that a pass has room
for, in one piece of a prompt that would take as many passes."""
_LAYER_ROUNDING = 0.25
"""Of a layer: less than this is missing where one more still runs."""
_ROWS_PASSES_KEPT = 9
_LEAST_GROWN = 0.4
"""Of the time beyond that of the rows, where these have grown since they were alone."""
_USUAL_OVERRUN = 1.1
"""What passes beside rows usually take, of what the faster half of such passes says."""
_SLOWNESS_WEIGHT = 0.5
"""Of the last pass, among those before it: answered in full, every second pass was a long one."""
_LEAST_EXTRA = 0.4
"""Of the time beyond that of the rows, where the machine is slow at this moment."""
_RESTORE_SHARE = 0.5
"""Of the same time, while prompts wait for their share of it."""
_RATE_SHARE_ALONE = 0.95
"""While nothing decodes a pass is long enough to run at this share of the best rate known: those who wait
for prefill come before those who may arrive."""
_SOON_S = 0.1
"""A newcomer who waits for no more than this would gain little from passes that are shorter still."""
_SOON_FOR_CROWD_S = 0.4
"""The same where several prompts wait: a pass that ends sooner would let the first of them decode, and what
decodes makes the passes of the others short. Four clients' worst first token came after 0.6 of the time."""
_LEAST_LIMIT = 4.0
"""A limit on a pass alone is at least so many times its fixed part: less would be mostly that."""
_PIECE_ROUNDING = 0.25
"""What is left behind the last whole piece makes one more from three quarters of a piece on."""
_PIECE_EXCESS = 4.0 / 3.0
"""Most times the limit that a chunk may take so that all are of one length."""
_FIRST_TOKEN_COUNT = 64
"""Prompt tokens of the first pass, before any was measured."""
_FIRST_COUNT_BESIDE = 16
_COUNTS_BESIDE = 4
_GROWTH_BESIDE = 1.5
"""Beside decoding rows a pass holds at most so many times the prompt tokens that one of the last few held:
where the machine was busy while one size was measured and not while another was, what is expected of a much
longer pass may be wrong, and each row would wait for it."""


def is_crowd(waiting_for_each_row: float) -> bool:
    """Tell whether so many that wait for their first token, for each row that decodes, are a crowd."""
    return waiting_for_each_row > _CROWD


@dataclasses.dataclass(frozen=True, slots=True)
class BudgetLimits:
    """What the settings say. `slice_s` 0 follows the decoding rows; `chunk_s` 0 bounds no pass alone."""

    slice_s: float
    chunk_s: float
    token_count: int
    """Most prompt tokens of a pass."""
    grid_token_count: int
    whole_token_count: int = 0
    """Prompts of fewer tokens go through all layers at once, however few of them a pass has room for."""
    ends_layers_in_time: bool = False
    """Whether a chunk goes through its layers until the time is over, and not through so many."""


class PrefillBudget:
    """Learns what passes cost. `crowd` is how many wait for their first token, for each row that decodes."""

    def __init__(self, limits: BudgetLimits) -> None:
        self._limits = limits
        self._costs = PassCostLearner()
        self._restore_debt_s = 0.0
        self._slowness = 1.0
        """Of the machine at this moment: what the last pass of rows and prompts took, of what such take."""
        self._counts_beside = collections.deque([_FIRST_COUNT_BESIDE], maxlen=_COUNTS_BESIDE)
        self._pace = LayerPace()
        self._rows_passes: collections.deque[tuple[PassSize, float]] = collections.deque(
            maxlen=_ROWS_PASSES_KEPT
        )
        """The last ones of decoding rows alone, and what they took."""

    def note_pass(self, size: PassSize, elapsed_s: float) -> None:
        """Learn from a pass that ran."""
        if 0 < size.draw_count < size.token_count and (expected_s := self.seconds(size)):
            self._note_slowness(elapsed_s / (_USUAL_OVERRUN * expected_s))
        if size.draw_count == size.token_count:
            self._rows_passes.append((size, elapsed_s))
            self._pace.note_rows_alone()
        self._costs.note(size, elapsed_s)

    def note_layers(self, beside: PassSize, part: PassSize, elapsed_s: float) -> None:
        """Learn from a pass in which a chunk went through some layers, `part` of it as it were, beside what
        went through all."""
        rows_s = self._known_rows_s(beside)
        layers_s = self.seconds(beside + part) - self.seconds(beside)
        if not layers_s > 0.0 or not elapsed_s > 0.0:
            return
        if beside.draw_count:
            self._note_slowness(elapsed_s / (self._pace.rows * rows_s + self._pace.layers * layers_s))
        self._pace.note(rows_s, layers_s, elapsed_s)

    def _rows_s(self, rows: PassSize) -> float:
        """Return what a pass of these rows takes now, whatever else is in it."""
        return self._pace.rows * self._known_rows_s(rows)

    def _known_rows_s(self, rows: PassSize) -> float:
        """Return what a pass of these rows takes by what the last ones took: whatever else ran since the
        start is in the costs, and they fit all of it."""
        taken = [elapsed_s / s for size, elapsed_s in self._rows_passes if (s := self.seconds(size))]
        return self.seconds(rows) * (statistics.median(taken) if taken else 1.0)

    def _note_slowness(self, overrun: float) -> None:
        self._slowness += _SLOWNESS_WEIGHT * (max(1.0, overrun) - self._slowness)

    def note_cut_beside(self, token_count: int) -> None:
        """Learn how many prompt tokens ran beside decoding rows where there were more to run."""
        self._counts_beside.append(token_count)

    def seconds(self, size: PassSize) -> float:
        """Return what a pass of this size is expected to take; 0 before any was measured."""
        cost = self._costs.cost()
        return cost.seconds(size) if cost and size.token_count else 0.0

    def restore_s(self, rows: PassSize, *, crowd: float, prompts_wait: bool, least_s: float) -> float:
        """Return how long blocks may be taken into use in this step; 0 while earlier ones took too long."""
        if not rows.token_count:
            self._restore_debt_s = 0.0
            return max(least_s, _SOON_S)
        share = _RESTORE_SHARE if prompts_wait else 1.0
        allowed_s = max(least_s, share * self._extra_s(rows, crowd))
        left_s = allowed_s - self._restore_debt_s
        self._restore_debt_s = max(0.0, -left_s)
        return max(0.0, left_s)

    def note_restore(self, elapsed_s: float, *, allowed_s: float) -> None:
        """Account for restores of a step; what they took too long is taken from the steps after it."""
        self._restore_debt_s += max(0.0, elapsed_s - allowed_s)

    def room(self, rows: PassSize, *, crowd: float, spent_s: float) -> PassRoom:
        """Return the room of a pass over these rows, in a step that spent some time on restores."""
        if not rows.token_count:
            soon_s = _SOON_FOR_CROWD_S if crowd else _SOON_S
            return PassRoom(self._costs, self._limits, rows, limit_s=None, soon_s=soon_s)
        rows_s, extra_s = self.seconds(rows), self._extra_s(rows, crowd)
        layers_s = extra_s
        if not is_crowd(crowd):
            layers_s = self._slowed_s(rows_s, _USED_SHARE_LAYERED * self._allowed_s(rows, crowd))
            extra_s = self._slowed_s(rows_s, extra_s)
        limit_s = rows_s + extra_s - spent_s
        most_s = rows_s + self._allowed_s(rows, crowd) - spent_s if not is_crowd(crowd) else 0.0
        tried = int(_GROWTH_BESIDE * max(self._counts_beside)) + self._limits.grid_token_count
        limits = dataclasses.replace(self._limits, token_count=min(tried, self._limits.token_count))
        layers = LayerRoom(
            layers_s - spent_s,
            pace=self._pace.layers,
            begins=not is_crowd(crowd) and spent_s <= 0.0,
            within_s=self._within_s(rows, crowd, spent_s=spent_s),
        )
        return PassRoom(self._costs, limits, rows, limit_s=limit_s, most_s=most_s, layers=layers)

    def _within_s(self, rows: PassSize, crowd: float, *, spent_s: float) -> float:
        """Return how long a pass may last for another layer of a chunk to begin."""
        if not self._limits.ends_layers_in_time:
            return math.inf
        return self._rows_s(rows) + _USED_SHARE_IN_TIME * self._allowed_s(rows, crowd) - spent_s

    def _slowed_s(self, rows_s: float, extra_s: float) -> float:
        """Return what is left of some time beyond that of the rows where the machine is slow: others' work
        lasts longer than a pass, and the next one is likely to be as slow as the last."""
        return max((rows_s + extra_s) / self._slowness - rows_s, _LEAST_EXTRA * extra_s)

    def _extra_s(self, rows: PassSize, crowd: float) -> float:
        """Return the time beyond that of the rows alone which is planned with."""
        share = _USED_SHARE_FOR_CROWD if is_crowd(crowd) else _USED_SHARE
        return share * self._allowed_s(rows, crowd)

    def _allowed_s(self, rows: PassSize, crowd: float) -> float:
        """Return the time beyond that of the rows alone which a pass may take."""
        factor = _FACTOR_FOR_CROWD if is_crowd(crowd) else _FACTOR_BESIDE_DECODE
        rows_s = self._rows_s(rows)
        if self._limits.slice_s or is_crowd(crowd):
            return (factor - 1.0) * (self._limits.slice_s or rows_s)
        # Who reads a reply compares with the pace before the prompt came, and rows grow beside a long one.
        return max(factor * self._pace_s(rows, rows_s) - rows_s, _LEAST_GROWN * (factor - 1.0) * rows_s)

    def _pace_s(self, rows: PassSize, rows_s: float) -> float:
        """Return what a pass of as many rows took when they were last alone, or takes now if that is less."""
        taken = [elapsed_s for size, elapsed_s in self._rows_passes if size.draw_count == rows.draw_count]
        return min(rows_s, statistics.median(taken)) if taken else rows_s


@dataclasses.dataclass(slots=True)
class LayerRoom:
    """What is left of one pass for a chunk that goes through some layers."""

    left_s: float
    """Beside what else is in the pass."""
    pace: float
    begins: bool
    """Whether another chunk may begin so."""
    within_s: float = math.inf
    """How long the pass may last for another layer to begin; no end where so many run as are asked for."""
    taken_s: float = 0.0


class PassRoom:
    """What is left of one pass while it is planned. `limit_s` None: nothing decodes."""

    def __init__(
        self,
        costs: PassCostLearner,
        limits: BudgetLimits,
        rows: PassSize,
        *,
        limit_s: float | None,
        most_s: float = math.inf,
        soon_s: float = _SOON_S,
        layers: LayerRoom | None = None,
    ) -> None:
        """`most_s`: how long a pass beside rows may take where less would hardly bring a prompt on. `soon_s`:
        how long a pass alone may be whatever its rate is."""
        self._costs = costs
        self._limits = limits
        self._rows = rows
        self._size = rows
        self._alone = limit_s is None
        self._limit_s = limit_s
        self._most_s = most_s
        self._whole_s: float | None = None
        """The limit of a pass alone, from its first chunk on."""
        self._soon_s = soon_s
        self._layers = layers
        """None where nothing decodes: then there is room for all."""

    def take(self, start: int, end: int, *, share: float = 1.0) -> int:
        """Give a prompt the tokens from `start` on, up to `end` or to this share of what is left; return
        where its chunk stops, which is `start` when nothing is left."""
        left = self._tokens_left(start)
        if share < 1.0:
            part, grid = math.ceil(share * left), self._limits.grid_token_count
            left = min(left, math.ceil(part / grid) * grid if part >= grid else part)
        count = end - start
        if count > left:
            fresh = self._is_fresh_alone(share)
            count = self._piece(count, left) if fresh else min(count, self._cut(left, start, share))
        stop = start + max(0, count)
        self._size = self._size + PassSize.of_chunk(start, stop - start)
        return stop

    def take_layered(self, start: int, end: int, *, layer_count: int) -> int:
        """Return where a prompt's chunk stops that begins to go through the layers a few in each pass.

        That is `start` where it would gain little, or something else is in the pass.
        """
        cost, layers = self._costs.cost(), self._layers
        if cost is None or layers is None or not layers.begins or self._size is not self._rows:
            return start
        if end < self._limits.whole_token_count:
            return start
        count, whole = end - start, max(1.0, self._tokens_left(start))
        all_s = layers.left_s * layer_count / (_LAYERS_AT_ONCE * layers.pace)
        fitting = cost.tokens_within(cost.seconds(self._rows) + all_s, start, beside=self._rows)
        length = min(float(_MOST_LAYERED_TOKENS), fitting, count)
        if length < _LAYERED_GAIN * whole:
            return start
        # All of one length, a little longer rather than a short one behind them.
        piece_count = max(1, math.ceil(count / length - _PIECE_ROUNDING))
        grid = self._limits.grid_token_count
        return start + min(count, math.ceil(count / piece_count / grid) * grid)

    def layers(self, whole: PassSize, *, left: int, layer_count: int, least: int, share: float = 1.0) -> int:
        """Give a chunk some of the layers that it has left to go through; `whole` is its size on all."""
        cost = self._costs.cost()
        assert cost is not None, "a chunk on its way was measured against something"
        if self._layers is None:
            return left
        rows_s = cost.seconds(self._rows)
        layer_s = self._layers.pace * (cost.seconds(self._rows + whole) - rows_s) / layer_count
        beside_s = cost.seconds(self._size) - rows_s
        left_s = share * (self._layers.left_s - self._layers.taken_s - beside_s)
        count = max(least, int(left_s / layer_s + _LAYER_ROUNDING)) if layer_s > 0.0 else left
        if count:
            count = math.ceil(left / math.ceil(left / count))  # in as many passes, all alike
        self._layers.taken_s += count * layer_s
        if count and share == 1.0 and not math.isinf(self._layers.within_s):
            return left  # the time ends them
        return count

    @property
    def within_s(self) -> float:
        """How long the pass may last for another layer of a chunk to begin."""
        return self._layers.within_s if self._layers is not None else math.inf

    def double(self) -> None:
        """Let what else comes into a pass alone take at most as long as what is in it already."""
        cost = self._costs.cost()
        if cost and self._whole_s is not None:
            self._limit_s = min(self._whole_s, 2.0 * cost.seconds(self._size))

    def _is_fresh_alone(self, share: float) -> bool:
        return self._alone and self._size is self._rows and share == 1.0

    def _piece(self, count: int, left: float) -> int:
        """Return the tokens of a chunk of a prompt that has a pass of its own, and more after it.

        Pieces are of that length or longer, all alike: a short last one would pay the fixed part again.
        """
        piece_count = max(1, int(count / max(1.0, left) + _PIECE_ROUNDING))
        if count / piece_count > _PIECE_EXCESS * max(1.0, left):
            piece_count += 1
        grid = self._limits.grid_token_count
        return min(count, math.ceil(count / piece_count / grid) * grid)

    def _cut(self, left: float, start: int, share: float) -> int:
        """Return the tokens of a chunk from `start` that takes what is left."""
        grid = self._limits.grid_token_count
        tokens = int(left)
        if tokens >= grid:
            return tokens // grid * grid
        if self._size is not self._rows:
            return tokens
        # A pass always brings the first prompt on, by the grid's tokens where they keep the promise at all.
        return grid if share == 1.0 and self._fits_whole(grid, start) else max(tokens, 1)

    def _fits_whole(self, count: int, start: int) -> bool:
        """Whether a first chunk takes no more than all of the time that a pass beside rows may take."""
        cost = self._costs.cost()
        if cost is None or self._alone:
            return False
        return cost.seconds(self._rows + PassSize.of_chunk(start, count)) <= self._most_s

    def _tokens_left(self, start: int) -> float:
        taken = self._size.token_count - self._rows.token_count
        most = float(self._limits.token_count - taken)
        cost = self._costs.cost()
        if cost is None:
            return min(most, _FIRST_TOKEN_COUNT - taken)
        if self._limit_s is None:
            self._limit_s = self._whole_s = self._limit_alone_s(start)
        if math.isinf(self._limit_s):
            return most
        layers_s = self._layers.taken_s if self._layers is not None else 0.0
        left = cost.tokens_within(self._limit_s - layers_s, start, beside=self._size)
        trusted = self._costs.trusted_tokens(start, budget_s=self._limit_s) - self._size.token_count
        if not self._alone and not self._costs.is_told_by(self._size.token_count + min(left, trusted)):
            # A size that tells nothing new would confirm whatever is believed: once, one twice as long.
            left = trusted
        return max(0.0, min(most, left, trusted))

    def _limit_alone_s(self, start: int) -> float:
        """Return how long a pass of prompts alone takes that begins with a chunk from `start`."""
        cost = self._costs.cost()
        assert cost is not None, "asked before any pass was measured"
        chunk_s = self._limits.chunk_s
        if not chunk_s:
            return math.inf
        limit_s = max(chunk_s, _LEAST_LIMIT * cost.base_s(start))
        trusted = self._costs.trusted_tokens(start, budget_s=chunk_s)
        most = max(1.0, min(float(self._limits.token_count), cost.tokens_within(limit_s, start), trusted))
        least = max(
            cost.tokens_at_rate(_RATE_SHARE_ALONE, start, limit=most),
            cost.tokens_within(min(self._soon_s, chunk_s), start),
        )
        length = max(1.0, min(most, least))
        if not self._costs.is_told_by(length):
            length = max(1.0, length / 2.0)
        return cost.seconds(PassSize.of_chunk(start, math.ceil(length)))
