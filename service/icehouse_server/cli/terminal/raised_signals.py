"""Raised signals: signals that would end this process at once raise SystemExit in a block instead."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn


@contextlib.contextmanager
def signals_raised(*numbers: signal.Signals, code: int | None = None) -> Iterator[None]:
    """Have signals raise SystemExit while the block runs, with this code or 128 plus the number. A second one
    ends the process at once: the first may have been raised where exceptions are lost, as in a destructor."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        signal.signal(number, signal.SIG_DFL)
        raise SystemExit(128 + number if code is None else code)

    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
