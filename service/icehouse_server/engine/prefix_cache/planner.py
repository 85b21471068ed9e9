"""Planner: from a match to a plan, which regions come from RAM, what is loaded from SSD, is it worth it.

Pure functions over the index, for the inference thread and for `Explain`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

from icehouse_server.averages import MovingAverage
from icehouse_server.domain.blocks import BlockHeader, RegionKind, split_keys
from icehouse_server.domain.events import CacheReport, ReuseLimit
from icehouse_server.domain.ids import BlockHash
from icehouse_server.engine.prefix_cache.divergence import find_divergence
from icehouse_server.engine.prefix_cache.tiers.entry import Entry
from icehouse_server.engine.prefix_cache.tiers.index import BlockIndex, Match
from icehouse_server.engine.prefix_cache.tiers.ports import PlacedBlock
from icehouse_server.engine.prefix_cache.tiers.settings import PrefixSettings
from icehouse_server.storage.api import PlannedBlock

_ADOPT_WEIGHT = 0.3
_LEAST_LOADS = 3
"""Fewer say too little: the first one after a start may meet cold files and fresh pages."""
_UNTRIED = 0.99
"""What is believed of how long restoring takes, by each prompt that was computed instead. What was slow for a
while is tried again: after 10 prompts where it took a tenth longer, 230 where it took ten times that."""
_MAY_DIVERGE = (ReuseLimit.NO_MATCH, ReuseLimit.DIVERGED, ReuseLimit.NO_CHECKPOINT)


@dataclasses.dataclass(slots=True)
class Rates:
    """Measured here, moving averages; 0 while nothing was measured."""

    read_bytes_per_s: float = 0.0
    adopt_tokens_per_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    load_count: int = 0
    reads_hang: bool = False
    """Whether the disk has not come back from a read: nothing is planned to be read until it has."""
    untried_count: int = 0
    """Prompts since the last load that were computed since that seemed faster."""
    _adopt: MovingAverage = dataclasses.field(
        default_factory=lambda: MovingAverage(weight=_ADOPT_WEIGHT), init=False, repr=False, compare=False
    )

    def note_read(self, bytes_per_s: float) -> None:
        """Take in how fast loads have been read, after one more of them."""
        self.read_bytes_per_s = bytes_per_s
        self.load_count += 1
        self.untried_count = 0

    def note_adopt(self, tokens_per_s: float) -> None:
        """Take in how fast caches were rebuilt once more."""
        self.adopt_tokens_per_s = self._adopt.add(tokens_per_s)

    def restore_s(self, *, ssd_bytes: int, token_count: int) -> float:
        """Predict how long restoring takes, in seconds."""
        read_s = ssd_bytes / self.read_bytes_per_s if self.read_bytes_per_s else 0.0
        adopt_s = token_count / self.adopt_tokens_per_s if self.adopt_tokens_per_s else 0.0
        # A product: powers differ from processor to processor in the last bit.
        return (read_s + adopt_s) * math.prod(itertools.repeat(_UNTRIED, self.untried_count))

    def prefill_s(self, token_count: int) -> float:
        """Predict how long computing takes, in seconds; 0 before anything was measured."""
        return token_count / self.prefill_tokens_per_s if self.prefill_tokens_per_s else 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class PrefixPlan:
    """What a request will reuse. `to_load` is empty when RAM has it all."""

    entries: tuple[Entry, ...]
    token_count: int
    report: CacheReport
    placed: tuple[PlacedBlock, ...] = ()
    to_load: tuple[PlannedBlock, ...] = ()
    origin_token_index: int = 0

    @property
    def is_hit(self) -> bool:
        return self.token_count > 0


@dataclasses.dataclass(frozen=True, slots=True)
class Planner:
    """Reads the index; changes nothing."""

    settings: PrefixSettings
    index: BlockIndex
    rates: Rates

    def plan(
        self,
        *,
        root: BlockHash,
        token_ids: Sequence[int],
        with_ssd: bool,
        shared_root: BlockHash | None = None,
    ) -> PrefixPlan:
        """Plan for a prompt whose last token always runs."""
        return self._plan(root, token_ids, with_ssd=with_ssd, shared_root=shared_root)[0]

    def plan_with_divergence(
        self,
        *,
        root: BlockHash,
        token_ids: Sequence[int],
        with_ssd: bool,
        shared_root: BlockHash | None = None,
    ) -> PrefixPlan:
        """As `plan`, and have the report say where the prompt parts from a cached one of its own tenant."""
        plan, known_token_count = self._plan(root, token_ids, with_ssd=with_ssd, shared_root=shared_root)
        if plan.report.limit not in _MAY_DIVERGE:
            return plan
        divergence = find_divergence(
            self.index,
            root=root,
            token_ids=token_ids,
            known=plan.entries,
            known_token_count=known_token_count,
            is_own=shared_root in (None, root),
        )
        return dataclasses.replace(plan, report=dataclasses.replace(plan.report, divergence=divergence))

    def _plan(
        self, root: BlockHash, token_ids: Sequence[int], *, with_ssd: bool, shared_root: BlockHash | None
    ) -> tuple[PrefixPlan, int]:
        """Return the plan, and how many tokens match at all."""
        limit = len(token_ids) - 1
        find = functools.partial(
            self.index.match, root=root, token_ids=token_ids, token_limit=limit, shared_root=shared_root
        )
        match = find(with_ssd=with_ssd)
        if match.token_count < min(self.settings.min_reuse_token_count, limit):
            # Rebuilding caches costs more than computing so few tokens.
            match = Match((), 0, match.known_token_count)
        reason = self._limit_of(match, limit)
        plan = self._split(match, token_ids, reason)
        if plan.to_load and self.rates.reads_hang:
            match = find(with_ssd=False)
            plan = self._split(match, token_ids, ReuseLimit.LOAD_FAILED)
        elif plan.to_load and self.settings.may_recompute and self._recompute_is_faster(plan):
            match = find(with_ssd=False)
            plan = self._split(match, token_ids, ReuseLimit.RECOMPUTE_FASTER)
        return plan, match.known_token_count

    def ssd_bytes(self, plan: PrefixPlan) -> int:
        """Return how much the plan reads."""
        by_hash = {entry.hash: entry for entry in plan.entries}
        return sum(by_hash[b.header.hash].ssd.get(kind, 0) for b in plan.to_load for kind in b.regions)

    def _recompute_is_faster(self, plan: PrefixPlan) -> bool:
        rates = self.rates
        if rates.load_count < _LEAST_LOADS or not (rates.read_bytes_per_s and rates.prefill_tokens_per_s):
            return False
        tokens = plan.report.ssd_token_count
        return rates.restore_s(ssd_bytes=self.ssd_bytes(plan), token_count=tokens) > rates.prefill_s(tokens)

    def _limit_of(self, match: Match, limit: int) -> ReuseLimit:
        if match.token_count >= limit:
            return ReuseLimit.NONE
        if match.known_token_count == 0:
            return ReuseLimit.NO_MATCH
        if match.known_token_count > match.token_count and self.index.rules.facts.needs_checkpoint:
            return ReuseLimit.NO_CHECKPOINT
        return ReuseLimit.DIVERGED

    def _split(self, match: Match, token_ids: Sequence[int], reason: ReuseLimit) -> PrefixPlan:
        """Take the beginning from RAM as far as its kv goes without a gap, the rest from SSD."""
        placed: list[PlacedBlock] = []
        to_load: list[PlannedBlock] = []
        origin = 0
        in_ram = True
        has_kv_to_load = False
        for entry in match.entries:
            kinds = self.index.rules.needed_kinds(entry, match.token_count)
            in_ram = in_ram and (RegionKind.KV not in kinds or RegionKind.KV in entry.ram)
            held = {kind: entry.ram[kind] for kind in kinds if kind in entry.ram}
            if not in_ram:
                held.pop(RegionKind.KV, None)
            missing = frozenset(kinds) - frozenset(held)
            placed.append(PlacedBlock(entry.start_token_index, entry.token_count, held))
            if missing:
                if RegionKind.KV in missing and not has_kv_to_load:
                    has_kv_to_load = True
                    origin = entry.start_token_index
                wanted = min(entry.end_token_index, match.token_count) - entry.start_token_index
                to_load.append(PlannedBlock(self._header(entry, token_ids), missing, wanted))
        ssd_tokens = sum(block.token_count for block in to_load)
        if to_load and not self.index.rules.facts.has_kv:
            # One checkpoint stands for everything before it.
            ssd_tokens = match.token_count
        report = CacheReport(
            ram_token_count=match.token_count - ssd_tokens, ssd_token_count=ssd_tokens, limit=reason
        )
        return PrefixPlan(match.entries, match.token_count, report, tuple(placed), tuple(to_load), origin)

    def _header(self, entry: Entry, token_ids: Sequence[int]) -> BlockHeader:
        known = entry.token_ids
        if known is None:
            known = tuple(token_ids[entry.start_token_index : entry.end_token_index])
            assert self.index.name_of(parent=entry.parent, token_ids=known) == entry.hash
        ids, extra = split_keys(known)
        return BlockHeader(
            hash=entry.hash,
            parent=entry.parent,
            fingerprint=self.settings.fingerprint,
            start_token_index=entry.start_token_index,
            token_ids=ids,
            block_token_limit=self.settings.block_token_count,
            extra=extra,
        )
