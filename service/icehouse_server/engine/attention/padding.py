"""Padding of attention's shapes: the few lengths that queries and keys of long chunks are padded to.

On CUDA the first attention of a shape waits while cuDNN builds a plan for it (40 ms on an H200), and each
later one does not. So queries and keys are padded, and whatever the lengths of the chunks are and wherever
they start, the shapes repeat: at most 64 of them up to a context of 32,000 tokens. Pure arithmetic.
"""

from __future__ import annotations

import bisect
from typing import Final

QUERY_LENGTHS: Final = (64, 256, 1024, 2048)
"""A longer run of queries is padded to a multiple of the last one."""
LEAST_KEY_LENGTH: Final = 64
"""One page of tokens."""


def padded_query_length(token_count: int) -> int:
    """Return the least usual number of queries that so many tokens fit into."""
    assert token_count > 0, token_count
    longest = QUERY_LENGTHS[-1]
    if token_count > longest:
        return -(-token_count // longest) * longest
    return QUERY_LENGTHS[bisect.bisect_left(QUERY_LENGTHS, token_count)]


def padded_key_length(token_count: int) -> int:
    """Return the least of 64, 96, 128, 192, 256 … that so many keys fit into: 1 and 1.5 times powers of two.

    Counted with the padded queries (a chunk's start plus `padded_query_length`) there are never fewer keys
    than queries.
    """
    assert token_count > 0, token_count
    power = max(LEAST_KEY_LENGTH, 1 << (token_count - 1).bit_length())
    smaller = power // 4 * 3
    return smaller if token_count <= smaller and power > LEAST_KEY_LENGTH else power
