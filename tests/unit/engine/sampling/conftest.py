"""References of the sampler's tests, run as they are written."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest


@pytest.fixture(autouse=True)
def uncompiled_references() -> Iterator[None]:
    """mlx-lm's filters are compiled for each shape and value, on a CPU by a C++ compiler: seconds a test
    on a new machine. The server compiles none there."""
    mx.disable_compile()
    yield
    mx.enable_compile()
