"""Steps: long work as a generator, which yields so that others have their turn in between."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

_Result = TypeVar("_Result")


def whole(steps: Generator[None, None, _Result]) -> _Result:
    """Do all of it at once, and return what it comes to."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: _Result = end.value
            return result
