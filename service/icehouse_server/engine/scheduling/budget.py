"""Budget of a pass: how long it may last, in seconds, and how many prompt tokens fit into it.

Inference thread only. Beside rows that decode, a pass and the restores of its step last at most twice as long
as the rows would alone, so that running sequences keep their latency between tokens; four times where many
sequences wait for their first token. Behind a pass that others' work made longer the next one holds less:
that work seldom ends with it. While nothing decodes nobody's tokens wait, and a pass is as long as the device
needs to run at nearly its best rate.
"""

from __future__ import annotations

import collections
import math
import statistics

from icehouse_server.engine.attention.padding import LONG_BORDER, SHORT_BORDER
from icehouse_server.engine.scheduling.limits import SchedulerLimits
from icehouse_server.engine.scheduling.pass_cost import NOTHING, PassCostLearner, PassSize


class PassPlanner:
    """Learns what passes cost. `waiting_per_row`: sequences that wait for their first token, per decoding
    row."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        policy = self._policy = limits.policy
        self._costs = PassCostLearner(policy)
        self._restore_debt_s = 0.0
        self._slowness = 1.0
        """Of the machine at this moment: what the last pass of rows and prompts took, of what such take."""
        self._rows_passes: collections.deque[tuple[PassSize, float]] = collections.deque(
            maxlen=policy.kept_count
        )
        """The last ones of decoding rows, and what they took."""
        self._alone_passes: collections.deque[tuple[PassSize, float]] = collections.deque(
            maxlen=policy.kept_count
        )
        """Those of them in which nothing else ran."""

    def note_pass(
        self, size: PassSize, elapsed_s: float, *, beside_layers: bool = False, is_host_bound: bool = False
    ) -> None:
        """Learn from a pass that ran; `beside_layers`: from what it took until a chunk went through some
        layers in it. `is_host_bound`: the device had done it before the host came to look."""
        if size.draw_count == size.token_count:
            self._rows_passes.append((size, elapsed_s))
            if not beside_layers:
                self._alone_passes.append((size, elapsed_s))
        elif not beside_layers and size.draw_count and (expected_s := self.seconds(size)):
            self._note_slowness(elapsed_s / expected_s)
        self._costs.note(size, elapsed_s, is_host_bound=is_host_bound)

    def _note_slowness(self, ratio: float) -> None:
        """Note what a pass of rows and prompts took of what was expected. One that took far longer was held
        up by something that is likely to be over with it, such as a compilation, and counts for no more."""
        policy = self._policy
        overrun = min(max(1.0, ratio / policy.usual_overrun), policy.surprise_factor)
        self._slowness += policy.slowness_weight * (overrun - self._slowness)

    def is_long_queue(self, waiting_per_row: float) -> bool:
        """Return whether so many wait that their first tokens come before the pace of decoding rows."""
        return waiting_per_row > self._policy.queue_per_row

    def seconds(self, size: PassSize) -> float:
        """Return what a pass of this size is expected to take; 0 before any was measured."""
        cost = self._costs.cost()
        return cost.seconds(size) if cost and size.token_count else 0.0

    def restore_s(
        self, rows: PassSize, *, waiting_per_row: float, prompts_wait: bool, least_s: float
    ) -> float:
        """Return how long blocks may be taken into use in this step; 0 while earlier ones took too long."""
        if not rows.token_count:
            self._restore_debt_s = 0.0
            return max(least_s, self._policy.soon_s)
        share = self._policy.restore_share if prompts_wait else 1.0
        allowed_s = max(least_s, share * self._policy.used_share * self._allowed_s(rows, waiting_per_row))
        left_s = allowed_s - self._restore_debt_s
        self._restore_debt_s = max(0.0, -left_s)
        return max(0.0, left_s)

    def note_restore(self, elapsed_s: float, *, allowed_s: float) -> None:
        """Account for restores of a step; what they took too long is taken from the steps after it."""
        self._restore_debt_s += max(0.0, elapsed_s - allowed_s)

    def budget(self, rows: PassSize, *, waiting_per_row: float, spent_s: float) -> PassBudget:
        """Return the budget of a pass over these rows, in a step that spent some time on restores."""
        policy, limits = self._policy, self._limits
        if not rows.token_count:
            return AloneBudget(self._costs, limits, has_queue=waiting_per_row > 0.0)
        rows_s, allowed_s = self.seconds(rows), self._allowed_s(rows, waiting_per_row)
        extra_s = policy.used_share * allowed_s
        most_s, layers_s = rows_s + allowed_s - spent_s, extra_s
        within_s = self._known_rows_s(rows) + extra_s - spent_s
        if self.is_long_queue(waiting_per_row):
            most_s = layers_s = 0.0
        else:
            # Others' work lasts longer than a pass, and the next one is likely to be as slow as the last.
            slowed_s = (rows_s + extra_s) / self._slowness - rows_s
            extra_s = max(slowed_s, policy.least_extra * extra_s)
        return BesideBudget(
            self._costs,
            limits,
            rows=rows,
            limit_s=rows_s + extra_s - spent_s,
            most_s=most_s,
            layers_s=layers_s,
            within_s=within_s,
        )

    def _known_rows_s(self, rows: PassSize) -> float:
        """Return what a pass of these rows takes by what the last ones took: whatever else ran since the
        start is in the costs, and they fit all of it."""
        taken = [elapsed_s / s for size, elapsed_s in self._rows_passes if (s := self.seconds(size))]
        return self.seconds(rows) * (statistics.median(taken) if taken else 1.0)

    def _allowed_s(self, rows: PassSize, waiting_per_row: float) -> float:
        """Return the time beyond that of the rows alone which a pass may take."""
        policy, rows_s = self._policy, self._known_rows_s(rows)
        factor = policy.queue_factor if self.is_long_queue(waiting_per_row) else policy.beside_factor
        if self._limits.prefill_slice_s:
            return (factor - 1.0) * self._limits.prefill_slice_s
        if self.is_long_queue(waiting_per_row):
            return max(policy.queue_least_s, (factor - 1.0) * rows_s)
        # Who reads a reply compares with the pace before the prompt came, and rows grow beside a long one.
        taken = [elapsed_s for size, elapsed_s in self._alone_passes if size.draw_count == rows.draw_count]
        pace_s = min(rows_s, statistics.median(taken)) if taken else rows_s
        return max(factor * pace_s - rows_s, policy.least_grown * (factor - 1.0) * rows_s)


class PassBudget:
    """What is left of one pass while it is planned."""

    within_s = math.inf
    """How long the pass may last for another layer of a chunk to begin."""

    def __init__(self, costs: PassCostLearner, limits: SchedulerLimits, *, rows: PassSize) -> None:
        self._costs, self._limits, self._policy = costs, limits, limits.policy
        self._rows = self._size = rows
        self._has_begun = False
        """Whether anything but the rows is in it."""

    def take(self, start: int, end: int, *, share: float = 1.0) -> int:
        """Give a prompt the tokens from `start` on, up to `end` or to this share of what is left; return
        where its chunk stops, which is `start` when nothing is left."""
        left, count = self._tokens_left(start), end - start
        if share < 1.0:
            part, grid = math.ceil(share * left), self._limits.prefill_grid_token_count
            left = min(left, math.ceil(part / grid) * grid if part >= grid else part)
        if count > left or not self._fits(count, start):
            cut = self._cut_padded if self._limits.pads_attention else self._cut
            count = min(count, cut(count, left, start, is_first=not self._has_begun and share == 1.0))
        if count > 0:
            self._has_begun = True
            self._size = self._size + self._limits.size_of_chunk(start, count)
        return start + max(0, count)

    def take_whole(self, start: int, end: int) -> int:
        """Give a prompt all its tokens, or none where there is something in the pass and too little is left;
        return where its chunk stops."""
        if self._has_begun and end - start > self._tokens_left(start):
            return start
        self._has_begun = True
        self._size = self._size + self._limits.size_of_chunk(start, end - start)
        return end

    def take_layered(self, start: int, end: int, *, layer_count: int) -> int:
        """Return where a prompt's chunk stops that begins to go through the layers in turns of passes; that
        is `start` where it is to go through all at once."""
        return start

    def reserve(self, share: float) -> None:
        """Leave so much of the time for a chunk on its way through the layers."""

    def double(self) -> None:
        """Let what else comes into a pass alone take at most as long as what is in it already."""

    def _limit_s(self, start: int) -> float:
        """Return how long the pass may last, with a chunk from `start`."""
        raise NotImplementedError

    def _cut(self, count: int, left: float, start: int, *, is_first: bool) -> int:
        """Return the tokens of a chunk from `start` that takes what is left of a longer prompt."""
        grid, tokens = self._limits.prefill_grid_token_count, int(left)
        if tokens >= grid:
            return tokens // grid * grid
        if not is_first:
            return tokens
        # A pass always brings the first prompt on, by the grid's tokens where they keep the promise at all.
        return grid if self._keeps_promise(grid, start) else max(tokens, 1)

    def _cut_padded(self, count: int, left: float, start: int, *, is_first: bool) -> int:
        """Return the same where attention pads the chunk: of the ends on its borders, and on the grid before
        the first one, the one with the best rate, since padding may make the longest chunk a dear one."""
        grid, behind = self._limits.prefill_grid_token_count, start % SHORT_BORDER
        ends = [*range(grid, SHORT_BORDER, grid), *range(SHORT_BORDER, 2 * LONG_BORDER + 1, SHORT_BORDER)]
        usual: list[int] = [end - behind for end in ends if 0 < end - behind <= count] or [count]
        fitting = [n for n in usual if n <= left and self._fits(n, start)]
        if not fitting:
            return usual[0] if is_first else 0
        cost = self._costs.cost()
        if cost is None:
            return fitting[-1]
        rates = {n: n / cost.seconds(self._with(n, start)) for n in fitting}
        return max(fitting, key=rates.__getitem__)

    def _with(self, count: int, start: int) -> PassSize:
        return self._size + self._limits.size_of_chunk(start, count)

    def _fits(self, count: int, start: int) -> bool:
        """Whether one chunk more keeps the time with all its padding; elsewhere that is known already."""
        cost = self._costs.cost()
        if cost is None or not self._limits.pads_attention:
            return True
        return cost.seconds(self._with(count, start)) <= self._limit_s(start)

    def _keeps_promise(self, count: int, start: int) -> bool:
        """Whether a first chunk takes no more than all of the time that a pass may take."""
        return False

    def _tokens_left(self, start: int) -> float:
        taken = self._size.token_count - self._rows.token_count
        most = float(self._limits.most_pass_token_count - taken)
        cost = self._costs.cost()
        if cost is None:
            return max(0.0, min(most, self._policy.first_token_count - taken))
        limit_s = self._limit_s(start)
        if math.isinf(limit_s):
            return most
        left = cost.tokens_within(limit_s, start, beside=self._size)
        trusted = self._costs.trusted_tokens(start, budget_s=limit_s, beside=self._size)
        return max(0.0, min(most, self._probing(left, trusted), trusted))

    def _probing(self, left: float, trusted: float) -> float:
        """Return the tokens that fit, or more where they would teach nothing new."""
        return left


class AloneBudget(PassBudget):
    """Budget of a pass while nothing decodes."""

    def __init__(self, costs: PassCostLearner, limits: SchedulerLimits, *, has_queue: bool) -> None:
        super().__init__(costs, limits, rows=NOTHING)
        self._soon_s = self._policy.soon_for_queue_s if has_queue else self._policy.soon_s
        self._most_s: float | None = None
        """The limit, from the first chunk on."""
        self._doubled_s = math.inf

    def double(self) -> None:
        cost = self._costs.cost()
        if cost and self._most_s is not None:
            self._doubled_s = 2.0 * cost.seconds(self._size)

    def _limit_s(self, start: int) -> float:
        if self._most_s is None:
            self._most_s = self._chosen_limit_s(start)
        return min(self._most_s, self._doubled_s)

    def _chosen_limit_s(self, start: int) -> float:
        """Return how long a pass takes that begins with a chunk from `start`."""
        cost, policy, chunk_s = self._costs.cost(), self._policy, self._limits.prefill_chunk_s
        assert cost is not None, "asked before any pass was measured"
        if not chunk_s:
            return math.inf
        limit_s = max(chunk_s, policy.least_limit * cost.base_s(start))
        most = max(1.0, min(float(self._limits.most_pass_token_count), cost.tokens_within(limit_s, start)))
        best = cost.tokens_at_rate(policy.alone_rate_share, start, limit=most)
        best_s = cost.seconds(PassSize.of_chunk(start, math.ceil(min(best, most))))
        limit_s = min(limit_s, max(best_s, min(self._soon_s, chunk_s)))
        trusted = self._costs.trusted_tokens(start, budget_s=limit_s)
        length = min(most, trusted, cost.tokens_within(limit_s, start))
        if not self._costs.separates_fixed_cost(length):
            return cost.seconds(PassSize.of_chunk(start, math.ceil(length / 2.0)))
        return limit_s

    def _cut(self, count: int, left: float, start: int, *, is_first: bool) -> int:
        if not is_first:
            return super()._cut(count, left, start, is_first=False)
        # Pieces are of that length or longer, all alike: a short last one would pay the fixed part again.
        length, grid = max(1.0, left), self._limits.prefill_grid_token_count
        piece_count = max(1, int(count / length + self._policy.piece_rounding))
        return math.ceil(count / piece_count / grid) * grid


class BesideBudget(PassBudget):
    """Budget of a pass over rows that decode."""

    def __init__(
        self,
        costs: PassCostLearner,
        limits: SchedulerLimits,
        *,
        rows: PassSize,
        limit_s: float,
        most_s: float,
        layers_s: float,
        within_s: float,
    ) -> None:
        """`most_s`: how long the pass may take where less would hardly bring a prompt on. `layers_s`: time
        for layers of a chunk that begins now; 0 where none is to begin."""
        super().__init__(costs, limits, rows=rows)
        self._planned_s, self._promised_s = limit_s, most_s
        self._layers_s, self.within_s = layers_s, within_s

    def take_layered(self, start: int, end: int, *, layer_count: int) -> int:
        cost, policy, count = self._costs.cost(), self._policy, end - start
        if cost is None or self._has_begun or end < self._limits.whole_token_count or not self._layers_s:
            return start
        all_s = cost.seconds(self._rows) + self._layers_s * layer_count / policy.layers_at_once
        fitting = cost.tokens_within(all_s, start, beside=self._rows)
        length = min(fitting, count)
        if length < policy.layered_gain * max(1.0, self._tokens_left(start)):
            return start
        # All of one length, a little longer rather than a short one behind them.
        piece_count = max(1, math.ceil(count / length - policy.piece_rounding))
        grid = self._limits.prefill_grid_token_count
        return start + min(count, math.ceil(count / piece_count / grid) * grid)

    def reserve(self, share: float) -> None:
        cost = self._costs.cost()
        assert cost is not None, "a chunk on its way was measured against something"
        self._has_begun = True
        self._planned_s -= share * max(0.0, self._planned_s - cost.seconds(self._rows))

    def _limit_s(self, start: int) -> float:
        cost = self._costs.cost()
        least_s = 0.0 if cost is None else cost.least_chunk_pass_s
        return max(self._planned_s, self._policy.built_factor * least_s)

    def _keeps_promise(self, count: int, start: int) -> bool:
        cost = self._costs.cost()
        size = self._rows + self._limits.size_of_chunk(start, count)
        return cost is not None and cost.seconds(size) <= self._promised_s

    def _probing(self, left: float, trusted: float) -> float:
        # A size that teaches nothing new would confirm whatever is believed: once, one twice as long.
        is_clear = self._costs.separates_fixed_cost(self._size.token_count + min(left, trusted))
        return left if is_clear else trusted
