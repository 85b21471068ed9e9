"""Layout of a pass's single queries over pages: which of them read which page, and where its scores go.

Rows that share pages read them once. Queries that see about as much stand in one block, so that the softmax
takes their scores in few steps and hardly any that nobody has. Pure arithmetic, once a pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from icehouse_server.engine.attention.port import Ints, TokenPlaces


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """The first `count` tokens of a page, which some queries read; or several whole pages side by side."""

    page: int
    page_count: int
    first: int
    """Where their scores begin in the block."""
    count: int
    columns: Any
    """Which queries of the block, each with its heads: a slice or an array."""
    column_count: int


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """Queries whose scores are one array, [KV heads, queries x heads of each, positions]."""

    tokens: Ints
    """[queries]: their places in the pass."""
    position_count: int
    segments: list[Segment]
    hidden: list[tuple[slice, slice]]
    """Columns and positions that a segment has and these queries do not see."""

    @property
    def score_count(self) -> int:
        """For one head."""
        return len(self.tokens) * self.position_count


@dataclasses.dataclass(slots=True)
class _Asked:
    """A page of a block under way."""

    count: int
    queries: list[int]


def blocks_of(
    places: TokenPlaces, tokens: Sequence[int], *, window: int | None, page_token_count: int, group: int
) -> list[Block]:
    """Return the blocks of these tokens of a pass; `group` heads share one of the keys."""
    alike: dict[int, list[int]] = {}
    for token in tokens:
        last = int(places.positions[token])
        page_count = last // page_token_count - _low(last, window) // page_token_count + 1
        alike.setdefault((page_count - 1).bit_length(), []).append(token)
    return [
        _block(places, some, window=window, size=page_token_count, group=group) for some in alike.values()
    ]


def shares_pages(blocks: Sequence[Block], *, group: int) -> bool:
    """Tell whether some page is read for several queries."""
    return any(segment.column_count > group for block in blocks for segment in block.segments)


def _block(places: TokenPlaces, tokens: list[int], *, window: int | None, size: int, group: int) -> Block:
    pages: dict[tuple[int, int], _Asked] = {}
    seen: list[tuple[int, int, int]] = []
    """Of each query: the first page's number in its row, and from which to which position behind its
    beginning it sees."""
    for query, token in enumerate(tokens):
        last = int(places.positions[token])
        low = _low(last, window)
        start = int(places.page_starts[places.rows[token]])
        first, stop = low // size, last // size + 1
        seen.append((first, low - first * size, last + 1 - first * size))
        for place, page in enumerate(places.pages[start + first : start + stop].tolist()):
            count = min(size, last + 1 - (first + place) * size)
            asked = pages.setdefault((page, place), _Asked(0, []))
            asked.count = max(asked.count, count)
            asked.queries.append(query)
    segments = _segments(pages, size=size, group=group)
    position_count = max(stop for _, _, stop in seen)
    hidden = [(_columns([query], group), slice(0, low)) for query, (_, low, _) in enumerate(seen) if low]
    for (_, place), asked in pages.items():
        end = place * size + asked.count
        for query in asked.queries if len(asked.queries) > 1 else ():
            if seen[query][2] < end:
                hidden.append((_columns([query], group), slice(seen[query][2], end)))
    return Block(np.array(tokens, np.int32), position_count, segments, hidden)


def _segments(pages: Mapping[tuple[int, int], _Asked], *, size: int, group: int) -> list[Segment]:
    """Return the pages in segments: those that lie side by side, for the same queries, in one."""
    found: list[Segment] = []
    last_queries: list[int] = []
    for (page, place), asked in pages.items():
        before = found[-1] if found else None
        if (
            before is not None
            and asked.count == before.count // before.page_count == size
            and (page, place * size) == (before.page + before.page_count, before.first + before.count)
            and asked.queries == last_queries
        ):
            found[-1] = dataclasses.replace(
                before, page_count=before.page_count + 1, count=before.count + size
            )
            continue
        columns, last_queries = _columns(asked.queries, group), asked.queries
        found.append(Segment(page, 1, place * size, asked.count, columns, len(asked.queries) * group))
    return found


def _low(position: int, window: int | None) -> int:
    """Return the first position that a token sees."""
    return 0 if window is None else max(0, position + 1 - window)


def _columns(queries: Sequence[int], group: int) -> Any:
    """Return where queries' heads are: a slice where they lie side by side, which copies nothing."""
    if queries[-1] - queries[0] == len(queries) - 1:
        return slice(queries[0] * group, (queries[-1] + 1) * group)
    return np.concatenate([np.arange(query * group, (query + 1) * group) for query in queries])
