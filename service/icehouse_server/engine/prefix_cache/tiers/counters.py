"""Counters of the prefix cache: lookups, drops on the way to SSD, restores."""

from __future__ import annotations

import dataclasses
from collections import Counter

from icehouse_server.domain.cache_stats import SpillDropCause
from icehouse_server.domain.events import CacheReport, ReuseLimit


@dataclasses.dataclass(slots=True)
class PrefixCounters:
    """Totals since start. Tokens are prompt tokens."""

    lookup_total: int = 0
    hit_total: int = 0
    ram_token_total: int = 0
    ssd_token_total: int = 0
    recompute_chosen_total: int = 0
    load_total: int = 0
    load_failed_total: int = 0
    restore_failed_total: int = 0
    promoted_block_total: int = 0
    promoted_token_total: int = 0
    miss_token_totals: Counter[ReuseLimit] = dataclasses.field(default_factory=Counter)
    drop_totals: Counter[SpillDropCause] = dataclasses.field(default_factory=Counter)

    def note_lookup(self, prompt_token_count: int, report: CacheReport) -> None:
        """Account for one prompt."""
        self.lookup_total += 1
        self.hit_total += report.cached_token_count > 0
        self.ram_token_total += report.ram_token_count
        self.ssd_token_total += report.ssd_token_count
        self.recompute_chosen_total += report.limit is ReuseLimit.RECOMPUTE_FASTER
        missed = prompt_token_count - report.cached_token_count
        self.miss_token_totals[report.limit] += missed

    def note_drop(self, cause: SpillDropCause) -> None:
        """Account for one block that is not sent to SSD."""
        self.drop_totals[cause] += 1
