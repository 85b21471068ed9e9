"""OpenBLAS in front of MLX: when it is loaded, and that MLX calls it then."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from icehouse_server.bootstrap.imports import openblas


def test_a_library_that_cannot_be_loaded_is_told_and_nothing_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(openblas, "runs_on_cpu", lambda: True)
    monkeypatch.setattr(openblas, "openblas_loaded", lambda: False)
    monkeypatch.setattr(openblas, "find_openblas", lambda: Path("/nowhere/libopenblas.so.0"))
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    openblas.load_openblas()
    assert [record.message for record in caplog.records] == ["openblas_not_loaded"]


_BOUND_TO = """
import ctypes, os, sys
from icehouse_server.bootstrap.imports import openblas
if sys.argv[1] == "load":
    openblas.load_openblas()
import mlx.core
# Whose sgemm a library finds that is loaded later: asked of the loader as libmlx's relocations ask it.
named = ctypes.CDLL(None)
found = getattr(named, "cblas_sgemm", None)
class Info(ctypes.Structure):
    _fields_ = [("file", ctypes.c_char_p), ("base", ctypes.c_void_p)]
    _fields_ += [("name", ctypes.c_char_p), ("at", ctypes.c_void_p)]
info = Info()
if found is not None:
    named.dladdr(ctypes.cast(found, ctypes.c_void_p), ctypes.byref(info))
print(os.path.basename((info.file or b"").decode()))
"""


@pytest.mark.parametrize(("order", "owner"), [("load", "openblas"), ("leave", "")])
def test_what_is_loaded_later_finds_openblas_first(order: str, owner: str) -> None:
    if not openblas.runs_on_cpu() or openblas.find_openblas() is None:
        pytest.skip("no CPU build of MLX, or no OpenBLAS on this machine")
    environ = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    said = subprocess.run(
        [sys.executable, "-c", _BOUND_TO, order], env=environ, capture_output=True, text=True, check=True
    ).stdout.strip()
    assert (owner in said) if owner else said == "", said
