"""Match: the longest chain of known blocks that a prompt begins with and that a restore can be made from.

Pure functions over the prefix tree. Every node whose tokens are known is compared token by token, so that
equal hashes alone never make a hit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import islice, takewhile
from typing import NamedTuple

from icehouse_server.domain.blocks import RegionKind, TokenKeys
from icehouse_server.domain.ids import BlockHash
from icehouse_server.engine.prefix_cache.tiers.node import Node
from icehouse_server.engine.prefix_cache.tiers.tree import PrefixTree

_CANDIDATE_LIMIT = 512
"""Children of one block that are compared token by token for a match that ends inside one."""

_UNREAD_LIMIT = 8
"""Blocks of unknown tokens that are looked into for one prompt."""


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """What is looked up: token keys, h0 of fingerprint, tenant and adapter, and h0 of a tenant whose blocks
    may stand for missing ones."""

    keys: TokenKeys
    root: BlockHash
    shared_root: BlockHash | None = None

    @property
    def roots(self) -> tuple[BlockHash, ...]:
        """Where its chains begin, its own first."""
        shared = self.shared_root
        return (self.root,) if shared is None or shared == self.root else (self.root, shared)

    @property
    def is_own(self) -> bool:
        """Whether all that may be found is its own tenant's."""
        return len(self.roots) == 1

    @property
    def limit(self) -> int:
        """Tokens that may match: the last one always runs."""
        return len(self.keys) - 1


@dataclasses.dataclass(frozen=True, slots=True)
class Match:
    """A chain of known blocks that a prompt begins with; the last may be used in part."""

    nodes: tuple[Node, ...]
    token_count: int
    """Tokens of the prompt covered; inside the last node when it is used in part."""
    known_token_count: int
    """Tokens that match at all, before regions and checkpoints are asked for."""


def match(tree: PrefixTree, prompt: Prompt, *, with_ssd: bool = True) -> Match:
    """Return the longest usable chain."""
    walk = _Walk(tree, prompt, prompt.keys[: prompt.limit])
    counts = walk.kv_counts(with_ssd=with_ssd)
    known = 0
    for found in walk.candidates():
        known = known or found.token_count
        if walk.is_usable(found, counts, with_ssd=with_ssd):
            return Match(tuple(walk.backwards(found))[::-1], found.token_count, known)
    return Match((), 0, known)


def unread_nodes(tree: PrefixTree, prompt: Prompt) -> list[Node]:
    """Return blocks on SSD that may begin like the rest of this prompt, as their tokens are not known.

    Latest first, a few only; with their tokens known a match may end inside one of them.
    """
    walk = _Walk(tree, prompt, prompt.keys[: prompt.limit])
    last = walk.places[-1]
    if not tree.facts.cuttable_inside or last.covered == len(walk.keys):
        return []
    below = (node for parent in last.parents for node in tree.children(parent, limit=_CANDIDATE_LIMIT))
    return list(islice((node for node in below if node.token_ids is None and node.ssd), _UNREAD_LIMIT))


def known_chain(tree: PrefixTree, prompt: Prompt) -> list[Node]:
    """Return every known block that is wholly part of these tokens, in order."""
    walk = _Walk(tree, prompt, prompt.keys)
    whole = (node for place in walk.places for node in walk.whole(place))
    return sorted(dict.fromkeys(whole), key=lambda node: node.end_token_index)


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """A place in a prompt between two blocks."""

    covered: int
    chain_count: int
    """Blocks of the walk's chain before this place."""
    parents: tuple[BlockHash, ...]
    """By that name the tenant's own blocks begin here, and those of the prefix it shares."""
    names: tuple[BlockHash, ...]
    """Of the full blocks that follow in the prompt, one for each parent; none where its rest is shorter."""


class _Candidate(NamedTuple):
    """A chain that a prompt begins with: the first so many blocks of a walk, and perhaps one more."""

    token_count: int
    chain_count: int
    last: Node | None


