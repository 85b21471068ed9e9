"""Steps: long work as a generator, which yields so that others have their turn in between.

It yields for how many seconds it has nothing to do, or None where it could go on at once.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

_Result = TypeVar("_Result")
Steps = Generator[float | None, None, _Result]


def whole(steps: Steps[_Result]) -> _Result:
    """Do all of it at once, and return what it comes to."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: _Result = end.value
            return result
