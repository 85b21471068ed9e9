"""Identities that travel through the server, and the scope within which requests share KV."""

from __future__ import annotations

import dataclasses
import re
from typing import NewType

CALLER_NAME_PATTERN = re.compile(r"[A-Za-z0-9._:\-]{1,128}")
"""What a caller may call a request or a session; logs show it unchanged."""

RequestId = NewType("RequestId", str)
"""Identifies a request among all tenants' requests: its name and its tenant (see `domain.request`)."""
Tenant = NewType("Tenant", str)
"""Requests of one tenant may share KV. The empty tenant is the default one."""

AdapterName = NewType("AdapterName", str)
"""A LoRA adapter's name in the config. The empty name is the bare model."""

AdapterDigest = NewType("AdapterDigest", bytes)
"""32 bytes, SHA-256 over all that an adapter computes with: its weights and where they apply."""

BlockHash = NewType("BlockHash", bytes)
"""32 bytes, SHA-256 chained over parent, token ids and extra digests (see `domain.blocks`)."""

ImageDigest = NewType("ImageDigest", bytes)
"""32 bytes, SHA-256 over the image that the model's processor made, and over the processor."""

SessionKey = NewType("SessionKey", bytes)
"""16 bytes, BLAKE2b over a session's name and tenant, keyed with the cache's key if there is one."""

Fingerprint = NewType("Fingerprint", bytes)
"""32 bytes, SHA-256 over everything that KV depends on."""

NO_ADAPTER = AdapterName("")

DEFAULT_TENANT = Tenant("")


@dataclasses.dataclass(frozen=True, slots=True)
class CacheScope:
    """One tenant with one adapter: in a scope, the same tokens have the same KV, and requests share it."""

    tenant: Tenant = DEFAULT_TENANT
    adapter: AdapterName = NO_ADAPTER


DEFAULT_SCOPE = CacheScope()
"""The default tenant's requests to the bare model."""


SequenceId = NewType("SequenceId", int)
"""A running request's handle; never reused within a process."""
