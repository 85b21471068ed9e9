"""Reads and copies of a group: host memory of rank 0 that remembers which of the followers' it goes with."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from icehouse_server.domain.blocks import HostRegion
from icehouse_server.domain.ids import BlockHash
from icehouse_server.group.order_log import Kept
from icehouse_server.storage.api import KvTarget, TensorShape


class GroupRead(Kept):
    """A read from the SSD tiers of all ranks."""


@dataclasses.dataclass(frozen=True, slots=True)
class GroupTarget:
    """Implements KvTarget: pages of rank 0, and with the followers those of the same read."""

    own: KvTarget
    read: GroupRead

    def segments(
        self, tensors: Sequence[TensorShape], *, start_token_index: int, token_count: int
    ) -> list[memoryview]:
        return self.own.segments(tensors, start_token_index=start_token_index, token_count=token_count)


@dataclasses.dataclass(frozen=True, slots=True)
class ReadRegion(HostRegion):
    """A region that was read on every rank."""

    read: GroupRead
    hash: BlockHash


@dataclasses.dataclass(frozen=True, slots=True)
class CopiedRegion(HostRegion):
    """A region that was copied to host memory on every rank."""

    copy: Kept
