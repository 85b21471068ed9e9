"""Runner port of the prefix cache: what cuts and restores blocks on the device.

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
    """The shortest one; 0 where there is none, or where all have the same length."""
    shares_blocks: bool = False
    """Whether sequences and blocks share pages of kv, so that captures and restores copy none."""

    def needed_kinds(self, *, end_token_index: int, token_count: int) -> tuple[RegionKind, ...]:
        """Return the regions of a block with this end that a restore to `token_count` tokens needs."""
        kinds = [RegionKind.KV] if self.has_kv else []
        if self.window_token_count and end_token_index > token_count - self.window_token_count:
            kinds.append(RegionKind.WINDOW)
        if self.needs_checkpoint and end_token_index == token_count:
            kinds.append(RegionKind.CHECKPOINT)
        return tuple(kinds)

    def holds_window(self, block_token_count: int, *, passed_token_count: int) -> bool:
        """Whether a full block's windows can still be cut after so many more tokens were decoded.

        A cache holds its window's tokens and no more: a window no longer than the block has lost some of the
        block's tokens with the first one decoded.
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
    """Regions on their way to host memory; it keeps them alive until `take`."""

    @property
    def is_done(self) -> bool:
        """Whether `take` would not wait for a pass of the device."""

    def take(self) -> tuple[HostRegion, ...]:
        """Return the bytes, which another thread may read and drop; waits for them if necessary."""

    @property
    def is_apart(self) -> bool:
        """Whether the bytes are a copy, so that the regions' memory can be freed first."""


@dataclasses.dataclass(frozen=True, slots=True)
class RestoreInput:
    """All that a restore needs: blocks in ascending order."""

    blocks: tuple[PlacedBlock, ...]
    token_count: int


class CacheRunner(Protocol):
    """The device's side. Inference thread only."""

    def cut(
        self, sequence_id: SequenceId, *, start: int, stop: int, kinds: Collection[RegionKind]
    ) -> dict[RegionKind, Region]:
        """Return evaluated copies of these regions of an open or decoding sequence."""

    def begin_load(self, blocks: Sequence[PlannedBlock]) -> KvTarget | None:
        """Return memory for the kv of these blocks, where it lies in pages; None without enough of it."""

    def end_load(self, place: KvTarget) -> Sequence[Region]:
        """Return the kv of the blocks that the memory was for, all of which were read and verified."""

    def begin_restore(self, sequence_id: SequenceId, restore: RestoreInput) -> None:
        """Begin to rebuild a sequence's caches. Raises StorageError when the input is not enough."""

    def continue_restore(self, sequence_id: SequenceId, *, budget_s: float) -> bool:
        """Rebuild for about `budget_s`; True once the sequence is open. Raises StorageError."""

    def misfit(self, regions: Sequence[HostRegion], *, token_count: int) -> str:
        """Return why these regions cannot be those of a block of so many tokens that was computed elsewhere;
        "" where they can."""

    def from_host(self, region: HostRegion) -> Region:
        """Copy host memory onto the device, evaluated."""

    def begin_to_host(self, regions: Sequence[Region]) -> HostCopy:
        """Have regions copied to host memory, behind the device's current work."""
