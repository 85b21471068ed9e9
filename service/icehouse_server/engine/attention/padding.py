"""Padding of attention's shapes: the few lengths to which queries and keys of long chunks are padded.

On CUDA the first attention of a shape waits while cuDNN builds a plan for it (50 ms on an H100, mlx 0.32.4);
each later one takes 0.1 to 0.7 ms. A mask instead of the causal rule needs a plan, too, and takes three to
five times as long. So attention treats a chunk as if it began at the border before its first token and ended
at one of a few lengths after that. The causal rule hides the padding before and after from the chunk's
tokens, and the padding's own output is dropped. Pure arithmetic.
"""

from __future__ import annotations

import dataclasses
from typing import Final

SHORT_BORDER: Final = 256
"""A chunk between two of these borders is padded to both."""
LONG_BORDER: Final = 1024
"""All other chunks begin at one of these and are padded to a multiple of it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Padding:
    """How one chunk is padded for attention. Counts of tokens."""

    front_count: int
    """Queries put before those of the chunk."""
    query_count: int
    """All queries, those put before and after included."""
    key_count: int
    """From the sequence's beginning on; the last ones belong to no token."""


def padding_of(begin: int, count: int) -> Padding:
    """Return the padding of `count` tokens after `begin` others."""
    assert count > 0, count
    border = SHORT_BORDER if begin % SHORT_BORDER + count <= SHORT_BORDER else LONG_BORDER
    front_count = begin % border
    query_count = -(-(front_count + count) // border) * border
    return Padding(front_count, query_count, begin - front_count + query_count)
