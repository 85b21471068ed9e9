"""Steps: long work as a generator, which yields so that others can have a turn."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

_Result = TypeVar("_Result")

Steps = Generator[float | None, None, _Result]
"""Yields for how many seconds it has nothing to do, or None if it could go on at once."""
