"""Cache controller in the engine's loop: prompts in, blocks from SSD back, caches rebuilt.

Inference thread only. Every way a restore can fail ends in planning again without the block that
failed, and in the end in prefilling: damage is a miss, never a caller's error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from functools import partial

from icehouse_server.clock import Clock
from icehouse_server.domain.blocks import Damage
from icehouse_server.domain.events import CacheReport, ReuseLimit
from icehouse_server.domain.ids import BlockHash, SequenceId
from icehouse_server.engine.core.sequence import Phase, Sequence
from icehouse_server.engine.prefix_cache.cache import PrefixCache
from icehouse_server.engine.prefix_cache.commands import CacheCommands
from icehouse_server.engine.prefix_cache.header_fetch import HeaderFetches
from icehouse_server.engine.prefix_cache.in_flight import InFlightPrefixes
from icehouse_server.engine.prefix_cache.restore import Restore
from icehouse_server.engine.prefix_cache.tiers.runner_port import CacheRunner
from icehouse_server.errors import StorageError
from icehouse_server.storage.api import Evicted, Failure, Inventory, Loaded, Outcome, Ticket, Trouble

_ATTEMPT_LIMIT = 3
"""Plans tried for one prompt before it is prefilled whatever the tree says."""


class CacheController:
    """Takes a sequence from its prompt to its caches, and what it computes to the cache.

    Everybody on the inference thread may ask `cache` itself, and give commands to `commands`.
    """

    def __init__(
        self, *, cache: PrefixCache, runner: CacheRunner, clock: Clock, adopt_budget_s: float
    ) -> None:
        self.cache = cache
        self._waits = cache.waits
        self.commands = CacheCommands(cache, clock)
        self._runner = runner
        self._clock = clock
        self.adopt_budget_s = adopt_budget_s
        """Least time of a step for taking loaded blocks into use."""
        self._restores: dict[SequenceId, Restore] = {}
        self._ready: list[Sequence] = []
        """Sequences that need wait for SSD no longer, since the last time that somebody looked."""
        self._header_fetches = HeaderFetches(cache, ready=self._ready.append)
        self._in_flight = InFlightPrefixes(
            cache.settings,
            can_share=cache.can_share,
            can_cut_inside=cache.facts.cuttable_inside,
            block_names=cache.names,
        )

    @property
    def cuts_before_last_token(self) -> bool:
        """Whether prefill must stop before a prompt's last token, since states, and windows that are as short
        as a block, can be kept only as they are there."""
        facts, block = self.cache.facts, self.cache.settings.block_token_count
        if not self.cache.is_supported:
            return False
        has_window = facts.window_token_count > 0
        return facts.needs_checkpoint or (has_window and not facts.holds_window(block, passed_token_count=1))

    def begin(self, sequence: Sequence) -> Phase:
        """Plan a prompt. FOLLOWING when another sequence computes what it shares, LOADING when more must be
        known first, RESTORING when something is reused, PREFILLING when nothing is."""
        restore = self._restores.get(sequence.sequence_id)
        if self.cache.may_read(sequence):
            if self._wait_for_shared(sequence):
                return Phase.FOLLOWING
            if restore is None and self._header_fetches.ask(sequence):
                return Phase.LOADING
        plan = self.cache.plan(sequence, with_ssd=restore is None or restore.with_ssd)
        if not plan.is_hit or (restore is not None and restore.attempt_count >= _ATTEMPT_LIMIT):
            self._begin_empty(sequence, plan.report.limit)
            return Phase.PREFILLING
        if restore is None:
            restore = Restore(sequence, self._clock.monotonic(), plan, self.cache.facts)
            self._restores[sequence.sequence_id] = restore
        else:
            restore.plan_again(plan)
        if plan.to_load and self.cache.may_write(sequence) and self.cache.may_hold(plan):
            self._in_flight.lead_load(sequence, [block.header.hash for block in plan.to_load])
        return Phase.RESTORING

    def receive(self, outcome: Outcome) -> list[Sequence]:
        """Take in what the SSD tier posts; return the sequences that need wait for it no longer."""
        if isinstance(outcome, Ticket):
            self._waits.settle(outcome)
        elif isinstance(outcome, Inventory):
            self.cache.take_inventory(outcome.records, is_first=outcome.is_first, is_last=outcome.is_last)
            if outcome.is_last:
                self._waits.settle_inventory()
        elif isinstance(outcome, Evicted):
            for name in outcome.hashes:
                self.cache.tree.forget_stored(name)
        else:
            # Nothing more comes from SSD: whoever waits for it plans again without it.
            self.cache.lose_storage()
            self._waits.lose_storage()
        return self._take_ready()

    def give_up_waits(self) -> list[Sequence]:
        """Return the sequences that have waited too long for an SSD tier that does not answer: they are
        planned again without it."""
        self._waits.look()
        return self._take_ready()

    def _take_ready(self) -> list[Sequence]:
        ready = self._ready[:]
        self._ready.clear()
        return ready

    def leave_cores(self, *, to_decode: bool) -> None:
        """Have loads take little of the cores while rows decode at an even pace, or all that they can."""
        if self.cache.storage is not None:
            self.cache.storage.leave_cores(to_decode=to_decode)

    def awaits_load(self, sequence: Sequence) -> bool:
        """Whether blocks of a restoring sequence are still to be asked of the SSD tier."""
        restore = self._restores.get(sequence.sequence_id)
        return restore is not None and bool(restore.plan.to_load) and restore.loaded is None

    def continue_restore(self, sequence: Sequence, *, budget_s: float) -> Phase:
        """Rebuild caches for about `budget_s`: RESTORING when more is left, LOADING when blocks must come
        from SSD first, PREFILLING when the caches are open, WAITING when the blocks turned out unusable and
        the prompt is to be planned again."""
        restore = self._restores.get(sequence.sequence_id)
        if restore is None or restore.is_to_plan:
            return Phase.WAITING
        began_time = self._clock.monotonic()
        phase = self._continue(restore, budget_s=budget_s)
        restore.spent_s += self._clock.monotonic() - began_time
        return phase

    def _continue(self, restore: Restore, *, budget_s: float) -> Phase:
        sequence, began_time = restore.sequence, self._clock.monotonic()
        if restore.plan.to_load and restore.loaded is None:
            return self._load(restore)
        try:
            if not restore.is_begun:
                restore.is_begun = True
                self._runner.begin_restore(sequence.sequence_id, restore.make_input(self._runner))
            if not self._runner.continue_restore(sequence.sequence_id, budget_s=budget_s):
                return Phase.RESTORING
        except StorageError:
            # The blocks do not make a cache: whichever is wrong, none of this chain is used again.
            restore.has_failed = True
            self.cache.reject(restore.plan.nodes)
            self._in_flight.withdraw(sequence)
            return Phase.WAITING
        self._adopted(restore, spent_s=restore.spent_s + self._clock.monotonic() - began_time)
        del self._restores[sequence.sequence_id]
        self._in_flight.withdraw(sequence)
        return Phase.PREFILLING

    def lead(self, sequence: Sequence) -> None:
        """Note that a sequence computes the rest of its input now, so that others may wait for it."""
        if self.cache.may_write(sequence):
            self._in_flight.lead(sequence, self.cache.root(sequence.request.scope))

    def take_ready(self) -> list[Sequence]:
        """Return sequences that waited for another one's blocks and need wait no longer."""
        return self._in_flight.take_ready()

    def has_to_keep(self, sequence: Sequence, *, is_end: bool) -> bool:
        """Whether a capture of this sequence would copy something."""
        size = self.cache.settings.block_token_count
        is_due = is_end or sequence.kv_token_count - len(sequence.chain) * size >= size
        return is_due and self.cache.may_write(sequence)

    def capture_input(self, sequence: Sequence) -> None:
        """Keep the blocks of its input that are complete now, and the tail at its end.

        Where the tail can be cut later as well, only if somebody waits for it: it stays in the caches of the
        sequence, which goes on to draw, and becomes a part of what that leaves.
        """
        self._capture(sequence, sequence.processed_token_count)
        if sequence.is_prefilled and (
            not self._can_cut_tail_later(sequence) or self._in_flight.has_followers(sequence)
        ):
            self._cut_tail(sequence, sequence.processed_token_count)

    def capture(self, sequence: Sequence, *, is_end: bool) -> None:
        """Keep the complete blocks of a sequence that draws; with `is_end` the tail too."""
        reached = sequence.kv_token_count
        has_completed = self._capture(sequence, reached)
        if is_end:
            self._cut_tail(sequence, reached)
        elif has_completed:
            self._in_flight.withdraw(sequence)  # the tail of its input is in that block

    def _capture(self, sequence: Sequence, reached: int) -> bool:
        """Keep the blocks that are complete, and a tail where one was asked for; return whether any was."""
        if sequence.unkept and len(sequence.output_token_ids) > 1:  # its caller waits for the first one
            self._promote_next(sequence)
        is_point = reached in sequence.capture_points
        if is_point:
            sequence.capture_points.remove(reached)
        names = self.cache.capture(sequence, reached, is_end=is_point)
        self._in_flight.complete(names)
        return bool(names)

    def _cut_tail(self, sequence: Sequence, reached: int) -> None:
        """Keep all up to where a sequence is, whose caches have `reached`; whoever waits for it is ready."""
        self._in_flight.complete(self.cache.capture(sequence, reached, is_end=True))
        self._in_flight.withdraw(sequence)

    def _can_cut_tail_later(self, sequence: Sequence) -> bool:
        """Whether the caches of a sequence hold the tail of its input for as long as it draws."""
        facts = self.cache.facts
        is_append_only = facts.has_kv and facts.cuttable_inside and not facts.window_token_count
        return is_append_only and sequence.input_end > sequence.prefill_target

    def _wait_for_shared(self, sequence: Sequence) -> bool:
        """Whether a sequence is to wait for what another one computes; of one that draws already, the tail
        that is still in its caches is kept now."""
        shared = self._in_flight.shared(sequence, self.cache.root(sequence.request.scope))
        if shared is None:
            return False
        leader = shared.leader
        if leader.phase is Phase.DECODING:
            if self.cache.reusable(sequence).token_count < shared.token_count:
                self._cut_tail(leader, leader.prefill_target)
            return False
        self._in_flight.follow(sequence, shared)
        return True

    def end(self, sequence: Sequence) -> None:
        """A sequence has ended or was parked: whoever waits for its blocks waits no longer."""
        self.cache.held_by.pop(sequence.sequence_id, None)
        sequence.unkept.clear()
        self._in_flight.forget(sequence)

    def yield_ram(
        self, size_bytes: int, *, spared: Collection[BlockHash] = (), is_urgent: bool = True
    ) -> int:
        """Let go of blocks in RAM that nobody reads; return the bytes that are free now.

        Urgent, they are dropped; else what the SSD tier takes is free when it is written.
        """
        spared = {*spared, *self._in_use}
        if is_urgent:
            return self.cache.ram.yield_bytes(size_bytes, spared=spared)
        return self.cache.ram.yield_by_spilling(size_bytes, spared=spared)

    def yieldable_bytes(self, *, spared: Collection[BlockHash] = ()) -> int:
        """Return the bytes that `yield_ram` could let go of, and those that are on their way."""
        return self.cache.ram.yieldable_bytes(spared={*spared, *self._in_use})

    def planned_blocks(self, sequence: Sequence) -> frozenset[BlockHash]:
        """Return the blocks that a sequence which is yet to begin would start from."""
        nodes = self.cache.reusable(sequence).nodes if self.cache.may_read(sequence) else ()
        return frozenset(node.hash for node in nodes)

    @property
    def is_stalled(self) -> bool:
        """Whether the storage thread hangs, so that nothing is written, removed or counted."""
        return self._waits.is_stalled

    @property
    def leaving_bytes(self) -> int:
        """Bytes of blocks that go from RAM as soon as they are written; 0 while nothing is."""
        return 0 if self.is_stalled else self.cache.ram.leaving_bytes

    @property
    def _in_use(self) -> set[BlockHash]:
        """Blocks whose arrays live on in a restore or a sequence: letting go of them would free nothing."""
        restoring = (node.hash for restore in self._restores.values() for node in restore.plan.nodes)
        return {*restoring, *(name for names in self.cache.held_by.values() for name in names)}

    def forget(self, sequence: Sequence) -> None:
        """Drop the restore of a cancelled sequence, and keep the blocks it has computed."""
        restore = self._restores.pop(sequence.sequence_id, None)
        self._header_fetches.forget(sequence)
        if restore is not None:
            return
        if sequence.phase is Phase.PREFILLING or (
            sequence.phase is Phase.DECODING and sequence.output_token_ids
        ):
            self.cache.capture(sequence, sequence.kv_token_count, is_end=True)
        elif sequence.phase is Phase.DECODING and self._can_cut_tail_later(sequence):
            self.cache.capture(sequence, sequence.prefill_target, is_end=True)  # what was drawn is not known

    def discard(self, sequence: Sequence) -> None:
        """Remove every block that a decoding sequence computed or began with: what came of them is no number,
        and it cannot be told which of them is why."""
        keys = sequence.keys(0, sequence.token_count)
        self.cache.remove(self.cache.known_chain(keys, sequence.request.scope))
        sequence.unkept.clear()

    def _begin_empty(self, sequence: Sequence, limit: ReuseLimit) -> None:
        """Nothing is reused: account for what was tried, and start the chain anew."""
        restore = self._restores.pop(sequence.sequence_id, None)
        sequence.loading_room_token_count = 0
        if restore is not None and restore.has_failed:
            tried_s = self._clock.monotonic() - restore.began_time
            sequence.note_cache(CacheReport(restore_s=tried_s, limit=ReuseLimit.LOAD_FAILED))
        else:
            sequence.note_cache(CacheReport(limit=limit))
        self.cache.start_chain(sequence, 0)

    def _load(self, restore: Restore) -> Phase:
        ticket = None
        if self._has_place(restore):
            ticket = self.cache.load(restore.plan.to_load, restore.place)
        if ticket is None:
            restore.leave_place()
            restore.with_ssd = False
            self._in_flight.withdraw(restore.sequence)
            return Phase.WAITING
        self._waits.add(ticket, partial(self._loaded, restore), token_count=restore.plan.token_count)
        return Phase.LOADING

    def _has_place(self, restore: Restore) -> bool:
        """Whether there is memory to read to, blocks in RAM having made way where they must."""
        if restore.find_place(self._runner):
            return True
        return self.yield_ram(restore.plan.ssd_bytes) > 0 and restore.find_place(self._runner)

    def _loaded(self, restore: Restore, outcome: Loaded | Failure) -> None:
        failure = outcome if isinstance(outcome, Failure) else outcome.failure
        if isinstance(outcome, Loaded):
            self.cache.rates.note_read(outcome.read_bytes_per_s)
            restore.loaded = None if failure is not None else outcome
        is_waiting = self._restores.get(restore.sequence.sequence_id) is restore
        if failure is not None:
            self._load_failed(restore, failure, is_waiting=is_waiting)
        if is_waiting:
            self._ready.append(restore.sequence)

    def _load_failed(self, restore: Restore, failure: Failure, *, is_waiting: bool) -> None:
        """Plan again: without a block that is damaged, or without SSD where it does not answer or memory is
        short. What there is no memory for is still there, and not tried again at once."""
        restore.leave_place()
        self.cache.counters.promote.failed_load_total += 1
        restore.with_ssd &= failure.cause not in (Damage.MEMORY, Trouble.TIMED_OUT)
        if failure.hash is not None and failure.cause is not Damage.MEMORY:
            self.cache.tree.forget_stored(failure.hash)
        if is_waiting:
            self._in_flight.withdraw(restore.sequence)
            restore.has_failed = restore.is_to_plan = True

    def _adopted(self, restore: Restore, *, spent_s: float) -> None:
        sequence, plan = restore.sequence, restore.plan
        restore_s = self._clock.monotonic() - restore.began_time
        self.cache.rates.note_adopt(plan.token_count / max(spent_s, 1e-9))
        limit = ReuseLimit.LOAD_FAILED if restore.has_failed else plan.report.limit
        sequence.note_cache(dataclasses.replace(plan.report, restore_s=restore_s, limit=limit))
        sequence.processed_token_count = plan.token_count
        sequence.loading_room_token_count = 0
        self.cache.start_chain(sequence, plan.token_count)
        if self.cache.facts.shares_blocks:
            names = {node.hash for node in plan.nodes}
            self.cache.held_by.setdefault(sequence.sequence_id, set()).update(names)
        if restore.loaded is not None:
            self.cache.note_promoted(plan)
            if self.cache.may_write(sequence):
                self._keep_read(restore)

    def _keep_read(self, restore: Restore) -> None:
        """Have RAM keep what came from SSD, the next request will look there first: at once what others wait
        for, and what there is space for. The rest, for which others must go, comes a block a token."""
        sequence = restore.sequence
        is_awaited = self._in_flight.has_followers(sequence)
        for node in restore.plan.nodes:
            regions = restore.read.get(node.hash)
            if regions is not None:
                sequence.unkept.append((node.hash, regions))
        while sequence.unkept and (is_awaited or self.cache.ram.has_space(sequence.unkept[0][1])):
            self._promote_next(sequence)

    def _promote_next(self, sequence: Sequence) -> None:
        name, regions = sequence.unkept.popleft()
        node = self.cache.tree.get(name)
        if node is not None:
            self.cache.promote(sequence, node, regions)
        self._in_flight.complete([name])
