"""Spans of the rows in one pass: which of its tokens are whose, at which positions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

import mlx.core as mx
import numpy as np

from icehouse_server.domain.request import text_positions
from icehouse_server.engine.runner.forward.row import Features, Row, Share

SHORT_TOKEN_COUNT: Final = 64
"""Tokens of a row in one pass: so few attend in one launch with all others', if KV is in pages."""


@dataclasses.dataclass(slots=True)
class RowSpans:
    """The rows of one pass in the order of their tokens: rows with one token first, long chunks last."""

    shares: tuple[Share, ...]
    rows: tuple[Row, ...]
    counts: tuple[int, ...]
    starts: tuple[int, ...]
    """Where each row's tokens begin in the pass."""
    order: tuple[int, ...] | None
    """Indices of the shares in the caller's order, if that differs."""
    single_count: int
    """How many rows add one token to caches that already hold some: these may be stacked."""
    token_count: int
    positions: mx.array
    """[tokens], each token's position in its own sequence."""
    rope_positions: mx.array | None = None
    """[3, tokens], if some row has an image that the model places on a grid."""
    wholes: tuple[tuple[Features, ...], ...] = ()
    """The parts of whole-seen images in each row; empty if no row has any."""
    shared: dict[Any, Any] = dataclasses.field(default_factory=dict)
    """What layers of one kind compute once per pass."""
    is_traced: bool = False
    """Whether the positions stand for those of any pass with equally many rows (`replay`)."""

    @classmethod
    def of(cls, shares: Sequence[Share]) -> RowSpans:
        """Lay out the shares."""
        order = sorted(range(len(shares)), key=lambda i: _rank(shares[i]))
        laid = tuple(shares[i] for i in order)
        counts = tuple(share.token_count for share in laid)
        starts: list[int] = []
        positions: list[int] = []
        total = 0
        for share in laid:
            begin = share.row.token_count
            starts.append(total)
            positions += range(begin, begin + share.token_count) if share.token_count > 1 else (begin,)
            total += share.token_count
        single_count = sum(1 for share in laid if _rank(share) == 0)
        wholes = tuple(tuple(f for f in share.features if f.seen_from is not None) for share in laid)
        return cls(
            shares=laid,
            rows=tuple(share.row for share in laid),
            counts=counts,
            starts=tuple(starts),
            order=None if order == list(range(len(order))) else tuple(order),
            single_count=single_count,
            token_count=total,
            positions=mx.array(positions, dtype=mx.int32),
            rope_positions=_rope_positions(laid),
            wholes=wholes if any(wholes) else (),
        )

    @property
    def cuts(self) -> list[int]:
        """Where `mx.split` cuts the tokens into rows."""
        return list(self.starts[1:])

    def arranged(self, token_ids: mx.array, shares: Sequence[Share]) -> mx.array:
        """Return the pass's tokens, given in the order of `shares`, in this order."""
        if self.order is None:
            return token_ids
        given, start = [], 0
        for share in shares:
            given.append(range(start, start + share.token_count))
            start += share.token_count
        return token_ids[mx.array([index for i in self.order for index in given[i]])]

    def last_indices(self, wanted: Sequence[int]) -> list[int]:
        """Return the indices of each row's last `wanted` tokens."""
        return [
            index
            for start, count, last in zip(self.starts, self.counts, wanted, strict=True)
            for index in range(start + count - last, start + count)
        ]


def _rope_positions(shares: Sequence[Share]) -> mx.array | None:
    if all(share.row.rope_positions is None for share in shares):
        return None
    parts = []
    for share in shares:
        begin, count = share.row.token_count, share.token_count
        laid = share.row.rope_positions
        parts.append(text_positions(begin, count) if laid is None else laid.at(begin, count))
    return mx.array(np.concatenate(parts, axis=1, dtype=np.int32))


def _rank(share: Share) -> int:
    if share.token_count == 1 and share.row.token_count:
        return 0
    return 1 if share.token_count <= SHORT_TOKEN_COUNT else 2
