"""Page table of one row: which pages hold its tokens, in their order, and how many tokens it has.

Layers with the same kind of attention share a run of pages: those of unlimited context keep all of them,
those of a sliding window let go of what it has left behind.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from icehouse_server.engine.attention.port import PagedAttention
from icehouse_server.engine.kv.pool import Page, PagePool


@dataclasses.dataclass(frozen=True, slots=True)
class PageGroup:
    """Layers whose KV lies in the pages of one pool, and what attends to it."""

    pool: PagePool
    attention: PagedAttention
    layers: Mapping[int, int]
    """By a cache's place among a row's caches: the layer's number in the pool."""
    window: int | None = None
    """How many tokens each one sees, with itself; None where it sees all before it."""
    has_costly_shapes: bool = False
    """Whether the first attention of each shape waits for a plan, so that there should be few."""


class PageRun:
    """Pages of one row in one group: page n holds its tokens from n times a page's on."""

    __slots__ = ("group", "numbers", "pages")

    def __init__(self, group: PageGroup) -> None:
        self.group = group
        self.pages: list[Page | None] = []
        """None where the window has left a page behind."""
        self.numbers: list[int] = []
        """Of the pages, -1 for none."""

    def make_room(self, token_count: int) -> None:
        """Have pages for so many tokens."""
        missing = self.group.pool.pages_for(token_count) - len(self.pages)
        if missing > 0:
            self.add(self.group.pool.take(missing))

    def add(self, pages: Sequence[Page]) -> None:
        """Go on with these pages, behind those that it has."""
        self.pages += pages
        self.numbers += [page.number for page in pages]

    def leave_behind(self, token_count: int) -> None:
        """Let go of pages that no token from `token_count` on will see, one page less than that: guesses may
        be taken back."""
        if self.group.window is None:
            return
        size = self.group.pool.shape.page_token_count
        first = min(max(0, (token_count + 1 - self.group.window) // size - 1), len(self.pages))
        while first and self.pages[first - 1] is not None:
            first -= 1
            self.pages[first], self.numbers[first] = None, -1

    def skip(self, token_count: int) -> None:
        """Begin where the page of this token does: what is before has been left behind."""
        assert not self.pages, "It has pages already"
        count = token_count // self.group.pool.shape.page_token_count
        self.pages, self.numbers = [None] * count, [-1] * count

    @property
    def first_token_index(self) -> int:
        """Of the first page that it still has."""
        return self.numbers.count(-1) * self.group.pool.shape.page_token_count

    def pages_of(self, start: int, stop: int) -> list[Page]:
        """Return the pages of tokens [start, stop); `start` is at a page's beginning."""
        size = self.group.pool.shape.page_token_count
        assert start % size == 0, f"A block begins inside a page: token {start}, pages of {size}"
        found = self.pages[start // size : self.group.pool.pages_for(stop)]
        assert all(page is not None for page in found), f"Tokens [{start}, {stop}) were left behind"
        return [page for page in found if page is not None]


class PageTable:
    """All pages of one row. Without groups it only counts tokens."""

    __slots__ = ("runs", "token_count")

    def __init__(self, groups: Sequence[PageGroup] = ()) -> None:
        self.runs = tuple(PageRun(group) for group in groups)
        self.token_count = 0

    def make_room(self, token_count: int) -> None:
        """Have pages for so many tokens, and none that are not seen any more."""
        for run in self.runs:
            run.leave_behind(self.token_count)
            run.make_room(token_count)
