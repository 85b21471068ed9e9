"""Sends commands to the server and checks that each is answered once and truthfully."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from icehouse_server.domain.cache_commands import (
    CacheAnswer,
    CacheCommand,
    EvictBlocks,
    EvictReport,
    Explain,
    Explanation,
    Pin,
    PinReport,
    Unpin,
    Verify,
    VerifyReport,
)
from icehouse_server.domain.cache_stats import CacheStats
from icehouse_server.domain.ids import BlockHash
from icehouse_server.domain.stats import EngineStats
from icehouse_server.engine.core.mailbox import Command, QueryStats
from icehouse_server.engine.prefix_cache.tiers.node import Node
from icehouse_server.errors import IcehouseError, NotFound, Overloaded, Reason, StorageError

from tests.system.sim.ledger import Ledger
from tests.system.sim.server import SimServer


@dataclasses.dataclass(eq=False, slots=True)
class _Doom:
    """The blocks that one eviction will remove, as far as they were spilled up to that number."""

    blocks: set[BlockHash] = dataclasses.field(default_factory=set)
    spill_number: int = 0


class CommandIssuer:
    """Works for all lives of the server. `open_count` commands still wait for their answer."""

    def __init__(self, ledger: Ledger, say: Callable[[str], None]) -> None:
        self.open_count = 0
        self._change_count = 0
        """Commands so far that change which blocks exist or are pinned."""
        self._ledger = ledger
        self._say = say

    def begin_life(self) -> None:
        """Forget open commands: nobody answers those of a process that is gone."""
        self.open_count = 0

    def give(self, served: SimServer, order: CacheCommand) -> None:
        """Send a command to the engine's mailbox."""
        self._say(f"order {order}")
        rot_count = self._ledger.rot_count
        self.open_count += 1
        is_open = True
        doom = _Doom()
        self._change_count += isinstance(order, Pin | Unpin | EvictBlocks)
        change_number, order_time = self._change_count, served.clock.wall()

        def reply(answer: CacheAnswer | IcehouseError) -> None:
            nonlocal is_open
            assert is_open, f"{order} was answered twice"
            is_open = False
            self.open_count -= 1
            self._say(f"  answered {answer!r:.200}")
            self._ledger.seen[type(answer).__name__] += 1
            is_sound = self._ledger.rot_count == rot_count
            is_over = isinstance(order, Pin) and served.clock.wall() >= order_time + (order.ttl_s or math.inf)
            is_last = change_number == self._change_count
            if isinstance(answer, PinReport) and is_last and is_sound and not is_over:
                # Blocks after one that was found damaged meanwhile are not checked.
                self._check_pins(served, order, answer)
            self._check(served, order, answer, doom)
            if isinstance(answer, VerifyReport) and order == Verify():
                # A block damaged during the verification may have been read before.
                self._check_verified(served, may_miss=self._ledger.rot_count > rot_count)

        if isinstance(order, EvictBlocks):
            # This command is answered at once, right before the eviction.
            served.mailbox.post(Command(Unpin((1, 2)), lambda _: self._pronounce(doom, served, order)))
        served.mailbox.post(Command(order, reply))

    def ask_stats(self, served: SimServer) -> None:
        """Ask for all counters."""
        self._say("ask stats")
        self.open_count += 1

        def reply(engine: EngineStats, cache: CacheStats | None) -> None:
            assert cache is not None
            self.open_count -= 1

        served.mailbox.post(QueryStats(reply))

    def _pronounce(self, doom: _Doom, served: SimServer, order: EvictBlocks) -> None:
        """Note the blocks that an eviction is about to remove, and the last spill before it."""
        doom.spill_number = self._ledger.spill_number
        doom.blocks |= {name for name in order.block_hashes if served.cache.tree.get(name) is not None}

    def _check(
        self, served: SimServer, order: CacheCommand, answer: CacheAnswer | IcehouseError, doom: _Doom
    ) -> None:
        if isinstance(answer, IcehouseError):
            is_expected = isinstance(answer, NotFound | Overloaded | StorageError)
            no_tier = answer.reason is Reason.CACHE_UNSUPPORTED and served.cache.storage is None
            assert is_expected or no_tier, f"{order} failed: {answer!r}"
        elif isinstance(answer, Explanation) and isinstance(order, Explain):
            assert answer.cache.cached_token_count <= len(order.prompt_token_ids) - 1, answer
        elif isinstance(answer, EvictReport) and served.storage is not None:
            self._check_evicted(served, doom)

    def _check_pins(self, served: SimServer, order: CacheCommand, answer: PinReport) -> None:
        """Assert that as many blocks are here and pinned as the answer says; after `Unpin`, that none is."""
        assert isinstance(order, Pin | Unpin)
        pinned = [e for e in _known(served, order) if e.is_pinned and (e.ram or e.ssd)]
        if isinstance(order, Pin):
            assert len(pinned) >= answer.block_count, f"{order}: {answer}, but pinned are {pinned}"
        else:
            assert not pinned, f"{order} left {pinned}"

    def _check_verified(self, served: SimServer, *, may_miss: bool) -> None:
        rotten = [r.hash.hex()[:8] for r in served.store.index if r.hash in self._ledger.damaged]
        is_excused = may_miss or self._ledger.io_errors(served)
        assert not rotten or is_excused, f"verified, but still damaged: {rotten}"

    def _check_evicted(self, served: SimServer, doom: _Doom) -> None:
        """Assert that the blocks that were on SSD, or on their way, when the command came are gone."""
        if served.is_storage_dead or self._ledger.io_errors(served):
            return
        numbers = self._ledger.spill_numbers
        left = {record.hash for record in served.store.index} & doom.blocks
        old = [name.hex()[:8] for name in left if numbers.get(name, 0) <= doom.spill_number]
        assert not old, f"evicted by order and still there: {old}"


def _known(served: SimServer, order: Pin | Unpin) -> Sequence[Node]:
    """Return the blocks that are wholly part of a command's prompt."""
    return served.cache.known_chain(order.prompt_token_ids, order.scope)
