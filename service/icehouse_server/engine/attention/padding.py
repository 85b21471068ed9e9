"""Padding of attention's shapes: the few lengths that queries and keys of long chunks are padded to.

On CUDA the first attention of a shape waits while cuDNN builds a plan for it (50 ms on an H100, mlx 0.32.4),
each later one takes 0.1 to 0.7 ms; a mask instead of the causal rule needs a plan as well and takes
three to five times as long. So a chunk is attended to as if it began at the border before its first token
and ended at one of a few lengths behind that: the causal rule keeps what is put in front and behind from
being seen, and what comes out for it is dropped. Pure arithmetic.
"""

from __future__ import annotations

import dataclasses
from typing import Final

SHORT_BORDER: Final = 256
"""Chunks that lie between two such borders are padded to these."""
LONG_BORDER: Final = 1024
"""All others begin at such a one and are padded to a multiple of it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Padding:
    """How one chunk is attended to. Counts of tokens."""

    front_count: int
    """Queries put before those of the chunk."""
    query_count: int
    """All together, with those put behind."""
    key_count: int
    """From the sequence's beginning on; the last ones are of no token."""


def padding_of(begin: int, count: int) -> Padding:
    """Return the padding of `count` tokens behind `begin` others."""
    assert count > 0, count
    border = SHORT_BORDER if begin % SHORT_BORDER + count <= SHORT_BORDER else LONG_BORDER
    front_count = begin % border
    query_count = -(-(front_count + count) // border) * border
    return Padding(front_count, query_count, begin - front_count + query_count)
