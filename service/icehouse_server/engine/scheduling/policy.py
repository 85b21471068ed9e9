"""Policy of passes: every number that planning and its learning go by; the rest is measured or set."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class PassPolicy:
    """How long a pass may last, who shares it, and how far what was measured is believed.

    Shares and factors are of what their names say. A number stands here only while a test misses it.
    """

    alone_limit: int | None = None
    """Requests in a row that ran alone, after which an idle engine expects no burst behind the next one and
    begins it 3 ms earlier. None: it always waits, which is nothing beside a CPU's first pass."""

    # How long a pass lasts beside decoding rows.
    beside_factor: float = 2.0
    """Longest pass, in passes of the decoding rows alone: latency between tokens at most doubles."""
    built_factor: float = 1.15
    """Or so many times what the host takes to build a pass with any chunk, if that is longer: the tokens that
    the device computes meanwhile cost nobody anything, and with fewer a prompt takes more such passes."""
    queue_factor: float = 4.0
    """The same where the queue is long."""
    queue_least_s: float = 0.0
    """Or so long beyond that of the rows, if that is more: nobody notices a gap of 50 ms."""
    queue_per_row: float = 0.2
    """More sequences than this that wait, for each one that decodes, are a long queue."""
    used_share: float = 0.78
    """Of the time beyond that of the rows which a pass may take: what is expected is not always what it
    takes, the rows grow meanwhile, and publishing and capturing take some too."""
    least_grown: float = 0.4
    """Of the time beyond that of the rows, where these have grown since they were alone."""
    least_extra: float = 0.4
    """Of the time beyond that of the rows, where the machine is slow at this moment."""
    usual_overrun: float = 1.1
    """What passes beside rows usually take, of what the faster half of such passes says."""
    slowness_weight: float = 0.5
    """Of the last pass, among those before it: answered in full, every second pass was a long one."""
    restore_share: float = 0.5
    """Of the time beyond that of the rows, for restores while prompts wait for theirs."""

    # How long a pass lasts while nothing decodes.
    alone_rate_share: float = 0.95
    """Of the best rate known: those who wait for prefill come before those who may arrive."""
    soon_s: float = 0.1
    """A newcomer who waits for no more than this would gain little from passes that are shorter still."""
    soon_for_queue_s: float = 0.4
    """The same where several prompts wait: a pass that ends sooner would let the first of them decode, and
    what decodes makes the passes of the others short."""
    least_limit: float = 4.0
    """A limit on a pass alone is at least so many times its fixed part: less would be mostly that."""
    piece_rounding: float = 0.25
    """What is left behind the last whole piece makes one more from three quarters of a piece on."""

    # Layers in slices, where time ends them.
    layers_at_once: float = 2.0
    """Of a chunk that begins: how many layers a pass has room for. Fewer leave nothing to choose where the
    room changes on its way, and more are shorter chunks, which read more."""
    layered_gain: float = 2.0
    """A chunk goes through the layers in turns where it has so many times the tokens that a pass has room
    for, in one piece of a prompt that would take as many passes."""

    # Who is let in, and who shares a pass.
    passed_limit: int = 16
    """So many others may be let in before one that is first in rank and has no memory yet."""
    blocked_limit: int = 8
    """So many that have no memory are looked past in a step."""
    pass_memory_share: float = 1.0 / 16.0
    """Of what the weights leave of the memory, for the activations of a pass of several chunks."""
    oldest_share: float = 0.25
    """Of a pass's prompt tokens, while shorter prompts go first."""

    # What is learned, and how far it is believed.
    first_token_count: int = 64
    """Prompt tokens of the first pass, before any was measured."""
    kept_count: int = 6
    """Passes remembered of rows alone, and of each doubling of tokens and of positions."""
    life: int = 512
    """In passes: the older one is the less it counts, and so old it is dropped."""
    surprise_factor: float = 2.0
    """A pass that took so many times what was expected, or so small a part of it, is no lesson by itself."""
    surprise_count: int = 12
    long_surprise_count: int = 3
    long_surprise_s: float = 2.0
    """So many surprises in a row, in one direction, are a change of speed, though their sizes had been
    measured before; fewer are where they took so long together."""
    prior_weight: float = 0.03
    """Of a measured pass, has the belief that half of the usual one's time is fixed and half grows with its
    tokens: either guess alone would confirm itself, by choosing the sizes that cannot refute it."""
    tokens_reach: float = 2.0
    scores_reach: float = 4.0
    """What is learned is believed of passes of up to so many times the largest one measured."""
    light_context: int = 1024
    """Positions up to which a token's scores cost little beside the rest of it."""
    separating_spread: float = 1.5
    """Sizes that differ by this factor separate what is fixed from what grows."""


POLICY = PassPolicy()
GPU_POLICY = dataclasses.replace(POLICY, used_share=0.9, queue_least_s=0.05, alone_limit=2)
"""A GPU's passes take what is expected of them, and it computes them while the host publishes."""
