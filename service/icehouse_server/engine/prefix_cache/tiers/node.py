"""Node: one known block, in whichever tier. Inference thread only, pure data, no mlx."""

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
    """What it will take of its owner's quota on SSD."""
    leaves_ram: bool = False
    """Whether its RAM copy goes when it is written: others need the space."""
    is_copied: bool = False
    """Whether it is written from memory of its own, so that its RAM copy may go earlier."""


@dataclasses.dataclass(slots=True, eq=False)
class Node:
    """One block of the prefix tree. The first four fields never change; the tiers' content, pin, owner and
    spill are written by `PrefixTree` alone.

    A region is opaque, and another block may share its bytes: two tails on one page both refer to it.
    """

    hash: BlockHash
    parent: BlockHash
    start_token_index: int
    token_count: int
    token_ids: TokenKeys | None = None
    """Token keys; None for a block on SSD that this process never saw whole."""
    ram: Regions = dataclasses.field(default_factory=lambda: NO_REGIONS)
    ram_sizes: Mapping[RegionKind, int] = dataclasses.field(default_factory=lambda: NO_SIZES)
    """Bytes of each region in RAM that has any, taken once, when it came."""
    ssd: Mapping[RegionKind, int] = dataclasses.field(default_factory=lambda: NO_SIZES)
    """Bytes of each region on SSD; empty when the block is not committed there."""
    ssd_bytes: int = 0
    """Of its file."""
    spill: Spilling | None = None
    pin_end_time: float = NOT_PINNED
    """When its pin ends (`Clock.wall`); `PrefixTree.end_pins` takes it off."""
    hit_count: int = 0
    last_used_time: float = 0.0
    owner: BlockHash | None = None
    """The root that its chain begins below; None when a block between is not known."""
    session: SessionKey | None = None
    """The session that computed it and alone has used it; `Sessions` writes it."""
    prefetched_token_count: int = 0
    """Its last tokens that a prefetch computed and no request has begun with yet."""

    @property
    def end_token_index(self) -> int:
        return self.start_token_index + self.token_count

    @property
    def ram_bytes(self) -> int:
        return sum(self.ram_sizes.values())

    @property
    def size_bytes(self) -> int:
        """Bytes of its regions in RAM, or where it is on SSD alone there."""
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
        """Whether it is on its way to SSD and leaves RAM there."""
        return self.spill is not None and self.spill.leaves_ram

    @property
    def may_leave_now(self) -> bool:
        """Whether no write reads its RAM copy."""
        return self.spill is None or self.spill.is_copied

    @property
    def is_safe(self) -> bool:
        """Whether SSD has all that RAM has of it, so that only time is lost with the RAM copy."""
        return self.spill is None and self.ram_sizes.keys() <= self.ssd.keys()

    def has(self, kind: RegionKind, *, with_ssd: bool) -> bool:
        """Whether this region can be had from RAM, or with `with_ssd` from either tier."""
        return kind in self.ram or (with_ssd and kind in self.ssd)

    def may_be(self, keys: TokenKeys) -> bool:
        """Whether its tokens are these, as far as they are known."""
        return self.token_ids is None or self.token_ids == keys
