"""Page table of one row: which pages hold its tokens, in order, and how many tokens it has.

Layers with the same kind of attention share a run of pages. A run of unlimited context keeps all of its
pages; one of a sliding window releases the pages that the window has passed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from icehouse_server.engine.attention.port import PagedAttention, TokenPlaces
from icehouse_server.engine.kv.pool import Page, PagePool


@dataclasses.dataclass(frozen=True, slots=True)
class PageGroup:
    """Layers whose KV is in the pages of one pool, and the attention that reads it."""

    pool: PagePool
    attention: PagedAttention
    layers: Mapping[int, int]
    """The layer's number in the pool, by its cache's index among a row's caches."""
    window: int | None = None
    """How many tokens each token sees, itself included; None if it sees all before it."""
    has_costly_shapes: bool = False
    """Whether the first attention of each shape waits for a plan, so that there should be few shapes."""


class PageRun:
    """Pages of one row in one group: page n holds its tokens from n times the page size on."""

    __slots__ = ("group", "numbers", "pages")

    def __init__(self, group: PageGroup) -> None:
        self.group = group
        self.pages: list[Page | None] = []
        """None for a page that the window has passed."""
        self.numbers: list[int] = []
        """Numbers of the pages; -1 where there is none."""

    def make_room(self, token_count: int) -> None:
        """Allocate the missing pages for this many tokens."""
        missing = self.group.pool.pages_for(token_count) - len(self.pages)
        if missing > 0:
            self.add(self.group.pool.take(missing))

    def add(self, pages: Sequence[Page]) -> None:
        self.pages += pages
        self.numbers += [page.number for page in pages]

    def leave_behind(self, token_count: int) -> None:
        """Release pages that no token from `token_count` on sees, but keep one: guesses may be taken back."""
        if self.group.window is None:
            return
        size = self.group.pool.shape.page_token_count
        first = min(max(0, (token_count + 1 - self.group.window) // size - 1), len(self.pages))
        while first and self.pages[first - 1] is not None:
            first -= 1
            self.pages[first], self.numbers[first] = None, -1

    def skip(self, token_count: int) -> None:
        """Begin with the page of this token; the window has passed those before it."""
        assert not self.pages, "It has pages already"
        count = token_count // self.group.pool.shape.page_token_count
        self.pages, self.numbers = [None] * count, [-1] * count

    def pages_of(self, start: int, stop: int) -> list[Page]:
        """Return the pages of tokens [start, stop); `start` must be at the beginning of a page."""
        size = self.group.pool.shape.page_token_count
        assert start % size == 0, f"A block begins inside a page: token {start}, pages of {size}"
        pages = self.pages[start // size : self.group.pool.pages_for(stop)]
        assert all(page is not None for page in pages), f"Tokens [{start}, {stop}) were released"
        return [page for page in pages if page is not None]


class PageTable:
    """All pages of one row. Without groups it only counts tokens."""

    __slots__ = ("runs", "token_count")

    def __init__(self, groups: Sequence[PageGroup] = ()) -> None:
        self.runs = tuple(PageRun(group) for group in groups)
        self.token_count = 0

    def make_room(self, token_count: int) -> None:
        """Allocate pages for this many tokens, and release those that no token sees any more."""
        for run in self.runs:
            run.leave_behind(self.token_count)
            run.make_room(token_count)


def places_of(runs: Sequence[PageRun], begins: Sequence[int], counts: Sequence[int]) -> TokenPlaces:
    """Return where a pass's tokens are in their pages: `counts` tokens of each row, from `begins` on."""
    pool = runs[0].group.pool
    tables = [
        run.numbers[: pool.pages_for(begin + count)]
        for run, begin, count in zip(runs, begins, counts, strict=True)
    ]
    return TokenPlaces.of(tables, begins, counts)
