"""Port of attention over pages: what a backend does with the page pool of one group of layers.

The pool is one array, [pages, layers, 2, KV heads, page tokens, head size], with keys at 0 and values at 1 of
the third axis. A pass's tokens are a flat list; `TokenPlaces` says where each one's KV is. A backend may
write into the pool's array in place. MLX does not know of such writes, so `Pool.order` tracks them: whatever
reads or writes the pool takes the latest `order` as an input, and each write gives a new one.

Inference thread only. Everything is lazy until it is evaluated.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Sequence
from typing import Any, Protocol, runtime_checkable

import mlx.core as mx
import numpy as np

Ints = np.ndarray[tuple[int], np.dtype[np.int32]]


@dataclasses.dataclass(frozen=True, slots=True)
class PoolShape:
    """What the KV of a group's layers has in common."""

    layer_count: int
    kv_head_count: int
    head_size: int
    page_token_count: int
    dtype: mx.Dtype

    @property
    def page_bytes(self) -> int:
        """Size of one page: keys and values of all layers."""
        numbers = self.layer_count * 2 * self.kv_head_count * self.page_token_count * self.head_size
        return numbers * self.dtype.size


class Pool(Protocol):
    """The array that a backend reads and writes."""

    shape: PoolShape
    array: mx.array
    """[pages, layers, 2, KV heads, page tokens, head size], contiguous."""
    order: mx.array
    """int32 [1], always 0: the output of the latest write."""
    view: mx.array | None
    """The array in a shape that its backend needs; reset when the array is replaced."""


@dataclasses.dataclass(frozen=True, slots=True)
class TokenPlaces:
    """Where the tokens of one pass are. Made once per pass and group, and used by each of its layers."""

    pages: Ints
    """[pages of all rows]: page numbers, row after row, each in the order of its tokens. A page that is no
    longer read (it left a window) is -1."""
    page_starts: Ints
    """[rows]: where each row's pages begin in `pages`."""
    rows: Ints
    """[tokens]: the row of each token. A row's tokens are consecutive, and so are their positions."""
    positions: Ints
    """[tokens]: each token's position in its row; its key and value are written there. A token sees its row's
    tokens from the first visible one up to itself."""
    derived: dict[Hashable, Any] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    """What a backend derived from them, for all layers of the pass."""

    @classmethod
    def of(cls, tables: Sequence[Sequence[int]], begins: Sequence[int], counts: Sequence[int]) -> TokenPlaces:
        """Return the places for a pass: each row's pages, where it continues, and how many tokens it adds."""
        starts = np.array(list(itertools.accumulate(map(len, tables[:-1]), initial=0)), np.int32)
        pages = np.array(list(itertools.chain.from_iterable(tables)), np.int32)
        rows = np.repeat(np.arange(len(tables), dtype=np.int32), counts)
        if len(rows) == len(tables):
            return cls(pages, starts, rows, np.array(begins, np.int32))
        spans = [np.arange(b, b + count, dtype=np.int32) for b, count in zip(begins, counts, strict=True)]
        return cls(pages, starts, rows, np.concatenate(spans))

    @property
    def token_count(self) -> int:
        return len(self.rows)


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionCall:
    """What one layer asks of attention, independent of the tokens."""

    layer: int
    """Its number within the group."""
    scale: float
    window: int | None = None
    """How many positions each token sees, its own included; None for all up to its own."""
    sinks: mx.array | None = None
    """Logits, [heads], that only take weight."""


class PagedAttention(Protocol):
    """A backend."""

    attends_to_chunks: bool
    """Whether `attend` suits any number of tokens per row, or only a few (decoding, guesses, short
    chunks)."""

    def write(self, pool: Pool, keys: mx.array, values: mx.array, places: TokenPlaces, *, layer: int) -> None:
        """Put the tokens' keys and values, [tokens, KV heads, 1, head size], in their places."""

    def attend(
        self,
        pool: Pool,
        queries: mx.array,
        places: TokenPlaces,
        call: AttentionCall,
        new: tuple[mx.array, mx.array] | None = None,
    ) -> mx.array:
        """Return [tokens, heads, 1, head size] for queries of that shape, in their dtype.

        `new` has the keys and values of all tokens of the pass, as for `write`, to be written first, in the
        same launch if the device can. Without `new`, it may be called for the first tokens of the pass alone:
        `queries` then has fewer of them than `places`.
        """

    def gather_row(
        self, pool: Pool, places: TokenPlaces, *, row: int, layer: int, first_token: int, key_count: int
    ) -> tuple[mx.array, mx.array]:
        """Return keys and values, [1, KV heads, key_count, head size] each, copied after the latest write.

        They belong to the row's tokens from `first_token` on, for long chunks to attend to. If the row ends
        earlier, its last token of this pass is repeated.
        """

    def settle(self, pool: Pool) -> bool:
        """Wait until all writes are done. Return whether the pool's array stays in place in memory when
        written to. If so, other threads may then write into pages that nobody else has."""

    def copy_pages(self, pool: Pool, sources: Ints, targets: Ints) -> None:
        """Copy whole pages onto others; no page is in both lists."""

    def fill_pages(self, pool: Pool, content: mx.array, pages: Ints) -> None:
        """Write `content`, [pages, layers, 2, KV heads, page tokens, head size], into these pages."""

    def read_pages(self, pool: Pool, pages: Ints) -> mx.array:
        """Return copies of these pages, [pages, layers, 2, KV heads, page tokens, head size]."""


@runtime_checkable
class ReplayedAttention(PagedAttention, Protocol):
    """A backend whose calls, in a pass of one token per row, depend on the places only through one array and
    on the pool only through `order`. Such passes can be traced once and replayed."""

    def array_of(self, places: TokenPlaces) -> mx.array:
        """Return the places as its launches take them; similar page counts give the same length."""

    def launch_of(self, places: TokenPlaces, window: int | None) -> Hashable:
        """Return what else its launches depend on: places that are equal in it share a replay."""

    def placed(self, places: TokenPlaces, array: mx.array) -> TokenPlaces:
        """Return these places with another array for the launches."""
