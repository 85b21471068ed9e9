"""Loads from SSD: what is asked for and what comes back. Frozen data only, never an mx.array.

Sizes are file or memory bytes, times are seconds.
"""

from __future__ import annotations

import dataclasses
from typing import NewType

from icehouse_server.domain.blocks import BlockHeader, Damage, HostRegion, HostTensor, RegionKind
from icehouse_server.domain.ids import BlockHash

LoadId = NewType("LoadId", int)


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedBlock:
    """One block of a load: what the file must say it is, and what of it is wanted."""

    header: BlockHeader
    """Compared whole with the file's, token ids included."""
    regions: frozenset[RegionKind]
    token_count: int
    """Leading tokens of the kv region that are wanted; fewer than the block's only in the last one."""


@dataclasses.dataclass(frozen=True, slots=True)
class LoadRequest:
    """Consecutive blocks of one chain to read, verify and assemble."""

    load_id: LoadId
    blocks: tuple[PlannedBlock, ...]
    origin_token_index: int
    """Sequence position of row 0 of the assembled buffers; the first block's start, or earlier."""
    capacity_token_count: int
    """Rows of each assembled buffer along the token axis."""
    targets: tuple[HostTensor, ...] = ()
    """Buffers of so many rows to read kv into, let go of before the answer; none: readers make their own."""


@dataclasses.dataclass(frozen=True, slots=True)
class HeadRequest:
    """Blocks whose token ids are wanted, so that a prompt may match inside one of them."""

    load_id: LoadId
    hashes: tuple[BlockHash, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class HeadsRead:
    """The headers that could be read and are what their names say; the others are left out."""

    load_id: LoadId
    headers: tuple[BlockHeader, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedBlock:
    """The window and checkpoint regions of one loaded block, those that were asked for."""

    header: BlockHeader
    regions: tuple[HostRegion, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class BlockFailure:
    """One block could not be used; it has been dropped or quarantined."""

    hash: BlockHash
    cause: Damage
    detail: str
    header_checksum: int | None = None
    """Of the file that was read, if it came so far: another one may have its name by now."""


@dataclasses.dataclass(frozen=True, slots=True)
class Loaded:
    """The verified beginning of a load: its first blocks, all of them unless `failure` is set."""

    load_id: LoadId
    tensors: tuple[HostTensor, ...]
    """The kv of all loaded blocks, each [..., capacity, width]; none when the request's `targets` hold it.

    Rows before the first block and from `end_token_index` on are not initialised.
    """
    blocks: tuple[LoadedBlock, ...]
    end_token_index: int
    """Sequence position behind the last wanted token that was read."""
    failure: BlockFailure | None
    read_bytes: int
    read_bytes_per_s: float
    """Moving average over the recent loads."""


@dataclasses.dataclass(frozen=True, slots=True)
class LoadFailed:
    """Not even the first block of a load could be used."""

    load_id: LoadId
    failure: BlockFailure
