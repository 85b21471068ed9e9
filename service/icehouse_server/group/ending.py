"""Ending of a rank: MLX's threads may wait for another rank for ever, and the process must not."""

from __future__ import annotations

import os
import threading

LEAVE_S = 2.0
"""By then callers are told, and logs are written."""
FOLLOWERS_END_S = 25.0
"""How long followers may take to write their blocks."""


def leave_later(code: int, *, after_s: float = LEAVE_S) -> None:
    """End the process soon, whatever it still waits for."""
    timer = threading.Timer(after_s, os._exit, args=(code,))
    timer.daemon = True
    timer.start()
