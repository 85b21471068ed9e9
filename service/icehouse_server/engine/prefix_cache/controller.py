"""Cache controller in the engine's loop: prompts in, blocks from SSD back, caches rebuilt.

Inference thread only. Every way a restore can fail ends in planning again without the block that
failed, and in the end in prefilling: damage is a miss, never a caller's error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from itertools import count

from icehouse_server.clock import Clock
from icehouse_server.domain.cache_stats import CacheStats
from icehouse_server.domain.events import CacheReport, ReuseLimit
from icehouse_server.domain.ids import BlockHash, SequenceId
from icehouse_server.engine.core.mailbox import Command
from icehouse_server.engine.core.sequence import Phase, Sequence, UnkeptBlock
from icehouse_server.engine.prefix_cache.cache import PrefixCache
from icehouse_server.engine.prefix_cache.commands import CacheCommands, storage_busy
from icehouse_server.engine.prefix_cache.header_fetch import HeaderFetches
from icehouse_server.engine.prefix_cache.in_flight import InFlightPrefixes
from icehouse_server.engine.prefix_cache.restore import Promotions, Restore
from icehouse_server.engine.prefix_cache.tiers.ports import CacheRunner
from icehouse_server.errors import IcehouseError, StorageError
from icehouse_server.storage.loads import HeadsRead, Loaded, LoadFailed, LoadId
from icehouse_server.storage.messages import (
    Evicted,
    Inventory,
    Outcome,
    Persisted,
    SpillDropped,
    StorageClosed,
    StorageFailed,
)

_ATTEMPT_LIMIT = 3
"""Plans tried for one prompt before it is prefilled whatever the index says."""
_SMOOTHING = 0.3
_EARLY_ORDER_LIMIT = 256


class CacheController:
    """What the loop asks and tells about prefixes."""

    def __init__(
        self, *, cache: PrefixCache, runner: CacheRunner, clock: Clock, adopt_budget_s: float
    ) -> None:
        self._cache = cache
        self._runner = runner
        self._clock = clock
        self.adopt_budget_s = adopt_budget_s
        """Least time of a step for taking loaded blocks into use."""
        self._restores: dict[SequenceId, Restore] = {}
        self._loads: dict[LoadId, Restore] = {}
        self._load_ids = count(1)
        self._early_commands: list[Command] = []
        self._commands = CacheCommands(cache, clock, load_ids=self._load_ids)
        self._header_fetches = HeaderFetches(cache, load_ids=self._load_ids)
        self._promotions = Promotions(cache, runner, budget_s=adopt_budget_s)
        self._in_flight = InFlightPrefixes(
            block_token_count=cache.settings.block_token_count,
            least_token_count=cache.settings.min_reuse_token_count,
            shares_blocks=cache.can_share,
            name_secret=cache.settings.name_secret,
        )

    @property
    def checkpoint_block_token_count(self) -> int:
        """Block size when prefill must stop at a prompt's last full block to take a checkpoint, else 0."""
        cache = self._cache
        needs_one = cache.is_supported and cache.facts.needs_checkpoint
        return cache.settings.block_token_count if needs_one else 0

    @property
    def cuts_before_last_token(self) -> bool:
        """Whether prefill must stop before a prompt's last token, since states, and windows that are as short
        as a block, can be kept only as they are there."""
        facts, block = self._cache.facts, self._cache.settings.block_token_count
        if not self._cache.is_supported:
            return False
        has_window = facts.window_token_count > 0
        return facts.needs_checkpoint or (has_window and not facts.holds_window(block, passed_token_count=1))

    def begin(self, sequence: Sequence) -> Phase:
        """Plan a prompt. FOLLOWING when another sequence computes what it shares, LOADING when more must be
        known first, RESTORING when something is reused, PREFILLING when nothing is."""
        self._cache.spills.request_id = sequence.request.request_id
        if self._follows(sequence):
            return Phase.FOLLOWING
        if sequence.sequence_id not in self._restores and self._header_fetches.ask(sequence):
            return Phase.LOADING
        restore = self._restores.get(sequence.sequence_id)
        plan = self._cache.plan(sequence, with_ssd=restore is None or restore.with_ssd)
        if restore is None:
            restore = Restore(sequence, self._clock.monotonic(), plan)
        else:
            restore.plan_again(plan)
        if not plan.is_hit or restore.attempt_count > _ATTEMPT_LIMIT:
            self._restores.pop(sequence.sequence_id, None)
            sequence.note_cache(
                CacheReport(
                    restore_s=self._clock.monotonic() - restore.began_time if restore.has_failed else 0.0,
                    limit=ReuseLimit.LOAD_FAILED if restore.has_failed else plan.report.limit,
                )
            )
            self._cache.start_chain(sequence, 0)
            return Phase.PREFILLING
        self._restores[sequence.sequence_id] = restore
        restore.begin_target(self._runner)
        return Phase.RESTORING

    def receive(self, outcome: Outcome) -> list[Sequence]:
        """Take an outcome of the SSD tier; return the sequences whose load has ended."""
        cache = self._cache
        cache.spills.request_id = None
        if isinstance(outcome, Loaded):
            return self._loaded(outcome)
        if isinstance(outcome, HeadsRead):
            ready = self._header_fetches.met(outcome)
            self._commands.met(outcome)
            return ready
        if isinstance(outcome, LoadFailed):
            restore = self._loads.pop(outcome.load_id, None)
            cache.forget_stored(outcome.failure.hash)
            return self._give_up(restore)
        if isinstance(outcome, Inventory):
            cache.take_inventory(outcome.records)
            ready = self._header_fetches.take_inventory()
            self._carry_out_early_commands()
            return ready
        if isinstance(outcome, Persisted):
            cache.note_persisted(outcome.record)
        elif isinstance(outcome, SpillDropped):
            cache.spill_ended(outcome.hash)
        elif isinstance(outcome, Evicted):
            for name in outcome.hashes:
                cache.forget_stored(name)
        else:
            self._commands.receive(outcome)
            if isinstance(outcome, StorageFailed | StorageClosed):
                return self._abandon_loads()
        return []

    def awaits_load(self, sequence: Sequence) -> bool:
        """Whether blocks of a restoring sequence are still to be asked of the SSD tier."""
        restore = self._restores.get(sequence.sequence_id)
        return restore is not None and bool(restore.plan.to_load) and restore.loaded is None

    def continue_restore(self, sequence: Sequence, *, beside_decode: bool, budget_s: float) -> Phase:
        """Rebuild caches for about `budget_s`: RESTORING when more is left, LOADING when blocks must come
        from SSD first, PREFILLING when the caches are open, WAITING when the blocks turned out unusable and
        the prompt is to be planned again."""
        restore = self._restores.get(sequence.sequence_id)
        if restore is None or restore.is_to_plan:
            return Phase.WAITING
        if restore.plan.to_load and restore.loaded is None:
            return self._load(restore, beside_decode=beside_decode, budget_s=budget_s)
        try:
            if not restore.is_begun:
                restore.is_begun = True
                self._runner.begin_restore(sequence.sequence_id, restore.make_input(self._runner))
            if not self._runner.continue_restore(sequence.sequence_id, budget_s=budget_s):
                return Phase.RESTORING
        except StorageError:
            # The blocks do not make a cache: whichever is wrong, none of this chain is used again.
            restore.has_failed = True
            self._cache.counters.restore_failed_total += 1
            self._cache.reject(restore.plan.entries)
            return Phase.WAITING
        self._adopted(restore)
        return Phase.PREFILLING

    def lead(self, sequence: Sequence) -> None:
        """Note that a sequence computes the rest of its input now, so that others may wait for it."""
        if self._cache.may_write(sequence):
            self._in_flight.make(sequence, self._cache.root(sequence.request.scope))

    def take_ready(self) -> list[Sequence]:
        """Return sequences that waited for another one's blocks and need wait no longer."""
        return self._in_flight.take_ready()

    def capture(self, sequence: Sequence, *, is_end: bool) -> None:
        """Keep the blocks that are complete now; with `is_end` the tail too."""
        self._cache.spills.request_id = sequence.request.request_id
        self._promotions.step(sequence)
        before = len(sequence.chain)
        self._cache.capture(sequence, is_end=is_end)
        self._in_flight.keep(sequence.chain[before:])
        if is_end:
            self._in_flight.withdraw(sequence)

    def end(self, sequence: Sequence) -> None:
        """A sequence has ended or was parked: whoever waits for its blocks waits no longer."""
        self._in_flight.forget(sequence)

    @property
    def cache(self) -> PrefixCache:
        """What the desk stands before."""
        return self._cache

    def yield_ram(
        self, size_bytes: int, *, spared: Collection[BlockHash] = (), is_urgent: bool = True
    ) -> int:
        """Let go of blocks in RAM so that running requests have memory; return the bytes that are free now.

        Urgent, blocks are dropped; else those that the SSD tier takes are free when they are written.
        """
        kept = {*spared, *self._restored_from}
        if is_urgent:
            return self._cache.eviction.yield_bytes(size_bytes, spared=kept)
        return self._cache.eviction.yield_by_spilling(size_bytes, spared=kept)

    def yieldable_bytes(self, *, spared: Collection[BlockHash] = ()) -> int:
        """Return the bytes that `yield_ram` could let go of, and those that are on their way."""
        return self._cache.eviction.yieldable_bytes(spared={*spared, *self._restored_from})

    @property
    def leaving_bytes(self) -> int:
        """Bytes of blocks that go from RAM as soon as they are written."""
        return self._cache.eviction.leaving_bytes

    def planned_blocks(self, sequence: Sequence) -> frozenset[BlockHash]:
        """Return the blocks that a sequence which is yet to begin would start from."""
        return frozenset(self._cache.reusable(sequence)) if self._cache.may_read(sequence) else frozenset()

    @property
    def _restored_from(self) -> set[BlockHash]:
        """Blocks whose arrays live on in a restore: letting go of them would free nothing."""
        return {entry.hash for restore in self._restores.values() for entry in restore.plan.entries}

    def settle(self, sequence: Sequence) -> None:
        """Count a lookup whose restore, if any, is over."""
        self._cache.settle(sequence.request, sequence.cache)

    def forget(self, sequence: Sequence) -> None:
        """Drop the restore of a cancelled sequence, and keep the blocks it has computed."""
        self._cache.spills.request_id = sequence.request.request_id
        restore = self._restores.pop(sequence.sequence_id, None)
        self._header_fetches.forget(sequence)
        # Before its first token a decoding sequence may have no row yet, and its prompt is kept already.
        has_row = sequence.phase is Phase.DECODING and sequence.output_token_ids
        if restore is None and (has_row or sequence.phase is Phase.PREFILLING):
            self._cache.capture(sequence, is_end=True)

    def note_prefill_rate(self, tokens_per_s: float) -> None:
        """Remember how fast this machine computes prompts."""
        self._cache.rates.prefill_tokens_per_s = tokens_per_s

    def stats(self) -> CacheStats:
        """Return the counters that need no answer from the storage thread."""
        return self._commands.stats(None)

    def query(self, reply: Callable[[CacheStats], None]) -> None:
        """Call `reply` with all counters, as soon as the storage thread has told its own."""
        self._commands.query(reply)

    def order(self, message: Command) -> None:
        """Carry out an order to the cache."""
        self._cache.spills.request_id = None
        if self._header_fetches.is_inventory_due:
            # To evict all, say, means what is on SSD too.
            if len(self._early_commands) < _EARLY_ORDER_LIMIT:
                self._early_commands.append(message)
            else:
                message.reply(storage_busy())
        else:
            self._commands.carry_out(message)

    def _abandon_loads(self) -> list[Sequence]:
        """Nothing more comes from SSD: whoever waits for it plans again without it."""
        waiting = [sequence for restore in self._loads.values() for sequence in self._give_up(restore)]
        self._loads.clear()
        waiting += self._header_fetches.abandon()
        self._carry_out_early_commands()
        return waiting

    def fail_commands(self, error: IcehouseError) -> None:
        """The engine ends before the inventory came: answer the orders that wait for it."""
        orders, self._early_commands = self._early_commands, []
        for message in orders:
            message.reply(error)

    def _carry_out_early_commands(self) -> None:
        orders, self._early_commands = self._early_commands, []
        for message in orders:
            self._commands.carry_out(message)

    def _follows(self, sequence: Sequence) -> bool:
        cache = self._cache
        if not cache.may_read(sequence):
            return False
        return self._in_flight.follow(sequence, cache.root(sequence.request.scope))

    def _load(self, restore: Restore, *, beside_decode: bool, budget_s: float) -> Phase:
        assert self._cache.storage is not None
        if restore.awaits_target:
            assert restore.target is not None
            restore.is_target_made = self._runner.continue_target(restore.target, budget_s=budget_s)
            if not restore.is_target_made:
                return Phase.RESTORING
        load_id = LoadId(next(self._load_ids))
        if not self._cache.storage.load(restore.make_request(load_id, beside_decode=beside_decode)):
            restore.with_ssd = False
            return Phase.WAITING
        self._cache.counters.load_total += 1
        self._loads[load_id] = restore
        return Phase.LOADING

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

    def _give_up(self, restore: Restore | None) -> list[Sequence]:
        self._cache.counters.load_failed_total += 1
        if restore is None or restore.sequence.sequence_id not in self._restores:
            return []
        restore.has_failed = restore.is_to_plan = True
        return [restore.sequence]

    def _adopted(self, restore: Restore) -> None:
        sequence, plan = restore.sequence, restore.plan
        del self._restores[sequence.sequence_id]
        restore_s = self._clock.monotonic() - restore.began_time
        read_s = restore.loaded.read_s if restore.loaded is not None else 0.0
        self._note_adopt_rate(plan.token_count / max(restore_s - read_s, 1e-9))
        limit = ReuseLimit.LOAD_FAILED if restore.has_failed else plan.report.limit
        sequence.note_cache(dataclasses.replace(plan.report, restore_s=restore_s, limit=limit))
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
