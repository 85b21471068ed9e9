"""Port of the prefix cache to the device, to cut and rebuild; to the SSD tier see `storage.api`.

Regions are opaque here. The runner makes them from caches and gives them back as host memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from icehouse_server.domain.blocks import HostRegion, Region, RegionKind
from icehouse_server.domain.ids import SequenceId
from icehouse_server.storage.api import ColdTier, KvPlace, PlannedBlock, Ticket


@dataclasses.dataclass(frozen=True, slots=True)
class CacheFacts:
    """What the model's cache classes allow; `unsupported_detail` says why nothing can be kept."""

    unsupported_detail: str = ""
    has_kv: bool = True
    cuttable_inside: bool = True
    needs_checkpoint: bool = False
    window_token_count: int = 0
    """The longest sliding window in tokens, 0 if there is none."""
    shortest_window_token_count: int = 0
    """The shortest one; 0 where there is none, or where all are alike."""
    shares_blocks: bool = False
    """Whether kv lies in pages, which a sequence and the blocks of what it holds have in common: to keep one
    and to begin with one copies nothing."""

    def needed_kinds(self, *, end_token_index: int, token_count: int) -> tuple[RegionKind, ...]:
        """Return the regions of a block with this end that a restore to `token_count` tokens reads."""
        kinds = [RegionKind.KV] if self.has_kv else []
        if self.window_token_count and end_token_index > token_count - self.window_token_count:
            kinds.append(RegionKind.WINDOW)
        if self.needs_checkpoint and end_token_index == token_count:
            kinds.append(RegionKind.CHECKPOINT)
        return tuple(kinds)

    def holds_window(self, block_token_count: int, *, passed_token_count: int) -> bool:
        """Whether a full block's windows can be cut after so many more tokens were decoded.

        A cache holds its window's tokens and no more: one that is as short as the block or shorter
        has moved on with the first of them.
        """
        shortest = self.shortest_window_token_count or self.window_token_count
        return shortest > 0 and shortest - min(block_token_count, shortest) >= passed_token_count


@dataclasses.dataclass(frozen=True, slots=True)
class PlacedBlock:
    """One block of a restore with the regions that are on the device."""

    start_token_index: int
    token_count: int
    regions: Mapping[RegionKind, Region]

    @property
    def end_token_index(self) -> int:
        return self.start_token_index + self.token_count


class HostCopy(Protocol):
    """Regions on their way to host memory. Keeps them alive until they are taken."""

    @property
    def is_done(self) -> bool:
        """Whether `take` waits for no pass of the device."""
        ...

    def take(self) -> tuple[HostRegion, ...]:
        """Return the bytes, which another thread may read and drop; wait for them if they are not there."""
        ...

    @property
    def is_apart(self) -> bool:
        """Whether the bytes are a copy, so that the regions' memory is free without them."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class RestoreInput:
    """All a restore is made from: blocks in ascending order."""

    blocks: tuple[PlacedBlock, ...]
    token_count: int


class CacheRunner(Protocol):
    """The device's side. Inference thread only."""

    def cut(
        self, sequence_id: SequenceId, *, start: int, stop: int, kinds: Collection[RegionKind]
    ) -> dict[RegionKind, Region]:
        """Return evaluated copies of these regions of an open or decoding sequence."""
        ...

    def begin_load(self, blocks: Sequence[PlannedBlock]) -> KvPlace | None:
        """Return memory for the kv of these blocks, where it lies in pages; None without room for it."""
        ...

    def end_load(self, place: KvPlace) -> Sequence[Region]:
        """Return the kv of the blocks that it was for, all of which were read and are right."""
        ...

    def begin_restore(self, sequence_id: SequenceId, restore: RestoreInput) -> None:
        """Open a sequence whose caches will be rebuilt. Raises StorageError when the input cannot do it."""
        ...

    def continue_restore(self, sequence_id: SequenceId, *, budget_s: float) -> bool:
        """Rebuild for about `budget_s`; True when the sequence is open. Raises StorageError."""
        ...

    def from_host(self, region: HostRegion) -> Region:
        """Copy host memory onto the device, evaluated."""
        ...

    def begin_to_host(self, regions: Sequence[Region]) -> HostCopy:
        """Have regions brought to host memory, behind what the device is at."""
        ...


class TierWaits(Protocol):
    """The SSD tier, None without one and when it is lost, and those who wait for what it was asked."""

    storage: ColdTier | None

    def add(self, ticket: Ticket[Any], then: Callable[[Any], object]) -> None:
        """Call `then` with a ticket's outcome when it comes."""
        ...
