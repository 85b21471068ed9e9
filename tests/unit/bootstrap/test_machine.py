"""Large blocks leave the process when they are freed, and as many files may be open as are wanted."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys

import pytest
from icehouse_server.bootstrap.machine import allow_open_files, cache_limit, memory_limit
from icehouse_server.device import Backend, Device

from tests.fixtures.patience import BOUND_S

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
        [sys.executable, "-c", _SCRIPT, mode], capture_output=True, text=True, check=True, timeout=BOUND_S
    )
    assert done.stdout.strip() == is_mapped


_FREEZE_SCRIPT = """
import gc
from icehouse_server.bootstrap.machine import freeze_objects
loaded = [[] for _ in range(1000)]
count = freeze_objects()
later = [[]]
looked_through = {id(each) for each in gc.get_objects()}
print(count >= 1000, id(loaded[0]) in looked_through, id(later) in looked_through, gc.isenabled())
"""


def test_what_is_loaded_is_not_looked_through_again_and_what_comes_later_is() -> None:
    command = [sys.executable, "-c", _FREEZE_SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=BOUND_S)
    assert done.stdout.split() == ["True", "False", "True", "True"]


_FILES_SCRIPT = """
import resource, sys
from icehouse_server.bootstrap.machine import allow_open_files, cache_limit, memory_limit
from icehouse_server.device import Backend, Device
soft, hard, wanted = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
print(allow_open_files(wanted), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "told", "then"),
    [
        pytest.param(64, 500, 200, 200, 200, id="raised to what is wanted"),
        pytest.param(64, 500, 900, 500, 500, id="no further than the hard limit"),
        pytest.param(300, 500, 200, 200, 300, id="never lowered"),
        pytest.param(500, 500, 900, 500, 500, id="nothing to be had"),
    ],
)
def test_open_files_are_allowed_as_far_as_the_system_lets_them(
    soft: int, hard: int, wanted: int, told: int, then: int
) -> None:
    command = [sys.executable, "-c", _FILES_SCRIPT, *map(str, (soft, hard, wanted))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=BOUND_S)
    assert done.stdout.split() == [str(told), str(then), str(hard)]


def test_a_system_that_refuses_what_its_hard_limit_allows_is_asked_for_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As macOS does, whose hard limit is none."""
    asked: list[int] = []

    def refuse(_what: int, limits: tuple[int, int]) -> None:
        asked.append(limits[0])
        if limits[0] > 10_240:
            raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr("resource.getrlimit", lambda _what: (256, resource.RLIM_INFINITY))
    monkeypatch.setattr("resource.setrlimit", refuse)
    assert allow_open_files(100_000) == 10_240 and asked == [100_000, 10_240]


def test_a_device_that_tells_no_size_is_bounded_by_the_hosts_memory() -> None:
    """The guard would be off with 0."""
    silent, told = Device("X", Backend.CUDA), Device("X", Backend.CUDA, 10 << 30, 9 << 30)
    host_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < cache_limit(0, silent) < memory_limit(0, silent) < host_bytes
    assert memory_limit(0, silent) == memory_limit(0, Device("X", Backend.CPU))
    assert (cache_limit(0, told), memory_limit(0, told)) == (2 << 30, 9 << 30)
    assert memory_limit(123, told) == cache_limit(123, told) == 123
