"""Blocks that came from SSD on their way back into RAM, where the next request will look first.

Inference thread only. The sequence that was restored from them goes on at once; its caches are copied
out again in slices behind its decode steps, one sequence at a time, so that however many were restored
together a step is lengthened by one slice. Nothing is copied before its first token: its caller waits.
"""

from __future__ import annotations

from service.domain.blocks import RegionKind
from service.engine.prefix_cache import PrefixCache
from service.engine.prefix_ports import CacheRunner, KvCutting
from service.engine.sequence import Phase, Sequence

_SLICE_SHARE = 0.5
"""Of the time a step may spend on loaded blocks: a slice may end a layer late."""


class Promotions:
    """At most one block is under way; the blocks that wait are their sequences' own (`Sequence.unkept`)."""

    def __init__(self, cache: PrefixCache, runner: CacheRunner, *, budget_s: float) -> None:
        self._cache = cache
        self._runner = runner
        self._slice_s = _SLICE_SHARE * budget_s
        self._current: Sequence | None = None
        self._cutting: KvCutting | None = None

    def step(self, sequence: Sequence) -> None:
        """After a token of this sequence: bring its next block nearer to RAM, if it is its turn."""
        if self._current is not None and self._current.phase is not Phase.DECODING:
            self._current = None
        if not self._is_due(sequence):
            # Whose turn it was gives it away only now, so that the next one begins in the next step.
            self._current = None if self._current is sequence else self._current
            return
        if self._current is None:
            self._current, self._cutting = sequence, None
        if self._current is sequence and self._copy(sequence):
            sequence.unkept.pop(0)
            self._cutting = None

    def _is_due(self, sequence: Sequence) -> bool:
        has_told = len(sequence.output_token_ids) > 1
        is_decoding = sequence.phase is Phase.DECODING
        return bool(sequence.unkept) and is_decoding and has_told and self._cache.may_write(sequence)

    def _copy(self, sequence: Sequence) -> bool:
        """Copy a slice of the sequence's next block; True when nothing of it is left to do."""
        block = sequence.unkept[0]
        entry = self._cache.index.get(block.hash)
        if entry is None:
            return True
        start, stop = entry.start_token_index, entry.end_token_index
        regions = dict(block.regions)
        if self._cache.facts.has_kv and RegionKind.KV not in entry.ram:
            if self._cutting is None:
                self._cutting = self._runner.begin_cut(start=start, stop=stop)
            region = self._runner.continue_cut(sequence.sequence_id, self._cutting, budget_s=self._slice_s)
            if region is None:
                return False
            regions[RegionKind.KV] = region
        if entry.token_ids is None:
            entry.token_ids = sequence.tokens(start, stop)
        missing = {kind: region for kind, region in regions.items() if kind not in entry.ram}
        self._cache.store(entry, missing, chain=sequence.chain)
        return True
