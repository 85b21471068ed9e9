"""The prefix cache's desk in the engine's loop: prompts in, blocks from SSD back, caches rebuilt.

Inference thread only. Every way a restore can fail ends in planning again without the block that
failed, and in the end in prefilling: damage is a miss, never a caller's error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import count

from service.clock import Clock
from service.domain.blocks import RegionKind
from service.domain.cache_stats import CacheStats
from service.domain.events import CacheReport, ReuseLimit
from service.domain.ids import BlockHash
from service.engine.ids import SequenceId
from service.engine.messages import Order
from service.engine.prefix_cache import PrefixCache
from service.engine.prefix_introductions import Introductions
from service.engine.prefix_orders import PrefixOrders
from service.engine.prefix_plan import PrefixPlan
from service.engine.prefix_ports import CacheRunner, PlacedBlock, RestoreInput
from service.engine.sequence import Phase, Sequence, UnkeptBlock
from service.errors import StorageError
from service.kv.index import Entry, Region
from service.kv.messages import (
    Evicted,
    HeadsRead,
    Inventory,
    Loaded,
    LoadFailed,
    LoadId,
    LoadRequest,
    Outcome,
    Persisted,
    SpillDropped,
    StorageClosed,
    StorageFailed,
)

_ATTEMPT_LIMIT = 3
"""Plans tried for one prompt before it is prefilled whatever the index says."""
_SMOOTHING = 0.3
_GROWTH_TOKEN_COUNT = 256
"""mlx-lm's caches grow by this many tokens; restored ones get room in the same unit."""


@dataclasses.dataclass(slots=True)
class _Restore:
    """One prompt's way from plan to caches."""

    sequence: Sequence
    began_time: float
    plan: PrefixPlan
    attempt_count: int = 1
    has_failed: bool = False
    loaded: Loaded | None = None
    read: dict[BlockHash, dict[RegionKind, Region]] = dataclasses.field(default_factory=dict)
    """Window and checkpoint regions that came from SSD and are on the device now."""
    is_begun: bool = False


