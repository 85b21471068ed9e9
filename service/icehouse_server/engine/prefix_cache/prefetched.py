"""Prefetched tokens: how many were computed ahead of requests, and how many of them a request reused.

Inference thread only, pure data, no mlx.
"""

from __future__ import annotations

import dataclasses

from icehouse_server.domain.cache_stats import PrefetchStats
from icehouse_server.engine.core.sequence import Sequence
from icehouse_server.engine.prefix_cache.reuse_plan import Plan
from icehouse_server.engine.prefix_cache.tiers.node import Node


class PrefetchedTokens:
    """Counts them. `Node.prefetched_token_count` says which tokens no request has reused yet."""

    def __init__(self, *, has_kv: bool) -> None:
        """Without kv regions one block stands for everything before it."""
        self._has_kv = has_kv
        self._stats = PrefetchStats()

    def note_computed(self, sequence: Sequence, node: Node) -> None:
        """Record a new block that a sequence has computed."""
        if sequence.request.is_prefetch:
            computed = node.end_token_index - sequence.cache.cached_token_count
            node.prefetched_token_count = min(node.token_count, computed) if self._has_kv else computed

    def note_use(self, sequence: Sequence, plan: Plan) -> None:
        """Record that a sequence reuses the blocks of a plan."""
        if sequence.request.is_prefetch:
            return
        for node in plan.nodes if self._has_kv else plan.nodes[-1:]:
            first = node.end_token_index - node.prefetched_token_count
            stop = min(node.end_token_index, plan.token_count)
            self._stats.used_token_total += max(0, stop - first)
            node.prefetched_token_count = 0

    def end(self, sequence: Sequence) -> None:
        self._stats.done_total += sequence.has_finished
        self._stats.given_up_total += not sequence.has_finished
        computed = sequence.processed_token_count - sequence.cache.cached_token_count
        self._stats.computed_token_total += max(0, computed)

    def snapshot(self) -> PrefetchStats:
        return dataclasses.replace(self._stats)
