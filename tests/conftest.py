"""What every test leaves as it found it."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import shutil
from collections.abc import Iterator

import hypothesis
import pytest

from tests.fixtures import installed_code

# An example may take as long as it takes: a busy machine is no fault.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

# Tests' folders are in memory where there is plenty: none is about a medium's speed, and each of thousands of
# syncs waits for whatever else is at work on a disk.
_MEMORY, _PLENTY_BYTES = "/dev/shm", 4 << 30
with contextlib.suppress(OSError):
    if shutil.disk_usage(_MEMORY).free >= _PLENTY_BYTES and os.access(_MEMORY, os.W_OK):
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", _MEMORY)

installed_code.read_once()

_LOGGERS = ("", "icehouse", "icehouse_server")


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
