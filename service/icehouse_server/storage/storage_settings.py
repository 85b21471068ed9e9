"""Settings of the SSD tier."""

from __future__ import annotations

import dataclasses
import enum

CODE_DETAIL = "code "
"""Prefix of the fingerprint details that name a module and give the digest of its code."""


class Codec(enum.StrEnum):
    """How blocks are stored. A region that would gain less than 1/64 is stored raw in any case."""

    AUTO = "auto"
    """In planes while readers decode at least as fast as the disk reads."""
    RAW = "raw"
    """Exactly as in memory."""
    PLANES = "planes"
    """In byte planes, compressed by Zstandard."""


@dataclasses.dataclass(frozen=True, slots=True)
class StorageSettings:
    """Settings of one directory, for all its models. All limits are enforced before the disk is touched."""

    directory: str
    limit_bytes: int
    free_floor_bytes: int
    daily_write_limit_bytes: int
    """0 means unlimited."""
    spill_queue_limit_bytes: int
    load_queue_limit_count: int
    task_queue_limit_count: int
    reader_thread_count: int
    share_beside_decode: float = 1.0
    """Share of one core's time that all readers together take while sequences decode; 1 is unlimited."""
    codec: Codec = Codec.RAW
