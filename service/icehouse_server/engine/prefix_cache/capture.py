"""Capture: which regions a block is kept with, where a sequence stands. Pure; inference thread."""

from __future__ import annotations

import dataclasses

from icehouse_server.domain.blocks import RegionKind
from icehouse_server.engine.core.sequence import Sequence
from icehouse_server.engine.prefix_cache.tiers.runner_port import CacheFacts


@dataclasses.dataclass(frozen=True, slots=True)
class CaptureRules:
    """What the model's caches can still show of a block that ends at or before the sequence's position."""

    facts: CacheFacts
    block_token_count: int
    checkpoint_interval_tokens: int

    def kinds_at(self, sequence: Sequence, stop: int, reached: int) -> list[RegionKind]:
        """Return the kinds, in file order, of a block of this sequence that ends at `stop`, where its caches
        have `reached`: guesses may be in them that nobody has been told yet."""
        kinds = [RegionKind.KV] if self.facts.has_kv else []
        # Windows hold all of the prompt's last chunk; behind it they let go of a token for each that comes.
        passed = reached - stop if reached > sequence.prefill_target else 0
        if self.facts.holds_window(self.block_token_count, passed_token_count=passed):
            kinds.append(RegionKind.WINDOW)
        is_here = stop == reached
        if self.facts.needs_checkpoint and is_here and self._is_checkpoint(sequence, stop):
            kinds.append(RegionKind.CHECKPOINT)
        return kinds

    def _is_checkpoint(self, sequence: Sequence, position: int) -> bool:
        """Every so often, at the prompt's last full block, at its end, and where the sequence ends."""
        size = self.block_token_count
        is_last_full = position == sequence.prefill_target // size * size
        is_interval = position % self.checkpoint_interval_tokens == 0
        return is_interval or is_last_full or position % size != 0 or position == sequence.prefill_target
