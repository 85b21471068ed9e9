"""Divergence: where a prompt parts from a cached one of its own tenant, so that people see what broke it.

Reads the index and changes nothing. Inference thread; what it looks at is bounded, since others decode.
"""

from __future__ import annotations

import array
import itertools
from collections.abc import Iterator, Sequence

from icehouse_server.domain.blocks import token_id_of
from icehouse_server.domain.events import Divergence
from icehouse_server.domain.ids import BlockHash
from icehouse_server.engine.prefix_cache.tiers.entry import Entry
from icehouse_server.engine.prefix_cache.tiers.index import BlockIndex, common_prefix

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
    index: BlockIndex,
    *,
    root: BlockHash,
    token_ids: Sequence[int],
    known: Sequence[Entry],
    known_token_count: int,
    is_own: bool,
) -> Divergence | None:
    """Return where a prompt parts from a cached one below `root` that it shares more than half with.

    `root` is h0 of the prompt's own tenant, and `known` the blocks of its beginning that are reused. Where
    some may be another tenant's (`is_own` false), they only lead to those of its own that come behind them:
    none of their tokens is told, nor where they differ.
    """
    tokens = tuple(token_ids)
    covered, parent = _last_block(index, root=root, tokens=tokens, known=known, is_own=is_own)
    children = [e for e in index.children(parent, limit=_CHILD_LIMIT) if e.token_ids is not None]
    rest = tokens[covered : covered + index.rules.block_token_count]
    common = {entry.hash: common_prefix(entry.token_ids or (), rest) for entry in children}
    longest = max(common.values(), default=0)
    place = covered + longest
    if place < known_token_count:
        # A block that is none of these goes along farther.
        return None
    # Latest first. One that ends before the prompt does is gone on from, not parted from.
    parted = [
        entry
        for entry in reversed(children)
        if common[entry.hash] == longest < min(entry.token_count, len(rest)) and entry.token_ids is not None
    ]
    for entry in parted[:_CANDIDATE_LIMIT]:
        if 2 * place > len(tokens) or _shares_most(index, entry, tokens, place=place, offset=longest):
            assert entry.token_ids is not None
            return Divergence(place, token_id_of(tokens[place]), token_id_of(entry.token_ids[longest]))
    return None


def _last_block(
    index: BlockIndex, *, root: BlockHash, tokens: tuple[int, ...], known: Sequence[Entry], is_own: bool
) -> tuple[int, BlockHash]:
    """Return where the last known full block of the prompt ends, and its name among its tenant's own."""
    size = index.rules.block_token_count
    whole = [
        entry
        for entry in known
        if entry.token_count == size and entry.end_token_index <= len(tokens)
        if entry.token_ids in (None, tokens[entry.start_token_index : entry.end_token_index])
    ]
    covered = whole[-1].end_token_index if whole else 0
    parent = root
    if whole:
        parent = whole[-1].hash if is_own else index.chain_names(root, tokens[:covered])[-1]
    while covered + size <= len(tokens):
        name = index.name_of(parent=parent, token_ids=tokens[covered : covered + size])
        if index.get(name) is None:
            break
        covered, parent = covered + size, name
    return covered, parent


def _shares_most(
    index: BlockIndex, entry: Entry, tokens: tuple[int, ...], *, place: int, offset: int
) -> bool:
    """Whether more than half of the prompt, all before `place` included, is in the cached one too, by samples
    of what comes behind."""
    behind = tokens[place : place + _REST_TOKEN_LIMIT]
    last = len(behind) - _SAMPLE_TOKEN_COUNT
    if last < _SAMPLE_COUNT:
        return False
    cached = itertools.islice(_tokens_from(index, entry), offset, offset + _REST_TOKEN_LIMIT)
    text = array.array("q", map(hash, cached)).tobytes()  # the hash of an id is the id
    found = 0
    for number in range(_SAMPLE_COUNT):
        start = number * last // (_SAMPLE_COUNT - 1)
        found += _has(
            text, array.array("q", map(hash, behind[start : start + _SAMPLE_TOKEN_COUNT])).tobytes()
        )
    return place + (len(tokens) - place) * found / _SAMPLE_COUNT > len(tokens) / 2


def _has(text: bytes, sample: bytes) -> bool:
    """Whether the sample is there, at the place of a token and not across two."""
    width = len(sample) // _SAMPLE_TOKEN_COUNT
    position = text.find(sample)
    while position >= 0 and position % width:
        position = text.find(sample, position + 1)
    return position >= 0


def _tokens_from(index: BlockIndex, entry: Entry | None) -> Iterator[int]:
    """Yield the tokens of a block and of those behind it, always the latest known one."""
    while entry is not None and entry.token_ids is not None:
        yield from entry.token_ids
        entry = next(iter(index.children(entry.hash, limit=1)), None)
