"""Page table of one row: which pages hold its tokens, in their order, and how many tokens it has."""

from __future__ import annotations

from collections.abc import Sequence

from icehouse_server.engine.kv.pool import Page, PagePool


class PageTable:
    """Pages of one row, shared by the caches of its layers. Without a pool it only counts tokens."""

    __slots__ = ("numbers", "pages", "pool", "token_count")

    def __init__(self, pool: PagePool | None = None) -> None:
        self.pool = pool
        self.pages: list[Page] = []
        self.numbers: list[int] = []
        """Of the pages."""
        self.token_count = 0

    def make_room(self, token_count: int) -> None:
        """Have pages for so many tokens."""
        if self.pool is None:
            return
        missing = self.pool.pages_for(token_count) - len(self.pages)
        if missing > 0:
            self.add(self.pool.take(missing))

    def add(self, pages: Sequence[Page]) -> None:
        """Go on with these pages, behind those that it has."""
        self.pages += pages
        self.numbers += [page.number for page in pages]

    def pages_of(self, start: int, stop: int) -> list[Page]:
        """Return the pages of tokens [start, stop); `start` is at a page's beginning."""
        assert self.pool is not None
        size = self.pool.shape.page_token_count
        assert start % size == 0, f"A block begins inside a page: token {start}, pages of {size}"
        return self.pages[start // size : self.pool.pages_for(stop)]
