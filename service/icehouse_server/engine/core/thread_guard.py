"""Thread guard: the thread that may touch MLX is claimed once and checked at every call of the runner."""

from __future__ import annotations

import threading


class OneThread:
    """Raises when another thread than the claiming one comes by; a detector, not a lock."""

    def __init__(self) -> None:
        self._owner: int | None = None

    def claim(self) -> None:
        """Make the calling thread the only one."""
        self._owner = threading.get_ident()

    def check(self) -> None:
        """Assert that the caller is the thread that claimed."""
        caller = threading.get_ident()
        assert caller == self._owner, f"thread {caller} touched the runner of thread {self._owner}"
