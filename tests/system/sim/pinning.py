"""Watch of the pinned blocks: they must stay."""

from __future__ import annotations

from icehouse_server.domain.ids import BlockHash

from tests.system.sim.ledger import Ledger
from tests.system.sim.server import SimServer


class PinWatch:
    """Checks after every engine step. Unpin and evict commands, damage and a broken disk excuse a loss."""

    def __init__(self, ledger: Ledger) -> None:
        self.is_excused = False
        self._ledger = ledger
        self._before: dict[BlockHash, tuple[float, bool]] = {}
        """Pinned blocks with the end of each pin, and whether it was in RAM after the last step."""

    def begin_life(self) -> None:
        """Forget the pins of a process that is gone."""
        self._before.clear()

    def look(self, served: SimServer) -> None:
        """Compare the pinned blocks with those of the last call."""
        if not (self.is_excused or self._ledger.io_errors(served) or served.is_storage_dead):
            for name, (end_time, was_in_ram) in self._before.items():
                if name not in self._ledger.ever_damaged and end_time > served.clock.wall():
                    self._check(served, name, was_in_ram=was_in_ram)
        self.is_excused = False
        self._before = {
            entry.hash: (entry.pin_end_time, bool(entry.ram))
            for entry in served.cache.tree
            if entry.is_pinned and (entry.ram or entry.hash in self._ledger.committed)
        }

    def _check(self, served: SimServer, name: BlockHash, *, was_in_ram: bool) -> None:
        entry = served.cache.tree.get(name)
        is_kept = entry is not None and entry.is_pinned and (entry.ram or entry.ssd)
        # If requests lack memory, the RAM copy of a block on SSD may be evicted.
        may_leave_ram = not was_in_ram or bool(served.setup.memory_limit_bytes)
        assert is_kept and (entry.ram or may_leave_ram), f"pinned block {name.hex()[:8]} is gone"

    def check_before_restart(self, served: SimServer) -> None:
        """Assert that pins survive a clean restart: the rows of pinned blocks must have them."""
        if served.storage is None or served.is_storage_dead or self._ledger.io_errors(served):
            return
        for entry in served.cache.tree:
            record = served.store.index.get(entry.hash)
            # The engine does not know of a block written after the flush gave up waiting.
            if entry.ssd and record is not None and entry.pin_end_time > served.clock.wall():
                assert record.pin_end_time == entry.pin_end_time, (
                    f"pinned block {entry.hash.hex()[:8]} will not be after the restart"
                )
