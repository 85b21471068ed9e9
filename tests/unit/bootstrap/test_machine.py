"""Large blocks leave the process when they are freed."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

_SCRIPT = """
import ctypes, sys
from icehouse_server.bootstrap.machine import give_back_large_arrays
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
if sys.argv[1] == "bounded":
    give_back_large_arrays()
libc.free(libc.malloc(16 << 20))  # by default this raises what counts as large
block = libc.malloc(2 << 20)
IS_MAPPED = 2  # of the size word that glibc keeps before each block
print(bool(ctypes.c_size_t.from_address(block - 8).value & IS_MAPPED))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps freed large blocks so")
@pytest.mark.parametrize(("mode", "is_mapped"), [("default", "False"), ("bounded", "True")])
def test_a_large_block_is_mapped_for_itself(mode: str, is_mapped: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, mode], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == is_mapped
