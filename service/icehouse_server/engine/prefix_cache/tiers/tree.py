"""Prefix tree: the only index in memory of the known blocks: where each is, and the order of eviction.

Inference thread only, pure data, no mlx. A chained hash makes a flat dict the tree: a node's name is the hash
of its parent's name and its own tokens. One node has the state of both tiers, so that a short RAM hit never
hides a longer SSD hit. Only this file writes changes to the block log.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from operator import attrgetter

from icehouse_server.domain.blocks import (
    BlockHeader,
    RegionKind,
    TokenKeys,
    join_keys,
    key_hash,
    prefix_key_hashes,
    split_keys,
)
from icehouse_server.domain.cache_commands import Tier
from icehouse_server.domain.ids import BlockHash
from icehouse_server.engine.core.block_log import BlockLog, Came, Left, ListingEnded
from icehouse_server.engine.prefix_cache.tiers.account import TierAccount
from icehouse_server.engine.prefix_cache.tiers.node import NO_REGIONS, NO_SIZES, Node, Regions, Spilling
from icehouse_server.engine.prefix_cache.tiers.prefix_settings import PrefixSettings
from icehouse_server.engine.prefix_cache.tiers.runner_port import CacheFacts
from icehouse_server.pins import NOT_PINNED, PinEnds
from icehouse_server.storage.api import StoredBlock

NAMES_LIMIT = 2048
"""Names that are cached by parent and tokens: the blocks of half a million tokens, some 5 MB. Matching,
following, leading and capturing a prompt each need its names; 256 tokens take some 20 us to hash and 2 us to
look up (2-core x86)."""
_SIZES_LIMIT = 4096
"""Cached mappings of region sizes on SSD; blocks with equal sizes share one."""


class _Siblings(dict[BlockHash, Node]):
    """Several blocks below one parent, and how many there are of each token count."""

    __slots__ = ("counts",)

    def __init__(self, first: Node) -> None:
        super().__init__({first.hash: first})
        self.counts = Counter((first.token_count,))


class Children:
    """Blocks by parent, in order of arrival, and their token counts.

    An only child, as most blocks are, takes no more than its slot in the dict. No method visits all children
    of a block: anybody can give a popular prompt twenty thousand of them.
    """

    def __init__(self) -> None:
        self._of: dict[BlockHash, Node | _Siblings] = {}

    def add(self, node: Node) -> None:
        """Add a block below its parent, as the latest."""
        known = self._of.get(node.parent)
        if known is None:
            self._of[node.parent] = node
            return
        if isinstance(known, Node):
            known = self._of[node.parent] = _Siblings(known)
        known[node.hash] = node
        known.counts[node.token_count] += 1

    def remove(self, node: Node) -> None:
        known = self._of[node.parent]
        if isinstance(known, _Siblings):
            del known[node.hash]
            known.counts.subtract((node.token_count,))
            if not known.counts[node.token_count]:
                del known.counts[node.token_count]
            if known:
                return
        del self._of[node.parent]

    def latest(self, parent: BlockHash) -> Iterator[Node]:
        """Yield the blocks below `parent`, the latest first."""
        known = self._of.get(parent)
        if isinstance(known, _Siblings):
            return reversed(known.values())
        return iter(() if known is None else (known,))

    def lengths(self, parent: BlockHash) -> Collection[int]:
        """Return the distinct token counts of the blocks below `parent`."""
        known = self._of.get(parent)
        if isinstance(known, _Siblings):
            return known.counts.keys()
        return () if known is None else (known.token_count,)


class PrefixTree:
    """All blocks of the served fingerprint that are in a tier, or on their way to one."""

    def __init__(self, settings: PrefixSettings, facts: CacheFacts, log: BlockLog) -> None:
        self.settings = settings
        self.facts = facts
        self.log = log

        @functools.lru_cache(maxsize=NAMES_LIMIT)
        def name_of(parent: BlockHash, keys: TokenKeys) -> BlockHash:
            return key_hash(parent=parent, keys=keys, secret=settings.name_secret)

        self.name_of = name_of
        """Returns the name of a block with these tokens below `parent`, known or not."""
        self._nodes: dict[BlockHash, Node] = {}
        self._children = Children()
        self._pinned: dict[BlockHash, Node] = {}
        self._pin_ends = PinEnds()
        self._spilling: dict[BlockHash, Node] = {}
        self._sizes: dict[tuple[int, int, int], Mapping[RegionKind, int]] = {}
        size, quotas = settings.block_token_count, settings.quotas
        self.ram = TierAccount(
            attrgetter("ram_bytes"), block_token_count=size, has_order=True, by_owner=bool(quotas.ram_bytes)
        )
        # The SSD tier itself keeps the order of all its blocks.
        self.ssd = TierAccount(
            attrgetter("ssd_bytes"), block_token_count=size, has_order=False, by_owner=bool(quotas.ssd_bytes)
        )

    # What is known.

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        """Yield all nodes in the order in which they became known."""
        return iter(self._nodes.values())

    def get(self, block: BlockHash) -> Node | None:
        return self._nodes.get(block)

    def recent(self, limit: int) -> list[Node]:
        """Return at most `limit` nodes: pinned ones in RAM, then those used last there, then the newest."""
        in_ram = islice(chain(self.pinned_in_ram, self.ram.latest()), limit)
        return list(dict.fromkeys((*in_ram, *islice(reversed(self._nodes.values()), limit))))[:limit]

    def in_ram(self) -> Iterator[Node]:
        """Yield the nodes in RAM: least recently used first, pinned ones last."""
        return chain(self.ram.oldest(), self.pinned_in_ram)

    @property
    def pinned_in_ram(self) -> list[Node]:
        return [node for node in self._pinned.values() if node.ram]

    @property
    def spilling(self) -> Collection[Node]:
        """The nodes on their way to SSD, in the order they were sent; the write queue bounds their number."""
        return self._spilling.values()

    def chain_names(self, root: BlockHash, keys: TokenKeys) -> list[BlockHash]:
        """Return the names of the full blocks of these tokens below `root`, in order."""
        size = self.settings.block_token_count
        names: list[BlockHash] = []
        for start in range(0, len(keys) - size + 1, size):
            names.append(self.name_of(names[-1] if names else root, keys[start : start + size]))
        return names

    def header_of(self, node: Node, keys: TokenKeys) -> BlockHeader:
        """Return a block's header as its file has it; `keys` are its tokens."""
        assert node.token_ids == keys or self.name_of(node.parent, keys) == node.hash
        token_ids, extra = split_keys(keys)
        return BlockHeader(
            hash=node.hash,
            parent=node.parent,
            fingerprint=self.settings.fingerprint,
            start_token_index=node.start_token_index,
            token_ids=token_ids,
            block_token_limit=self.settings.block_token_count,
            extra=extra,
        )

    def children(self, parent: BlockHash, *, limit: int | None = None) -> list[Node]:
        """Return the nodes that follow `parent`, the latest first, at most `limit`."""
        return list(islice(self._children.latest(parent), limit))

    def reach(self, node: Node) -> int:
        """Return the largest end of the blocks right after this one; its own end if there is none."""
        return node.end_token_index + max(self._children.lengths(node.hash), default=0)

    def ancestors(self, node: Node) -> Iterator[Node]:
        """Yield the known nodes before this one, the nearest first."""
        above = self._nodes.get(node.parent)
        while above is not None:
            yield above
            above = self._nodes.get(above.parent)

    def beginnings(self, parent: BlockHash, keys: TokenKeys, *, limit: int) -> Iterator[Node]:
        """Yield nodes below `parent` that consist of the first tokens of `keys`, at most `limit` tokens."""
        lengths = [n for n in self._children.lengths(parent) if n <= limit]
        secret = self.settings.name_secret
        names = prefix_key_hashes(parent=parent, keys=keys, lengths=lengths, secret=secret)
        for name, length in zip(names, lengths, strict=True):
            node = self._nodes.get(name)
            if node is not None and node.may_be(keys[:length]):
                yield node

    def superseded(self, node: Node) -> list[Node]:
        """Return the shorter unpinned blocks that this one begins with and can replace."""
        if node.token_ids is None or not self.facts.cuttable_inside:
            return []
        return [
            other
            for other in self.beginnings(node.parent, node.token_ids, limit=node.token_count - 1)
            if not other.is_pinned and all(node.has(kind, with_ssd=True) for kind in (*other.ram, *other.ssd))
        ]

    # What becomes known, and what is forgotten.

    def insert(self, *, parent: BlockHash, start_token_index: int, keys: TokenKeys) -> Node:
        """Return the node of these tokens below `parent`, made if not known; `prune` it if it stays empty."""
        name = self.name_of(parent, keys)
        node = self._nodes.get(name)
        if node is None:
            node = self._add(Node(name, parent, start_token_index, len(keys)))
        self.learn_keys(node, keys)
        assert node.token_ids == keys, f"two blocks share the hash {name.hex()}"
        return node

    def learn_keys(self, node: Node, keys: TokenKeys) -> None:
        """Record the tokens of a block if they were not known, and log them if it is on SSD."""
        if node.token_ids is None:
            node.token_ids = keys
            if node.ssd:
                self._note_came(Tier.SSD, node)

    def learn_header(self, header: BlockHeader) -> None:
        """Record the tokens from a block's header, if this version can decode them."""
        node = self._nodes.get(header.hash)
        # A block of another version whose tokens cannot be decoded matches by its name alone.
        with contextlib.suppress(ValueError):
            if node is not None:
                self.learn_keys(node, join_keys(header.token_ids, header.extra))

    def prune(self, node: Node) -> None:
        """Forget a node that is in neither tier and not on its way to one."""
        is_empty = not (node.ram or node.ssd or node.spill)
        if is_empty and self._nodes.get(node.hash) is node:
            del self._nodes[node.hash]
            self._note_pin(node, NOT_PINNED)
            self._children.remove(node)

    # RAM.

    def add_regions(self, node: Node, regions: Regions) -> None:
        """Add regions of a block to RAM; the caller has made space."""
        if not regions:
            return
        is_new = not node.ram
        if not is_new:
            self.ram.remove(node)
        node.ram = {**node.ram, **regions}
        sizes = {kind: size for kind, region in regions.items() if (size := region.size_bytes)}
        node.ram_sizes = {**node.ram_sizes, **sizes}
        self.ram.add(node)
        if is_new:
            self._note_came(Tier.RAM, node)

    def drop(self, node: Node) -> bool:
        """Drop a block's regions in RAM; False if it had none."""
        if not node.ram:
            return False
        self.ram.remove(node)
        node.ram, node.ram_sizes = NO_REGIONS, NO_SIZES
        self._note_left(Tier.RAM, node)
        self.prune(node)
        return True

    def drop_region(self, node: Node, kind: RegionKind) -> None:
        """Drop one region of a block in RAM; the others stay, and the block keeps its place in the order."""
        if node.ram.keys() == {kind}:
            self.drop(node)
        elif kind in node.ram:
            with self.ram.resized(node):
                node.ram = {other: region for other, region in node.ram.items() if other is not kind}
                node.ram_sizes = {other: size for other, size in node.ram_sizes.items() if other is not kind}

    # SSD.

    def store(self, record: StoredBlock) -> Node:
        """Record that a block is committed on SSD."""
        node = self._nodes.get(record.hash)
        if node is None:
            node = Node(record.hash, record.parent, record.start_token_index, record.token_count)
            node.hit_count, node.pin_end_time = record.hit_count, record.pin_end_time
            self._add(node)
        is_new = not node.ssd
        if not is_new:
            self.ssd.remove(node)
        node.ssd, node.ssd_bytes = self._sizes_of(record), record.file_bytes
        # A block not used since the start counts as older than all that were used.
        self.ssd.add(node, is_oldest=not node.last_used_time)
        if is_new:
            self._note_came(Tier.SSD, node)
        return node

    def forget_stored(self, block: BlockHash) -> None:
        """Record that a block is no longer on SSD."""
        node = self._nodes.get(block)
        if node is not None and node.ssd:
            self.ssd.remove(node)
            node.ssd, node.ssd_bytes = NO_SIZES, 0
            self._note_left(Tier.SSD, node)
            self.prune(node)

    def begin_spill(self, node: Node, *, size_bytes: int) -> None:
        """Record that a block is on its way to SSD; it stays known until `end_spill`."""
        assert node.spill is None, f"{node.hash.hex()} is on its way to SSD already"
        node.spill = Spilling(size_bytes)
        self._spilling[node.hash] = node

    def end_spill(self, node: Node) -> Spilling | None:
        """Record that a block was written or dropped; return the state of its spill."""
        spill, node.spill = node.spill, None
        self._spilling.pop(node.hash, None)
        self.prune(node)
        return spill

    # Use, pins and owners.

    def touch(self, nodes: Sequence[Node], *, now: float) -> None:
        """Record the use of a chain, its first block last."""
        for node in reversed(nodes):
            node.last_used_time = now
            for tier, is_there in ((self.ram, node.ram), (self.ssd, node.ssd)):
                if is_there:
                    tier.touch(node)

    def demote(self, node: Node) -> None:
        """Make a block the next to be evicted from each tier that it is in."""
        for tier, is_there in ((self.ram, node.ram), (self.ssd, node.ssd)):
            if is_there:
                tier.demote(node)

    def set_pin(self, node: Node, end_time: float) -> None:
        """Pin a block until `end_time` (`Clock.wall`), or unpin it as the most recently used one."""
        if node.pin_end_time != end_time and self._nodes.get(node.hash) is node:
            with self._recounted(node):
                node.pin_end_time = end_time
            self._note_pin(node, end_time)

    def end_pins(self, now_time: float) -> None:
        """Unpin the blocks whose pins have ended (`Clock.wall`), the tail of a chain before its head."""
        ended = [self._nodes[name] for name in self._pin_ends.take(now_time)]
        for node in sorted(ended, key=lambda node: -node.start_token_index):
            self.set_pin(node, NOT_PINNED)

    def claim(self, nodes: Iterable[Node], owner: BlockHash) -> None:
        """Assign blocks without a known owner to the root below which they were just used."""
        for node in nodes:
            if node.owner is None:
                with self._recounted(node):
                    node.owner = owner

    def listing(self, *, slice_count: int) -> Iterator[int]:
        """Turn the log on and write every known block to it, a slice at a time; yield how many are left.

        A block is written in its current state: changes since the beginning are in the log anyway.
        """
        left = list(self._nodes.values())
        self.log.begin()
        while left and self.log.is_on:
            for _ in range(min(slice_count, len(left))):
                node = left.pop()
                for tier, is_there in ((Tier.RAM, node.ram), (Tier.SSD, node.ssd)):
                    if is_there and self._nodes.get(node.hash) is node:
                        self._note_came(tier, node)
            if left:
                yield len(left)
        if self.log.is_on:
            self.log.note(ListingEnded())

    def _add(self, node: Node) -> Node:
        above = self._nodes.get(node.parent)
        owner_above = None if above is None else above.owner
        node.owner = owner_above if node.start_token_index else node.parent
        self._nodes[node.hash] = node
        self._children.add(node)
        self._note_pin(node, node.pin_end_time)
        return node

    def _note_pin(self, node: Node, end_time: float) -> None:
        self._pin_ends.note(node.hash, end_time)
        if end_time == NOT_PINNED:
            self._pinned.pop(node.hash, None)
        else:
            self._pinned[node.hash] = node

    @contextlib.contextmanager
    def _recounted(self, node: Node) -> Iterator[None]:
        """Take a node out of its tiers' accounts during a change, and add it again afterwards."""
        tiers = [tier for tier, is_there in ((self.ram, node.ram), (self.ssd, node.ssd)) if is_there]
        for tier in tiers:
            tier.remove(node)
        yield
        for tier in tiers:
            tier.add(node)

    def _sizes_of(self, record: StoredBlock) -> Mapping[RegionKind, int]:
        """Return one mapping shared by all blocks of these sizes, which saves two thirds of the memory."""
        sizes = (record.kv_bytes, record.window_bytes, record.checkpoint_bytes)
        if sizes not in self._sizes:
            if len(self._sizes) >= _SIZES_LIMIT:
                self._sizes.clear()
            self._sizes[sizes] = {kind: size for kind, size in zip(RegionKind, sizes, strict=True) if size}
        return self._sizes[sizes]

    def _note_came(self, tier: Tier, node: Node) -> None:
        if self.log.is_on:
            is_first = node.start_token_index == 0
            self.log.note(Came(tier, node.hash, node.parent, is_first, node.token_count, node.token_ids))

    def _note_left(self, tier: Tier, node: Node) -> None:
        if self.log.is_on:
            self.log.note(Left(tier, node.hash))
