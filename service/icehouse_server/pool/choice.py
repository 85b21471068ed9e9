"""Choice: which models give way to one that is to be loaded. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from icehouse_server.errors import CannotFit, Reason


@dataclasses.dataclass(frozen=True, slots=True)
class Occupant:
    """A model in memory."""

    name: str
    size_bytes: int
    """Of its weights; what it keeps beside them, it gives back when others need it."""
    is_pinned: bool
    user_count: int
    """Calls that use it."""
    use_time: float
    """When it was last used."""


def yielding(
    name: str, size_bytes: int, occupants: Sequence[Occupant], *, limit_bytes: int
) -> tuple[Occupant, ...]:
    """Return who gives way to a model of this size, the first one first; nobody where it fits beside all.

    Idle models come before running ones, which must be drained first, and among either the least
    recently used one; pinned ones never. Raises CannotFit if even that is not enough.
    """
    missing_bytes = size_bytes + sum(each.size_bytes for each in occupants) - limit_bytes
    movable = [each for each in occupants if not each.is_pinned]
    pinned_bytes = sum(each.size_bytes for each in occupants if each.is_pinned)
    if size_bytes + pinned_bytes > limit_bytes:
        raise CannotFit(
            Reason.MEMORY_NEVER_FITS,
            f"model {name!r} takes {size_bytes} bytes, pinned models take {pinned_bytes}, and the server may "
            f"use {limit_bytes}; pin fewer models, or raise engine.memory_limit_bytes if there is more",
            metadata={
                "model": name,
                "weight_bytes": size_bytes,
                "pinned_bytes": pinned_bytes,
                "limit_bytes": limit_bytes,
            },
        )
    chosen: list[Occupant] = []
    for each in sorted(movable, key=lambda each: (each.user_count > 0, each.use_time)):
        if missing_bytes <= 0:
            break
        chosen.append(each)
        missing_bytes -= each.size_bytes
    # An idle one that is not needed any more, now that larger ones go, stays.
    for each in tuple(chosen):
        if missing_bytes + each.size_bytes <= 0:
            chosen.remove(each)
            missing_bytes += each.size_bytes
    return tuple(chosen)
