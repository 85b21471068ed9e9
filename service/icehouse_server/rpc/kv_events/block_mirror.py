"""Block mirror: the blocks of both tiers as the block log tells, and the resulting events for subscribers.

Plain data, owned by the event loop. A block is published while its prefix is whole, its tokens are known and
its root belongs to a known tenant. It is published after its parent and removed before it, so a subscriber
never has a block without its parent, not even in a snapshot.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from icehouse_server.domain.blocks import pack_tokens, runs_of, split_keys
from icehouse_server.domain.cache_commands import KnownTokens, Tier
from icehouse_server.domain.ids import BlockHash, CacheScope, Tenant
from icehouse_server.engine.core.block_log import (
    Came,
    Change,
    Left,
    ListingBegan,
    ListingEnded,
    RootForgotten,
    RootsKnown,
)

CUT_BYTES = 8
"""Bytes of a block's name in events."""


class BlockImage(NamedTuple):
    """An image that a block overlaps, as in vLLM's `extra_keys`."""

    identifier: str
    """The digest of the prepared pixels, in hex, as Explain shows it."""
    offset: int
    """Index of the image's first token, relative to the block; negative if it is in an earlier block."""


@dataclasses.dataclass(frozen=True, slots=True)
class KvBlock:
    """One whole block of a chain that begins at a prompt's first token."""

    hash: int
    """Signed, 64 bits."""
    parent: int | None
    """None for a prompt's first block."""
    packed_token_ids: bytes
    """In the form of `blocks.pack_tokens`."""
    scope: CacheScope
    images: tuple[BlockImage, ...] = ()
    """The images that the block overlaps, in order: its tokens do not identify them."""

    @property
    def token_count(self) -> int:
        return len(self.packed_token_ids) // 4


@dataclasses.dataclass(frozen=True, slots=True)
class BlockStored:
    """A tier now has the block."""

    block: KvBlock
    tier: Tier

    @property
    def tenant(self) -> Tenant:
        return self.block.scope.tenant


@dataclasses.dataclass(frozen=True, slots=True)
class BlockRemoved:
    """A tier no longer has the block."""

    hash: int
    tier: Tier
    tenant: Tenant


@dataclasses.dataclass(frozen=True, slots=True)
class BlocksCleared:
    """Everything before must be forgotten: the whole state follows."""


KvEvent = BlockStored | BlockRemoved | BlocksCleared


@dataclasses.dataclass(frozen=True, slots=True)
class SnapshotChunk:
    """Which part of a snapshot a batch is. The last part has the number at which the snapshot was taken."""

    index: int
    chunk_count: int
    stored_count: int
    """How many `BlockStored` events the whole state has."""


@dataclasses.dataclass(frozen=True, slots=True)
class KvBatch:
    """Events that happened together. Sequence numbers rise by one."""

    sequence_number: int
    time: float
    """`Clock.wall`."""
    events: tuple[KvEvent, ...]
    snapshot: SnapshotChunk | None = None


def images_of(extra: bytes) -> tuple[BlockImage, ...]:
    """Return the images of a block from its header; raises ValueError for a header of another version."""
    return tuple(BlockImage(run.digest.hex(), run.start - run.place) for run in runs_of(extra))


def cut(name: BlockHash) -> int:
    """Return the first 64 bits of a block's name as a signed number."""
    return int.from_bytes(name[:CUT_BYTES], "big", signed=True)


Held = tuple[Tier, ...]


@dataclasses.dataclass(slots=True, eq=False)
class _KnownBlock:
    """A whole block that some tier has; `published` while subscribers know of it."""

    name: BlockHash
    parent: BlockHash
    is_first: bool
    packed: bytes | None
    images: tuple[BlockImage, ...] = ()
    held: Held = ()
    published: KvBlock | None = None


