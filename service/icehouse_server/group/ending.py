"""Ending of a rank: MLX's threads may wait for another rank forever, and the process must not."""

from __future__ import annotations

import logging
import os
import threading
from typing import NoReturn

LEAVE_S = 2.0
"""By then callers have been told, and logs are written."""
FOLLOWERS_END_S = 25.0
"""How long followers may take to write their blocks."""


def leave(code: int) -> NoReturn:
    """End the process now. MLX's own threads may abort it if another rank is gone when it ends normally."""
    for handler in logging.getLogger().handlers:
        handler.flush()
    os._exit(code)


def leave_later(code: int, *, after_s: float = LEAVE_S) -> None:
    """End the process soon, whatever it still waits for."""
    timer = threading.Timer(after_s, leave, args=(code,))
    timer.daemon = True
    timer.start()
