"""What a request may do with the server's prefix cache."""

from __future__ import annotations

from typing import Literal, TypedDict

from icehouse.v1 import cache_policy_pb2

from icehouse_client.options import chosen

CacheUse = Literal["read_write", "read_only", "write_only", "off"]

_CACHE_USES = {
    "read_write": cache_policy_pb2.CACHE_USE_READ_WRITE,
    "read_only": cache_policy_pb2.CACHE_USE_READ_ONLY,
    "write_only": cache_policy_pb2.CACHE_USE_WRITE_ONLY,
    "off": cache_policy_pb2.CACHE_USE_OFF,
}


class CacheOptions(TypedDict, total=False):
    """Left out: the server's default."""

    cache_use: CacheUse
    tenant: str
    shared_prefix_name: str


def cache_policy(options: CacheOptions) -> cache_policy_pb2.CachePolicy | None:
    """Return the message; None where nothing is said."""
    policy = cache_policy_pb2.CachePolicy(
        tenant=options.get("tenant", ""), shared_prefix_name=options.get("shared_prefix_name", "")
    )
    if "cache_use" in options:
        policy.use = chosen("cache_use", options["cache_use"], _CACHE_USES)
    return policy if policy.ByteSize() else None
