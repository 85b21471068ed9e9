"""What a restore is made from: blocks on the device, and K/V read from SSD into host buffers."""

from __future__ import annotations

import dataclasses

from service.domain.blocks import HostTensor
from service.kv.layout_regions import ArrayRegion


@dataclasses.dataclass(frozen=True, slots=True)
class RestoreBlock:
    """The regions of one block that are on the device; the others are None.

    `kv` is None when `KvBuffers` covers these tokens; `window` when the block ends before every
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
class KvBuffers:
    """The kv tensors of many blocks, already put together along the token axis.

    Each tensor is [1, heads, slots, width]; slot 0 is token `start_token_index` of the sequence,
    tokens up to `end_token_index` are valid, later slots are room and may hold anything. With
    `start_token_index` 0 and slots a multiple of 256 a buffer becomes the cache in one copy.
    """

    start_token_index: int
    end_token_index: int
    tensors: tuple[HostTensor, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class RestoreSource:
    """Blocks in ascending order; their kv regions, then `kv_buffers`, cover the tokens from 0."""

    blocks: tuple[RestoreBlock, ...]
    kv_buffers: KvBuffers | None = None
