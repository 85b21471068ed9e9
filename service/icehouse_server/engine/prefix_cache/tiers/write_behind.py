"""Write-behind: blocks that go to SSD while the disk is idle, before RAM needs their space.

Such a block keeps its RAM copy. Blocks written in time survive a crash, make a stop short, and can leave RAM
at once: pinned blocks too, which stay pinned on SSD. Blocks that will probably be used again (pinned, of a
session, or used twice) go first, older before younger ones, and so a chain from its beginning.

Writing behind has the lowest priority for the disk and the inference thread: a step sends only a few blocks,
and none during other writes or restores. Inference thread only.
"""

from __future__ import annotations

import collections
import enum
from collections.abc import Iterable

from icehouse_server.clock import Clock
from icehouse_server.domain.ids import BlockHash
from icehouse_server.engine.prefix_cache.tiers.node import Node
from icehouse_server.engine.prefix_cache.tiers.spill import Spills
from icehouse_server.engine.prefix_cache.tiers.tree import PrefixTree
from icehouse_server.storage.api import BlockPersisted, StorageFailure

QUIET_S = 0.1
"""How long the disk must have been idle before."""
IN_FLIGHT_BYTES = 64 << 20
"""Limit of blocks that were sent and are not written yet; a single block may be larger."""
FAILURE_PAUSE_S = 10.0
"""Pause after a failed write: the disk is full or refuses, or the day's budget is spent."""
PASSES_BETWEEN = 128
"""While rows decode, a block is copied in fewer than one pass of a hundred, so that p99 between tokens does
not show it: on a GPU, too, copying a block of a large model takes the inference thread some milliseconds."""
_STEP_BYTES = 16 << 20
"""Copied in a step without a pass, at least one block; a request that arrives waits some milliseconds."""
_OTHERS_SHARE = 0.5
"""Share of the day's budget that is left for evictions and for blocks that will probably be used again."""
_STALE_FACTOR = 2
"""Names of blocks that have left RAM are dropped once there are this many times more names than blocks."""


class Turn(enum.IntEnum):
    """Which blocks go first."""

    PINNED = 0
    LIKELY = 1
    """A session's, or used twice: probably used again."""
    OTHER = 2


class Beside(enum.Enum):
    """What ran in the step after which blocks may be sent."""

    NOTHING = enum.auto()
    PREFILL = enum.auto()
    DECODE = enum.auto()


