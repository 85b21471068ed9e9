"""The SSD tier as the storage bench drives it: made-up blocks, spilled and loaded."""

from __future__ import annotations

import dataclasses
import os
import queue
import time
from pathlib import Path

import numpy as np
from icehouse_server.clock import SystemClock
from icehouse_server.domain.blocks import (
    BlockHeader,
    HostBlock,
    HostRegion,
    HostTensor,
    RegionKind,
    block_hash,
    root_hash,
)
from icehouse_server.domain.ids import DEFAULT_TENANT, Fingerprint
from icehouse_server.storage.api import (
    BlockPersisted,
    BlocksLoaded,
    Inventory,
    Outcome,
    PlannedBlock,
    StorageClosed,
    Ticket,
)
from icehouse_server.storage.files import Files
from icehouse_server.storage.local.encryption.aes_gcm import Cipher
from icehouse_server.storage.local.model_tiers import ModelTiers
from icehouse_server.storage.storage_settings import Codec, StorageSettings

FINGERPRINT = Fingerprint(b"\x33" * 32)
TOKEN_COUNT = 256


@dataclasses.dataclass(frozen=True)
class Shape:
    """The KV of one model."""

    layer_count: int
    head_count: int
    width: int


def settings(directory: Path, codec: Codec = Codec.RAW) -> StorageSettings:
    """Return settings that never limit."""
    return StorageSettings(
        directory=os.fspath(directory),
        limit_bytes=1 << 40,
        free_floor_bytes=0,
        daily_write_limit_bytes=0,
        spill_queue_limit_bytes=1 << 31,
        load_queue_limit_count=64,
        task_queue_limit_count=64,
        reader_thread_count=2,
        codec=codec,
    )


def make_chain(
    count: int, *, shape: Shape, seed: int, cipher: Cipher | None = None, has_values: bool = False
) -> list[HostBlock]:
    """Return blocks of one sequence with bf16 keys and values of this shape, named as with `cipher`.

    They are random bytes, which cannot be compressed, or with `has_values` normally distributed numbers,
    whose byte planes compress about as well as those of real KV.
    """
    secret = cipher.name_secret if cipher else b""
    dimensions = (1, shape.head_count, TOKEN_COUNT, shape.width)
    noise = np.random.default_rng(seed)
    parent = root_hash(fingerprint=FINGERPRINT, tenant=DEFAULT_TENANT, secret=secret)
    chain = []
    for index in range(count):
        token_ids = tuple(noise.integers(0, 100_000, TOKEN_COUNT).tolist())
        header = BlockHeader(
            hash=block_hash(parent=parent, token_ids=token_ids, secret=secret),
            parent=parent,
            fingerprint=FINGERPRINT,
            start_token_index=index * TOKEN_COUNT,
            token_ids=token_ids,
            block_token_limit=TOKEN_COUNT,
        )
        tensors = tuple(
            HostTensor(
                f"{layer:03}.{part}",
                "BF16",
                dimensions,
                _content(noise, int(np.prod(dimensions)), has_values=has_values),
            )
            for layer in range(shape.layer_count)
            for part in "kv"
        )
        chain.append(HostBlock(header, (HostRegion(RegionKind.KV, tensors),)))
        parent = header.hash
    return chain


def _content(noise: np.random.Generator, count: int, *, has_values: bool) -> memoryview:
    """Return the bytes of so many bf16 numbers."""
    if not has_values:
        return noise.integers(0, 256, 2 * count, dtype=np.uint8).data
    bits = noise.standard_normal(count, dtype=np.float32).view(np.uint32) >> 16
    return bits.astype(np.uint16).view(np.uint8).data


class Tier:
    """A running tier and its outcomes."""

    def __init__(
        self,
        directory: Path,
        *,
        cipher: Cipher | None = None,
        codec: Codec = Codec.RAW,
        files: Files | None = None,
    ) -> None:
        self.outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._tiers = ModelTiers(
            settings(directory, codec), files=files or Files(), clock=SystemClock(), cipher=cipher
        )
        self.storage = self._tiers.open(FINGERPRINT, {}, self.outcomes.put)

    def __enter__(self) -> Tier:
        self.storage.start()
        self._tiers.start()
        assert isinstance(self.outcomes.get(), Inventory)
        return self

    def __exit__(self, *_: object) -> None:
        self._tiers.close(deadline_time=time.monotonic() + 60)
        while not isinstance(self.outcomes.get(), StorageClosed):
            pass
        self._tiers.join(timeout_s=10)


def tier_write(tier: Tier, chain: list[HostBlock]) -> None:
    """Spill a chain and wait until every row is committed."""
    for block in chain:
        tier.storage.put(block)
    for _ in chain:
        written = tier.outcomes.get()
        assert isinstance(written, Ticket) and isinstance(written.outcome, BlockPersisted)


def tier_read(tier: Tier, chain: list[HostBlock]) -> None:
    """Load a chain into memory that the readers allocate."""
    planned = tuple(PlannedBlock(block.header, frozenset({RegionKind.KV})) for block in chain)
    ticket = tier.storage.get_into(planned, None)
    assert ticket is not None and tier.outcomes.get() is ticket
    assert isinstance(ticket.outcome, BlocksLoaded) and ticket.outcome.failure is None
