"""The units of work that a step may run; the scheduler picks one, the loop runs it (inference thread)."""

from __future__ import annotations

import dataclasses

from service.engine.sequence import Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Run prompt tokens [start, stop) of one sequence."""

    sequence: Sequence
    start: int
    stop: int


@dataclasses.dataclass(frozen=True, slots=True)
class RestoreSlice:
    """Go on rebuilding one sequence's caches from its blocks."""

    sequence: Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Join:
    """Let a prefilled sequence decode with the others from the next step on."""

    sequence: Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeStep:
    """Draw one token for every decoding sequence."""


@dataclasses.dataclass(frozen=True, slots=True)
class Idle:
    """Nothing to run until a message comes."""


Work = PrefillChunk | RestoreSlice | Join | DecodeStep | Idle
