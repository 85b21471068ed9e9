"""Two vaults with known keys, and a forger who knows everything but the keys."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import xxhash
from icehouse_server.storage.block_format.header import assemble_head
from icehouse_server.storage.encryption.aes_gcm import AesVault

VAULT = AesVault(bytes(range(32)))
OTHER_VAULT = AesVault(bytes(range(1, 33)))
BOTH_WAYS = {"argvalues": [None, VAULT], "ids": ["clear", "encrypted"]}
"""For `pytest.mark.parametrize`: everything that holds in the clear holds encrypted too."""


def forge(
    path: Path, *, metadata: Callable[[dict], None] = lambda _: None, flip_at: int | None = None
) -> None:
    """Change a block file and make all its checksums fit, as anybody can who may write the disk."""
    text = bytearray(path.read_bytes())
    head_bytes = 8 + int.from_bytes(text[:8], "little")
    head = json.loads(text[8:head_bytes])
    facts = head.pop("__metadata__")
    del facts["header_xxh3"]
    data = text[head_bytes:]
    if flip_at is not None:
        data[flip_at] ^= 1
    regions = json.loads(facts["regions"])
    for region in regions:
        begin, end = region["offset"], region["offset"] + region["size_bytes"]
        region["xxh3"] = f"{xxhash.xxh3_64_intdigest(data[begin:end]):016x}"
    facts["regions"] = json.dumps(regions, separators=(",", ":"))
    metadata(facts)
    path.write_bytes(assemble_head(facts, head)[0] + data)
