"""Block log: which blocks entered and left each tier, for the thread that reports them to gateways.

The inference thread alone appends and one other thread takes. It is bounded and needs no lock, since a
deque's ends are safe for one thread each. It is off until somebody listens, and turns itself off when full: a
listing of all blocks (`PrefixTree.listing`) makes up for what was lost, so nothing ever waits here.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import NamedTuple

from icehouse_server.domain.blocks import TokenKeys
from icehouse_server.domain.cache_commands import Tier
from icehouse_server.domain.ids import BlockHash, CacheScope

LOG_LIMIT = 16_384
"""How many changes may be queued: those of many steps, since a step rarely makes more than a few."""


class Came(NamedTuple):
    """A block, full or a tail, entered a tier. Noted again when the tokens of a block on SSD become known.

    `parent` is the chain's root if this is its first block.
    """

    tier: Tier
    name: BlockHash
    parent: BlockHash
    is_first: bool
    token_count: int
    keys: TokenKeys | None
    """None for a block on SSD that this process has not fully seen yet."""


class Left(NamedTuple):
    """A block left a tier."""

    tier: Tier
    name: BlockHash


class RootsKnown(NamedTuple):
    """Which tenants' chains begin below which roots."""

    scopes: tuple[tuple[BlockHash, CacheScope], ...]


class RootForgotten(NamedTuple):
    """No new block begins below this root, unless the root becomes known again."""

    root: BlockHash


class ListingBegan(NamedTuple):
    """All blocks are reported from here on, even those reported before."""


class ListingEnded(NamedTuple):
    """Blocks reported before the listing, and not again since, are gone."""


Change = Came | Left | RootsKnown | RootForgotten | ListingBegan | ListingEnded


class BlockLog:
    """The log of one prefix cache. Changes are plain tuples, so a step pays only for an append."""

    def __init__(self, *, limit: int = LOG_LIMIT) -> None:
        self._limit = limit
        self._changes: collections.deque[Change] = collections.deque()
        self._scopes: dict[BlockHash, CacheScope] = {}
        self.is_on = False
        """Written by the inference thread alone."""

    def begin(self) -> None:
        """Note changes from now on, beginning with the start of a listing and the known roots."""
        self.is_on = True
        self.note(ListingBegan())
        self.note(RootsKnown(tuple(self._scopes.items())))

    def add_roots(self, scopes: Mapping[BlockHash, CacheScope]) -> None:
        """Note whose chains begin below these roots."""
        self._scopes.update(scopes)
        if self.is_on:
            self.note(RootsKnown(tuple(scopes.items())))

    def drop_root(self, root: BlockHash) -> None:
        """Forget a root, whose tenant is no longer known."""
        self._scopes.pop(root, None)
        if self.is_on:
            self.note(RootForgotten(root))

    def note(self, change: Change) -> None:
        """Append a change. If there is no room, nothing more is noted until the next `begin`."""
        if len(self._changes) < self._limit:
            self._changes.append(change)
        else:
            self.is_on = False

    def take(self, *, limit: int) -> list[Change]:
        """Remove and return the oldest changes, at most `limit`."""
        count = min(limit, len(self._changes))
        return [self._changes.popleft() for _ in range(count)]

    def __len__(self) -> int:
        return len(self._changes)
