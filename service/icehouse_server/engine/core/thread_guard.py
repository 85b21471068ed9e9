"""Thread guard: one thread claims MLX, and every call of the runner checks that it is on that thread."""

from __future__ import annotations

import threading


class OneThread:
    """Raises if another thread than the claiming one calls; a detector, not a lock."""

    def __init__(self) -> None:
        self._owner: int | None = None

    def claim(self) -> None:
        """Make the calling thread the only one allowed."""
        self._owner = threading.get_ident()

    def check(self) -> None:
        """Assert that the caller is the thread that claimed."""
        caller = threading.get_ident()
        assert caller == self._owner, f"thread {caller} touched the runner of thread {self._owner}"