class _Walk:
    """The known full blocks of a prompt, and the places between them.

    Without kv regions the blocks between two checkpoints hold nothing and are not known, so the walk then
    goes on to the prompt's end.
    """

    def __init__(self, tree: PrefixTree, prompt: Prompt, keys: TokenKeys) -> None:
        self.keys = keys
        self.places: list[_Place] = []
        self._tree = tree
        self._size = size = tree.settings.block_token_count
        self._chain: list[Node] = []
        parents, in_ram = prompt.roots, True
        for start in range(0, len(keys) + 1, size):
            wanted = keys[start : start + size]
            is_full = len(wanted) == size
            names = tuple(tree.name_of(parent=p, keys=wanted) for p in parents) if is_full else ()
            self.places.append(_Place(start, len(self._chain), parents, names))
            node = _best(self._named(names, wanted), in_ram=in_ram)
            if node is not None:
                self._chain.append(node)
                in_ram = in_ram and RegionKind.KV in node.ram
            if not is_full or (node is None and tree.facts.has_kv):
                break
            parents = names

    def candidates(self) -> Iterator[_Candidate]:
        """Yield the chains a prompt begins with, longest first."""
        for place in reversed(self.places):
            for node, count in self._inside(place):
                yield _Candidate(place.covered + count, place.chain_count, node)
            # A place whose own block is unknown repeats the chain of the one before it.
            before = self._chain[place.chain_count - 1] if place.chain_count else None
            if before is not None and before.end_token_index == place.covered:
                yield _Candidate(place.covered, place.chain_count, None)

    def backwards(self, found: _Candidate) -> Iterator[Node]:
        """Yield a chain's blocks from the last to the first."""
        if found.last is not None:
            yield found.last
        for number in range(found.chain_count - 1, -1, -1):
            yield self._chain[number]

    def whole(self, place: _Place) -> list[Node]:
        """Return the children at this place that are wholly part of the prompt."""
        rest = self._rest(place)
        found = self._named(place.names, rest)
        for parent in place.parents:
            found += self._tree.beginnings(parent, rest, limit=min(len(rest), self._size - 1))
        return found

    def kv_counts(self, *, with_ssd: bool) -> tuple[int, int]:
        """Return how many of the first blocks have their kv in RAM, and up to where it can be had at all:
        from RAM as far as it goes, from there all from SSD."""
        ram_count = _count(takewhile(lambda node: RegionKind.KV in node.ram, self._chain))
        behind = islice(self._chain, ram_count, None) if with_ssd else ()
        return ram_count, ram_count + _count(takewhile(lambda node: RegionKind.KV in node.ssd, behind))

    def is_usable(self, found: _Candidate, counts: tuple[int, int], *, with_ssd: bool) -> bool:
        """Say whether a restore can be made. What is asked of every block is in `counts` (`kv_counts`); the
        rest is asked of those in the window, and of the last."""
        facts, last = self._tree.facts, next(self.backwards(found))
        if facts.needs_checkpoint and not (
            last.end_token_index == found.token_count and last.has(RegionKind.CHECKPOINT, with_ssd=with_ssd)
        ):
            return False
        if facts.has_kv:
            ram_count, kv_count = counts
            goes_on_in_ram = found.chain_count <= ram_count and RegionKind.KV in last.ram
            goes_on = found.last is None or goes_on_in_ram or (with_ssd and RegionKind.KV in last.ssd)
            if found.chain_count > kv_count or not goes_on:
                return False
        return self._covers_window(found, with_ssd=with_ssd)

    def _covers_window(self, found: _Candidate, *, with_ssd: bool) -> bool:
        """Say whether the blocks reach back as far as the window does, and have what it holds; without kv a
        chain may have gaps."""
        window = self._tree.facts.window_token_count
        window_start = max(0, found.token_count - window)
        covered_from = found.token_count
        for node in self.backwards(found):
            if covered_from <= window_start or node.end_token_index < covered_from:
                break
            if window and not node.has(RegionKind.WINDOW, with_ssd=with_ssd):
                return False
            covered_from = node.start_token_index
        return covered_from <= window_start

    def _inside(self, place: _Place) -> list[tuple[Node, int]]:
        """Return children that begin like the rest, with how much of each is wanted; longest first."""
        found = [(node, node.token_count) for node in self.whole(place)]
        if self._tree.facts.cuttable_inside:
            rest = self._rest(place)
            for parent in place.parents:
                for node in reversed(self._tree.children(parent, limit=_CANDIDATE_LIMIT)):
                    count = common_prefix(node.token_ids or (), rest)
                    if 0 < count < node.token_count:
                        found.append((node, count))
        return sorted(found, key=lambda pair: -pair[1])

    def _named(self, names: Sequence[BlockHash], wanted: TokenKeys) -> list[Node]:
        found = (self._tree.get(name) for name in names)
        return [node for node in found if node is not None and node.may_be(wanted)]

    def _rest(self, place: _Place) -> TokenKeys:
        return self.keys[place.covered : place.covered + self._size]


def _best(nodes: Sequence[Node], *, in_ram: bool) -> Node | None:
    """Return the node that holds most; of equal ones the first that goes on where the chain is, `in_ram` or,
    behind the first gap there, on SSD."""
    return max(nodes, key=lambda n: (len({*n.ram, *n.ssd}), len(n.ram if in_ram else n.ssd)), default=None)


def _count(nodes: Iterator[Node]) -> int:
    return sum(1 for _ in nodes)


def common_prefix(known: TokenKeys, wanted: TokenKeys) -> int:
    """Return how many tokens two blocks have in common from their beginning on."""
    limit = min(len(known), len(wanted))
    if known[:limit] == wanted[:limit]:
        return limit
    return next(i for i in range(limit) if known[i] != wanted[i])
