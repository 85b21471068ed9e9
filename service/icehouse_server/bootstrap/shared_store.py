"""Object store of the configured URL. `obstore` is needed from here on only."""

from __future__ import annotations

from icehouse_server.config import CacheConfig
from icehouse_server.errors import ConfigError, Reason, imports_of_extra
from icehouse_server.storage.api import OVERHEAD_BYTES
from icehouse_server.storage.shared.object_store import ObjectStore, make_store
from icehouse_server.storage.shared.shared_settings import SharedSettings

_FIELD = "cache.shared_url"


def open_shared_store(cache: CacheConfig) -> ObjectStore:
    """Return the object store, without asking it anything: one that is down stops no start. Raises
    ConfigError for a URL that names none, or without the extra."""
    assert cache.shared_url is not None, "an object store is configured"
    try:
        with imports_of_extra("shared", setting=_FIELD):
            return make_store(cache.shared_url)
    except ValueError as error:
        detail = f"{_FIELD} = {cache.shared_url} names no object store: {error}"
        raise ConfigError(Reason.CONFIG_INVALID, detail, field=_FIELD) from error


def shared_settings(cache: CacheConfig) -> SharedSettings:
    """Return the limits of its traffic."""
    return SharedSettings(
        lookup_timeout_s=cache.shared_lookup_timeout_ms / 1000,
        write_bytes_per_s=cache.shared_write_rate_bytes,
        # A block that does not fit the write queue cannot have been stored by a server such as this one.
        object_limit_bytes=cache.write_queue_bytes + OVERHEAD_BYTES,
    )
