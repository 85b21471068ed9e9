"""Policy of passes: all constants of planning and of learning costs. Everything else is measured or set."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class PassPolicy:
    """How long a pass may take, who shares it, and how far measurements are trusted.

    A constant stays here only while a test misses it.
    """

    alone_limit: int | None = None
    """After so many requests in a row that ran alone, an idle engine expects no burst after the next one and
    begins it 3 ms earlier. None: it always waits, which is little beside a CPU's first pass."""

    # How long a pass takes while rows decode.
    beside_factor: float = 2.0
    """Longest pass, relative to one of the decoding rows alone: latency between tokens at most doubles."""
    built_factor: float = 1.15
    """Or so many times what the host takes to build a pass with any chunk, if that is longer. Tokens that the
    device computes meanwhile are free, and with fewer of them a prompt takes more such passes."""
    queue_factor: float = 4.0
    """The same where the queue is long."""
    queue_least_s: float = 0.0
    """Or so much longer than the rows, if that is more: nobody notices a gap of 50 ms."""
    queue_per_row: float = 0.2
    """The queue is long if more sequences than this wait for each one that decodes."""
    used_share: float = 0.78
    """Share of the extra time that is planned: passes do not always take what was expected, rows grow
    meanwhile, and publishing and capturing take time too."""
    least_grown: float = 0.4
    """Least share of the extra time when the rows have grown since they ran alone."""
    least_extra: float = 0.4
    """Least share of the extra time while the machine is slow."""
    usual_overrun: float = 1.1
    """How much longer passes beside rows usually take than the faster half of such passes."""
    slowness_weight: float = 0.5
    """Weight of the last pass among those before it. With full weight, every second pass was a long one."""
    restore_share: float = 0.5
    """Share of the extra time for restores while prompts are waiting to be computed."""

    # How long a pass takes while nothing decodes.
    alone_rate_share: float = 0.95
    """Share of the best known rate: those who wait for prefill matter more than those who may arrive."""
    soon_s: float = 0.1
    """Passes as short as this keep no newcomer waiting for long."""
    soon_for_queue_s: float = 0.4
    """The same while several prompts wait. In shorter passes the first of them would begin to decode, and
    rows that decode make the passes of the others short."""
    least_limit: float = 4.0
    """Least limit of a pass alone, in fixed parts: a shorter pass would be mostly fixed cost."""
    piece_rounding: float = 0.25
    """A remainder of a prompt becomes a piece of its own from three quarters of a piece on."""

    # Chunks that go through a few layers in each pass.
    layers_at_once: float = 2.0
    """Layers that a pass should have room for when a chunk begins. With fewer there is nothing to adjust when
    the room changes, and more mean shorter chunks, which read more."""
    layered_gain: float = 2.0
    """A chunk goes through a few layers in each pass if it can then have so many times the tokens that one
    pass has room for."""

    # Who is let in, and who shares a pass.
    passed_limit: int = 16
    """So many others may be admitted ahead of one that comes first but has no memory yet."""
    blocked_limit: int = 8
    """So many without memory are skipped in a step."""
    pass_memory_share: float = 1.0 / 16.0
    """Share of the memory beside the weights for the activations of a pass with several chunks."""
    oldest_share: float = 0.25
    """The oldest prompt's share of a pass's prompt tokens while shorter ones go first."""

    # What is learned, and how far it is trusted.
    first_token_count: int = 64
    """Prompt tokens of the first pass, before any was measured."""
    kept_count: int = 6
    """Passes remembered for rows alone, and for each doubling of tokens and of positions."""
    life: int = 512
    """Age in passes at which one is dropped. Until then it counts less and less."""
    surprise_factor: float = 2.0
    """A pass that took so many times what was expected, or the inverse, teaches nothing by itself."""
    surprise_count: int = 12
    long_surprise_count: int = 3
    long_surprise_s: float = 2.0
    """So many surprises in a row, in one direction, at sizes that were measured before, mean a change of
    speed. `long_surprise_count` are enough if together they took `long_surprise_s`."""
    prior_weight: float = 0.03
    """Weight, in measured passes, of the assumption that half of the usual pass's time is fixed and half
    grows with its tokens. Either extreme would choose sizes that cannot refute it."""
    tokens_reach: float = 2.0
    scores_reach: float = 4.0
    """What is learned is trusted for passes of up to so many times the largest one measured."""
    light_context: int = 1024
    """Positions up to which a token's scores cost little compared with the rest of it."""
    separating_spread: float = 1.5
    """Sizes that differ by this factor tell the fixed part from what grows."""


POLICY = PassPolicy()
GPU_POLICY = dataclasses.replace(POLICY, used_share=0.9, queue_least_s=0.05, alone_limit=2)
"""A GPU's passes take what is expected, and it computes them while the host publishes."""
