"""Divergence: where a prompt parts from a cached one of its own tenant, so that people see what broke it.

Reads the prefix tree and changes nothing. Inference thread; what it looks at is bounded, since others decode.
"""

from __future__ import annotations

import array
import itertools
from collections.abc import Iterable, Iterator, Sequence

from icehouse_server.domain.blocks import TokenKeys, token_id_of
from icehouse_server.domain.events import Divergence
from icehouse_server.domain.ids import BlockHash
from icehouse_server.engine.prefix_cache.tiers.matching import Prompt, common_prefix
from icehouse_server.engine.prefix_cache.tiers.node import Node
from icehouse_server.engine.prefix_cache.tiers.tree import PrefixTree

_CHILD_LIMIT = 64
"""Blocks below one that are compared; anybody can give a popular prompt thousands of them."""
_CANDIDATE_LIMIT = 2
"""Cached prompts whose rest is compared, the latest of those that go along farthest."""
_REST_TOKEN_LIMIT = 8192
"""Tokens behind the place that are compared: about a millisecond with the samples."""
_SAMPLE_COUNT = 32
_SAMPLE_TOKEN_COUNT = 16
"""Texts in one language share words; so many tokens in a row they share by being the same text."""


def find_divergence(
    tree: PrefixTree, prompt: Prompt, *, known: Sequence[Node], known_token_count: int
) -> Divergence | None:
    """Return where a prompt parts from a cached one of its own tenant that it shares more than half with.

    `known` are the blocks of its beginning that are reused. Where some may be another tenant's, they only
    lead to those of its own that come behind them: none of their tokens is told, nor where they differ.
    """
    keys = prompt.keys
    covered, parent = _last_block(tree, prompt, known)
    children = [node for node in tree.children(parent, limit=_CHILD_LIMIT) if node.token_ids is not None]
    rest = keys[covered : covered + tree.settings.block_token_count]
    common = {node: common_prefix(node.token_ids or (), rest) for node in children}
    longest = max(common.values(), default=0)
    place = covered + longest
    if place < known_token_count:
        # A block that is none of these goes along farther.
        return None
    # Latest first. One that ends before the prompt does is gone on from, not parted from.
    parted = [n for n in children if common[n] == longest < min(n.token_count, len(rest))]
    for node in parted[:_CANDIDATE_LIMIT]:
        if 2 * place > len(keys) or _shares_most(tree, node, keys, place=place, offset=longest):
            assert node.token_ids is not None
            return Divergence(place, token_id_of(keys[place]), token_id_of(node.token_ids[longest]))
    return None


def _last_block(tree: PrefixTree, prompt: Prompt, known: Sequence[Node]) -> tuple[int, BlockHash]:
    """Return where the last known full block of the prompt ends, and its name among its tenant's own."""
    size, keys = tree.settings.block_token_count, prompt.keys
    whole = [
        node
        for node in known
        if node.token_count == size and node.end_token_index <= len(keys)
        if node.may_be(keys[node.start_token_index : node.end_token_index])
    ]
    covered, parent = (whole[-1].end_token_index, whole[-1].hash) if whole else (0, prompt.root)
    if whole and not prompt.is_own:
        parent = tree.chain_names(prompt.root, keys[:covered])[-1]
    while covered + size <= len(keys):
        name = tree.name_of(parent=parent, keys=keys[covered : covered + size])
        if tree.get(name) is None:
            break
        covered, parent = covered + size, name
    return covered, parent


def _shares_most(tree: PrefixTree, node: Node, keys: TokenKeys, *, place: int, offset: int) -> bool:
    """Whether more than half of the prompt, all before `place` included, is in the cached one too, by samples
    of what comes behind."""
    behind = keys[place : place + _REST_TOKEN_LIMIT]
    last = len(behind) - _SAMPLE_TOKEN_COUNT
    if last < _SAMPLE_COUNT:
        return False
    cached = itertools.islice(_tokens_from(tree, node), offset, offset + _REST_TOKEN_LIMIT)
    text = _packed(cached)
    starts = (number * last // (_SAMPLE_COUNT - 1) for number in range(_SAMPLE_COUNT))
    found = sum(_has(text, _packed(behind[start : start + _SAMPLE_TOKEN_COUNT])) for start in starts)
    return place + (len(keys) - place) * found / _SAMPLE_COUNT > len(keys) / 2


def _packed(keys: Iterable[int]) -> bytes:
    return array.array("q", map(hash, keys)).tobytes()  # the hash of an id is the id


def _has(text: bytes, sample: bytes) -> bool:
    """Whether the sample is there, at the place of a token and not across two."""
    width = len(sample) // _SAMPLE_TOKEN_COUNT
    position = text.find(sample)
    while position >= 0 and position % width:
        position = text.find(sample, position + 1)
    return position >= 0


def _tokens_from(tree: PrefixTree, node: Node | None) -> Iterator[int]:
    """Yield the tokens of a block and of those behind it, always the latest known one."""
    while node is not None and node.token_ids is not None:
        yield from node.token_ids
        node = next(iter(tree.children(node.hash, limit=1)), None)
