"""Counters of the prefix cache: lookups, drops on the way to SSD, restores."""

from __future__ import annotations

import dataclasses
from collections import Counter

from icehouse_server.domain.cache_stats import LookupStats, PromoteStats, SpillDropCause
from icehouse_server.domain.events import CacheReport, ReuseLimit


@dataclasses.dataclass(slots=True)
class PrefixCounters:
    """Since start, in the shape they are shown in. Tokens are prompt tokens."""

    lookups: LookupStats = dataclasses.field(default_factory=LookupStats)
    promote: PromoteStats = dataclasses.field(default_factory=PromoteStats)
    miss_token_totals: Counter[ReuseLimit] = dataclasses.field(default_factory=Counter)
    drop_totals: Counter[SpillDropCause] = dataclasses.field(default_factory=Counter)

    def note_lookup(self, prompt_token_count: int, report: CacheReport) -> None:
        """Account for one prompt."""
        self.lookups.lookup_total += 1
        self.lookups.hit_total += report.cached_token_count > 0
        self.lookups.ram_token_total += report.ram_token_count
        self.lookups.ssd_token_total += report.ssd_token_count
        self.promote.recompute_chosen_total += report.limit is ReuseLimit.RECOMPUTE_FASTER
        missed = prompt_token_count - report.cached_token_count
        self.miss_token_totals[report.limit] += missed

    def note_drop(self, cause: SpillDropCause) -> None:
        """Account for one block that is not sent to SSD."""
        self.drop_totals[cause] += 1
