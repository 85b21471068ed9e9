"""Counters of the prefix cache: lookups, drops on the way to SSD, restores."""

from __future__ import annotations

import dataclasses
from collections import Counter

from icehouse_server.domain.cache_stats import (
    CacheStats,
    LookupStats,
    MissTokens,
    PromoteStats,
    SpillDropCause,
    SpillDrops,
)
from icehouse_server.domain.events import CacheReport, ReuseLimit


@dataclasses.dataclass(slots=True)
class PrefixCounters:
    """Since start, in the form in which they are shown. Tokens are prompt tokens."""

    lookups: LookupStats = dataclasses.field(default_factory=LookupStats)
    promote: PromoteStats = dataclasses.field(default_factory=PromoteStats)
    miss_token_totals: Counter[ReuseLimit] = dataclasses.field(default_factory=Counter)
    drop_totals: Counter[SpillDropCause] = dataclasses.field(default_factory=Counter)
    """Blocks that were not sent to SSD."""

    def note_lookup(self, prompt_token_count: int, report: CacheReport) -> None:
        """Account for one prompt."""
        self.lookups.lookup_total += 1
        self.lookups.hit_total += report.cached_token_count > 0
        self.lookups.ram_token_total += report.ram_token_count
        self.lookups.ssd_token_total += report.ssd_token_count
        self.promote.recompute_chosen_total += report.limit is ReuseLimit.RECOMPUTE_FASTER
        missed = prompt_token_count - report.cached_token_count
        self.miss_token_totals[report.limit] += missed

    def joined(self, theirs: CacheStats, *, promote: PromoteStats) -> CacheStats:
        """Return the SSD tier's statistics with what is counted here.

        A load is requested and used here, and read there: each number of `promote` is counted by one
        thread and 0 with the other.
        """
        drops = self.drop_totals.copy()
        drops.update({drop.cause: drop.block_total for drop in theirs.spill.drops})
        names = [field.name for field in dataclasses.fields(PromoteStats)]
        both = {name: getattr(promote, name) + getattr(theirs.promote, name) for name in names}
        return dataclasses.replace(
            theirs,
            lookups=dataclasses.replace(self.lookups, miss_tokens=MissTokens.of(self.miss_token_totals)),
            spill=dataclasses.replace(theirs.spill, drops=SpillDrops.of(drops)),
            promote=PromoteStats(**both),
        )
