"""Reuse plan: which blocks a prompt reuses, which of them come from SSD, and where the prompt diverges.

Pure functions over the prefix tree, for prompts and for `Explain`. The search for a divergence is bounded,
since others wait to decode meanwhile.
"""

from __future__ import annotations

import array
import dataclasses
import itertools
from collections.abc import Container, Iterable, Iterator

from icehouse_server.domain.blocks import RegionKind, TokenKeys, token_id_of
from icehouse_server.domain.events import CacheReport, PromptDivergence, ReuseLimit
from icehouse_server.domain.ids import BlockHash
from icehouse_server.engine.prefix_cache.tiers.matching import LookupPrompt, Match, common_prefix, match
from icehouse_server.engine.prefix_cache.tiers.node import Node
from icehouse_server.engine.prefix_cache.tiers.runner_port import PlacedBlock
from icehouse_server.engine.prefix_cache.tiers.storage_waits import Rates
from icehouse_server.engine.prefix_cache.tiers.tree import PrefixTree
from icehouse_server.storage.api import PlannedBlock

_MAY_DIVERGE = (ReuseLimit.NO_MATCH, ReuseLimit.DIVERGED, ReuseLimit.NO_CHECKPOINT)
_CHILD_LIMIT = 64
"""Children of a block that are compared; anybody can give a popular prompt thousands of them."""
_CANDIDATE_LIMIT = 2
"""Cached prompts whose rest is compared: the latest of those that match farthest."""
_REST_TOKEN_LIMIT = 8192
"""Tokens after the divergence that are searched for samples: takes about a millisecond."""
_SAMPLE_COUNT = 32
_SAMPLE_TOKEN_COUNT = 16
"""Texts in one language share words; only copies of a text share this many tokens in a row."""


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """The blocks that a request will reuse. `to_load` is empty if all of them are in RAM."""

    nodes: tuple[Node, ...]
    token_count: int
    report: CacheReport
    placed: tuple[PlacedBlock, ...] = ()
    """The regions of each node that are in RAM."""
    to_load: tuple[PlannedBlock, ...] = ()
    ssd_bytes: int = 0
    """Bytes to read from SSD."""
    known_token_count: int = 0
    """Tokens that match at all, whether or not they can be reused."""

    def promoted_token_count(self, read: Container[BlockHash]) -> int:
        """Return how many tokens of the blocks `read` from SSD are in RAM now."""
        loaded = [node for node in self.nodes if node.hash in read]
        if all(node.ram for node in loaded):
            return self.report.ssd_token_count
        kept = (node for node in loaded if RegionKind.KV in node.ram)
        return sum(min(node.end_token_index, self.token_count) - node.start_token_index for node in kept)

    @property
    def is_hit(self) -> bool:
        return self.token_count > 0


def plan(tree: PrefixTree, prompt: LookupPrompt, rates: Rates, *, with_ssd: bool = True) -> Plan:
    """Plan a prompt's reuse; its last token is always computed. Changes nothing."""
    settings = tree.settings
    matched = match(tree, prompt, with_ssd=with_ssd)
    if matched.token_count < min(settings.min_reuse_token_count, prompt.limit):
        # Rebuilding caches costs more than computing so few tokens.
        matched = Match((), 0, matched.known_token_count)
    made = _split(tree, prompt, matched, _limit_of(tree, matched, prompt.limit))
    if not made.to_load:
        return made
    if rates.reads_hang:
        limit = ReuseLimit.LOAD_FAILED
    elif settings.may_recompute and rates.recompute_is_faster(
        ssd_bytes=made.ssd_bytes, token_count=made.report.ssd_token_count
    ):
        limit = ReuseLimit.RECOMPUTE_FASTER
    else:
        return made
    return _split(tree, prompt, match(tree, prompt, with_ssd=False), limit)


def with_divergence(tree: PrefixTree, prompt: LookupPrompt, made: Plan) -> Plan:
    """Add to the report where the prompt diverges from a cached one of its own tenant."""
    if made.report.limit not in _MAY_DIVERGE:
        return made
    return dataclasses.replace(
        made, report=dataclasses.replace(made.report, divergence=_find_divergence(tree, prompt, made))
    )


def _limit_of(tree: PrefixTree, matched: Match, limit: int) -> ReuseLimit:
    if matched.token_count >= limit:
        return ReuseLimit.NONE
    if matched.known_token_count == 0:
        return ReuseLimit.NO_MATCH
    if matched.known_token_count > matched.token_count and tree.facts.needs_checkpoint:
        return ReuseLimit.NO_CHECKPOINT
    return ReuseLimit.DIVERGED


