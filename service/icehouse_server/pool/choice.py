"""Choice: which models give way to one that is to be loaded. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from icehouse_server.errors import CannotFit, Reason, size_text


@dataclasses.dataclass(frozen=True, slots=True)
class ModelNeeds:
    """What a model takes of the memory."""

    weight_bytes: int
    """As long as it is loaded."""
    run_bytes: int = 0
    """What a small request takes besides. Idle models give back what they keep, so it must be there once."""


@dataclasses.dataclass(frozen=True, slots=True)
class Occupant:
    """A model in memory."""

    name: str
    needs: ModelNeeds
    is_pinned: bool
    user_count: int
    """Calls that use it."""
    use_time: float
    """When it was last used."""


def taken_bytes(needs: ModelNeeds, staying: Iterable[Occupant]) -> int:
    """Return what a model needs beside others: all weights, and that any of them can run."""
    together = [needs, *(each.needs for each in staying)]
    return sum(each.weight_bytes for each in together) + max(each.run_bytes for each in together)


def yielding(
    name: str, needs: ModelNeeds, occupants: Sequence[Occupant], *, limit_bytes: int
) -> tuple[Occupant, ...]:
    """Return who gives way to a model, the first one first; nobody where it fits beside all.

    Idle models come before running ones, which must be drained first, and among either the least
    recently used one; pinned ones never. Raises CannotFit if even that is not enough.
    """
    pinned = [each for each in occupants if each.is_pinned]
    if taken_bytes(needs, pinned) > limit_bytes:
        raise _never_fits(name, needs, pinned, limit_bytes=limit_bytes)
    staying, chosen = list(occupants), list[Occupant]()
    movable = (each for each in occupants if not each.is_pinned)
    for each in sorted(movable, key=lambda each: (each.user_count > 0, each.use_time)):
        if taken_bytes(needs, staying) <= limit_bytes:
            break
        chosen.append(each)
        staying.remove(each)
    # An idle one that is not needed any more, now that larger ones go, stays.
    for each in tuple(chosen):
        if taken_bytes(needs, [*staying, each]) <= limit_bytes:
            chosen.remove(each)
            staying.append(each)
    return tuple(chosen)


def _never_fits(name: str, needs: ModelNeeds, pinned: Sequence[Occupant], *, limit_bytes: int) -> CannotFit:
    pinned_bytes = sum(each.needs.weight_bytes for each in pinned)
    run_bytes = taken_bytes(needs, pinned) - needs.weight_bytes - pinned_bytes
    beside, advice = "", ""
    if pinned:
        beside, advice = f", pinned models take {size_text(pinned_bytes)}", "pin fewer models, or "
    return CannotFit(
        Reason.MEMORY_NEVER_FITS,
        f"model {name!r} takes {size_text(needs.weight_bytes)} of memory, a small request takes about "
        f"{size_text(run_bytes)}{beside}, and the server may use {size_text(limit_bytes)}; {advice}raise "
        "engine.memory_limit_bytes if there is more",
        metadata={
            "model": name,
            "weight_bytes": needs.weight_bytes,
            "pinned_bytes": pinned_bytes,
            "run_bytes": run_bytes,
            "limit_bytes": limit_bytes,
        },
    )
