"""Settings of the traffic with the object store that servers share."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class SharedSettings:
    """Limits of the traffic with the store."""

    lookup_timeout_s: float
    """Maximum time of one lookup, and so of what a slow store costs a request."""
    write_bytes_per_s: int
    """Of all blocks that are stored, on average; 0 is unlimited."""
    object_limit_bytes: int
    """A larger object is no block of this server's model."""
    silence_s: float = 2.0
    """A read of which nothing comes for so long is given up."""
    put_timeout_s: float = 60.0
