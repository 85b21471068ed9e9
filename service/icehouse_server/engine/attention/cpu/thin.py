"""Queries one by one: read by NumPy, which multiplies by a vector without a copy of the keys.

Pages that several rows have are read once. Inference thread, and one more that sees views of computed arrays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from icehouse_server.engine.attention.cpu.layout import Block, Segment, blocks_of, shares_pages
from icehouse_server.engine.attention.cpu.softmax import HIDDEN, Floats, exponentials, in_two
from icehouse_server.engine.attention.port import TokenPlaces


@dataclasses.dataclass(frozen=True, slots=True)
class ThinPlan:
    """Which queries of a pass are taken so, and how."""

    halves: tuple[list[Block], ...]
    """Blocks of no page in common, for two threads, or all of them: they share the heads then."""
    runs: list[tuple[int, int]]
    """From which to which token of the pass they are."""
    score_count: int
    """For one head."""

    @classmethod
    def of(
        cls,
        places: TokenPlaces,
        spans: Sequence[tuple[int, int]],
        *,
        window: int | None,
        page_token_count: int,
        group: int,
    ) -> ThinPlan:
        """`spans`: from which to which token of the pass each row's lie."""

        def laid(some: Sequence[tuple[int, int]]) -> list[Block]:
            tokens = [token for first, last in some for token in range(first, last)]
            return blocks_of(places, tokens, window=window, page_token_count=page_token_count, group=group)

        blocks = laid(spans)
        halves: tuple[list[Block], ...] = (blocks,)
        if len(spans) > 1 and not shares_pages(blocks, group=group):
            order = sorted(spans, key=lambda span: int(places.positions[span[0]]))
            halves = (laid(order[::2]), laid(order[1::2]))
        runs: list[tuple[int, int]] = []
        for first, last in spans:
            begin = runs.pop()[0] if runs and runs[-1][1] == first else first
            runs.append((begin, last))
        return cls(halves, runs, sum(block.score_count for block in blocks))


def attend_thin(plan: ThinPlan, layer: Floats, queries: Floats, *, scale: float) -> Floats:
    """Return [tokens, heads, 1, size]: anything for tokens that the plan has not.

    `layer`: [pages, 2, KV heads, page tokens, size] of one layer. `queries`: the pass's, [tokens, heads, 1,
    size].
    """
    head_count, size = queries.shape[1], queries.shape[3]
    kv_head_count = layer.shape[2]
    by_head = queries.reshape(len(queries), kv_head_count, -1, size)
    output = np.empty((len(queries), *by_head.shape[1:]), dtype=np.float32)
    worth = plan.score_count * head_count

    def attend(halves: slice, heads: slice) -> None:
        with np.errstate(all="ignore"):  # what is no number stays none
            for half in plan.halves[halves]:
                for block in half:
                    output[block.tokens, heads] = _attend(block, layer, by_head, heads, scale)

    in_two(attend, len(plan.halves), kv_head_count, is_worth=worth)
    return output.reshape(len(queries), head_count, 1, size)


def _attend(block: Block, layer: Floats, by_head: Floats, heads: slice, scale: float) -> Floats:
    """Return [queries, KV heads, heads of each, size] of one block."""
    # [KV heads, queries x heads of each, size]
    rows = by_head[block.tokens, heads].swapaxes(0, 1)
    query_count, group, size = rows.shape[1:]
    asked = rows.reshape(len(rows), query_count * group, size) * np.float32(scale)
    # Each head's queries in columns that lie together: products take half the time of the other way.
    columns = np.ascontiguousarray(asked.swapaxes(-1, -2))
    scores = np.full((len(asked), query_count * group, block.position_count), HIDDEN, dtype=np.float32)
    for segment in block.segments:
        # [pages, KV heads, tokens of each, queries x heads of each]
        told = np.matmul(_pages(layer, segment, 0, heads), columns[:, :, segment.columns])
        by_query = told.transpose(1, 3, 0, 2).reshape(len(asked), -1, segment.count)
        scores[:, segment.columns, segment.first : segment.first + segment.count] = by_query
    for some, positions in block.hidden:
        scores[:, some, positions] = HIDDEN
    sums = exponentials(scores.reshape(-1, block.position_count))
    output = np.zeros((len(asked), query_count * group, size), dtype=np.float32)
    for segment in block.segments:
        weights = scores[:, segment.columns, segment.first : segment.first + segment.count]
        by_page = weights.reshape(*weights.shape[:2], segment.page_count, -1).transpose(2, 0, 1, 3)
        # One by one: sums do not hang on which pages lie side by side.
        for found in np.matmul(by_page, _pages(layer, segment, 1, heads)):
            output[:, segment.columns] += found
    output /= sums.reshape(len(asked), -1, 1)
    return output.reshape(len(asked), query_count, group, size).swapaxes(0, 1)


def _pages(layer: Floats, segment: Segment, kind: int, heads: slice) -> Floats:
    """Return the keys, or for `kind` 1 the values, [pages, KV heads, tokens of each, size]."""
    token_count = segment.count // segment.page_count
    return layer[segment.page : segment.page + segment.page_count, kind, heads, :token_count]
