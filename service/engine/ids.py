"""Names of things that live inside the engine only."""

from __future__ import annotations

from typing import NewType

SequenceId = NewType("SequenceId", int)
"""A running request's handle; never reused within a process."""
