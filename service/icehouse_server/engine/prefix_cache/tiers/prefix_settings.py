"""Settings of the prefix cache, fixed before it is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from icehouse_server.domain.ids import AdapterDigest, AdapterName, Fingerprint


@dataclasses.dataclass(frozen=True, slots=True)
class QuotaLimits:
    """Bytes for each tenant; 0 is unlimited."""

    ram_bytes: int = 0
    ssd_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class PrefixSettings:
    """Settings of one cache, from the configuration and the model."""

    fingerprint: Fingerprint
    block_token_count: int
    is_enabled: bool
    ram_limit_bytes: int
    checkpoint_interval_tokens: int
    session_checkpoint_limit: int = 0
    """Checkpoints that a session may have; 0 is unlimited."""
    ssd_limit_bytes: int = 0
    """0 without an SSD tier."""
    spill_policy: str = "off"
    """"on_evict", "write_behind" or "off"."""
    write_share_beside_passes: float = 1.0
    """Share of the time of passes that write-behind may take if both need the same cores; 1 if they do
    not."""
    min_prefix_token_count: int = 0
    may_recompute: bool = True
    measured_on: str = ""
    """What measured rates depend on: the machine, the device and how blocks are written."""
    quotas: QuotaLimits = dataclasses.field(default_factory=QuotaLimits)
    name_secret: bytes = dataclasses.field(default=b"", repr=False)
    """Secret in the hash of block names; derived from the key if blocks are encrypted on SSD, else empty."""
    min_reuse_token_count: int = 0
    """Shorter matches, such as a lone start token, are computed instead of reused."""
    adapters: Mapping[AdapterName, AdapterDigest] = dataclasses.field(default_factory=dict)
    """The LoRA adapters that requests may name: each has chains of its own."""
