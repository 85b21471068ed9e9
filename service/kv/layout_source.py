"""What a restore is made from: blocks on the device, and K/V that was read from SSD to where it stays."""

from __future__ import annotations

import dataclasses

from service.kv.layout_regions import ArrayRegion
from service.kv.layout_target import KvTarget


@dataclasses.dataclass(frozen=True, slots=True)
class RestoreBlock:
    """The regions of one block that are on the device; the others are None.

    `kv` is None when `LoadedKv` covers these tokens; `window` when the block ends before every
    window begins; `checkpoint` unless the block ends where the restore ends.
    """

    start_token_index: int
    token_count: int
    kv: ArrayRegion | None = None
    window: ArrayRegion | None = None
    checkpoint: ArrayRegion | None = None

    @property
    def end_token_index(self) -> int:
        return self.start_token_index + self.token_count


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedKv:
    """Full-length kv arrays whose rows [start, end) were read; rows are tokens of the sequence.

    Rows before are filled from the blocks, rows behind are room and may hold anything.
    """

    target: KvTarget
    start_token_index: int
    end_token_index: int


@dataclasses.dataclass(frozen=True, slots=True)
class RestoreSource:
    """Blocks in ascending order; their kv regions, then `loaded_kv`, cover the tokens from 0."""

    blocks: tuple[RestoreBlock, ...]
    loaded_kv: LoadedKv | None = None
