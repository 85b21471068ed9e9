"""Block names, each computed once: a prompt's are asked for when it is matched, followed, led and captured.

Inference thread only. 256 tokens take some 20 us to hash and 2 us to find again (2-core x86).
"""

from __future__ import annotations

import functools

from icehouse_server.domain.blocks import TokenKeys, key_hash
from icehouse_server.domain.ids import BlockHash

_KEPT_COUNT = 2048
"""Names that are remembered, with their tokens: the blocks of half a million tokens, some 5 MB."""


class BlockNames:
    """Names by the block before and the tokens, of those that were asked for last."""

    def __init__(self, secret: bytes = b"") -> None:
        """`secret` is what blocks are named under besides their tokens."""

        def name(parent: BlockHash, keys: TokenKeys) -> BlockHash:
            return key_hash(parent=parent, keys=keys, secret=secret)

        self._name = functools.lru_cache(maxsize=_KEPT_COUNT)(name)

    def of(self, parent: BlockHash, keys: TokenKeys) -> BlockHash:
        """Return the name of the block with these tokens below `parent`."""
        return self._name(parent, keys)
