"""Body budget: the bytes of all requests' bodies that are held at once, over all connections."""

from __future__ import annotations

from icehouse_http.errors import ApiError

_RETRY_S = 1.0


class BodyBudget:
    """Bytes of bodies as they arrive, until their requests are answered. Belongs to the event loop."""

    def __init__(self, *, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0

    def take(self, size_bytes: int) -> None:
        """Hold so much more; raises ApiError, with when to come again, where that is too much."""
        if self.held_bytes + size_bytes > self.limit_bytes:
            raise ApiError(
                503,
                f"the bodies of all requests hold {self.held_bytes} of {self.limit_bytes} bytes; try again "
                "when some of them are answered",
                code="BODY_MEMORY_FULL",
                retry_s=_RETRY_S,
            )
        self.held_bytes += size_bytes

    def give_back(self, size_bytes: int) -> None:
        """Hold so much less."""
        self.held_bytes -= size_bytes
        assert self.held_bytes >= 0, "more was given back than taken"
