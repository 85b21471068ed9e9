"""Matching: the longest chain of known blocks that a prompt begins with and that can be restored.

Pure functions over the prefix tree. Nodes whose tokens are known are compared token by token, so that equal
hashes alone never make a hit.
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
"""Children of a block that are compared token by token for a match that ends inside one of them."""

_UNREAD_LIMIT = 8
"""Blocks with unknown tokens whose headers are read for one prompt."""


@dataclasses.dataclass(frozen=True, slots=True)
class LookupPrompt:
    """The tokens of a lookup; `root` is h0 of fingerprint, tenant and adapter, and `shared_root` that of a
    tenant whose blocks may stand in for missing ones."""

    keys: TokenKeys
    root: BlockHash
    shared_root: BlockHash | None = None

    @property
    def roots(self) -> tuple[BlockHash, ...]:
        """Roots of the chains that it may use, its own first."""
        shared = self.shared_root
        return (self.root,) if shared is None or shared == self.root else (self.root, shared)

    @property
    def is_own(self) -> bool:
        """Whether it may use only its own tenant's blocks."""
        return len(self.roots) == 1

    @property
    def limit(self) -> int:
        """Tokens that may match: the last one is always computed."""
        return len(self.keys) - 1


@dataclasses.dataclass(frozen=True, slots=True)
class Match:
    """A chain of known blocks that a prompt begins with; the last may be used in part."""

    nodes: tuple[Node, ...]
    token_count: int
    """Tokens of the prompt that are covered; ends inside the last node if that is used in part."""
    known_token_count: int
    """Tokens that match at all, whether or not their regions and checkpoints are there."""


def match(tree: PrefixTree, prompt: LookupPrompt, *, with_ssd: bool = True) -> Match:
    """Return the longest usable chain."""
    search = _Search(tree, prompt.roots, prompt.keys[: prompt.limit], with_ssd=with_ssd)
    known = 0
    for candidate in search.candidates():
        known = known or candidate.token_count
        if search.is_usable(candidate):
            return Match(tuple(search.backwards(candidate))[::-1], candidate.token_count, known)
    return Match((), 0, known)


def unread_nodes(tree: PrefixTree, prompt: LookupPrompt) -> list[Node]:
    """Return the latest few blocks on SSD whose tokens are unknown and may begin like the prompt's rest."""
    search = _Search(tree, prompt.roots, prompt.keys[: prompt.limit])
    last = search.boundaries[-1]
    if not tree.facts.cuttable_inside or last.token_index == len(search.keys):
        return []
    below = (node for parent in last.parents for node in tree.children(parent, limit=_CANDIDATE_LIMIT))
    return list(islice((node for node in below if node.token_ids is None and node.ssd), _UNREAD_LIMIT))


def known_chain(tree: PrefixTree, prompt: LookupPrompt) -> list[Node]:
    """Return every known block that is wholly part of these tokens, in order."""
    search = _Search(tree, prompt.roots, prompt.keys)
    whole = (node for boundary in search.boundaries for node in search.whole(boundary))
    return sorted(dict.fromkeys(whole), key=lambda node: node.end_token_index)


@dataclasses.dataclass(frozen=True, slots=True)
class _Boundary:
    """A position in a prompt where a full block begins."""

    token_index: int
    chain_count: int
    """Blocks of the search's chain before it."""
    parents: tuple[BlockHash, ...]
    """Names of the block before it: in the tenant's own chain, and in the shared one if there is one."""
    names: tuple[BlockHash, ...]
    """Names of the full block that follows, one for each parent; none if the rest is shorter."""


class _Candidate(NamedTuple):
    """A chain that a prompt begins with: the first `chain_count` blocks of a search, and perhaps one more."""

    token_count: int
    chain_count: int
    last: Node | None