class PrefixDesk:
    """What the loop asks and tells about prefixes."""

    def __init__(
        self, *, cache: PrefixCache, runner: CacheRunner, clock: Clock, adopt_budget_s: float
    ) -> None:
        self._cache = cache
        self._runner = runner
        self._clock = clock
        self._adopt_budget_s = adopt_budget_s
        self._orders = PrefixOrders(cache, clock)
        self._restores: dict[SequenceId, _Restore] = {}
        self._loads: dict[LoadId, _Restore] = {}
        self._load_ids = count(1)
        self._introductions = Introductions(cache, load_ids=self._load_ids)
        self._to_flush: list[Entry] = []

    @property
    def checkpoint_block_token_count(self) -> int:
        """Block size when prefill must stop at a prompt's last full block to take a checkpoint, else 0."""
        cache = self._cache
        needs_one = cache.is_supported and cache.facts.needs_checkpoint
        return cache.settings.block_token_count if needs_one else 0

    def begin(self, sequence: Sequence) -> Phase:
        """Plan a prompt. LOADING or RESTORING when something is reused, PREFILLING when nothing is."""
        if sequence.sequence_id not in self._restores and self._introductions.ask(sequence):
            return Phase.LOADING
        plan = self._cache.plan(sequence.request)
        restore = self._restores.get(sequence.sequence_id)
        if restore is None:
            restore = _Restore(sequence, self._clock.monotonic(), plan)
        else:
            restore.attempt_count += 1
            restore.plan, restore.loaded, restore.is_begun = plan, None, False
        if not plan.is_hit or restore.attempt_count > _ATTEMPT_LIMIT:
            self._restores.pop(sequence.sequence_id, None)
            sequence.cache = CacheReport(
                restore_s=self._clock.monotonic() - restore.began_time if restore.has_failed else 0.0,
                limit=ReuseLimit.LOAD_FAILED if restore.has_failed else plan.report.limit,
            )
            self._cache.start_chain(sequence, 0)
            return Phase.PREFILLING
        self._restores[sequence.sequence_id] = restore
        if not plan.to_load:
            return Phase.RESTORING
        return self._load(restore)

    def receive(self, outcome: Outcome) -> list[Sequence]:
        """Take an outcome of the SSD tier; return the sequences whose load has ended."""
        cache = self._cache
        if isinstance(outcome, Loaded):
            return self._loaded(outcome)
        if isinstance(outcome, HeadsRead):
            return self._introductions.met(outcome)
        if isinstance(outcome, LoadFailed):
            restore = self._loads.pop(outcome.load_id, None)
            cache.forget_stored(outcome.failure.hash)
            return self._give_up(restore)
        if isinstance(outcome, Inventory):
            cache.take_inventory(outcome.records)
            return self._introductions.take_inventory()
        if isinstance(outcome, Persisted):
            cache.note_persisted(outcome.record)
        elif isinstance(outcome, SpillDropped):
            cache.spill_ended(outcome.hash)
        elif isinstance(outcome, Evicted):
            for name in outcome.hashes:
                cache.forget_stored(name)
        else:
            self._orders.receive(outcome)
            if isinstance(outcome, StorageFailed | StorageClosed):
                return self._abandon_loads()
        return []

    def continue_restore(self, sequence: Sequence) -> Phase:
        """Rebuild caches for a time slice: RESTORING when more is left, PREFILLING when they are open,
        WAITING when the blocks turned out unusable and the prompt is to be planned again."""
        restore = self._restores.get(sequence.sequence_id)
        if restore is None:
            return Phase.WAITING
        if restore.has_failed and restore.loaded is None and restore.plan.to_load:
            return Phase.WAITING
        try:
            if not restore.is_begun:
                restore.is_begun = True
                self._runner.begin_restore(sequence.sequence_id, self._input_of(restore))
            if not self._runner.continue_restore(sequence.sequence_id, budget_s=self._adopt_budget_s):
                return Phase.RESTORING
        except StorageError:
            # The blocks do not make a cache: whichever is wrong, none of this chain is used again.
            restore.has_failed = True
            self._cache.counters.restore_failed_total += 1
            self._cache.reject(restore.plan.entries)
            return Phase.WAITING
        self._adopted(restore)
        return Phase.PREFILLING

    def capture(self, sequence: Sequence, *, is_end: bool) -> None:
        """Keep the blocks that are complete now; with `is_end` the tail too."""
        self._cache.capture(sequence, is_end=is_end)

    def settle(self, sequence: Sequence) -> None:
        """Count a lookup whose restore, if any, is over."""
        self._cache.settle(sequence.request, sequence.cache)

    def forget(self, sequence: Sequence) -> None:
        """Drop the restore of a cancelled sequence, and keep the blocks it has computed."""
        restore = self._restores.pop(sequence.sequence_id, None)
        self._introductions.forget(sequence)
        # Before its first token a decoding sequence may have no row yet, and its prompt is kept already.
        has_row = sequence.phase is Phase.DECODING and sequence.output_token_ids
        if restore is None and (has_row or sequence.phase is Phase.PREFILLING):
            self._cache.capture(sequence, is_end=True)

    def note_prefill_rate(self, tokens_per_s: float) -> None:
        """Remember how fast this machine computes prompts."""
        self._cache.rates.prefill_tokens_per_s = tokens_per_s

    def stats(self) -> CacheStats:
        """Return the counters that need no answer from the storage thread."""
        return self._orders.stats(None)

    def query(self, reply: Callable[[CacheStats], None]) -> None:
        """Call `reply` with all counters, as soon as the storage thread has told its own."""
        self._orders.query(reply)

    def order(self, message: Order) -> None:
        """Carry out an order to the cache."""
        self._orders.carry_out(message)

    def begin_flush(self) -> None:
        """Choose what goes to SSD before the process ends: everything in RAM, most recently used first."""
        self._to_flush = [entry for entry in self._cache.ram if self._cache.spills.wants(entry)]

    def continue_flush(self) -> bool:
        """Send on as much as the write queue takes; False when all of it is written or dropped."""
        spills = self._cache.spills
        while self._to_flush:
            # With nothing under way the queue will not be emptier than it is: what does not fit never will.
            if spills.under_way_count and not spills.has_credit(self._to_flush[-1]):
                break
            spills.send(self._to_flush.pop())
        return bool(self._to_flush) or spills.under_way_count > 0

    def _abandon_loads(self) -> list[Sequence]:
        """Nothing more comes from SSD: whoever waits for it plans again without it."""
        waiting = [sequence for restore in self._loads.values() for sequence in self._give_up(restore)]
        self._loads.clear()
        return waiting + self._introductions.abandon()

    def _load(self, restore: _Restore) -> Phase:
        assert self._cache.storage is not None
        load_id = LoadId(next(self._load_ids))
        request = LoadRequest(
            load_id=load_id,
            blocks=restore.plan.to_load,
            origin_token_index=restore.plan.origin_token_index,
            capacity_token_count=self._capacity(restore) - restore.plan.origin_token_index,
        )
        if not self._cache.storage.load(request):
            return self._without_ssd(restore)
        self._cache.counters.load_total += 1
        self._loads[load_id] = restore
        return Phase.LOADING

    def _without_ssd(self, restore: _Restore) -> Phase:
        """The read queue is full: take what RAM has."""
        request = restore.sequence.request
        restore.plan = self._cache.planner.plan(
            root=self._cache.root(request.tenant), token_ids=request.prompt_token_ids, with_ssd=False
        )
        if restore.plan.is_hit:
            return Phase.RESTORING
        self._restores.pop(restore.sequence.sequence_id)
        restore.sequence.cache = restore.plan.report
        self._cache.start_chain(restore.sequence, 0)
        return Phase.PREFILLING

    def _loaded(self, outcome: Loaded) -> list[Sequence]:
        restore = self._loads.pop(outcome.load_id, None)
        self._cache.rates.read_bytes_per_s = outcome.read_bytes_per_s
        if outcome.failure is not None:
            self._cache.forget_stored(outcome.failure.hash)
            return self._give_up(restore)
        if restore is None or restore.sequence.sequence_id not in self._restores:
            return []
        restore.loaded = outcome
        return [restore.sequence]

    def _give_up(self, restore: _Restore | None) -> list[Sequence]:
        self._cache.counters.load_failed_total += 1
        if restore is None or restore.sequence.sequence_id not in self._restores:
            return []
        restore.has_failed = True
        return [restore.sequence]

    def _input_of(self, restore: _Restore) -> RestoreInput:
        plan = restore.plan
        placed = plan.placed
        if restore.loaded is not None:
            placed = self._place_loaded(restore)
        return RestoreInput(
            blocks=placed,
            loaded=restore.loaded,
            origin_token_index=plan.origin_token_index,
            token_count=plan.token_count,
            capacity_token_count=self._capacity(restore),
        )

    def _place_loaded(self, restore: _Restore) -> tuple[PlacedBlock, ...]:
        """Put the window and checkpoint regions that were read onto the device, beside those in RAM."""
        assert restore.loaded is not None
        plan = restore.plan
        restore.read = read = {
            block.header.hash: {region.kind: self._runner.from_host(region) for region in block.regions}
            for block in restore.loaded.blocks
        }
        return tuple(
            PlacedBlock(
                block.start_token_index, block.token_count, {**block.regions, **read.get(entry.hash, {})}
            )
            for block, entry in zip(plan.placed, plan.entries, strict=True)
        )

    def _adopted(self, restore: _Restore) -> None:
        sequence, plan = restore.sequence, restore.plan
        del self._restores[sequence.sequence_id]
        restore_s = self._clock.monotonic() - restore.began_time
        read_s = restore.loaded.read_s if restore.loaded is not None else 0.0
        self._note_adopt_rate(plan.token_count / max(restore_s - read_s, 1e-9))
        sequence.cache = dataclasses.replace(plan.report, restore_s=restore_s)
        if restore.has_failed:
            sequence.cache = dataclasses.replace(sequence.cache, limit=ReuseLimit.LOAD_FAILED)
        sequence.processed_token_count = plan.token_count
        self._cache.start_chain(sequence, plan.token_count)
        if restore.loaded is not None:
            sequence.unkept = [
                UnkeptBlock(block.header.hash, restore.read.get(block.header.hash, {}))
                for block in plan.to_load
                if block.token_count == block.header.token_count
            ]
            self._cache.counters.promoted_block_total += len(plan.to_load)
            self._cache.counters.promoted_token_total += plan.report.ssd_token_count

    def _note_adopt_rate(self, tokens_per_s: float) -> None:
        rates = self._cache.rates
        old = rates.adopt_tokens_per_s
        rates.adopt_tokens_per_s = tokens_per_s if old == 0.0 else old + _SMOOTHING * (tokens_per_s - old)

    def _capacity(self, restore: _Restore) -> int:
        """Room for the prompt and the first of the output, so that the next tokens copy nothing."""
        request = restore.sequence.request
        room = len(request.prompt_token_ids) + min(request.max_output_tokens, _GROWTH_TOKEN_COUNT)
        return -(-room // _GROWTH_TOKEN_COUNT) * _GROWTH_TOKEN_COUNT
