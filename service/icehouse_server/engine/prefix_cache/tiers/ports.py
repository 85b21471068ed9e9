"""Port of the prefix cache to the device, to cut and rebuild; to the SSD tier see `storage.api`.

Regions are opaque here. The runner makes them from caches and gives them back as host memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from icehouse_server.domain.blocks import HostRegion, Region, RegionKind
from icehouse_server.domain.ids import SequenceId
from icehouse_server.storage.api import ColdTier, KvPlace, Loaded, NewRows, Ticket


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
    least_lent_token_count: int = 0
    """From how many tokens on a sequence that is put back reads kv in RAM where it is; 0 if it never does."""
    shares_captures: bool = False
    """Whether a block that is cut of a sequence holds what that one reads, and no copy of it."""

    def needed_kinds(self, *, end_token_index: int, token_count: int) -> tuple[RegionKind, ...]:
        """Return the regions of a block with this end that a restore to `token_count` tokens reads."""
        kinds = [RegionKind.KV] if self.has_kv else []
        if self.window_token_count and end_token_index > token_count - self.window_token_count:
            kinds.append(RegionKind.WINDOW)
        if self.needs_checkpoint and end_token_index == token_count:
            kinds.append(RegionKind.CHECKPOINT)
        return tuple(kinds)

    def lends(self, token_count: int) -> bool:
        """Whether a sequence that is put back with so many tokens keeps its blocks in RAM alive."""
        return 0 < self.least_lent_token_count <= token_count

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


class KvCutting(Protocol):
    """A block's kv on its way out of live caches, a layer at a time. Opaque."""


class KvTarget(Protocol):
    """Arrays on the device that will be a sequence's kv once readers have filled them."""

    def place(self, rows: NewRows) -> KvPlace | None:
        """Return the arrays' own bytes for other threads to write and drop, as such rows of a sequence; None
        where readers are to find memory."""
        ...


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
    """All a restore is made from: blocks in RAM in ascending order, then what was loaded from SSD."""

    blocks: tuple[PlacedBlock, ...]
    loaded: Loaded | None
    origin_token_index: int
    """Sequence position of the first kv token that was loaded; row 0 of buffers the readers made."""
    target: KvTarget | None
    """What the readers filled, unless they made buffers of their own (`Loaded.tensors`)."""
    target_origin_token_index: int
    """Sequence position of the target's row 0."""
    token_count: int
    capacity_token_count: int


class CacheRunner(Protocol):
    """The device's side. Inference thread only."""

    def cut(
        self, sequence_id: SequenceId, *, start: int, stop: int, kinds: Collection[RegionKind]
    ) -> dict[RegionKind, Region]:
        """Return evaluated copies of these regions of an open or decoding sequence."""
        ...

    def begin_cut(self, *, start: int, stop: int) -> KvCutting:
        """Prepare to copy the kv of tokens that stay in a sequence's caches."""
        ...

    def continue_cut(self, sequence_id: SequenceId, cutting: KvCutting, *, budget_s: float) -> Region | None:
        """Copy for about `budget_s` from where the sequence is now; the region when all is copied."""
        ...

    def begin_target(self, *, capacity_token_count: int) -> KvTarget | None:
        """Prepare kv arrays of so many tokens for readers to fill; None when they are to find memory."""
        ...

    def continue_target(self, target: KvTarget, *, budget_s: float) -> bool:
        """Make arrays for about `budget_s`; True when all are made."""
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
