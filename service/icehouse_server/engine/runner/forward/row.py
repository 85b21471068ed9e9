"""Row of a forward pass: one sequence's caches, how many tokens they hold, and how tokens are taken back.

Inference thread only. A row's caches are mlx-lm's own, one sequence each and unpadded, or are in pages. So
code that cuts, stores and rebuilds caches reads them as they are. Rows that decode together may have their
states stacked in a `StateGroup`; reading `Row.caches` first puts this row's slice back.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from icehouse_server.domain.request import RopePositions
from icehouse_server.engine.kv.paged_cache import table_of
from icehouse_server.engine.kv_cache import cache_classes
from icehouse_server.engine.kv_cache.cache_classes import Cache, Undo, class_of, is_list, leaves


class Row:
    """One sequence in forward passes."""

    __slots__ = ("_caches", "_mark", "group", "rope_positions", "table")

    def __init__(self, caches: Sequence[Cache], *, token_count: int = 0) -> None:
        """`caches` are fresh, or hold `token_count` tokens; they now belong to the row."""
        self._caches = list(caches)
        self.rope_positions: RopePositions | None = None
        """Of its tokens, if these differ from their positions in the sequence."""
        self.table = table_of(caches)
        """Where its paged part is."""
        self.token_count = token_count
        self.group: StateGroup | None = None
        self._mark: _Mark | None = None

    @property
    def token_count(self) -> int:
        """How many tokens the caches hold."""
        return self.table.token_count

    @token_count.setter
    def token_count(self, token_count: int) -> None:
        self.table.token_count = token_count

    @property
    def caches(self) -> list[Cache]:
        """The caches with everything of this row in them, for reading or copying, not for writing."""
        if self.group is not None:
            self.group.put_back(self)
        return self._caches

    @property
    def raw_caches(self) -> list[Cache]:
        """The cache objects; states that are stacked in a group may be missing from them."""
        return self._caches

    def make_room(self, count: int) -> None:
        """Allocate pages for `count` more tokens, if KV is in pages."""
        self.table.make_room(self.token_count + count)

    def leave_group(self) -> None:
        """Move everything of this row into its own caches."""
        if self.group is not None:
            self.group.leave(self)
        assert self.group is None, self.group

    def take_over(self, caches: Sequence[Cache], *, count: int) -> None:
        """Continue with caches that were forked from its own and hold `count` more tokens."""
        assert self.group is None, "Only a row by itself has its own caches"
        self._caches = list(caches)
        self.token_count += count
        self.forget_mark()

    def mark(self, fed_count: int) -> None:
        """Remember states before a pass feeds `fed_count` tokens, so that they can be rolled back."""
        states = [leaf for leaf in leaves(self._caches) if class_of(leaf).is_state]
        self._mark = _Mark(fed_count, cache_classes.mark(states))

    def take_back(self, count: int) -> int:
        """Take back the latest pass's last `count` tokens; return how many of its tokens must be fed again.

        That is 0 for attention. A state that is not attention is known only where the pass began. A row that
        has one goes back there, and the pass's right tokens are fed again. Needs `Share.may_be_taken_back` in
        that pass, which fed more than `count` tokens.
        """
        mark, self._mark = self._mark, None
        assert mark is not None, "The row's latest pass was not one from which tokens may be taken back"
        assert 0 <= count < mark.fed_count, f"{count} of {mark.fed_count} tokens cannot be taken back"
        if count == 0:
            return 0
        caches = self.caches
        taken = mark.fed_count if mark.states else count
        for undo in mark.states:
            undo()
        for leaf in leaves(caches):
            if not class_of(leaf).is_state:
                class_of(leaf).rewind(leaf, taken)
        self.token_count -= taken
        return taken - count

    def forget_mark(self) -> None:
        self._mark = None


class StateGroup:
    """Rows whose non-attention states are stacked, so that a layer runs all of them together.

    It lasts from pass to pass while the same rows decode, so nothing is copied in between. The rows' own
    caches hold what was last put back, or what they came with.
    """

    def __init__(self, rows: Sequence[Row], indices: Sequence[int]) -> None:
        """`indices` are those of the states among the leaves of a row's caches; every row has all of them."""
        self.rows = tuple(rows)
        self._indices = tuple(indices)
        self._number = {id(row): number for number, row in enumerate(self.rows)}
        states = [self._states_of(row) for row in self.rows]
        self.stacked: dict[int, Any] = {
            index: class_of(column[0]).stacked(column)
            for index, column in zip(indices, zip(*states, strict=True), strict=True)
        }
        for row in self.rows:
            row.group = self

    def is_of(self, rows: Sequence[Row]) -> bool:
        """Return whether these rows, in this order, are the group."""
        return len(rows) == len(self._number) == len(self.rows) and all(
            a is b for a, b in zip(self.rows, rows, strict=True)
        )

    def put_back(self, row: Row) -> None:
        """Put a row's slice of the stacked states into its caches, lazily; the row stays in the group."""
        number = self._number[id(row)]
        for index, state in zip(self._indices, self._states_of(row), strict=True):
            state.cache = [array[number : number + 1] for array in self.stacked[index].cache]

    def leave(self, row: Row) -> None:
        """Put a row's slice into its caches for good."""
        self.put_back(row)
        del self._number[id(row)]
        row.group = None

    def dissolve(self) -> None:
        """Make all rows leave."""
        for row in self.rows:
            if row.group is self:
                self.leave(row)

    @property
    def arrays(self) -> list[mx.array]:
        """What each pass must evaluate, or its graph would grow with the next pass."""
        return [array for state in self.stacked.values() for array in state.cache if array is not None]

    def _states_of(self, row: Row) -> list[Any]:
        states = list(leaves(row.raw_caches))
        return [states[index] for index in self._indices]


