"""Requests in the storage thread's inbox. Made by `Storage`, read by `StorageLoop`."""

from __future__ import annotations

import dataclasses

from icehouse_server.domain.blocks import HostBlock
from icehouse_server.domain.ids import BlockHash, RequestId
from icehouse_server.storage.messages import TaskId
from icehouse_server.storage.worker.credit import Credit
from icehouse_server.storage.worker.reader_pool import HeadReport, LoadReport


@dataclasses.dataclass(frozen=True, slots=True)
class SpillRequest:
    """Persist a block; its room in the queue comes back with the outcome."""

    block: HostBlock
    credit: Credit
    request_id: RequestId | None = None
    """Whose work made the block leave RAM."""
    pinned: bool = False
    """Whether its row says from the first that it is kept from eviction."""


@dataclasses.dataclass(frozen=True, slots=True)
class TouchRequest:
    """These blocks were used now, in this order."""

    hashes: tuple[BlockHash, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class PinRequest:
    """Protect these blocks, stored or waiting to be, or stop to."""

    task_id: TaskId
    hashes: tuple[BlockHash, ...]
    pinned: bool


@dataclasses.dataclass(frozen=True, slots=True)
class PurgeRequest:
    """Remove these blocks."""

    task_id: TaskId
    hashes: tuple[BlockHash, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class VerifyRequest:
    """Read and hash these blocks, or all."""

    task_id: TaskId
    hashes: tuple[BlockHash, ...] | None


@dataclasses.dataclass(frozen=True, slots=True)
class ListRequest:
    """Name the stored blocks, least recently verified first; at most `block_limit`, 0 is all."""

    task_id: TaskId
    block_limit: int


@dataclasses.dataclass(frozen=True, slots=True)
class StatsRequest:
    """Answer with the counters."""

    task_id: TaskId


@dataclasses.dataclass(frozen=True, slots=True)
class CloseRequest:
    """Finish the spills until the deadline (`Clock.monotonic`), close the directory and end."""

    deadline_time: float


Request = (
    SpillRequest
    | TouchRequest
    | PinRequest
    | PurgeRequest
    | VerifyRequest
    | ListRequest
    | StatsRequest
    | CloseRequest
    | LoadReport
    | HeadReport
)
