"""Capture: which regions of a block are kept, and where a prefill stops for checkpoints."""

from __future__ import annotations

from icehouse_server.domain.blocks import RegionKind
from icehouse_server.engine.core.sequence import Sequence
from icehouse_server.engine.prefix_cache.tiers.prefix_settings import PrefixSettings
from icehouse_server.engine.prefix_cache.tiers.runner_port import CacheFacts

_LEAST_GAP = 64
"""Least tokens from where a prefill begins to a border: a nearer checkpoint would save too little."""


def captured_kinds(
    settings: PrefixSettings, facts: CacheFacts, sequence: Sequence, *, stop: int, reached: int
) -> list[RegionKind]:
    """Return the kinds of regions, in file order, that can still be cut for a block of this sequence that
    ends at `stop`. Its caches have `reached` that token or a later one; guesses may be among them."""
    size = settings.block_token_count
    kinds = [RegionKind.KV] if facts.has_kv else []
    # Windows hold all of the prompt's last chunk; after it they lose a token for each new one.
    passed = reached - stop if reached > sequence.prefill_target else 0
    if facts.holds_window(size, passed_token_count=passed):
        kinds.append(RegionKind.WINDOW)
    if facts.needs_checkpoint and stop == reached:
        # Kept at the prompt's last full block, at its end, where the sequence ends, at borders of messages,
        # and at intervals.
        is_last_full = stop == sequence.prefill_target // size * size
        is_end = stop % size != 0 or stop == sequence.prefill_target
        is_border = stop in sequence.border_points
        if is_last_full or is_end or is_border or stop % settings.checkpoint_interval_tokens == 0:
            kinds.append(RegionKind.CHECKPOINT)
    return kinds


def stop_at_borders(sequence: Sequence, facts: CacheFacts) -> None:
    """Have a sequence's prefill stop at borders of messages, if the model needs checkpoints there."""
    if facts.needs_checkpoint:
        first, borders = sequence.processed_token_count + _LEAST_GAP, sequence.request.border_token_indices
        sequence.border_points = tuple(i for i in borders if first <= i < sequence.prefill_target)
        sequence.capture_points += sequence.border_points
