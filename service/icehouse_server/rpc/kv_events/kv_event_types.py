"""KV events: which whole blocks this server can reuse, for gateways that route prompts by it.

Only whole blocks with a whole prefix are published: nobody could route by others. A block's name is cut to
the 64 bits that gateways keep; they hash its tokens themselves.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from icehouse_server.domain.blocks import runs_of
from icehouse_server.domain.ids import BlockHash, CacheScope, Tenant
from icehouse_server.engine.core.block_log import KvTier

CUT_BYTES = 8
"""Of a block's name, in events."""


class BlockImage(NamedTuple):
    """An image that a block overlaps, as vLLM's `extra_keys` have it."""

    identifier: str
    """The digest of the prepared pixels, in hex, as Explain has it."""
    offset: int
    """Of the image's first token, from the block's; negative where that stands in an earlier block."""


@dataclasses.dataclass(frozen=True, slots=True)
class KvBlock:
    """One whole block of a chain that begins at a prompt's first token."""

    hash: int
    """Signed, 64 bits."""
    parent: int | None
    """None for a prompt's first block."""
    packed_token_ids: bytes
    """As `blocks.pack_tokens` has them."""
    scope: CacheScope
    images: tuple[BlockImage, ...] = ()
    """The images that the block overlaps, in order: its tokens do not say which."""

    @property
    def token_count(self) -> int:
        return len(self.packed_token_ids) // 4


@dataclasses.dataclass(frozen=True, slots=True)
class BlockStored:
    """A tier holds the block now."""

    block: KvBlock
    tier: KvTier

    @property
    def tenant(self) -> Tenant:
        return self.block.scope.tenant


@dataclasses.dataclass(frozen=True, slots=True)
class BlockRemoved:
    """A tier holds the block no longer."""

    hash: int
    tier: KvTier
    tenant: Tenant


@dataclasses.dataclass(frozen=True, slots=True)
class BlocksCleared:
    """Forget everything before: what follows is the whole state."""


KvEvent = BlockStored | BlockRemoved | BlocksCleared


@dataclasses.dataclass(frozen=True, slots=True)
class SnapshotChunk:
    """Which part of a snapshot a batch is. Its last batch has the number at which it was taken."""

    index: int
    chunk_count: int
    stored_count: int
    """`BlockStored` events of the whole state."""


@dataclasses.dataclass(frozen=True, slots=True)
class KvBatch:
    """Events that happened together. Numbers rise by one."""

    sequence_number: int
    time: float
    """`Clock.wall`."""
    events: tuple[KvEvent, ...]
    snapshot: SnapshotChunk | None = None


def images_of(extra: bytes) -> tuple[BlockImage, ...]:
    """Return the images of a block by its header; raises ValueError for a header of another version."""
    return tuple(BlockImage(run.digest.hex(), run.start - run.place) for run in runs_of(extra))


def cut(name: BlockHash) -> int:
    """Return the first 64 bits of a block's name as a signed number."""
    return int.from_bytes(name[:CUT_BYTES], "big", signed=True)
