"""Hooks of the pass being built: what attention does for the host or the device while layers are added to it.

One thread builds one pass at a time, so each hook is one object of the process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import mlx.core as mx

from icehouse_server.clock import Clock

_LAYERS_A_START: Final = 6
"""Attended, before the device is given what was built. Not tuned on a device."""


class EarlyStart:
    """Gives an idle device the layers built so far, from `begin` to `end`.

    A prompt whose KV is in RAM waits for one pass alone, which would be built and then computed.
    """

    def __init__(self) -> None:
        self._clock: Clock | None = None
        self._layer_count = 0
        self._began_time: float | None = None

    def begin(self, clock: Clock) -> None:
        """The device has nothing to do."""
        self._clock, self._layer_count, self._began_time = clock, 0, None

    def end(self) -> float | None:
        """The pass is built. Return when the device began with it, None where it was given nothing yet."""
        self._clock = None
        return self._began_time

    def note_layer(self, output: mx.array) -> None:
        """Note that a layer has attended; the device may compute it."""
        if self._clock is None:
            return
        self._layer_count += 1
        if self._layer_count % _LAYERS_A_START == 0:
            mx.async_eval(output)  # type: ignore[no-untyped-call]
            if self._began_time is None:
                self._began_time = self._clock.monotonic()


class FirstWait:
    """Something to do once, just before a pass is waited for the first time."""

    def __init__(self) -> None:
        self._act: Callable[[], None] | None = None

    def expect(self, act: Callable[[], None] | None) -> None:
        """Set what to do before the next pass is waited for."""
        self._act = act

    def come(self) -> None:
        """Do it, unless it is done."""
        act, self._act = self._act, None
        if act is not None:
            act()


EARLY_START: Final = EarlyStart()
FIRST_WAIT: Final = FirstWait()
