"""Setup of every test run: folders in memory, CPU scheduling, the compiler, garbage collection, logging."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.fixtures import quick_compiler

# An example may take any time: a busy machine is not a fault.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

# Put the tests' folders into memory if there is plenty: no test is about a medium's speed, and each of
# thousands of syncs would wait for other work on the disk. The mount may report free space while the
# machine's memory is full, so both are checked.
_MEMORY, _PLENTY_BYTES = "/dev/shm", 12 << 30


def _free_memory_bytes() -> int:
    """Return the bytes free in the mount, or available on the machine if that is less."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    return min(shutil.disk_usage(_MEMORY).free, available)


with contextlib.suppress(OSError):
    if _free_memory_bytes() >= _PLENTY_BYTES and os.access(_MEMORY, os.W_OK):
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", _MEMORY)

# MLX on a CPU hands each operation to another thread. With this policy, a woken thread waits its turn instead
# of preempting the one that woke it, thousands of times a second on busy cores. Tests that compute take a
# tenth to a third less CPU time with it (2 x86 cores). Processes that tests start inherit it.
if hasattr(os, "SCHED_BATCH"):
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

quick_compiler.put_first()

# Imported modules and collected tests stay to the end: walking them for garbage takes a third of the time of
# collecting tests.
gc.disable()

_LOGGERS = ("", "icehouse", "icehouse_server")


def pytest_collection_finish() -> None:
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def light_collections() -> None:
    """Freeze the tests and their imports, which stay to the end: later garbage collections, of which the
    simulation makes many, then skip them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Undo what a command run in this process did to logging: it logs to its own stream, which is closed when
    it ends, and later tests would find the complaints about that in their output."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [(logger, list(logger.handlers), logger.level) for logger in loggers]
    yield
    for logger, handlers, level in before:
        logger.handlers = handlers
        logger.setLevel(level)
