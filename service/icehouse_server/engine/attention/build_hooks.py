"""Hooks of the pass being built: what attention does for the host or the device while layers are added to it.

One thread builds one pass at a time, so the process has a single object of each hook.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import mlx.core as mx

from icehouse_server.clock import Clock

_LAYERS_A_START: Final = 6
"""Layers attended before the device is given what was built. Not tuned on a device."""


class EarlyStart:
    """Gives an idle device the layers built so far, between `begin` and `end`.

    Otherwise a prompt whose KV is in RAM would wait for its one pass to be built and then computed.
    """

    def __init__(self) -> None:
        self._clock: Clock | None = None
        self._layer_count = 0
        self._began_time: float | None = None

    def begin(self, clock: Clock) -> None:
        """Begin to start layers early: the device has nothing to do."""
        self._clock, self._layer_count, self._began_time = clock, 0, None

    def end(self) -> float | None:
        """End with the pass built. Return when the device began with it; None if it was given nothing yet."""
        self._clock = None
        return self._began_time

    def note_layer(self, output: mx.array) -> None:
        """Note that a layer has attended, so the device may compute it."""
        if self._clock is None:
            return
        self._layer_count += 1
        if self._layer_count % _LAYERS_A_START == 0:
            mx.async_eval(output)  # type: ignore[no-untyped-call]
            if self._began_time is None:
                self._began_time = self._clock.monotonic()


class FirstWait:
    """An action to run once, just before the first wait for a pass."""

    def __init__(self) -> None:
        self._act: Callable[[], None] | None = None

    def expect(self, act: Callable[[], None] | None) -> None:
        """Set the action to run before the next wait for a pass."""
        self._act = act

    def come(self) -> None:
        """Run it, unless it has run already."""
        act, self._act = self._act, None
        if act is not None:
            act()


EARLY_START: Final = EarlyStart()
FIRST_WAIT: Final = FirstWait()
