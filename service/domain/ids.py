"""Names for the identities that travel through the house."""

from __future__ import annotations

from typing import NewType

RequestId = NewType("RequestId", str)
Tenant = NewType("Tenant", str)
"""Who may share KV with whom. The empty tenant is the default one."""

BlockHash = NewType("BlockHash", bytes)
"""32 bytes, SHA-256 chained over parent, token ids and extra digests (see `domain.blocks`)."""

Fingerprint = NewType("Fingerprint", bytes)
"""32 bytes, SHA-256 over everything KV depends on."""

DEFAULT_TENANT = Tenant("")
