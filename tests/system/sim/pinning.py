"""What is pinned, and that it stays where it is."""

from __future__ import annotations

import dataclasses

from icehouse_server.domain.ids import BlockHash

from tests.system.sim.ledger import Ledger
from tests.system.sim.server import SimServer


@dataclasses.dataclass(frozen=True, slots=True)
class _Pinned:
    """One pinned block as it was after the last step."""

    ram_bytes: int
    was_leaving: bool


class PinWatch:
    """Looks after every engine step. An order to unpin or evict, damage and a broken disk excuse a loss."""

    def __init__(self, ledger: Ledger) -> None:
        self.is_excused = False
        self._ledger = ledger
        self._before: dict[BlockHash, _Pinned] = {}

    def begin_life(self) -> None:
        """Forget what a process that is gone had pinned."""
        self._before.clear()

    def look(self, served: SimServer) -> None:
        """Compare with the look before."""
        if not (self.is_excused or self._ledger.io_errors(served) or served.is_storage_dead):
            for name, before in self._before.items():
                if name not in self._ledger.ever_damaged:
                    self._check(served, name, before)
        self.is_excused = False
        self._before = {
            entry.hash: _Pinned(entry.ram_bytes, entry.is_leaving)
            for entry in served.cache._index
            if entry.is_pinned and (entry.ram or entry.hash in self._ledger.committed)
        }

    def _check(self, served: SimServer, name: BlockHash, before: _Pinned) -> None:
        entry = served.cache._index.get(name)
        is_kept = entry is not None and entry.is_pinned and (entry.ram or entry.ssd)
        if is_kept and (before.was_leaving or not before.ram_bytes or entry.ram):
            return
        # A block that was on its way out when it was pinned may find no room to stay.
        pinned_bytes = sum(e.ram_bytes for e in served.cache._ram if e.is_pinned)
        has_no_room = pinned_bytes + before.ram_bytes > served.cache._ram.limit_bytes
        assert before.was_leaving and has_no_room, f"pinned block {name.hex()[:8]} is gone"

    def check_before_restart(self, served: SimServer) -> None:
        """A pin survives an orderly restart: the rows of pinned blocks say so."""
        if served.storage is None or served.is_storage_dead or self._ledger.io_errors(served):
            return
        for entry in served.cache._index:
            record = served.store.index.get(entry.hash)
            # One that was written after the flush had given up waiting is not known to the engine.
            if entry.is_pinned and entry.ssd and record is not None:
                assert record.pinned, f"pinned block {entry.hash.hex()[:8]} will not be after the restart"