def _split(tree: PrefixTree, prompt: LookupPrompt, matched: Match, limit: ReuseLimit) -> Plan:
    """Plan to take regions from RAM if they are there, and the others from SSD."""
    placed: list[PlacedBlock] = []
    to_load: list[PlannedBlock] = []
    ssd_bytes = ssd_tokens = 0
    for node in matched.nodes:
        kinds = tree.facts.needed_kinds(end_token_index=node.end_token_index, token_count=matched.token_count)
        in_ram = {kind: node.ram[kind] for kind in kinds if kind in node.ram}
        placed.append(PlacedBlock(node.start_token_index, node.token_count, in_ram))
        missing = frozenset(kinds) - frozenset(in_ram)
        if missing:
            keys = node.token_ids or prompt.keys[node.start_token_index : node.end_token_index]
            to_load.append(PlannedBlock(tree.header_of(node, keys), missing))
            ssd_bytes += sum(node.ssd.get(kind, 0) for kind in missing)
            ssd_tokens += min(node.end_token_index, matched.token_count) - node.start_token_index
    if to_load and not tree.facts.has_kv:
        # One checkpoint stands for everything before it.
        ssd_tokens = matched.token_count
    return Plan(
        matched.nodes,
        matched.token_count,
        CacheReport(
            ram_token_count=matched.token_count - ssd_tokens, ssd_token_count=ssd_tokens, limit=limit
        ),
        tuple(placed),
        tuple(to_load),
        ssd_bytes=ssd_bytes,
        known_token_count=matched.known_token_count,
    )


def _find_divergence(tree: PrefixTree, prompt: LookupPrompt, made: Plan) -> PromptDivergence | None:
    """Return where a prompt diverges from a cached one of its own tenant that shares more than half of it.

    The reused blocks may be another tenant's. They only lead to the tenant's own blocks after them: their
    tokens are never reported, nor where they differ.
    """
    keys = prompt.keys
    covered, parent = _last_block(tree, prompt, made.nodes)
    children = [node for node in tree.children(parent, limit=_CHILD_LIMIT) if node.token_ids is not None]
    rest = keys[covered : covered + tree.settings.block_token_count]
    common = {node: common_prefix(node.token_ids or (), rest) for node in children}
    longest = max(common.values(), default=0)
    index = covered + longest
    if index < made.known_token_count:
        # A block that is not among these children matches farther.
        return None
    # Latest first. From a shorter cached block the prompt does not diverge: it continues it.
    diverged = [n for n in children if common[n] == longest < min(n.token_count, len(rest))]
    for node in diverged[:_CANDIDATE_LIMIT]:
        if 2 * index > len(keys) or _shares_most(tree, node, keys, index=index, offset=longest):
            assert node.token_ids is not None
            return PromptDivergence(index, token_id_of(keys[index]), token_id_of(node.token_ids[longest]))
    return None


def _last_block(tree: PrefixTree, prompt: LookupPrompt, known: Iterable[Node]) -> tuple[int, BlockHash]:
    """Return where the last known full block of the prompt ends, and its name in its own tenant's chain."""
    size, keys = tree.settings.block_token_count, prompt.keys
    covered, parent = 0, prompt.root
    for node in known:
        is_whole = node.token_count == size and node.end_token_index <= len(keys)
        if is_whole and node.may_be(keys[node.start_token_index : node.end_token_index]):
            covered, parent = node.end_token_index, node.hash
    if covered and not prompt.is_own:
        parent = tree.chain_names(prompt.root, keys[:covered])[-1]
    while covered + size <= len(keys):
        name = tree.name_of(parent, keys[covered : covered + size])
        if tree.get(name) is None:
            break
        covered, parent = covered + size, name
    return covered, parent


def _shares_most(tree: PrefixTree, node: Node, keys: TokenKeys, *, index: int, offset: int) -> bool:
    """Whether the cached prompt has more than half of this one, estimated by samples after `index`."""
    behind = keys[index : index + _REST_TOKEN_LIMIT]
    last = len(behind) - _SAMPLE_TOKEN_COUNT
    if last < _SAMPLE_COUNT:
        return False
    text = _packed(itertools.islice(_tokens_from(tree, node), offset, offset + _REST_TOKEN_LIMIT))
    starts = (number * last // (_SAMPLE_COUNT - 1) for number in range(_SAMPLE_COUNT))
    hit_count = sum(_has(text, _packed(behind[start : start + _SAMPLE_TOKEN_COUNT])) for start in starts)
    return index + (len(keys) - index) * hit_count / _SAMPLE_COUNT > len(keys) / 2


def _packed(keys: Iterable[int]) -> bytes:
    return array.array("q", map(hash, keys)).tobytes()  # the hash of an id is the id


def _has(text: bytes, sample: bytes) -> bool:
    """Whether the sample occurs in the text, aligned to whole tokens."""
    width = len(sample) // _SAMPLE_TOKEN_COUNT
    position = text.find(sample)
    while position >= 0 and position % width:
        position = text.find(sample, position + 1)
    return position >= 0


def _tokens_from(tree: PrefixTree, node: Node | None) -> Iterator[int]:
    """Yield the tokens of a block and of the chain after it, following the latest child each time."""
    while node is not None and node.token_ids is not None:
        yield from node.token_ids
        node = next(iter(tree.children(node.hash, limit=1)), None)
