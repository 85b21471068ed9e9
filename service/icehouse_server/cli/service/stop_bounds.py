"""Bounds of a stop: how long each part of it may take, and all of them together.

docs/running.md tells them to operators; whatever stops the server has to wait that long.
"""

from __future__ import annotations

import dataclasses

from icehouse_server.config import Config


@dataclasses.dataclass(frozen=True, slots=True)
class StopBounds:
    """Time limits in seconds of parts that no setting limits; each part ends as soon as it is done."""

    step_s: float = 10.0
    """How long the inference thread may continue after everything was cancelled, for one long prefill chunk.
    Then it writes RAM's blocks to SSD, which has its own limit."""
    edge_s: float = 6.0
    """How long the edge may take to close after its calls' grace. The engine ends meanwhile."""
    close_s: float = 10.0
    """How long the storage thread may go on writing what was sent to it, before it closes the manifest."""
    closed_s: float = 10.0
    """How long closing may take: the file being written, and the manifest."""
    telemetry_s: float = 6.0
    """How long sending the last spans may take."""
    work_s: float = 2.0
    """How long tokenizing a text or compiling a format may continue after all else has ended."""
    end_s: float = 5.0
    """How long Python may take to close the event loop, after all else has ended."""

    def engine_s(self, *, grace_s: float, flush_timeout_s: float) -> float:
        """Return the time from the stop command until the inference thread and the edge have ended."""
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
