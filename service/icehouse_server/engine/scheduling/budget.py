"""Budget of a pass: how long it may take, in seconds, and how many prompt tokens fit into it.

Inference thread only. While rows decode, a pass and the restores of its step take at most twice as long as
the rows alone, so that running sequences keep their latency between tokens. With many sequences waiting for
their first token, they may take four times as long. After a pass that other work on the machine has slowed
down, the next one holds less, since such work rarely ends at once. While nothing decodes, no tokens are
delayed, and a pass is as long as the device needs to run at nearly its best rate.
"""

from __future__ import annotations

import collections
import math
import statistics

from icehouse_server.engine.attention.padding import LONG_BORDER, SHORT_BORDER
from icehouse_server.engine.scheduling.limits import SchedulerLimits
from icehouse_server.engine.scheduling.pass_cost import NOTHING, PassCostLearner, PassSize


class PassPlanner:
    """Learns what passes cost and sets their budgets. `waiting_per_row` is how many sequences wait for their
    first token, for each decoding row."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        policy = self._policy = limits.policy
        self._costs = PassCostLearner(policy)
        self._restore_debt_s = 0.0
        self._slowness = 1.0
        """How slow the machine is right now: what recent passes of rows and prompts took, over what was
        expected."""
        self._rows_passes: collections.deque[tuple[PassSize, float]] = collections.deque(
            maxlen=policy.kept_count
        )
        """The last passes of decoding rows alone, and what they took."""
        self._alone_passes: collections.deque[tuple[PassSize, float]] = collections.deque(
            maxlen=policy.kept_count
        )
        """Those of them in which no chunk went through some layers either."""

    def note_pass(
        self, size: PassSize, elapsed_s: float, *, beside_layers: bool = False, is_host_bound: bool = False
    ) -> None:
        """Learn from a pass that ran. `beside_layers`: its time is up to where a chunk went through some
        layers. `is_host_bound`: the device had finished before the host looked."""
        if size.draw_count == size.token_count:
            self._rows_passes.append((size, elapsed_s))
            if not beside_layers:
                self._alone_passes.append((size, elapsed_s))
        elif not beside_layers and size.draw_count and (expected_s := self.seconds(size)):
            self._note_slowness(elapsed_s / expected_s)
        self._costs.note(size, elapsed_s, is_host_bound=is_host_bound)

    def _note_slowness(self, ratio: float) -> None:
        """Note how much longer than expected a pass of rows and prompts took. A huge overrun is capped: most
        likely it was something that happens once, such as a compilation."""
        policy = self._policy
        overrun = min(max(1.0, ratio / policy.usual_overrun), policy.surprise_factor)
        self._slowness += policy.slowness_weight * (overrun - self._slowness)

    def is_long_queue(self, waiting_per_row: float) -> bool:
        """Return whether so many wait that their first tokens matter more than the pace of decoding rows."""
        return waiting_per_row > self._policy.queue_per_row

    def seconds(self, size: PassSize) -> float:
        """Return what a pass of this size is expected to take; 0 before any was measured."""
        cost = self._costs.cost()
        return cost.seconds(size) if cost and size.token_count else 0.0

    def restore_s(
        self, rows: PassSize, *, waiting_per_row: float, prompts_wait: bool, least_s: float
    ) -> float:
        """Return how long this step may spend on taking loaded blocks into use; 0 while earlier steps took
        too long."""
        if not rows.token_count:
            self._restore_debt_s = 0.0
            return max(least_s, self._policy.soon_s)
        share = self._policy.restore_share if prompts_wait else 1.0
        allowed_s = max(least_s, share * self._policy.used_share * self._allowed_s(rows, waiting_per_row))
        left_s = allowed_s - self._restore_debt_s
        self._restore_debt_s = max(0.0, -left_s)
        return max(0.0, left_s)

    def note_restore(self, elapsed_s: float, *, allowed_s: float) -> None:
        """Account for the restores of a step. Time over what was allowed is taken from later steps."""
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
            # Other work outlasts a pass, so the next pass is likely to be as slow as the last one.
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
        """Return what a pass of these rows takes, corrected by the last such passes: the fitted costs cover
        everything that ran since the start, so they may be off for rows alone."""
        taken = [elapsed_s / s for size, elapsed_s in self._rows_passes if (s := self.seconds(size))]
        return self.seconds(rows) * (statistics.median(taken) if taken else 1.0)

    def _allowed_s(self, rows: PassSize, waiting_per_row: float) -> float:
        """Return how much longer than the rows alone a pass may take."""
        policy, rows_s = self._policy, self._known_rows_s(rows)
        factor = policy.queue_factor if self.is_long_queue(waiting_per_row) else policy.beside_factor
        if self._limits.prefill_slice_s:
            return (factor - 1.0) * self._limits.prefill_slice_s
        if self.is_long_queue(waiting_per_row):
            return max(policy.queue_least_s, (factor - 1.0) * rows_s)
        # Readers of a reply compare with its pace before the prompt came, and rows grow meanwhile.
        taken = [elapsed_s for size, elapsed_s in self._alone_passes if size.draw_count == rows.draw_count]
        pace_s = min(rows_s, statistics.median(taken)) if taken else rows_s
        return max(factor * pace_s - rows_s, policy.least_grown * (factor - 1.0) * rows_s)


class PassBudget:
    """The room left in one pass while it is being planned."""

    within_s = math.inf
    """Until when, from the pass's beginning, another layer of a chunk may begin."""

    def __init__(self, costs: PassCostLearner, limits: SchedulerLimits, *, rows: PassSize) -> None:
        self._costs, self._limits, self._policy = costs, limits, limits.policy
        self._rows = self._size = rows
        self._has_begun = False
        """Whether the pass holds anything but the rows."""

    def take(self, start: int, end: int, *, share: float = 1.0) -> int:
        """Give a prompt its tokens from `start` to `end`, or as many as this share of the room holds. Return
        where its chunk stops: at `start` if there is no room."""
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
        """Give a prompt all its tokens, or none if they do not fit beside what the pass holds already. Return
        where its chunk stops."""
        if self._has_begun and end - start > self._tokens_left(start):
            return start
        self._has_begun = True
        self._size = self._size + self._limits.size_of_chunk(start, end - start)
        return end

    def take_layered(self, start: int, end: int, *, layer_count: int) -> int:
        """Return where a prompt's chunk stops if it is to go through a few layers in each pass, and `start`
        if it is to go through all of them at once."""
        return start

    def reserve(self, share: float) -> None:
        """Set this share of the time aside for a chunk that is on its way through the layers."""

    def double(self) -> None:
        """Let whatever else is added take at most as long as what the pass already holds, if nothing
        decodes."""

    def _limit_s(self, start: int) -> float:
        """Return how long the pass may take with a chunk that begins at `start`."""
        raise NotImplementedError

    def _cut(self, count: int, left: float, start: int, *, is_first: bool) -> int:
        """Return how many tokens of a longer prompt go into a chunk from `start`, where `left` would fit."""
        grid, tokens = self._limits.prefill_grid_token_count, int(left)
        if tokens >= grid:
            return tokens // grid * grid
        if not is_first:
            return tokens
        # Each pass advances the first prompt: by a grid step if the promise can be kept, else by what fits.
        return grid if self._keeps_promise(grid, start) else max(tokens, 1)

    def _cut_padded(self, count: int, left: float, start: int, *, is_first: bool) -> int:
        """Return the same where attention pads chunks: of the ends at padding borders, and on the grid before
        the first border, the one with the best rate. Padding may make the longest chunk expensive."""
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
        """Whether another chunk fits with its padding. Without padding that is known already."""
        cost = self._costs.cost()
        if cost is None or not self._limits.pads_attention:
            return True
        return cost.seconds(self._with(count, start)) <= self._limit_s(start)

    def _keeps_promise(self, count: int, start: int) -> bool:
        """Whether the pass takes no longer than promised with such a first chunk."""
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
        """Return the tokens that fit, or more if that size would teach nothing new."""
        return left


class AloneBudget(PassBudget):
    """Budget of a pass while nothing decodes."""

    def __init__(self, costs: PassCostLearner, limits: SchedulerLimits, *, has_queue: bool) -> None:
        super().__init__(costs, limits, rows=NOTHING)
        self._soon_s = self._policy.soon_for_queue_s if has_queue else self._policy.soon_s
        self._most_s: float | None = None
        """The limit, once there is a first chunk."""
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
        """Choose how long a pass takes whose first chunk begins at `start`."""
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
        # Pieces of equal length, at least that long: a short last one would pay the fixed part again.
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
        """`most_s`: how long the pass may take if a prompt would hardly advance in less. `layers_s`: time for
        layers of a chunk that begins now; 0 if none is to begin."""
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
        # Pieces of equal length, a little longer rather than with a short one at the end.
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
        # A size that teaches nothing new would confirm any belief, so one twice as long is tried once.
        is_clear = self._costs.separates_fixed_cost(self._size.token_count + min(left, trusted))
        return left if is_clear else trusted
