"""Preemption: when memory is short, the RAM tier gives way first, then passes get smaller, then the youngest
sequence of the largest tenant is parked. One is also parked when a tenant that runs nothing finds no slot.

Inference thread only. Consulted before a sequence is admitted and before every forward pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from icehouse_server.domain.ids import Tenant
from icehouse_server.engine.core.ports import Runner
from icehouse_server.engine.core.sequence import Phase, Sequence
from icehouse_server.engine.prefix_cache.controller import CacheController
from icehouse_server.engine.scheduling.memory_guard import MemoryGuard
from icehouse_server.engine.scheduling.pass_plan import PassPlan, PrefillChunk
from icehouse_server.engine.scheduling.scheduler import Scheduler
from icehouse_server.errors import IcehouseError, Overloaded


class SchedulingParts(NamedTuple):
    """What decides who runs."""

    scheduler: Scheduler
    guard: MemoryGuard


class Preemption:
    """Watches the device's memory for the loop."""

    def __init__(
        self,
        *,
        scheduling: SchedulingParts,
        runner: Runner,
        prefix: CacheController,
        park: Callable[[Sequence], None],
        fail: Callable[[Sequence, IcehouseError], None],
    ) -> None:
        """`fail` ends a sequence that has no memory although nobody else holds any that could be taken."""
        self._scheduler, self.guard = scheduling
        self._queue = self._scheduler.queue
        self._runner = runner
        self._prefix = prefix
        self._park = park
        self._fail = fail

    def may_start(self, sequence: Sequence) -> bool:
        """Whether there is memory for a waiting sequence now. If the RAM tier can free it, it is asked to.
        While others run it spills to SSD, so the memory comes in a later step. Otherwise nothing is
        dropped."""
        if not self.guard.limit_bytes:
            return True
        if self.guard.share.must_wait:
            return False
        running = self._scheduler.running
        kv_bytes = self.guard.growth_bytes((sequence, *running))
        excess = self._excess_bytes(self.guard.start_bytes(sequence, beside=running), kv_bytes)
        may_start = not excess or self._is_given(sequence, excess)
        if may_start:
            self._runner.pages.reserve(kv_bytes)
        return may_start

    def _is_given(self, sequence: Sequence, excess: int) -> bool:
        """Whether the RAM tier has freed that much for a sequence."""
        running = self._scheduler.running
        protected = self._prefix.cache.planned_blocks(sequence)
        if not running and self._prefix.yieldable_bytes(protected=protected) < excess:
            protected = frozenset()
        if self._prefix.yieldable_bytes(protected=protected) < excess:
            return False
        return self._prefix.yield_ram(excess, protected=protected, is_urgent=not running) >= excess

    def make_slot(self, sequence: Sequence) -> bool:
        """Free a slot, or memory, for a sequence of a tenant that runs nothing: park the youngest sequence of
        the tenant that runs most, if it runs more than one."""
        tenant = self._queue.greediest
        if self.guard.share.must_wait:
            return False  # another engine would get what is freed
        if tenant is None or self._queue.running_count(sequence.request.tenant):
            return False
        if self._queue.running_count(tenant) < 2:
            return False
        victim = _last_comer(s for s in self._holding if s.request.tenant == tenant)
        if victim is None:
            return False
        self._park(victim)
        return True

    def hopeless(self, sequence: Sequence) -> Overloaded | None:
        """Return the refusal of a sequence that does not fit although nothing that could still free memory is
        running, here or in another engine, or being written."""
        share = self.guard.share
        if self._scheduler.running or self._prefix.is_writing or share.others_work or share.must_wait:
            return None
        return self.guard.short(
            needed_bytes=self.guard.start_bytes(sequence), active_bytes=self._runner.memory().active_bytes
        )

    def note_blocked(self, *, is_blocked: bool, now: float) -> None:
        """Note whether a sequence waits for memory."""
        self._prefix.lacks_memory = is_blocked
        self.guard.note_waiting(now if is_blocked and not self._scheduler.running else None)

    def make_fit(self, plan: PassPlan) -> PassPlan:
        """Free memory for a planned pass; return as much of it as fits. A sequence that does not fit even
        alone is ended."""
        if not self.guard.limit_bytes:
            return plan
        return self._scheduler.planned(self._fitting(list(plan.chunks)))

    def _fitting(self, fitting: list[PrefillChunk]) -> list[PrefillChunk]:
        decoding = self._scheduler.decoding
        while self._excess_after_yield(
            needed := self.guard.pass_bytes(fitting, decoding=decoding),
            self.guard.pass_kv_bytes(fitting, decoding=decoding),
        ):
            if len(fitting) > 1:
                del fitting[-1]
                continue
            own = fitting[0].sequence if fitting else None
            victim = self._victim()
            # A sequence that decodes alone on the machine fits, or it would not have been admitted. Beside
            # other models it may not.
            if own is None and self._scheduler.decoding_count <= (not self.guard.has_company):
                break
            if victim is None or self._holding == [own]:
                assert own is not None, "those who decode can be parked"
                self._fail_if_alone(own, needed)
                return []
            self._park(victim)
            if victim is own:
                fitting = []
            decoding = self._scheduler.decoding
        return fitting

    def image_to_encode(self) -> Sequence | None:
        """Return the oldest sequence that waits for an image, with memory free to encode it in this step. A
        sequence whose image does not fit even alone is ended."""
        sequence = self._scheduler.awaiting_image
        if sequence is None or sequence.next_image is None:
            return None
        size_bytes = self._runner.encode_bytes(sequence.request.whole_image(sequence.next_image))
        while size_bytes and self._excess_after_yield(size_bytes):
            if self._holding == [sequence]:
                self._fail_if_alone(sequence, size_bytes)
                return None
            victim = self._victim()
            assert victim is not None, "a sequence that waits for an image holds caches"
            self._park(victim)
            if victim is sequence:
                return None
        return sequence

    def _fail_if_alone(self, sequence: Sequence, needed_bytes: int) -> None:
        """End a sequence, unless blocks are being loaded or written: their memory comes free in a later step.
        While another engine is at work, the sequence is parked instead: otherwise both might wait for each
        other's memory."""
        if self.guard.share.others_work:
            self._park(sequence)
        elif not (self._scheduler.loading_count or self._prefix.is_writing):
            active_bytes = self._runner.memory().active_bytes
            self._fail(sequence, self.guard.short(needed_bytes=needed_bytes, active_bytes=active_bytes))

    def _excess_bytes(self, needed_bytes: int, kv_bytes: int = 0) -> int:
        """Return by how much these bytes, `kv_bytes` of them for KV, would exceed the limit."""
        pages = self._runner.pages
        excess = self._excess(needed_bytes)
        copied_bytes = pages.copied_bytes(kv_bytes)
        if not copied_bytes:
            return excess
        # Either the pool can grow, or enough of its pages come free.
        return min(self._excess(needed_bytes + copied_bytes), max(excess, pages.missing_bytes(kv_bytes)))

    def _excess(self, needed_bytes: int) -> int:
        active_bytes = self._runner.memory().active_bytes
        return self.guard.excess_bytes(active_bytes=active_bytes, needed_bytes=needed_bytes)

    def _excess_after_yield(self, needed_bytes: int, kv_bytes: int = 0) -> int:
        excess = self._excess_bytes(needed_bytes, kv_bytes)
        if not excess:
            return 0
        # What is dropped here is free for new arrays, even before the allocator returns it.
        excess -= self._prefix.yield_ram(excess)
        return max(0, excess - self.guard.yield_others(excess)) if excess > 0 else 0

    @property
    def _holding(self) -> list[Sequence]:
        """Sequences that hold caches and can be parked, oldest first."""
        return [s for s in self._scheduler.running if s.phase in (Phase.PREFILLING, Phase.DECODING)]

    def _victim(self) -> Sequence | None:
        """Return the youngest sequence of the lowest priority, of the tenant that holds the most KV."""
        holding = self._holding
        lengths: Counter[Tenant] = Counter()
        for sequence in holding:
            lengths[sequence.request.tenant] += sequence.kv_token_count
        longest = max(lengths, key=lambda tenant: lengths[tenant], default=None)
        return _last_comer(s for s in holding if s.request.tenant == longest)


def _last_comer(sequences: Iterable[Sequence]) -> Sequence | None:
    """Return the youngest sequence of the lowest priority."""
    return min(sequences, key=lambda s: (s.request.priority, -s.sequence_id), default=None)
