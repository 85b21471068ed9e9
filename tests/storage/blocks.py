"""Blocks with recognisable bytes, for every test of the SSD tier."""

from __future__ import annotations

import numpy as np
from icehouse_server.domain.blocks import (
    BlockHeader,
    HostBlock,
    HostRegion,
    HostTensor,
    RegionKind,
    block_hash,
    root_hash,
)
from icehouse_server.domain.ids import DEFAULT_TENANT, BlockHash, Fingerprint
from icehouse_server.storage.encryption.cipher import Vault

FINGERPRINT = Fingerprint(b"\x11" * 32)
OTHER_FINGERPRINT = Fingerprint(b"\x22" * 32)
BLOCK_TOKEN_LIMIT = 16


def tensor(name: str, dtype: str, shape: tuple[int, ...], *, seed: int) -> HostTensor:
    """Return a tensor of random bytes, the same for the same seed."""
    itemsize = {"BF16": 2, "F16": 2, "F32": 4, "U32": 4}[dtype]
    size_bytes = int(np.prod(shape)) * itemsize
    data = np.random.default_rng(seed).integers(0, 256, size_bytes, dtype=np.uint8)
    return HostTensor(name, dtype, shape, memoryview(data))


def make_block(
    *,
    parent: BlockHash | None = None,
    start: int = 0,
    token_ids: tuple[int, ...] | None = None,
    fingerprint: Fingerprint = FINGERPRINT,
    seed: int = 0,
    head_count: int = 2,
    row_width: int = 8,
    window: bool = True,
    checkpoint: bool = False,
    block_token_limit: int = BLOCK_TOKEN_LIMIT,
    vault: Vault | None = None,
) -> HostBlock:
    """Return a block of two kv layers, one window layer and perhaps a checkpoint."""
    secret = vault.name_secret if vault else b""
    parent = parent or root_hash(fingerprint=fingerprint, tenant=DEFAULT_TENANT, secret=secret)
    token_ids = token_ids or tuple(seed * 1000 + index for index in range(block_token_limit))
    count = len(token_ids)
    header = BlockHeader(
        hash=block_hash(parent=parent, token_ids=token_ids, secret=secret),
        parent=parent,
        fingerprint=fingerprint,
        start_token_index=start,
        token_ids=token_ids,
        block_token_limit=block_token_limit,
    )
    shape = (1, head_count, count, row_width)
    regions = [
        HostRegion(
            RegionKind.KV,
            (
                tensor("000.k", "BF16", shape, seed=seed * 10 + 1),
                tensor("000.v", "BF16", shape, seed=seed * 10 + 2),
                tensor("003.k", "F32", shape, seed=seed * 10 + 3),
            ),
        )
    ]
    if window:
        regions.append(
            HostRegion(RegionKind.WINDOW, (tensor("001.k", "F16", (1, 1, 4, 6), seed=seed * 10 + 4),))
        )
    if checkpoint:
        regions.append(
            HostRegion(RegionKind.CHECKPOINT, (tensor("002.state", "F32", (3, 5), seed=seed * 10 + 5),))
        )
    return HostBlock(header, tuple(regions))


def make_chain(
    count: int, *, seed: int = 1, fingerprint: Fingerprint = FINGERPRINT, **how
) -> list[HostBlock]:
    """Return consecutive full blocks of one sequence."""
    chain: list[HostBlock] = []
    for index in range(count):
        parent = chain[-1].header.hash if chain else None
        start = index * BLOCK_TOKEN_LIMIT
        chain.append(
            make_block(parent=parent, start=start, seed=seed * 100 + index, fingerprint=fingerprint, **how)
        )
    return chain
