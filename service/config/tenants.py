"""Settings of what one tenant may take of the house."""

from __future__ import annotations

import dataclasses

from service.config.setting import Kind, setting


@dataclasses.dataclass(frozen=True, slots=True)
class TenantConfig:
    """Limits for each tenant. How many requests of one run at once is `engine.tenant_running_limit`."""

    waiting_limit: int = setting(
        0,
        Kind.COUNT,
        "Requests of one tenant that may wait for a slot; 0 is unlimited.",
        minimum=0,
        flag="--tenant-waiting-limit",
    )
    tokens_per_minute: int = setting(
        0,
        Kind.COUNT,
        "Prompt and output tokens of one tenant per minute; 0 is unlimited.",
        minimum=0,
        flag="--tenant-tokens-per-minute",
    )
    ram_bytes: int = setting(
        0,
        Kind.BYTES,
        "RAM tier that one tenant's blocks may fill; 0 is all of it.",
        minimum=0,
        flag="--tenant-ram-bytes",
    )
    ssd_bytes: int = setting(
        0,
        Kind.BYTES,
        "SSD tier that one tenant's blocks may fill; 0 is all of it.",
        minimum=0,
        flag="--tenant-ssd-bytes",
    )
