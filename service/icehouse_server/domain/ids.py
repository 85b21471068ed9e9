"""Identities that travel through the server, and the scope within which requests share KV."""

from __future__ import annotations

import dataclasses
import re
from typing import NewType

CALLER_NAME_PATTERN = re.compile(r"[A-Za-z0-9._:\-]{1,128}")
"""What a caller may call a request or a session: it stands in logs as it is."""

RequestId = NewType("RequestId", str)
"""A request among those of all tenants, made of its name and its tenant (see `domain.request`)."""
Tenant = NewType("Tenant", str)
"""Who may share KV with whom. The empty tenant is the default one."""

AdapterName = NewType("AdapterName", str)
"""A LoRA adapter, as the config calls it. The empty name is the model by itself."""

AdapterDigest = NewType("AdapterDigest", bytes)
"""32 bytes, SHA-256 over what an adapter computes: its weights and where they apply."""

BlockHash = NewType("BlockHash", bytes)
"""32 bytes, SHA-256 chained over parent, token ids and extra digests (see `domain.blocks`)."""

ImageDigest = NewType("ImageDigest", bytes)
"""32 bytes, SHA-256 over an image as the model's processor made it, and over the processor."""

SessionKey = NewType("SessionKey", bytes)
"""16 bytes, BLAKE2b over a session's name and its tenant, under the key of the cache if there is one."""

Fingerprint = NewType("Fingerprint", bytes)
"""32 bytes, SHA-256 over everything KV depends on."""

NO_ADAPTER = AdapterName("")

DEFAULT_TENANT = Tenant("")


@dataclasses.dataclass(frozen=True, slots=True)
class CacheScope:
    """Requests of one tenant with one adapter: the same tokens have the same KV, and may share it."""

    tenant: Tenant = DEFAULT_TENANT
    adapter: AdapterName = NO_ADAPTER


DEFAULT_SCOPE = CacheScope()
"""The default tenant's requests to the model by itself."""


SequenceId = NewType("SequenceId", int)
"""A running request's handle; never reused within a process."""
