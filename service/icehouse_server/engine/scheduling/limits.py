"""Scheduler limits: bounds on what runs at once, and for how long, from the settings, device and model."""

from __future__ import annotations

import dataclasses

from icehouse_server.engine.attention.padding import padding_of
from icehouse_server.engine.core.memory_model import MemoryModel
from icehouse_server.engine.scheduling.pass_cost import PassSize
from icehouse_server.engine.scheduling.policy import POLICY, PassPolicy


@dataclasses.dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds on what runs at once, and for how long.

    A chunk has at most `prefill_chunk_token_count` prompt tokens, and chunks end at multiples of it, counted
    from the sequence's start; where time cuts them shorter their lengths are multiples of
    `prefill_grid_token_count`, which divides it, or less than that.
    `prefill_slice_s` 0 follows the decoding rows; `prefill_chunk_s` 0 leaves passes whole while nothing
    decodes.
    """

    running_limit: int
    prefilling_limit: int
    prefill_chunk_token_count: int
    prefill_grid_token_count: int = 1
    pass_token_count: int = 0
    """Most prompt tokens of a pass, of several sequences; 0 is one chunk's."""
    pads_attention: bool = False
    """Whether attention pads chunks: those that time cuts end on the grid and have one of a few lengths."""
    prefill_slice_s: float = 0.0
    prefill_chunk_s: float = 0.0
    chunk_ends_at_last_block: int = 0
    """Block size when a chunk must end at the prompt's last full block (checkpoints), else 0."""
    cuts_before_last_token: bool = False
    """Whether a chunk must end before the prompt's last token, since what is stored is cut there and only as
    it passes."""
    measured_chunk_token_count: int = 0
    """Longest chunk whose logits are wanted, a divisor or multiple of the block size; 0 is any."""
    layer_count: int = 0
    """Layers of the model that a chunk may go through in turns of passes; 0 where it must go through all."""
    whole_token_count: int = 128
    """Prompts of fewer tokens go through all layers at once: they hold little that each chunk reads."""
    runs_whole: bool = False
    """Whether each prompt runs in one pass, whatever that takes: an encoder keeps nothing between passes."""
    policy: PassPolicy = POLICY

    def whole(self, context_token_count: int) -> SchedulerLimits:
        """Return the same for a model whose prompts run whole, as long as its context."""
        return dataclasses.replace(
            self,
            prefill_chunk_token_count=context_token_count,
            prefill_grid_token_count=1,
            pass_token_count=max(context_token_count, self.pass_token_count),
            pads_attention=False,
            runs_whole=True,
        )

    @property
    def most_pass_token_count(self) -> int:
        return self.pass_token_count or self.prefill_chunk_token_count

    def within(self, model: MemoryModel, *, free_bytes: int) -> SchedulerLimits:
        """Return the same with as many tokens in a pass as there is memory for beside the weights, but those
        of a whole chunk at least."""
        budget_bytes = max(0, int(self.policy.pass_memory_share * free_bytes))
        fitting = min(self.most_pass_token_count, model.pass_token_count(budget_bytes=budget_bytes))
        return dataclasses.replace(self, pass_token_count=max(self.prefill_chunk_token_count, fitting))

    def size_of_chunk(self, start: int, token_count: int, *, draw_count: int = 0) -> PassSize:
        """Return the size of a chunk of one sequence on top of `start` tokens, padding included."""
        size = PassSize.of_chunk(start, token_count, draw_count=draw_count)
        if not self.pads_attention or token_count <= self.prefill_grid_token_count:
            return size
        padded = padding_of(start, token_count)
        return dataclasses.replace(size, score_count=padded.query_count * padded.key_count)
