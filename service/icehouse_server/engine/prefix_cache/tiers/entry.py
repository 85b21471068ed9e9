"""Entry: one known block, in whichever tier. Inference thread only, pure data, no mlx."""

from __future__ import annotations

import dataclasses

from icehouse_server.domain.blocks import BlockHeader, Region, RegionKind, TokenKeys, split_keys
from icehouse_server.domain.cache_commands import BlockMatch, RecentBlock, Tier
from icehouse_server.domain.ids import BlockHash, Fingerprint
from icehouse_server.engine.core.block_log import Came, KvTier


@dataclasses.dataclass(slots=True)
class Spilling:
    """A block's way to SSD, from its hand-over to the storage thread until it is written or dropped."""

    size_bytes: int
    """What it will take of its owner's quota there."""
    leaves_ram: bool = False
    """Whether its RAM copy goes when it is written: others need the space."""
    is_copied: bool = False
    """Whether it is written from memory of its own, so that its RAM copy may go before."""


@dataclasses.dataclass(slots=True, eq=False)
class Entry:
    """One known block. `token_ids`, its token keys, is None for a block on SSD that this process never saw
    whole."""

    hash: BlockHash
    parent: BlockHash
    start_token_index: int
    token_count: int
    token_ids: TokenKeys | None = None
    ram: dict[RegionKind, Region] = dataclasses.field(default_factory=dict)
    ssd: dict[RegionKind, int] = dataclasses.field(default_factory=dict)
    """Bytes of each region on SSD; empty when the block is not committed there."""
    ssd_bytes: int = 0
    spill: Spilling | None = None
    """Set by `BlockIndex.begin_spill` and cleared by `end_spill`, by nobody else."""
    is_pinned: bool = False
    hit_count: int = 0
    last_used_time: float = 0.0
    owner: BlockHash | None = None
    """The root that its chain begins below; None when a block between is not known."""

    @property
    def end_token_index(self) -> int:
        return self.start_token_index + self.token_count

    @property
    def ram_bytes(self) -> int:
        return sum(region.size_bytes for region in self.ram.values())

    @property
    def is_spilling(self) -> bool:
        """Whether it is on its way to SSD."""
        return self.spill is not None

    @property
    def is_leaving(self) -> bool:
        """Whether it is on its way to SSD and leaves RAM there."""
        return self.spill is not None and self.spill.leaves_ram

    def has(self, kind: RegionKind, *, with_ssd: bool) -> bool:
        """Whether this region can be had from RAM, or with `with_ssd` from either tier."""
        return kind in self.ram or (with_ssd and kind in self.ssd)

    def came_to(self, tier: KvTier) -> Came:
        """Return what the block log says of it."""
        return Came(
            tier, self.hash, self.parent, self.start_token_index == 0, self.token_count, self.token_ids
        )

    def header(self, fingerprint: Fingerprint, block_token_limit: int) -> BlockHeader:
        """Return the block's facts; only for a block whose tokens are known."""
        assert self.token_ids is not None, self.hash.hex()
        token_ids, extra = split_keys(self.token_ids)
        return BlockHeader(
            hash=self.hash,
            parent=self.parent,
            fingerprint=fingerprint,
            start_token_index=self.start_token_index,
            token_ids=token_ids,
            block_token_limit=block_token_limit,
            extra=extra,
        )


def block_match(entry: Entry) -> BlockMatch:
    """Return what a caller is told of a block of its prompt."""
    return BlockMatch(
        hash=entry.hash,
        start_token_index=entry.start_token_index,
        token_count=entry.token_count,
        size_bytes=entry.ram_bytes or sum(entry.ssd.values()),
        tier=Tier.RAM if entry.ram else Tier.SSD,
        has_checkpoint=entry.has(RegionKind.CHECKPOINT, with_ssd=True),
        pinned=entry.is_pinned,
    )


def recent_block(entry: Entry, *, with_tokens: bool) -> RecentBlock:
    """Return what an operator is shown of a block: without tokens nothing that they could be read from.

    With them it has the entry's own tuple, which nobody changes, so that they cost no copy.
    """
    return RecentBlock(
        hash=entry.hash,
        parent=entry.parent,
        start_token_index=entry.start_token_index,
        token_count=entry.token_count,
        hit_count=entry.hit_count,
        is_in_ram=bool(entry.ram),
        is_on_ssd=bool(entry.ssd),
        token_keys=entry.token_ids if with_tokens else None,
    )
