"""Row of a forward pass: one sequence's caches, how many tokens they hold, and how tokens are taken back.

Inference thread only. A row's caches are mlx-lm's own, one sequence each and unpadded, or lie in pages, so
that what cuts, keeps and rebuilds caches reads them as they are. Where the states of several decoding rows
are kept stacked (`state_group`), looking at `Row.caches` puts this row's share of them in first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

from icehouse_server.domain.request import RopePositions
from icehouse_server.engine.kv.paged_cache import table_of
from icehouse_server.engine.kv_cache import rewind
from icehouse_server.engine.kv_cache.cache_classes import Cache, Undo, class_of, leaves


class Keeper(Protocol):
    """What holds states of a row elsewhere while it decodes in company."""

    def settle(self, row: Row) -> None:
        """Put what is this row's into its caches; it stays in company."""
        ...

    def leave(self, row: Row) -> None:
        """Put what is this row's into its caches for good."""
        ...


class Row:
    """One sequence in forward passes."""

    __slots__ = (
        "_caches",
        "_mark",
        "keeper",
        "rope_positions",
        "table",
    )

    def __init__(self, caches: Sequence[Cache], *, token_count: int = 0) -> None:
        """`caches` are fresh, or hold `token_count` tokens; they belong to the row now."""
        self._caches = list(caches)
        self.rope_positions: RopePositions | None = None
        """Of its tokens, where they are not those in the sequence."""
        self.table = table_of(caches)
        """Where what is paged of it lies."""
        self.token_count = token_count
        self.keeper: Keeper | None = None
        self._mark: _Mark | None = None

    @property
    def token_count(self) -> int:
        """Tokens that the caches hold."""
        return self.table.token_count

    @token_count.setter
    def token_count(self, token_count: int) -> None:
        self.table.token_count = token_count

    @property
    def caches(self) -> list[Cache]:
        """The caches with everything of this row in them, to be read or copied, not to be written."""
        if self.keeper is not None:
            self.keeper.settle(self)
        return self._caches

    @property
    def raw_caches(self) -> list[Cache]:
        """The cache objects; what a keeper holds may be missing in them."""
        return self._caches

    def make_room(self, count: int) -> None:
        """Have pages for `count` more tokens, where there are pages."""
        self.table.make_room(self.token_count + count)

    def leave_company(self) -> None:
        """Have everything of this row in its caches, and nowhere else."""
        if self.keeper is not None:
            self.keeper.leave(self)
        assert self.keeper is None, self.keeper

    def take_over(self, caches: Sequence[Cache], *, count: int) -> None:
        """Go on with caches that were forked from its own and hold `count` tokens more."""
        assert self.keeper is None, "Only a row by itself has its own caches"
        self._caches = list(caches)
        self.token_count += count
        self.forget_mark()

    def mark(self, fed_count: int) -> None:
        """Remember where states stand before a pass feeds `fed_count` tokens, so that they can go back."""
        states = [leaf for leaf in leaves(self._caches) if class_of(leaf).is_state]
        self._mark = _Mark(fed_count, rewind.mark(states))

    def take_back(self, count: int) -> int:
        """Take the last `count` tokens of the latest pass back; return how many of it must be fed again.

        That is 0 for attention. A state that is not attention is known only where the pass began, so a
        row that has one goes back there, and the tokens of the pass that were right are fed once more.
        Needs `Share.may_be_taken_back` in that pass, and that it fed more than `count` tokens.
        """
        mark, self._mark = self._mark, None
        assert mark is not None, "The row's latest pass was not one from which tokens may be taken back"
        assert 0 <= count < mark.fed_count, f"{count} of {mark.fed_count} tokens cannot be taken back"
        if count == 0:
            return 0
        caches = self.caches
        taken = mark.fed_count if mark.states else count
        rewind.return_to(mark.states)
        rewind.rewind([leaf for leaf in leaves(caches) if not class_of(leaf).is_state], taken)
        self.token_count -= taken
        return taken - count

    def forget_mark(self) -> None:
        """Let go of what `mark` keeps."""
        self._mark = None


@dataclasses.dataclass(slots=True)
class _Mark:
    fed_count: int
    states: list[Undo]


@dataclasses.dataclass(frozen=True, slots=True)
class Features:
    """Vectors that a vision tower made, for consecutive tokens of a share."""

    start: int
    """Of the first of these tokens in the share."""
    vectors: mx.array
    """[tokens, width], or longer by a width for each of the first layers that has some of its own."""
    seen_from: int | None = None
    """Where in the share the image begins, before the share perhaps, of which each of these tokens sees all;
    None where they see what is before each."""

    @property
    def end(self) -> int:
        """Behind the last of these tokens in the share."""
        return self.start + self.vectors.shape[0]


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """What one row brings to one pass, and what it wants to know of it."""

    row: Row
    token_count: int
    """How many of the pass's tokens are this row's: they lie side by side, in the order of the shares."""
    logit_count: int = 0
    """Logits of the last so many of them: 0 of a chunk in the middle of a prompt, 1 where a token is drawn,
    all of them where guesses are verified or a prompt is measured."""
    hidden_count: int = 0
    """Hidden states of the last so many: what the model's head reads, for embeddings."""
    features: tuple[Features, ...] = ()
    """What stands in the place of some of the tokens' own embeddings."""
    may_be_taken_back: bool = False
    """Some of the tokens are guesses: `Row.take_back` follows."""


def can_take_back(caches: Sequence[Cache]) -> bool:
    """Tell whether tokens fed together can be taken back out of such caches, whatever they hold."""
    return all(class_of(leaf).is_state or class_of(leaf).can_rewind(leaf) for leaf in leaves(caches))
