"""Planner: from a match to a plan, which regions come from RAM, what is loaded from SSD, is it worth it.

Pure functions over the prefix tree, for the inference thread and for `Explain`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

from icehouse_server.averages import MovingAverage
from icehouse_server.domain.events import CacheReport, ReuseLimit
from icehouse_server.engine.prefix_cache.divergence import find_divergence
from icehouse_server.engine.prefix_cache.tiers.matching import Match, Prompt, match
from icehouse_server.engine.prefix_cache.tiers.node import Node
from icehouse_server.engine.prefix_cache.tiers.runner_port import PlacedBlock
from icehouse_server.engine.prefix_cache.tiers.tree import PrefixTree
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

    def recompute_is_faster(self, *, ssd_bytes: int, token_count: int) -> bool:
        """Predict whether tokens are computed sooner than read; False while too little was measured."""
        is_measured = self.load_count >= _LEAST_LOADS and self.read_bytes_per_s and self.prefill_tokens_per_s
        restore_s = self.restore_s(ssd_bytes=ssd_bytes, token_count=token_count)
        return bool(is_measured) and restore_s > self.prefill_s(token_count)


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What a request will reuse. `to_load` is empty when RAM has it all."""

    nodes: tuple[Node, ...]
    token_count: int
    report: CacheReport
    placed: tuple[PlacedBlock, ...] = ()
    to_load: tuple[PlannedBlock, ...] = ()
    ssd_bytes: int = 0
    """What is read."""
    known_token_count: int = 0
    """Tokens that match at all, whether or not they can be reused."""

    @property
    def is_hit(self) -> bool:
        return self.token_count > 0


def plan(tree: PrefixTree, prompt: Prompt, rates: Rates, *, with_ssd: bool = True) -> Plan:
    """Plan for a prompt whose last token always runs; changes nothing."""
    settings = tree.settings
    found = match(tree, prompt, with_ssd=with_ssd)
    if found.token_count < min(settings.min_reuse_token_count, prompt.limit):
        # Rebuilding caches costs more than computing so few tokens.
        found = Match((), 0, found.known_token_count)
    made = _split(tree, prompt, found, _limit_of(tree, found, prompt.limit))
    if not made.to_load:
        return made
    if rates.reads_hang:
        limit = ReuseLimit.LOAD_FAILED
    elif settings.may_recompute and rates.recompute_is_faster(
        ssd_bytes=made.ssd_bytes, token_count=made.report.ssd_token_count
    ):
        limit = ReuseLimit.RECOMPUTE_FASTER
    else:
        return made
    return _split(tree, prompt, match(tree, prompt, with_ssd=False), limit)


def with_divergence(tree: PrefixTree, prompt: Prompt, made: Plan) -> Plan:
    """Have the report say where the prompt parts from a cached one of its own tenant."""
    if made.report.limit not in _MAY_DIVERGE:
        return made
    divergence = find_divergence(tree, prompt, known=made.nodes, known_token_count=made.known_token_count)
    return dataclasses.replace(made, report=dataclasses.replace(made.report, divergence=divergence))


def _limit_of(tree: PrefixTree, found: Match, limit: int) -> ReuseLimit:
    if found.token_count >= limit:
        return ReuseLimit.NONE
    if found.known_token_count == 0:
        return ReuseLimit.NO_MATCH
    if found.known_token_count > found.token_count and tree.facts.needs_checkpoint:
        return ReuseLimit.NO_CHECKPOINT
    return ReuseLimit.DIVERGED


def _split(tree: PrefixTree, prompt: Prompt, found: Match, limit: ReuseLimit) -> Plan:
    """Take from RAM what it has, and the rest from SSD."""
    placed: list[PlacedBlock] = []
    to_load: list[PlannedBlock] = []
    ssd_bytes = ssd_tokens = 0
    for node in found.nodes:
        kinds = tree.facts.needed_kinds(end_token_index=node.end_token_index, token_count=found.token_count)
        held = {kind: node.ram[kind] for kind in kinds if kind in node.ram}
        placed.append(PlacedBlock(node.start_token_index, node.token_count, held))
        missing = frozenset(kinds) - frozenset(held)
        if missing:
            keys = node.token_ids or prompt.keys[node.start_token_index : node.end_token_index]
            to_load.append(PlannedBlock(tree.header_of(node, keys), missing))
            ssd_bytes += sum(node.ssd.get(kind, 0) for kind in missing)
            ssd_tokens += min(node.end_token_index, found.token_count) - node.start_token_index
    if to_load and not tree.facts.has_kv:
        # One checkpoint stands for everything before it.
        ssd_tokens = found.token_count
    return Plan(
        found.nodes,
        found.token_count,
        CacheReport(ram_token_count=found.token_count - ssd_tokens, ssd_token_count=ssd_tokens, limit=limit),
        tuple(placed),
        tuple(to_load),
        ssd_bytes=ssd_bytes,
        known_token_count=found.known_token_count,
    )
