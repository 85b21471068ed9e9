"""Another server of the same model and object store, with its own disk, which never fails."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

from icehouse_server.engine.core.mailbox import Submit
from icehouse_server.engine.prefix_cache.tiers.prefix_settings import QuotaLimits
from icehouse_server.engine.prefix_cache.tiers.write_behind import QUIET_S

from tests.system.sim.clock import SimClock
from tests.system.sim.ledger import Ledger, Promise
from tests.system.sim.server import Life, SimServer
from tests.system.sim.setup import Setup


class Neighbour:
    """Answers a request now and then, also from the store's blocks, and stores those that it computes."""

    def __init__(self, setup: Setup, folder: Path, *, clock: SimClock, ledger: Ledger) -> None:
        self._setup = dataclasses.replace(
            setup,
            has_storage=True,
            ram_limit_bytes=100_000,
            spill_policy="write_behind",
            memory_limit_bytes=0,
            disk_limit_bytes=1 << 30,
            daily_limit_bytes=0,
            quotas=QuotaLimits(),
        )
        self._folder, self._clock, self._ledger = folder, clock, ledger
        self._own = Ledger()
        # Each of the two servers may have the other's blocks.
        self._own.spilled = ledger.spilled
        self._life_count = 0

    def answer(self, promise: Promise) -> None:
        """Run a request in a new life of the neighbour, and check it as if it were this server's."""
        life = Life(self._life_count, promise.model, self._folder / "neighbour", 10**18)
        self._life_count += 1
        served = SimServer(
            self._setup, life, clock=self._clock, ledger=self._own, dice=random.Random(self._life_count)
        )
        try:
            served.open()
            assert served.mailbox.offer(Submit(promise.request))
            served.come_to_rest()
            self._ledger.check_end(promise, served.recorder.events[promise.request.request_id])
            self._clock.now += 2.0 * QUIET_S
            served.come_to_rest()
            served.stop(grace_s=5.0, flush_s=60.0)
        finally:
            served.disk.release()
            served.end_traffic()
        self._ledger.seen["answered by a neighbour"] += 1
        fetched = self._own.seen.pop("Fetched", 0)
        self._ledger.seen["fetched by a neighbour"] += fetched