class _Search:
    """The known full blocks that a prompt's tokens begin with, and the boundaries between them.

    Without kv regions the blocks between two checkpoints are empty and not known, so the search then goes
    on to the end of the tokens.
    """

    def __init__(
        self, tree: PrefixTree, roots: tuple[BlockHash, ...], keys: TokenKeys, *, with_ssd: bool = True
    ) -> None:
        self.keys = keys
        self.boundaries: list[_Boundary] = []
        self._tree = tree
        self._size = size = tree.settings.block_token_count
        self._with_ssd = with_ssd
        self._chain: list[Node] = []
        parents, in_ram = roots, True
        for start in range(0, len(keys) + 1, size):
            wanted = keys[start : start + size]
            is_full = len(wanted) == size
            names = tuple(tree.name_of(p, wanted) for p in parents) if is_full else ()
            self.boundaries.append(_Boundary(start, len(self._chain), parents, names))
            node = _best(self._named(names, wanted), in_ram=in_ram)
            if node is not None:
                self._chain.append(node)
                in_ram = in_ram and RegionKind.KV in node.ram
            if not is_full or (node is None and tree.facts.has_kv):
                break
            parents = names
        self._ram_count = _count(takewhile(lambda node: RegionKind.KV in node.ram, self._chain))
        """First blocks of the chain whose kv is in RAM, up to the first gap."""
        behind = islice(self._chain, self._ram_count, None) if with_ssd else ()
        self._kv_count = self._ram_count + _count(takewhile(lambda node: RegionKind.KV in node.ssd, behind))
        """First blocks of the chain whose kv is available: from RAM up to the first gap, then from SSD."""

    def candidates(self) -> Iterator[_Candidate]:
        """Yield the chains that the tokens begin with, longest first."""
        for boundary in reversed(self.boundaries):
            for node, count in self._inside(boundary):
                yield _Candidate(boundary.token_index + count, boundary.chain_count, node)
            # A boundary whose own block is unknown repeats the chain of the one before it.
            before = self._chain[boundary.chain_count - 1] if boundary.chain_count else None
            if before is not None and before.end_token_index == boundary.token_index:
                yield _Candidate(boundary.token_index, boundary.chain_count, None)

    def backwards(self, candidate: _Candidate) -> Iterator[Node]:
        """Yield a chain's blocks from the last to the first."""
        if candidate.last is not None:
            yield candidate.last
        for number in range(candidate.chain_count - 1, -1, -1):
            yield self._chain[number]

    def whole(self, boundary: _Boundary) -> list[Node]:
        """Return the children at this boundary that are wholly part of the tokens."""
        rest = self._rest(boundary)
        nodes = self._named(boundary.names, rest)
        for parent in boundary.parents:
            nodes += self._tree.beginnings(parent, rest, limit=min(len(rest), self._size - 1))
        return nodes

    def is_usable(self, candidate: _Candidate) -> bool:
        """Whether a candidate can be restored. Every block's kv is needed, see `_ram_count` and `_kv_count`;
        other regions only of the blocks in the window and of the last block."""
        facts, last = self._tree.facts, next(self.backwards(candidate))
        if facts.needs_checkpoint and not (
            last.end_token_index == candidate.token_count
            and last.has(RegionKind.CHECKPOINT, with_ssd=self._with_ssd)
        ):
            return False
        if facts.has_kv:
            continues_in_ram = candidate.chain_count <= self._ram_count and RegionKind.KV in last.ram
            continues_on_ssd = self._with_ssd and RegionKind.KV in last.ssd
            continues = candidate.last is None or continues_in_ram or continues_on_ssd
            if candidate.chain_count > self._kv_count or not continues:
                return False
        return self._covers_window(candidate)

    def _covers_window(self, candidate: _Candidate) -> bool:
        """Whether the blocks cover the window and have its regions; without kv a chain may have gaps."""
        window = self._tree.facts.window_token_count
        window_start = max(0, candidate.token_count - window)
        covered_from = candidate.token_count
        for node in self.backwards(candidate):
            if covered_from <= window_start or node.end_token_index < covered_from:
                break
            if window and not node.has(RegionKind.WINDOW, with_ssd=self._with_ssd):
                return False
            covered_from = node.start_token_index
        return covered_from <= window_start

    def _inside(self, boundary: _Boundary) -> list[tuple[Node, int]]:
        """Return children that begin like the rest, each with the number of common tokens; longest first."""
        pairs = [(node, node.token_count) for node in self.whole(boundary)]
        if self._tree.facts.cuttable_inside:
            rest = self._rest(boundary)
            for parent in boundary.parents:
                for node in reversed(self._tree.children(parent, limit=_CANDIDATE_LIMIT)):
                    count = common_prefix(node.token_ids or (), rest)
                    if 0 < count < node.token_count:
                        pairs.append((node, count))
        return sorted(pairs, key=lambda pair: -pair[1])

    def _named(self, names: Sequence[BlockHash], wanted: TokenKeys) -> list[Node]:
        nodes = (self._tree.get(name) for name in names)
        return [node for node in nodes if node is not None and node.may_be(wanted)]

    def _rest(self, boundary: _Boundary) -> TokenKeys:
        return self.keys[boundary.token_index : boundary.token_index + self._size]


def _best(nodes: Sequence[Node], *, in_ram: bool) -> Node | None:
    """Return the node with the most regions; of equal ones the first with the most in the tier from which
    the chain continues: `in_ram`, or SSD after the first gap in RAM."""
    return max(nodes, key=lambda n: (len({*n.ram, *n.ssd}), len(n.ram if in_ram else n.ssd)), default=None)


def _count(nodes: Iterator[Node]) -> int:
    return sum(1 for _ in nodes)


def common_prefix(known: TokenKeys, wanted: TokenKeys) -> int:
    """Return how many first tokens two blocks have in common."""
    limit = min(len(known), len(wanted))
    if known[:limit] == wanted[:limit]:
        return limit
    return next(i for i in range(limit) if known[i] != wanted[i])
