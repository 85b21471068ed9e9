"""Block log: what came to a tier and what left it, from the inference thread to whoever reports it to
gateways.

Appended to by the inference thread alone and taken from by one other thread; bounded, without a lock, since a
deque's ends are safe for one of each. Off until somebody listens. When it is full it goes off: what was lost
is found again by a listing of all blocks (`PrefixTree.listing`), never by waiting here.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import NamedTuple

from icehouse_server.domain.blocks import TokenKeys
from icehouse_server.domain.cache_commands import Tier
from icehouse_server.domain.ids import BlockHash, CacheScope

LOG_LIMIT = 16_384
"""Changes that may wait: of many steps, since a step seldom makes more than a few."""


class Came(NamedTuple):
    """A block came to a tier, whole or a tail; noted again when the tokens of one on SSD become known.

    `parent` is its chain's root where it is the first one.
    """

    tier: Tier
    name: BlockHash
    parent: BlockHash
    is_first: bool
    token_count: int
    keys: TokenKeys | None
    """None for a block on SSD that this process has not seen whole yet."""


class Left(NamedTuple):
    """A block left a tier."""

    tier: Tier
    name: BlockHash


class RootsKnown(NamedTuple):
    """Whose chains begin below which roots."""

    scopes: tuple[tuple[BlockHash, CacheScope], ...]


class RootForgotten(NamedTuple):
    """Nothing new begins below this root, unless it becomes known again."""

    root: BlockHash


class ListingBegan(NamedTuple):
    """All blocks are reported from here on, whether or not they were before."""


class ListingEnded(NamedTuple):
    """What was reported before the listing, and not since, is gone."""


Change = Came | Left | RootsKnown | RootForgotten | ListingBegan | ListingEnded


class BlockLog:
    """Of one prefix cache. Plain tuples, so that a step pays for an append and no more."""

    def __init__(self, *, limit: int = LOG_LIMIT) -> None:
        self._limit = limit
        self._changes: collections.deque[Change] = collections.deque()
        self._scopes: dict[BlockHash, CacheScope] = {}
        self.is_on = False
        """Written by the inference thread alone."""

    def begin(self) -> None:
        """Note changes from now on, after a listing's beginning and the roots that are known."""
        self.is_on = True
        self.note(ListingBegan())
        self.note(RootsKnown(tuple(self._scopes.items())))

    def add_roots(self, scopes: Mapping[BlockHash, CacheScope]) -> None:
        """Note whose chains begin below these roots."""
        self._scopes.update(scopes)
        if self.is_on:
            self.note(RootsKnown(tuple(scopes.items())))

    def drop_root(self, root: BlockHash) -> None:
        """A root's tenant is known no longer."""
        self._scopes.pop(root, None)
        if self.is_on:
            self.note(RootForgotten(root))

    def note(self, change: Change) -> None:
        """Append a change; where there is no room for it nothing more is noted until the next `begin`."""
        if len(self._changes) < self._limit:
            self._changes.append(change)
        else:
            self.is_on = False

    def take(self, *, limit: int) -> list[Change]:
        """Return the oldest changes, at most so many."""
        count = min(limit, len(self._changes))
        return [self._changes.popleft() for _ in range(count)]

    def __len__(self) -> int:
        return len(self._changes)
