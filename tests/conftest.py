"""What every test leaves as it found it."""

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

# An example may take as long as it takes: a busy machine is no fault.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

# Tests' folders are in memory where there is plenty: none is about a medium's speed, and each of thousands of
# syncs waits for whatever else is at work on a disk. The mount may say that it is empty while the
# machine's memory is full, so both are asked.
_MEMORY, _PLENTY_BYTES = "/dev/shm", 12 << 30


def _free_memory_bytes() -> int:
    """Return what is free in the mount, or available on the machine if that is less."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    return min(shutil.disk_usage(_MEMORY).free, available)


with contextlib.suppress(OSError):
    if _free_memory_bytes() >= _PLENTY_BYTES and os.access(_MEMORY, os.W_OK):
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", _MEMORY)

# MLX on a CPU hands each operation to a thread of its own. Of this policy, a thread that is woken waits its
# turn instead of pushing aside the one that wakes it, on busy cores thousands of times a second. Tests that
# compute take a tenth to a third less CPU time with it (2 x86 cores). What tests start inherits it.
if hasattr(os, "SCHED_BATCH"):
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

quick_compiler.put_first()

# What is imported and collected stays to the end: to look through it again and again for what might go takes
# a third of the time that collecting takes.
gc.disable()

_LOGGERS = ("", "icehouse", "icehouse_server")


def pytest_collection_finish() -> None:
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def light_collections() -> None:
    """The tests themselves and what they import stay to the end: no collection of a later test, of which the
    simulation asks for many, need walk them again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Take back what a command that ran in this process made of logging: it writes to a stream of its own
    that is closed when it ends, and every later test would find the complaints in its output."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [(logger, list(logger.handlers), logger.level) for logger in loggers]
    yield
    for logger, handlers, level in before:
        logger.handlers = handlers
        logger.setLevel(level)
