"""Thin rows: queries taken one by one over pages, by NumPy, which multiplies by a vector without copying the
keys.

The layout, computed once per pass, says which queries read which page and where their scores go. Rows that
share pages read them once. Queries that see about as much share a block, so that the softmax takes few steps
and little padding. Inference thread, and one more that only sees views of computed arrays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from icehouse_server.engine.attention.cpu.softmax import HIDDEN, Floats, exponentials, in_two
from icehouse_server.engine.attention.port import Ints, TokenPlaces


@dataclasses.dataclass(frozen=True, slots=True)
class PageSegment:
    """The first `count` tokens of a page, which some queries read; or several whole adjacent pages."""

    page: int
    page_count: int
    first: int
    """Where its scores begin in the block."""
    count: int
    columns: Any
    """The queries of the block that read it, each with its heads: a slice or an array."""
    column_count: int


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """Queries whose scores are one array, [KV heads, queries x heads of each, positions]."""

    tokens: Ints
    """[queries]: their indices in the pass."""
    position_count: int
    segments: list[PageSegment]
    hidden: list[tuple[slice, slice]]
    """Columns and positions that a segment has but these queries do not see."""

    @property
    def score_count(self) -> int:
        """Scores for one head."""
        return len(self.tokens) * self.position_count


@dataclasses.dataclass(slots=True)
class _Readers:
    """The queries that read one page, while a block is being laid out."""

    count: int
    queries: list[int]


@dataclasses.dataclass(frozen=True, slots=True)
class ThinPlan:
    """Which queries of a pass are taken one by one, and how."""

    halves: tuple[list[Block], ...]
    """Two lists of blocks without a common page, for two threads; or one, which they share by heads."""
    runs: list[tuple[int, int]]
    """First and last (exclusive) token of the pass of each run of these queries."""
    score_count: int
    """Scores for one head."""

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
        """`spans` has the first and last (exclusive) token of the pass for each row."""

        def laid(some: Sequence[tuple[int, int]]) -> list[Block]:
            tokens = [token for first, last in some for token in range(first, last)]
            return _blocks_of(places, tokens, window=window, page_token_count=page_token_count, group=group)

        blocks = laid(spans)
        halves: tuple[list[Block], ...] = (blocks,)
        shares_pages = any(segment.column_count > group for block in blocks for segment in block.segments)
        if len(spans) > 1 and not shares_pages:
            order = sorted(spans, key=lambda span: int(places.positions[span[0]]))
            halves = (laid(order[::2]), laid(order[1::2]))
        runs: list[tuple[int, int]] = []
        for first, last in spans:
            begin = runs.pop()[0] if runs and runs[-1][1] == first else first
            runs.append((begin, last))
        return cls(halves, runs, sum(block.score_count for block in blocks))


def _blocks_of(
    places: TokenPlaces, tokens: Sequence[int], *, window: int | None, page_token_count: int, group: int
) -> list[Block]:
    """Return the blocks of these tokens of a pass; each KV head serves `group` query heads."""
    alike: dict[int, list[int]] = {}
    for token in tokens:
        last = int(places.positions[token])
        page_count = last // page_token_count - _low(last, window) // page_token_count + 1
        alike.setdefault((page_count - 1).bit_length(), []).append(token)
    return [
        _block(places, some, window=window, size=page_token_count, group=group) for some in alike.values()
    ]


def _block(places: TokenPlaces, tokens: list[int], *, window: int | None, size: int, group: int) -> Block:
    pages: dict[tuple[int, int], _Readers] = {}
    seen: list[tuple[int, int, int]] = []
    """For each query: the number of the first page in its row, and the range of positions that it sees,
    counted from that page's beginning."""
    for query, token in enumerate(tokens):
        last = int(places.positions[token])
        low = _low(last, window)
        start = int(places.page_starts[places.rows[token]])
        first, stop = low // size, last // size + 1
        seen.append((first, low - first * size, last + 1 - first * size))
        for index, page in enumerate(places.pages[start + first : start + stop].tolist()):
            count = min(size, last + 1 - (first + index) * size)
            readers = pages.setdefault((page, index), _Readers(0, []))
            readers.count = max(readers.count, count)
            readers.queries.append(query)
    segments = _segments(pages, size=size, group=group)
    position_count = max(stop for _, _, stop in seen)
    hidden = [(_columns([query], group), slice(0, low)) for query, (_, low, _) in enumerate(seen) if low]
    for (_, index), readers in pages.items():
        end = index * size + readers.count
        for query in readers.queries if len(readers.queries) > 1 else ():
            if seen[query][2] < end:
                hidden.append((_columns([query], group), slice(seen[query][2], end)))
    return Block(np.array(tokens, np.int32), position_count, segments, hidden)


