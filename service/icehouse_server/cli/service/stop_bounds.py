"""Bounds of a stop: how long each part of it may take, and all of them together.

docs/running.md gives them to whoever runs a server; what stops it has to wait so long.
"""

from __future__ import annotations

import dataclasses

from icehouse_server.config import Config


@dataclasses.dataclass(frozen=True, slots=True)
class StopBounds:
    """Seconds that the parts may take which no setting bounds; each ends as soon as it is done."""

    step_s: float = 10.0
    """How long the inference thread may go on after everything was cancelled, one long prefill chunk, before
    it writes RAM's blocks to SSD, which has a bound of its own."""
    edge_s: float = 6.0
    """How long the edge may take to close, once its calls have had their grace. Meanwhile the engine ends."""
    close_s: float = 10.0
    """How long the storage thread may go on writing what was sent to it, before it closes the manifest."""
    closed_s: float = 10.0
    """How long that may take it: the file it is writing, and the manifest."""
    telemetry_s: float = 6.0
    """How long the last spans may take to be sent."""
    work_s: float = 2.0
    """How long a text being tokenized, or a format being compiled, may go on when all else has ended."""
    end_s: float = 5.0
    """How long Python may take to close the event loop, when nothing else goes on."""

    def engine_s(self, *, grace_s: float, flush_timeout_s: float) -> float:
        """Return how long after the order the inference thread and the edge have ended."""
        return grace_s + max(self.edge_s, self.step_s + flush_timeout_s)


BOUNDS = StopBounds()


def stop_bound_s(config: Config) -> float:
    """Return how long a stop may take, from the signal to the end of the process."""
    engine_s = BOUNDS.engine_s(
        grace_s=config.server.drain_grace_s, flush_timeout_s=config.cache.flush_timeout_s
    )
    is_traced = config.telemetry.traces_endpoint is not None
    telemetry_s = BOUNDS.telemetry_s if is_traced else 0.0
    return engine_s + BOUNDS.close_s + BOUNDS.closed_s + telemetry_s + BOUNDS.work_s + BOUNDS.end_s