class BlockMirror:
    """Keeps at most `block_limit` blocks. Further ones and their descendants are not published."""

    def __init__(self, *, block_token_count: int, block_limit: int) -> None:
        self._block_token_count = block_token_count
        self._block_limit = block_limit
        self._known: dict[BlockHash, _KnownBlock] = {}
        self._children: dict[BlockHash, dict[BlockHash, _KnownBlock]] = {}
        self._scopes: dict[BlockHash, CacheScope] = {}
        self._forgotten_roots: set[BlockHash] = set()
        self._published: dict[Tenant, dict[BlockHash, _KnownBlock]] = {}
        """Each tenant's blocks in the order in which they were published: parents first."""
        self._unread: dict[BlockHash, None] = {}
        """Blocks whose tokens must be read, in order."""
        self._unlisted: dict[tuple[BlockHash, Tier], None] = {}
        """Blocks that were known before the current listing but that it has not named yet."""
        self.unpublished_total = 0
        """Blocks that were not published because the mirror was full."""

    def __len__(self) -> int:
        return len(self._known)

    def apply(self, changes: Iterable[Change]) -> Iterator[KvEvent]:
        """Apply changes in order; yield the events for subscribers."""
        for change in changes:
            if isinstance(change, Came):
                yield from self._came(change)
            elif isinstance(change, Left):
                yield from self._left(change.name, change.tier)
            elif isinstance(change, RootsKnown):
                yield from self._roots_known(change)
            elif isinstance(change, RootForgotten):
                self._forget_root(change.root)
            elif isinstance(change, ListingBegan):
                held = ((each.name, tier) for each in self._known.values() for tier in each.held)
                self._unlisted = dict.fromkeys(held)
            elif isinstance(change, ListingEnded):
                unlisted, self._unlisted = self._unlisted, {}
                for name, tier in unlisted:
                    yield from self._left(name, tier)

    def take_unread(self, *, limit: int) -> tuple[BlockHash, ...]:
        """Return at most `limit` blocks whose tokens must be read; each is returned once."""
        names = tuple(name for name, _ in zip(self._unread, range(limit), strict=False))
        for name in names:
            del self._unread[name]
        return names

    def put_back(self, names: Iterable[BlockHash]) -> None:
        """Let the tokens of these blocks be read later, if they are still needed."""
        for name in names:
            known = self._known.get(name)
            if known is not None and known.packed is None:
                self._unread[name] = None

    def learn(self, blocks: Iterable[KnownTokens]) -> Iterator[KvEvent]:
        """Note the tokens of blocks; yield the events for subscribers."""
        for block in blocks:
            known = self._known.get(block.hash)
            if known is not None and known.packed is None:
                yield from self._learn(known, block.token_ids, block.extra)

    def published_blocks(self, tenant: Tenant | None) -> list[tuple[KvBlock, Held]]:
        """Return the published blocks of one tenant or of all, parents first."""
        owned = self._published.values() if tenant is None else (self._published.get(tenant, {}),)
        return [
            (each.published, each.held)
            for own in owned
            for each in own.values()
            if each.published is not None
        ]

    def _came(self, change: Came) -> Iterator[KvEvent]:
        if change.token_count != self._block_token_count:
            return
        known = self._known.get(change.name)
        if known is None:
            if len(self._known) >= self._block_limit:
                self.unpublished_total += 1
                return
            known = _KnownBlock(change.name, change.parent, change.is_first, None)
            self._known[change.name] = known
            self._children.setdefault(change.parent, {})[change.name] = known
        self._unlisted.pop((change.name, change.tier), None)
        is_new = change.tier not in known.held
        if is_new:
            known.held += (change.tier,)
        if known.published is not None:
            if is_new:
                yield BlockStored(known.published, change.tier)
        elif change.keys is not None:
            yield from self._learn(known, *split_keys(change.keys))
        elif known.packed is None:
            self._unread[change.name] = None

    def _left(self, name: BlockHash, tier: Tier) -> Iterator[KvEvent]:
        known = self._known.get(name)
        if known is None or tier not in known.held:
            return
        self._unlisted.pop((name, tier), None)
        if known.held == (tier,):
            yield from self._retract(known)
            self._forget(known)
        else:
            known.held = tuple(other for other in known.held if other is not tier)
            if known.published is not None:
                yield BlockRemoved(known.published.hash, tier, known.published.scope.tenant)

    def _forget(self, known: _KnownBlock) -> None:
        known.held = ()
        del self._known[known.name]
        self._unread.pop(known.name, None)
        siblings = self._children[known.parent]
        del siblings[known.name]
        if not siblings:
            del self._children[known.parent]
            if known.parent in self._forgotten_roots:
                self._forgotten_roots.discard(known.parent)
                del self._scopes[known.parent]

    def _roots_known(self, change: RootsKnown) -> Iterator[KvEvent]:
        for root, scope in change.scopes:
            self._forgotten_roots.discard(root)
            if root not in self._scopes:
                self._scopes[root] = scope
                for first in list(self._children.get(root, {}).values()):
                    yield from self._publish(first)

    def _forget_root(self, root: BlockHash) -> None:
        """Forget a root once it has no blocks; until then these stay published."""
        if root in self._children:
            self._forgotten_roots.add(root)
        else:
            self._scopes.pop(root, None)

    def _learn(self, known: _KnownBlock, token_ids: tuple[int, ...], extra: bytes) -> Iterator[KvEvent]:
        if known.packed is None:
            try:
                known.images = images_of(extra)
            except ValueError:
                return  # of another version: prompts still find the block by its name
            known.packed = pack_tokens(token_ids)
            self._unread.pop(known.name, None)
        yield from self._publish(known)

    def _publish(self, first: _KnownBlock) -> Iterator[KvEvent]:
        """Publish a block and its descendants, as far as possible."""
        waiting = deque((first,))
        while waiting:
            known = waiting.popleft()
            block = self._publishable(known)
            if block is None:
                continue
            known.published = block
            self._published.setdefault(block.scope.tenant, {})[known.name] = known
            for tier in known.held:
                yield BlockStored(block, tier)
            waiting.extend(self._children.get(known.name, {}).values())

    def _publishable(self, known: _KnownBlock) -> KvBlock | None:
        if known.published is not None or known.packed is None:
            return None
        if known.is_first:
            scope = self._scopes.get(known.parent)
            if scope is None:
                return None
            return KvBlock(cut(known.name), None, known.packed, scope, known.images)
        above = self._known.get(known.parent)
        if above is None or above.published is None:
            return None
        return KvBlock(
            cut(known.name), above.published.hash, known.packed, above.published.scope, known.images
        )

    def _retract(self, known: _KnownBlock) -> Iterator[KvEvent]:
        """Unpublish a block and its descendants, the last ones first."""
        chain = [known] if known.published is not None else []
        for each in chain:
            chain += [
                child for child in self._children.get(each.name, {}).values() if child.published is not None
            ]
        for each in reversed(chain):
            assert each.published is not None
            tenant = each.published.scope.tenant
            for tier in each.held:
                yield BlockRemoved(each.published.hash, tier, tenant)
            each.published = None
            own = self._published[tenant]
            del own[each.name]
            if not own:
                del self._published[tenant]
