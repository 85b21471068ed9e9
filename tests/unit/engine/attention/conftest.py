"""Kernels of attention over pages, run without a GPU."""

from __future__ import annotations

import pytest

from tests.fixtures.quick_compiler import BUILD
from tests.unit.engine.attention.emulation import COMPILER, Emulation


@pytest.fixture(scope="module")
def emulation() -> Emulation:
    if COMPILER is None:
        pytest.skip("no C++ compiler here: the kernels of attention over pages are not run")
    folder = BUILD / "kernels"
    folder.mkdir(parents=True, exist_ok=True)
    return Emulation(folder)
