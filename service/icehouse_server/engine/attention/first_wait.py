"""First wait of a pass: what is to be done just before it, where attention waits while the pass is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final


class FirstWait:
    """What is to be done once, just before a pass is waited for the first time."""

    def __init__(self) -> None:
        self._act: Callable[[], None] | None = None

    def expect(self, act: Callable[[], None] | None) -> None:
        """Know what to do before the pass that is built next."""
        self._act = act

    def come(self) -> None:
        """Do it, unless it is done."""
        act, self._act = self._act, None
        if act is not None:
            act()


FIRST_WAIT: Final = FirstWait()
"""Of the pass being built, which one thread builds."""
