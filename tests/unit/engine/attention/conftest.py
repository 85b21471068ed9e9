"""Kernels of attention over pages, run without a GPU."""

from __future__ import annotations

import pytest

from tests.unit.engine.attention.emulation import COMPILER, Emulation


@pytest.fixture(scope="module")
def emulation(tmp_path_factory: pytest.TempPathFactory) -> Emulation:
    if COMPILER is None:
        pytest.skip("no C++ compiler here: the kernels of attention over pages are not run")
    return Emulation(tmp_path_factory.mktemp("kernels"))
