"""Node: one known block, in either tier or both. Inference thread only, pure data, no mlx."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Final

from icehouse_server.domain.blocks import Region, RegionKind, TokenKeys
from icehouse_server.domain.ids import BlockHash, SessionKey
from icehouse_server.pins import NOT_PINNED

Hashes = Collection[BlockHash]
"""Names of some blocks."""
Regions = Mapping[RegionKind, Region]

NO_REGIONS: Final[Regions] = {}
NO_SIZES: Final[Mapping[RegionKind, int]] = {}


@dataclasses.dataclass(slots=True)
class Spilling:
    """The state of a block's spill to SSD, until it is written or dropped."""

    size_bytes: int
    """Bytes that the block will take of its owner's SSD quota."""
    leaves_ram: bool = False
    """Whether its RAM copy is dropped once it is written, because others need the space."""
    is_copied: bool = False
    """Whether it is written from a copy in host memory, so that its RAM copy may be dropped earlier."""


@dataclasses.dataclass(slots=True, eq=False)
class Node:
    """One block of the prefix tree. The first four fields never change; only `PrefixTree` writes the tiers'
    content, pin, owner and spill.

    A region is opaque, and blocks may share its bytes: two tails on one page both refer to it.
    """

    hash: BlockHash
    parent: BlockHash
    start_token_index: int
    token_count: int
    token_ids: TokenKeys | None = None
    """Token keys; None for a block on SSD whose tokens this process has not read yet."""
    ram: Regions = dataclasses.field(default_factory=lambda: NO_REGIONS)
    ram_sizes: Mapping[RegionKind, int] = dataclasses.field(default_factory=lambda: NO_SIZES)
    """Bytes of each nonempty region in RAM, as when it was added."""
    ssd: Mapping[RegionKind, int] = dataclasses.field(default_factory=lambda: NO_SIZES)
    """Bytes of each region on SSD; empty if the block is not committed there."""
    ssd_bytes: int = 0
    """Size of its file."""
    spill: Spilling | None = None
    pin_end_time: float = NOT_PINNED
    """When its pin ends (`Clock.wall`); `PrefixTree.end_pins` then unpins it."""
    hit_count: int = 0
    last_used_time: float = 0.0
    owner: BlockHash | None = None
    """The root below which its chain begins; None if a block between them is not known."""
    session: SessionKey | None = None
    """The only session that has used it, or the parent of the only family; written by `Sessions`."""
    prefetched_token_count: int = 0
    """How many of its last tokens a prefetch computed and no request has reused yet."""

    @property
    def end_token_index(self) -> int:
        return self.start_token_index + self.token_count

    @property
    def ram_bytes(self) -> int:
        return sum(self.ram_sizes.values())

    @property
    def size_bytes(self) -> int:
        """Bytes of its regions in RAM, or on SSD if it is only there."""
        return self.ram_bytes or sum(self.ssd.values())

    @property
    def is_pinned(self) -> bool:
        return self.pin_end_time > NOT_PINNED

    @property
    def is_spilling(self) -> bool:
        """Whether it is on its way to SSD."""
        return self.spill is not None

    @property
    def is_leaving(self) -> bool:
        """Whether it is on its way to SSD and leaves RAM once written."""
        return self.spill is not None and self.spill.leaves_ram

    @property
    def may_leave_now(self) -> bool:
        """Whether its RAM copy can be dropped now: no write reads it."""
        return self.spill is None or self.spill.is_copied

    @property
    def is_safe(self) -> bool:
        """Whether SSD has all of its regions in RAM, so that dropping these costs only time."""
        return self.spill is None and self.ram_sizes.keys() <= self.ssd.keys()

    def has(self, kind: RegionKind, *, with_ssd: bool) -> bool:
        """Whether this region is in RAM, or with `with_ssd` in either tier."""
        return kind in self.ram or (with_ssd and kind in self.ssd)

    def may_be(self, keys: TokenKeys) -> bool:
        """Whether its tokens are these, as far as they are known."""
        return self.token_ids is None or self.token_ids == keys
