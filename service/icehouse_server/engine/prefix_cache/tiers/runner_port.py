"""Runner port of the prefix cache: how blocks are cut and restored on the device.

Regions are opaque here. The runner cuts them from caches and copies them to and from host memory. The port to
the SSD tier is `storage.api`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from icehouse_server.domain.blocks import HostRegion, Region, RegionKind
from icehouse_server.domain.ids import SequenceId
from icehouse_server.storage.api import KvTarget, PlannedBlock


@dataclasses.dataclass(frozen=True, slots=True)
class CacheFacts:
    """What the model's cache classes allow; `unsupported_detail` says why nothing can be cached."""

    unsupported_detail: str = ""
    has_kv: bool = True
    cuttable_inside: bool = True
    needs_checkpoint: bool = False
    window_token_count: int = 0
    """The longest sliding window in tokens, 0 if there is none."""
    shortest_window_token_count: int = 0
    """The shortest one; 0 if there is none or all have the same length."""
    shares_blocks: bool = False
    """Whether sequences and blocks share pages of kv, so that captures and restores copy no kv."""

    def needed_kinds(self, *, end_token_index: int, token_count: int) -> tuple[RegionKind, ...]:
        """Return the regions that a restore of `token_count` tokens needs of a block with this end."""
        kinds = [RegionKind.KV] if self.has_kv else []
        if self.window_token_count and end_token_index > token_count - self.window_token_count:
            kinds.append(RegionKind.WINDOW)
        if self.needs_checkpoint and end_token_index == token_count:
            kinds.append(RegionKind.CHECKPOINT)
        return tuple(kinds)

    def holds_window(self, block_token_count: int, *, passed_token_count: int) -> bool:
        """Whether a full block's windows can still be cut after so many more tokens were decoded.

        A cache holds only its window's tokens: if the window is no longer than the block, the first decoded
        token already pushes out one of the block's.
        """
        shortest = self.shortest_window_token_count or self.window_token_count
        return shortest > 0 and shortest - min(block_token_count, shortest) >= passed_token_count


@dataclasses.dataclass(frozen=True, slots=True)
class PlacedBlock:
    """One block of a restore with those of its regions that are on the device."""

    start_token_index: int
    token_count: int
    regions: Mapping[RegionKind, Region]

    @property
    def end_token_index(self) -> int:
        return self.start_token_index + self.token_count


class HostCopy(Protocol):
    """A copy of regions to host memory under way; it keeps the regions alive until `take`."""

    @property
    def is_done(self) -> bool:
        """Whether `take` would return without waiting for a pass of the device."""

    def take(self) -> tuple[HostRegion, ...]:
        """Return the bytes, waiting for them if necessary; another thread may read and drop them."""

    @property
    def is_apart(self) -> bool:
        """Whether the bytes are in other memory, so that the regions' can be freed before the write."""


@dataclasses.dataclass(frozen=True, slots=True)
class RestoreInput:
    """The input of a restore: blocks in ascending order."""

    blocks: tuple[PlacedBlock, ...]
    token_count: int


class CacheRunner(Protocol):
    """The device's side. Inference thread only."""

    def cut(
        self, sequence_id: SequenceId, *, start: int, stop: int, kinds: Collection[RegionKind]
    ) -> dict[RegionKind, Region]:
        """Return evaluated copies of these regions of an open or decoding sequence."""

    def begin_load(self, blocks: Sequence[PlannedBlock]) -> KvTarget | None:
        """Return pages to read the kv of these blocks into; None without enough of them."""

    def end_load(self, place: KvTarget) -> Sequence[Region]:
        """Return the kv of the blocks that the pages were for; all were read and verified."""

    def begin_restore(self, sequence_id: SequenceId, restore: RestoreInput) -> None:
        """Begin to rebuild a sequence's caches. Raises StorageError if the input is incomplete."""

    def continue_restore(self, sequence_id: SequenceId, *, budget_s: float) -> bool:
        """Rebuild for about `budget_s`; True once the sequence is open. Raises StorageError."""

    def misfit(self, regions: Sequence[HostRegion], *, token_count: int) -> str:
        """Return why regions computed elsewhere cannot be those of a block of so many tokens; "" if they
        can."""

    def from_host(self, region: HostRegion) -> Region:
        """Copy a region from host memory to the device, evaluated."""

    def begin_to_host(self, regions: Sequence[Region]) -> HostCopy:
        """Begin to copy regions to host memory, after the device's current work."""
