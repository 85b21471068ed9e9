"""Pass cost, learned from the passes that ran: a fixed part, and a price for each token, score, draw and
read.

The fixed part is paid whatever the pass holds (the weights are read). Each token has its price, each position
that it is scored against, each token whose logits are read (the head, the draw), and each position whose keys
and values are read. That is the device's time. A host that runs ahead builds the next pass meanwhile. If
building takes longer than the device, a pass with a chunk takes as long as building; passes of rows alone may
be replayed instead. It knows nothing of prompts or policy, has no clock of its own and belongs to one
thread.

The faster half of the last few passes of each size and context is fitted by least squares of the *relative*
error: so a pass of 4 tokens says as much as one of 1,000, a hundred tiny passes do not hide what one long
pass taught. Other work on the machine only ever delays, so it hardly counts. Old passes fade. Passes that
took twice or half of what was expected are set aside. Many of them in a row mean that the machine's speed has
changed, and then all that was learned is scaled.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import operator
import statistics
from collections.abc import Iterable

from icehouse_server.engine.scheduling.policy import PassPolicy

_LEAST_S = 1e-6
"""No pass takes less; a clock that says so was read at the wrong moment."""


@dataclasses.dataclass(frozen=True, slots=True)
class PassSize:
    """What a pass holds. The sizes of its parts add up."""

    token_count: int
    score_count: int
    """Sum over its tokens of the positions each one is scored against, masked ones included."""
    draw_count: int = 0
    """Tokens whose logits are read."""
    read_count: int = 0
    """Sum over its rows and chunks of the positions whose keys and values are read for all its tokens."""

    @classmethod
    def of_chunk(cls, start: int, token_count: int, *, draw_count: int = 0) -> PassSize:
        """Return the size of a chunk of one sequence on top of `start` tokens."""
        end = start + token_count
        return cls(token_count, token_count * end, draw_count, end if token_count else 0)

    @classmethod
    def of_rows(cls, context_token_counts: Iterable[int]) -> PassSize:
        """Return the size of one token for each decoding row, on top of so many of its own."""
        counts = list(context_token_counts)
        position_count = sum(counts) + len(counts)
        return cls(len(counts), position_count, len(counts), position_count)

    @property
    def has_chunk(self) -> bool:
        """Whether it holds more than decoding rows, whose tokens are all drawn from."""
        return self.token_count > self.draw_count

    def with_guesses(self, count: int) -> PassSize:
        """Return the size with the guesses that rows fed besides, on contexts of the usual length."""
        scores = count * self.score_count // max(1, self.token_count)
        return self + PassSize(count, scores, count)  # their context is read anyway

    def part(self, share: float) -> PassSize:
        """Return the size of this on a share of the layers."""
        return PassSize(
            max(1, round(share * self.token_count)),
            round(share * self.score_count),
            0,
            round(share * self.read_count),
        )

    def counts(self) -> tuple[int, int, int, int]:
        """Return tokens, scores, draws and reads; a fit asks hundreds, for which `astuple` is slow."""
        return self.token_count, self.score_count, self.draw_count, self.read_count

    def __add__(self, other: PassSize) -> PassSize:
        return PassSize(
            self.token_count + other.token_count,
            self.score_count + other.score_count,
            self.draw_count + other.draw_count,
            self.read_count + other.read_count,
        )


NOTHING = PassSize(0, 0)


@dataclasses.dataclass(frozen=True, slots=True)
class PassCost:
    """Seconds of a pass: `fixed_s`, `token_s` for each token, `score_s` for each token and position, `draw_s`
    for each token whose logits are read, `read_s` for each position that is read. With a chunk it is
    `least_chunk_pass_s` at least, which the host takes to build it.

    Methods with `start` are about a chunk of one sequence after so many tokens; they may return infinity.
    """

    fixed_s: float
    token_s: float
    score_s: float
    draw_s: float = 0.0
    read_s: float = 0.0
    least_chunk_pass_s: float = 0.0

    def seconds(self, size: PassSize) -> float:
        """Return what a pass of this size is expected to take, more than nothing."""
        return max(self.device_s(size), self.least_chunk_pass_s if size.has_chunk else 0.0)

    def device_s(self, size: PassSize) -> float:
        """Return how long the device is expected to be at it, more than nothing."""
        tokens_s = self.token_s * size.token_count + self.draw_s * size.draw_count
        scores_s, reads_s = self.score_s * size.score_count, self.read_s * size.read_count
        return max(self.fixed_s + tokens_s + scores_s + reads_s, _LEAST_S)

    def base_s(self, start: int) -> float:
        """Return what a chunk takes, however few tokens it has."""
        return self.fixed_s + self.read_s * start

    def tokens_within(self, budget_s: float, start: int, *, beside: PassSize = NOTHING) -> float:
        """Return how many tokens a chunk may have for the pass to take `budget_s`, beside what it holds."""
        if budget_s < self.least_chunk_pass_s:
            return 0.0
        # fixed + slope * n + score_s * n * n = budget, in the form that also holds for score_s = 0
        slope = self._slope(start)
        left_s = max(0.0, budget_s - self.device_s(beside) - self.read_s * start)
        divisor = slope + math.sqrt(slope**2 + 4.0 * self.score_s * left_s)
        return 2.0 * left_s / divisor if divisor > 0.0 else math.inf

    def tokens_at_rate(self, share: float, start: int, *, limit: float) -> float:
        """Return the fewest tokens that give a chunk this share of the best rate up to `limit` tokens."""
        fixed_s = self.base_s(start)
        if fixed_s <= 0.0:
            return 1.0
        best = min(limit, math.sqrt(fixed_s / self.score_s) if self.score_s > 0.0 else math.inf)
        if math.isinf(best):
            slack_s = self._slope(start) * (1.0 / share - 1.0)
            return fixed_s / slack_s if slack_s > 0.0 else math.inf
        # seconds(n) / n may be at most that of the best chunk, divided by the share: the smaller root
        allowed_s = (fixed_s / best + self._slope(start) + self.score_s * best) / share
        slack_s = allowed_s - self._slope(start)
        return 2.0 * fixed_s / (slack_s + math.sqrt(slack_s**2 - 4.0 * self.score_s * fixed_s))

    def _slope(self, start: int) -> float:
        return self.token_s + self.score_s * start + self.read_s


_PRIOR = (
    (1.0, 0.0, 0.0, 0.0, 0.0, 0.5),
    (0.0, 1.0, 0.0, 0.0, 0.0, 0.5),
    (0.0, 0.0, 1.0, 0.0, 0.0, 0.0),
    (0.0, 0.0, 0.0, 1.0, 0.0, 0.0),
    (0.0, 0.0, 0.0, 0.0, 1.0, 0.0),
)
"""Shares of the fixed part, tokens, scores, draws and reads in the usual pass, as if they were measured."""
_MOST_SPREAD = 1000.0
"""A pass counts as if it took at least this fraction of the usual one's time: one over it."""
_Kind = tuple[int, int, int]
"""Doublings of tokens, of positions and of draws."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Measured:
    size: PassSize
    elapsed_s: float
    number: int
    is_fitted: bool = True
    """False if it only shows that the device takes no longer, as was expected."""


class PassCostLearner:
    """Predicts the cost of a pass from earlier ones, and says up to which size it can be trusted."""

    def __init__(self, policy: PassPolicy) -> None:
        self._policy = policy
        self._passes: dict[_Kind, collections.deque[_Measured]] = {}
        self._doubted: dict[_Kind, _Measured] = {}
        """Passes that were the first of their kind and took far too long: a compilation, or other work."""
        self._noted_count = 0
        self._surprises: list[tuple[float, _Measured]] = []
        """Consecutive passes that were far off, each with its time over what was expected."""
        self._built_s = collections.deque[float](maxlen=policy.kept_count)
        """What the last passes with a chunk took that waited for the host."""
        self._cost: PassCost | None = None
        self._is_stale = False

    def note(self, size: PassSize, elapsed_s: float, *, is_host_bound: bool = False) -> None:
        """Learn from a pass that ran. `is_host_bound`: the device had finished before the host looked."""
        assert size.token_count > 0, size
        if size.has_chunk and is_host_bound:
            self._note_built(size, elapsed_s)
            return
        if size.has_chunk and self._built_s and elapsed_s < statistics.median(self._built_s):
            self._built_s.append(elapsed_s)  # the host has become faster
            self._is_stale = True
        policy = self._policy
        self._noted_count += 1
        measured = _Measured(size, max(elapsed_s, _LEAST_S), self._noted_count)
        if self._is_far_off(measured):
            self.cost()  # fitted on demand, so there may be passes that it does not know yet
        ratio, is_far_off = self._ratio(measured), self._is_far_off(measured)
        if is_far_off and ratio > 1.0 and self._doubts(measured):
            return
        is_surprise = is_far_off and _kind_of(size) in self._passes
        if not is_surprise or (self._surprises and (ratio > 1.0) is not (self._surprises[0][0] > 1.0)):
            self._store_surprises()
        if not is_surprise:
            self._store(measured)
            return
        self._surprises.append((ratio, measured))
        surprising_s = sum(each.elapsed_s for _, each in self._surprises)
        is_long = surprising_s >= policy.long_surprise_s
        if len(self._surprises) >= (policy.long_surprise_count if is_long else policy.surprise_count):
            self._change_speed()
            self._store_surprises()

    def _note_built(self, size: PassSize, elapsed_s: float) -> None:
        """Learn from a pass that took as long as the host, and the device no longer."""
        self._noted_count += 1
        self._built_s.append(elapsed_s)
        cost = self.cost()
        is_fitted = cost is None or cost.device_s(size) > elapsed_s
        self._store(_Measured(size, max(elapsed_s, _LEAST_S), self._noted_count, is_fitted))

    def _doubts(self, measured: _Measured) -> bool:
        """Whether a pass that took far too long teaches nothing yet: a second one of its kind confirms it."""
        kind = _kind_of(measured.size)
        if kind in self._passes:
            return False
        before = self._doubted.pop(kind, None)
        if before is None:
            self._doubted[kind] = measured
            return True
        self._store(before)
        return False

    def cost(self) -> PassCost | None:
        """Return what passes cost, as far as known; None before the first."""
        if self._is_stale:
            passes = self._undisturbed() if self._cost else self._living()
            passes = [measured for measured in passes if measured.is_fitted] or passes
            weights = [self._weight(measured) for measured in passes]
            fitted = _fit(passes, weights, self._policy.prior_weight)
            built_s = statistics.median(self._built_s) if self._built_s else 0.0
            self._cost, self._is_stale = dataclasses.replace(fitted, least_chunk_pass_s=built_s), False
        return self._cost

    def trusted_tokens(self, start: int, *, budget_s: float, beside: PassSize = NOTHING) -> float:
        """Return the tokens of the largest chunk from `start` that the passes so far allow to predict, beside
        what the pass holds already; 0 before any.

        It may be larger if it would keep the budget even with no fixed part.
        """
        policy, living = self._policy, self._living()
        if not living:
            return 0.0
        most = max(living, key=lambda measured: measured.size.token_count)
        tokens = max(policy.tokens_reach, budget_s / most.elapsed_s) * most.size.token_count
        scores = policy.scores_reach * max(
            policy.light_context * most.size.token_count, *(measured.size.score_count for measured in living)
        )
        # n * (start + n) = scores
        scores = max(0.0, scores - beside.score_count)
        by_scores = 2.0 * scores / (start + math.sqrt(start**2 + 4.0 * scores)) if scores else 0.0
        by_scores = max(by_scores, float(policy.light_context - start))
        return max(0.0, min(tokens - beside.token_count, by_scores))

    def separates_fixed_cost(self, token_count: float) -> bool:
        """Whether the passes so far separate what is fixed from what grows, or would after one of this
        size."""
        counts = [measured.size.token_count for measured in self._living()]
        spread = self._policy.separating_spread
        return not counts or max(*counts, token_count) >= spread * min(*counts, token_count)

    def _store(self, measured: _Measured) -> None:
        made = collections.deque[_Measured](maxlen=self._policy.kept_count)
        self._passes.setdefault(_kind_of(measured.size), made).append(measured)
        self._is_stale = True
        oldest = self._noted_count - self._policy.life
        for stale in [kind for kind, passes in self._passes.items() if passes[-1].number <= oldest]:
            del self._passes[stale]

    def _living(self) -> list[_Measured]:
        return [measured for passes in self._passes.values() for measured in passes]

    def _undisturbed(self) -> list[_Measured]:
        """Return the faster half of each kind's passes: other work on the machine only ever delays."""
        return [
            measured
            for passes in self._passes.values()
            for measured in sorted(passes, key=self._ratio)[: (len(passes) + 1) // 2]
        ]

    def _weight(self, measured: _Measured) -> float:
        """Return the weight of a pass of this age, as the square root that least squares take."""
        age = self._noted_count - measured.number
        return math.sqrt(max(0.0, 1.0 - age / self._policy.life))

    def _is_far_off(self, measured: _Measured) -> bool:
        factor = self._policy.surprise_factor
        return not 1.0 / factor < self._ratio(measured) < factor

    def _ratio(self, measured: _Measured) -> float:
        """Return a pass's time over what was last expected for its size."""
        cost = self._cost or self.cost()
        return measured.elapsed_s / cost.seconds(measured.size) if cost else 1.0

    def _store_surprises(self) -> None:
        """Learn from the surprising passes, once it is known whether the whole machine changed with them."""
        for _, measured in self._surprises:
            self._store(measured)
        self._surprises.clear()

    def _change_speed(self) -> None:
        """Scale all that is known by how much slower or faster the surprising passes were.

        They measured only their own sizes, and a machine that becomes busy slows all parts of the cost alike.
        """
        factor = statistics.median(ratio for ratio, _ in self._surprises)
        for passes in self._passes.values():
            for index, old in enumerate(passes):
                passes[index] = dataclasses.replace(old, elapsed_s=factor * old.elapsed_s)
        self._doubted.clear()
        self._is_stale = True


def _kind_of(size: PassSize) -> _Kind:
    return size.token_count.bit_length(), size.score_count.bit_length(), size.draw_count.bit_length()


def _fit(passes: list[_Measured], weights: list[float], prior_weight: float) -> PassCost:
    """Return the non-negative cost with the least relative errors over the passes.

    The result has the same bits on every processor: it uses only exact sums, products and quotients, which
    IEEE 754 rounds in one way. BLAS, powers and exponentials differ in the last bit. Who gets one token more
    may depend on that, and a story from one machine could not be replayed on another.
    """
    sizes = [(1, *measured.size.counts()) for measured in passes]
    usual_s = statistics.median(measured.elapsed_s for measured in passes)
    # A column's unit is its price if the usual pass had no other cost, so that unknowns are shares near 1.
    units = [usual_s / max(1.0, statistics.median(column)) for column in zip(*sizes, strict=True)]
    rows = [[prior_weight * number for number in row] for row in _PRIOR]
    for size, measured, weight in zip(sizes, passes, weights, strict=True):
        seconds = max(measured.elapsed_s, usual_s / _MOST_SPREAD)
        shares = [weight * count * unit / seconds for count, unit in zip(size, units, strict=True)]
        rows.append([*shares, weight])
    columns = list(zip(*rows, strict=True))
    products = [[math.fsum(map(operator.mul, one, other)) for other in columns] for one in columns]
    free, shares = list(range(len(units))), [0.0] * len(units)
    while free:
        solution = _solution([[products[row][column] for column in (*free, -1)] for row in free])
        if min(solution) >= 0.0:
            for index, share in zip(free, solution, strict=True):
                shares[index] = share
            break
        free.pop(solution.index(min(solution)))
    return PassCost(*(share * unit for share, unit in zip(shares, units, strict=True)))


def _solution(rows: list[list[float]]) -> list[float]:
    """Solve a positive definite system whose last column is the right-hand side."""
    count = len(rows)
    for pivot, upper in enumerate(rows):
        for lower in range(pivot + 1, count):
            factor = rows[lower][pivot] / upper[pivot]
            rows[lower] = [low - factor * high for low, high in zip(rows[lower], upper, strict=True)]
    solution = [0.0] * count
    for index in reversed(range(count)):
        left = rows[index][count]
        for later in range(index + 1, count):
            left -= rows[index][later] * solution[later]
        solution[index] = left / rows[index][index]
    return solution