class LayeredChunk:
    """Prompt tokens of one row that go through some layers in one pass and through the next ones in the next
    pass ("layered prefill", arXiv:2510.08055).

    A short chunk through all layers reads all the KV of its prompt for a few tokens. In the same time, many
    tokens get through one or two layers. Until the last layer, the row stays unchanged: layers write into
    forks of its caches, which replace them at the end. A chunk that is dropped before that leaves no trace.
    """

    def __init__(self, row: Row, token_ids: Sequence[int]) -> None:
        """At least two tokens: a single one would be written in place, into some of the row's own caches."""
        assert len(token_ids) >= 2, "A chunk of one token goes through all layers"
        self.row = row
        self.token_ids = token_ids
        self.layer = 0
        """The next layer to run."""
        self.hidden: mx.array | None = None
        """[tokens, 1, width], the input of the next layer; None before the first one."""
        self.forks = _forked(row.raw_caches)
        self.written: set[int] = set()
        """Indices of the caches whose layers have run."""
        self._begin = row.token_count

    @property
    def caches(self) -> list[Cache]:
        """The caches to give the model: those of layers that have run hold as much as the others. Masks are
        made from them, and nothing is written to them."""
        caches = list(self.forks)
        for index in self.written:
            (caches[index],) = _forked([self.row.raw_caches[index]])
        return caches

    def end(self) -> None:
        """Give the caches to the row, after the last layer."""
        assert self.row.token_count == self._begin, "The row went on while a chunk was in progress"
        self.row.take_over(self.forks, count=len(self.token_ids))


def _forked(caches: Sequence[Cache]) -> list[Cache]:
    """Return caches that continue from these, while these stay as they are.

    Nothing is copied. If several tokens are fed at once, what is written into shared arrays comes after the
    last token, and all else goes into new arrays. The originals must not be fed until the forks are dropped.
    """
    return [_fork_of(cache) for cache in caches]


def _fork_of(cache: Cache) -> Cache:
    fork = copy.copy(cache)
    if is_list(cache):
        fork.caches = type(cache.caches)(_fork_of(part) for part in cache.caches)
        return fork
    for name, value in getattr(cache, "__dict__", {}).items():  # paged caches have none: their table counts
        if isinstance(value, list):  # the slots of a state
            setattr(fork, name, list(value))
    return fork


@dataclasses.dataclass(slots=True)
class _Mark:
    fed_count: int
    states: list[Undo]


@dataclasses.dataclass(frozen=True, slots=True)
class Features:
    """Vectors that a vision tower made, for consecutive tokens of a share."""

    start: int
    """Index in the share of the first of these tokens."""
    vectors: mx.array
    """[tokens, width], or wider by one width for each of the first layers that gets vectors of its own."""
    seen_from: int | None = None
    """Where in the share the image begins, perhaps before the share, if these tokens see all of it; None if
    each token sees only what is before it."""

    @property
    def end(self) -> int:
        """The stop of these tokens in the share."""
        return self.start + self.vectors.shape[0]


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """What one row adds to one pass, and what it wants from it."""

    row: Row
    token_count: int
    """How many of the pass's tokens are this row's: they are contiguous, in the order of the shares."""
    logit_count: int = 0
    """Logits of this many last tokens: 0 for a chunk in the middle of a prompt, 1 to draw a token, all to
    verify guesses or to measure a prompt."""
    hidden_count: int = 0
    """Hidden states of this many last tokens: the input of the model's head, for embeddings."""
    features: tuple[Features, ...] = ()
    """What replaces some of the tokens' own embeddings."""
    may_be_taken_back: bool = False
    """Some of the tokens are guesses: `Row.take_back` follows."""


def can_take_back(caches: Sequence[Cache]) -> bool:
    """Return whether tokens fed together can be taken back out of such caches, whatever they hold."""
    return all(class_of(leaf).is_state or class_of(leaf).can_rewind(leaf) for leaf in leaves(caches))