class WriteBehind:
    """The blocks that wait to be written behind, and those in flight. None under other spill policies."""

    def __init__(self, tree: PrefixTree, *, spills: Spills, clock: Clock) -> None:
        self._tree = tree
        self._settings = tree.settings
        self._spills = spills
        self._clock = clock
        self._queues: dict[Turn, collections.OrderedDict[BlockHash, None]] = {
            turn: collections.OrderedDict() for turn in Turn
        }
        """Names, in order of arrival. A block that is gone or written when its turn comes is skipped."""
        self._in_flight: dict[BlockHash, int] = {}
        """Bytes of each block that was sent and is not written yet."""
        self._busy_time = clock.monotonic()
        """When the disk last had something else to do."""
        self._pause_end_time = self._busy_time
        self._pace_end_time = self._busy_time
        """Until when nothing is sent beside passes that need the same cores."""
        self._pass_count = 0
        """Passes since the last block was sent."""
        self.block_total = 0
        self.byte_total = 0
        """Blocks and bytes written behind since the start."""

    @property
    def is_on(self) -> bool:
        return self._spills.is_on and self._settings.spill_policy == "write_behind"

    @property
    def waiting_count(self) -> int:
        """Blocks that wait or are in flight; a few of them may be gone, or written by a spill, by now."""
        return sum(map(len, self._queues.values())) + len(self._in_flight)

    def note(self, nodes: Iterable[Node], turn: Turn) -> None:
        """Queue blocks of one chain, parents first."""
        if not self.is_on:
            return
        for node in nodes:
            # A prefix that was too short to write may no longer be with this block after it.
            if node.start_token_index < self._settings.min_prefix_token_count:
                for above in reversed(list(self._tree.ancestors(node))):
                    self._add(above, turn)
            self._add(node, turn)
        for names in self._queues.values():
            if len(names) > _STALE_FACTOR * self._tree.ram.block_count:
                for name in [name for name in names if self._wanted(name) is None]:
                    del names[name]

    def offer(self, beside: Beside, *, is_restoring: bool, lacks_memory: bool) -> None:
        """Send blocks after a step: one after a step with a pass, more after one without.

        While a request lacks memory only pinned blocks are sent: once on SSD they can be evicted for it.
        """
        now = self._clock.monotonic()
        self._pass_count += beside is not Beside.NOTHING
        if is_restoring or self._spills.under_way_count > len(self._in_flight):
            self._busy_time = now
        is_quiet = now - self._busy_time >= QUIET_S and now >= self._pause_end_time
        if not (self.is_on and is_quiet) or self._would_slow(beside, now):
            return
        turns = (Turn.PINNED,) if lacks_memory else tuple(Turn)
        left_bytes = _STEP_BYTES if beside is Beside.NOTHING else 1
        while left_bytes > 0 and (node := self._next(turns)) is not None:
            left_bytes -= node.ram_bytes
            self._send(node)
            self._pass_count = 0

    def note_end(self, node: Node, outcome: BlockPersisted | StorageFailure) -> None:
        """Record that a block was written or dropped; ignores blocks that were sent by others."""
        if self._in_flight.pop(node.hash, None) is None:
            return
        now = self._clock.monotonic()
        if isinstance(outcome, StorageFailure):
            self._pause_end_time = now + FAILURE_PAUSE_S
            return
        self.block_total += 1
        self.byte_total += outcome.record.file_bytes
        self._pace_end_time = now + outcome.duration_s * (
            1.0 / self._settings.write_share_beside_passes - 1.0
        )

    def lose_storage(self) -> None:
        """Forget all waiting blocks: the SSD tier is lost."""
        for names in self._queues.values():
            names.clear()
        self._in_flight.clear()

    def _add(self, node: Node, turn: Turn) -> None:
        """Queue a block, unless it waits already with this turn or an earlier one."""
        if not self._spills.wants(node):
            return
        waits_for = next((each for each in Turn if node.hash in self._queues[each]), None)
        if waits_for is not None and waits_for <= turn:
            return
        if waits_for is not None:
            del self._queues[waits_for][node.hash]
        self._queues[turn][node.hash] = None

    def _wanted(self, name: BlockHash) -> Node | None:
        """Return the block of this name if it should still be written."""
        node = self._tree.get(name)
        return node if node is not None and self._spills.wants(node) else None

    def _next(self, turns: Iterable[Turn]) -> Node | None:
        """Take the next block whose turn it is; None if there is none, or no space for it."""
        for turn in turns:
            names = self._queues[turn]
            while names:
                node = self._wanted(next(iter(names)))
                if node is not None and not self._fits(node, turn):
                    return None
                names.popitem(last=False)
                if node is not None:
                    return node
        return None

    def _fits(self, node: Node, turn: Turn) -> bool:
        """Whether the queue, the bytes in flight and the day's budget allow this block."""
        size_bytes, in_flight_bytes = node.ram_bytes, sum(self._in_flight.values())
        if in_flight_bytes and in_flight_bytes + size_bytes > IN_FLIGHT_BYTES:
            return False
        assert self._spills.storage is not None, "there is no SSD tier"
        budget = self._spills.storage.write_budget
        if budget is not None:
            left_bytes = budget.left_bytes - in_flight_bytes - size_bytes
            if left_bytes < (budget.limit_bytes * _OTHERS_SHARE if turn is Turn.OTHER else 0):
                return False
        return self._spills.has_credit(node)

    def _send(self, node: Node) -> None:
        # If its tenant's SSD quota is full, the blocks before it must not be removed for it.
        has_quota = self._settings.quotas.ssd_bytes
        protected = [above.hash for above in self._tree.ancestors(node)] if has_quota else ()
        if self._spills.send(node, protected=protected, request_id=None):
            self._in_flight[node.hash] = node.ram_bytes

    def _would_slow(self, beside: Beside, now: float) -> bool:
        """Whether sending a block now would slow the running passes too much."""
        if beside is Beside.DECODE and self._pass_count < PASSES_BETWEEN:
            return True
        shares_cores = beside is not Beside.NOTHING and self._settings.write_share_beside_passes < 1.0
        return shares_cores and (bool(self._in_flight) or now < self._pace_end_time)
