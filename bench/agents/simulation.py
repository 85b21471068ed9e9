"""Simulation: a trace played against one cache, and what came of it."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from bench.agents.checkpoints import Budget, Checkpoints, Victim
from bench.agents.paths import Paths, paths_of
from bench.agents.rules import Rule
from bench.agents.tiers import Cache, Limits
from bench.agents.trace import Trace


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What one rule came to at one size. Counts of tokens; rates from 0 to 1."""

    rule: str
    block_limit: int
    ram_hit_rate: float
    """Prompt tokens found in RAM, of all prompt tokens."""
    ssd_hit_rate: float
    written_token_count: int
    """KV written to SSD; a checkpoint counts as the tokens that take as much."""
    read_token_count: int
    checkpoints_per_session: float | None = None
    """How many a session had of its own at its end, on average."""
    shared_checkpoint_count: int = 0
    """Those held at the trace's end that count for no session."""

    @property
    def hit_rate(self) -> float:
        """Prompt tokens found in a tier, of all prompt tokens."""
        return self.ram_hit_rate + self.ssd_hit_rate


class Replay:
    """A trace with its paths, which are made once and played many times."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.paths: Paths = paths_of(trace)

    def play(self, rule: Rule, limits: Limits) -> Outcome:
        """Play the trace against a cache of models whose KV can be cut anywhere."""
        return self._play(Cache(self.paths, limits, rule), rule.value, limits)

    def play_checkpoints(
        self, budget: Budget, limits: Limits, *, size_blocks: int, rule: Rule = Rule.LRU
    ) -> Outcome:
        """Play it for models that need checkpoints, each of which takes so many blocks."""
        checkpoints = Checkpoints(self.paths, budget, size_blocks=size_blocks)
        cache = Cache(self.paths, limits, rule, checkpoints=checkpoints)
        found = self._play(cache, budget.name, limits)
        held = checkpoints.held_at_ends
        return dataclasses.replace(
            found,
            checkpoints_per_session=statistics.fmean(held) if held else 0.0,
            shared_checkpoint_count=checkpoints.shared_count,
        )

    def _play(self, cache: Cache, name: str, limits: Limits) -> Outcome:
        ram_count = ssd_count = 0
        for number, request in enumerate(self.trace.requests):
            hit = cache.play(number, request)
            ram_count += hit.ram_count
            ssd_count += hit.ssd_count
        block, total = self.paths.block_token_count, max(1, self.trace.prompt_token_count)
        return Outcome(
            rule=name,
            block_limit=limits.block_count,
            ram_hit_rate=ram_count * block / total,
            ssd_hit_rate=ssd_count * block / total,
            written_token_count=cache.written_count * block,
            read_token_count=ssd_count * block,
        )


def limits_of(paths: Paths, *, share: float, ram_share: float) -> Limits:
    """Return a cache of a share of all different blocks, and of that a share in RAM."""
    count = max(1, round(share * paths.block_count))
    return Limits(count, max(1, round(ram_share * count)))


def budgets(sizes: Sequence[int]) -> list[Budget]:
    """Return the rules for checkpoints that are compared, the first one today's; budgets of these sizes."""
    limited = [
        Budget(f"budget {size}, {victim.value}", per_session=size, victim=victim)
        for size in sizes
        for victim in Victim
    ]
    sparing = [
        dataclasses.replace(each, name=f"{each.name}, branches", at_branches=True, spares_shared=True)
        for each in limited
    ]
    return [
        Budget("all: every 2,048 tokens and ends", at_heads=False),
        Budget("all: heads and ends", interval_token_count=0),
        Budget("a newer one replaces what it extends", supersedes=True),
        *limited,
        *sparing,
    ]
