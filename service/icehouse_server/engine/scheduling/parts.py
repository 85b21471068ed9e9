"""Scheduling parts, which belong together: the waiting queue, the scheduler over it, the memory guard."""

from __future__ import annotations

import dataclasses

from icehouse_server.engine.scheduling.memory_guard import MemoryGuard
from icehouse_server.engine.scheduling.scheduler import Scheduler
from icehouse_server.engine.scheduling.waiting_queue import WaitingQueue


@dataclasses.dataclass(frozen=True, slots=True)
class SchedulingParts:
    """What decides who runs. `scheduler` takes from `queue`."""

    queue: WaitingQueue
    scheduler: Scheduler
    guard: MemoryGuard
