"""Settings of what one tenant may take of the server."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from icehouse_server.config.setting import setting


@dataclasses.dataclass(frozen=True, slots=True)
class TenantConfig:
    """Limits for each tenant. How many requests of one run at once is `engine.tenant_running_limit`."""

    waiting_limit: int = setting(
        0, "Maximum waiting requests of one tenant; 0 is unlimited.", minimum=0, flag="--tenant-waiting-limit"
    )
    tokens_per_minute: int = setting(
        0,
        "Maximum prompt and output tokens of one tenant per minute; 0 is unlimited.",
        minimum=0,
        flag="--tenant-tokens-per-minute",
    )
    ram_bytes: int = setting(
        0,
        "Maximum bytes of the RAM tier for one tenant's blocks; 0 is all of it.",
        minimum=0,
        flag="--tenant-ram-bytes",
    )
    ssd_bytes: int = setting(
        0,
        "Maximum bytes of the SSD tier for one tenant's blocks; 0 is all of it.",
        minimum=0,
        flag="--tenant-ssd-bytes",
    )
    shared_prefixes: str | None = setting(
        None,
        "Tenants, comma-separated, whose cached prompts others may start from; `a=b+c` allows b and c only.",
    )

    normalized_prompts: str | None = setting(
        None,
        "Tenants, comma-separated, whose conversations are normalized: volatile billing lines are removed "
        "and tools put in a stable order. `*` is every tenant.",
    )

    def normalizes(self, tenant: str) -> bool:
        """Whether this tenant's conversations are normalised before they are rendered."""
        named = {name.strip() for name in (self.normalized_prompts or "").split(",") if name.strip()}
        return "*" in named or tenant in named

    @property
    def shared_prefix_grants(self) -> Mapping[str, frozenset[str] | None]:
        """Who may start from the prompts of each shared tenant; None: every tenant."""
        parts = [part.partition("=") for part in (self.shared_prefixes or "").split(",") if part.strip()]
        return {name.strip(): _names(listed) if equals else None for name, equals, listed in parts}


def _names(listed: str) -> frozenset[str]:
    return frozenset(name.strip() for name in listed.split("+") if name.strip())
