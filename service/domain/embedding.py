"""Vectors of texts: how hidden states are pooled, and what becomes of the vector."""

from __future__ import annotations

import enum

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float32]


class Pooling(enum.Enum):
    """How the hidden states of an input's tokens become one vector."""

    LAST_TOKEN = enum.auto()
    MEAN = enum.auto()


def finished(vector: Vector, *, dimension_count: int, is_normalized: bool) -> Vector:
    """Return the leading dimensions, of length 1 if so wanted. A vector of zeros stays one."""
    kept = vector[:dimension_count]
    length = float(np.linalg.norm(kept))
    return kept / np.float32(length) if is_normalized and length > 0 else kept
