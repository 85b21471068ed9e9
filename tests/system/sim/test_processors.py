"""A story is the same on every processor, although BLAS, NumPy and libm have other code for each kind."""

from __future__ import annotations

import itertools
import os
import platform
import subprocess
import sys
from collections.abc import Mapping

import numpy as np
import pytest

from tests.system.sim.scenario import IMAGES_SEED

_SEEDS = (1, 18, 20, 22, IMAGES_SEED + 9, IMAGES_SEED + 14)
"""Some stories that differed between processors when BLAS still fitted the cost of a pass."""
_TELL = """
import sys
from tests.system.sim.stories import play
print(*sorted(play(map(int, sys.argv[1:]), is_told=True).items()), sep="\\n")
"""
_SHOW_BITS = """
import math, random, zlib
import numpy as np
dice = random.Random(0)
values = [dice.random() for _ in range(20_000)]
for made in (
    np.linalg.lstsq(np.reshape(values[:250], (50, 5)), np.array(values[:50]), rcond=None)[0],
    0.5 ** np.array(values),
    np.array([math.exp(-value) for value in values]),
):
    print(zlib.crc32(made.tobytes()))
"""
_WHAT = ("BLAS", "NumPy", "libm")
"""The library whose bits each line of its output shows."""


def _older() -> Mapping[str, str]:
    """Return variables that make each library work as on a processor of 2011, if it has code for several."""
    chosen = np.show_config(mode="dicts")["SIMD Extensions"].get("found", [])
    return {
        "OPENBLAS_CORETYPE": "ARMV8" if platform.machine() in ("arm64", "aarch64") else "Sandybridge",
        "NPY_DISABLE_CPU_FEATURES": " ".join(chosen),
        "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-FMA4,-AVX2_Usable,-FMA_Usable",
    }


def _run(program: str, *arguments: str, on: Mapping[str, str]) -> list[str]:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environ = {**os.environ, "PYTHONPATH": path, **on}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_stories_go_the_same_way_on_another_processor() -> None:
    here, there = _run(_SHOW_BITS, on={}), _run(_SHOW_BITS, on=_older())
    differing = [what for what, one, other in zip(_WHAT, here, there, strict=True) if one != other]
    if not differing:
        pytest.skip("BLAS, NumPy and libm compute the same here whatever processor they are told")
    print("differing in the last bit:", ", ".join(differing))
    seeds = [str(seed) for seed in _SEEDS]
    told, told_there = _run(_TELL, *seeds, on={}), _run(_TELL, *seeds, on=_older())
    assert len(told) > 50 * len(seeds)
    for number, (line, other) in enumerate(itertools.zip_longest(told, told_there)):
        before = "\n".join(told[max(0, number - 10) : number])
        assert line == other, f"{before}\nand then with other {', '.join(differing)}:"