def _segments(pages: Mapping[tuple[int, int], _Readers], *, size: int, group: int) -> list[PageSegment]:
    """Return the pages as segments; adjacent pages with the same queries share one."""
    segments: list[PageSegment] = []
    last_queries: list[int] = []
    for (page, index), readers in pages.items():
        before = segments[-1] if segments else None
        if (
            before is not None
            and readers.count == before.count // before.page_count == size
            and (page, index * size) == (before.page + before.page_count, before.first + before.count)
            and readers.queries == last_queries
        ):
            segments[-1] = dataclasses.replace(
                before, page_count=before.page_count + 1, count=before.count + size
            )
            continue
        columns, last_queries = _columns(readers.queries, group), readers.queries
        segments.append(
            PageSegment(page, 1, index * size, readers.count, columns, len(readers.queries) * group)
        )
    return segments


def _low(position: int, window: int | None) -> int:
    """Return the first position that a token sees."""
    return 0 if window is None else max(0, position + 1 - window)


def _columns(queries: Sequence[int], group: int) -> Any:
    """Return the columns of queries' heads: a slice if they are adjacent, since that copies nothing."""
    if queries[-1] - queries[0] == len(queries) - 1:
        return slice(queries[0] * group, (queries[-1] + 1) * group)
    return np.concatenate([np.arange(query * group, (query + 1) * group) for query in queries])


def attend_thin(plan: ThinPlan, layer: Floats, queries: Floats, *, scale: float) -> Floats:
    """Return [tokens, heads, 1, size], with undefined values for tokens not in the plan.

    `layer`: [pages, 2, KV heads, page tokens, size] of one layer. `queries`: the pass's, [tokens, heads, 1,
    size].
    """
    head_count, size = queries.shape[1], queries.shape[3]
    kv_head_count = layer.shape[2]
    by_head = queries.reshape(len(queries), kv_head_count, -1, size)
    output = np.empty((len(queries), *by_head.shape[1:]), dtype=np.float32)
    worth = plan.score_count * head_count

    def attend(halves: slice, heads: slice) -> None:
        with np.errstate(all="ignore"):  # NaN stays NaN
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
    scaled = rows.reshape(len(rows), query_count * group, size) * np.float32(scale)
    # Each head's queries in contiguous columns: products take half the time of the other way.
    columns = np.ascontiguousarray(scaled.swapaxes(-1, -2))
    scores = np.full((len(scaled), query_count * group, block.position_count), HIDDEN, dtype=np.float32)
    for segment in block.segments:
        # [pages, KV heads, tokens of each, queries x heads of each]
        scores_by_page = np.matmul(_pages(layer, segment, 0, heads), columns[:, :, segment.columns])
        by_query = scores_by_page.transpose(1, 3, 0, 2).reshape(len(scaled), -1, segment.count)
        scores[:, segment.columns, segment.first : segment.first + segment.count] = by_query
    for some, positions in block.hidden:
        scores[:, some, positions] = HIDDEN
    sums = exponentials(scores.reshape(-1, block.position_count))
    output = np.zeros((len(scaled), query_count * group, size), dtype=np.float32)
    for segment in block.segments:
        weights = scores[:, segment.columns, segment.first : segment.first + segment.count]
        by_page = weights.reshape(*weights.shape[:2], segment.page_count, -1).transpose(2, 0, 1, 3)
        # One by one, so that sums do not depend on which pages are adjacent.
        for part in np.matmul(by_page, _pages(layer, segment, 1, heads)):
            output[:, segment.columns] += part
    output /= sums.reshape(len(scaled), -1, 1)
    return output.reshape(len(scaled), query_count, group, size).swapaxes(0, 1)


def _pages(layer: Floats, segment: PageSegment, kind: int, heads: slice) -> Floats:
    """Return the keys, or for `kind` 1 the values, [pages, KV heads, tokens of each, size]."""
    token_count = segment.count // segment.page_count
    return layer[segment.page : segment.page + segment.page_count, kind, heads, :token_count]
