"""Cache controller in the engine's loop: it plans prompts, loads blocks from SSD, and rebuilds caches.

Inference thread only. After a failed restore the prompt is planned again without the failed block, and in
the end prefilled: damage is a miss, never a caller's error.
"""

from __future__ import annotations

import dataclasses
from functools import partial

from icehouse_server.clock import Clock
from icehouse_server.domain.blocks import BlockDamage, Region, RegionKind
from icehouse_server.domain.events import CacheReport, ReuseLimit
from icehouse_server.domain.ids import BlockHash, SequenceId
from icehouse_server.engine.core.sequence import Phase, Sequence
from icehouse_server.engine.prefix_cache.capture import stop_at_borders
from icehouse_server.engine.prefix_cache.in_flight import InFlightPrefixes
from icehouse_server.engine.prefix_cache.prefix_cache import PrefixCache
from icehouse_server.engine.prefix_cache.prefix_commands import CacheCommands
from icehouse_server.engine.prefix_cache.reuse_plan import Plan
from icehouse_server.engine.prefix_cache.shared_prefix import SharedPrefixes
from icehouse_server.engine.prefix_cache.tiers.node import Hashes
from icehouse_server.engine.prefix_cache.tiers.runner_port import CacheRunner, RestoreInput
from icehouse_server.engine.prefix_cache.tiers.storage_waits import Awaited, Steps
from icehouse_server.engine.prefix_cache.tiers.write_behind import Beside
from icehouse_server.errors import StorageError
from icehouse_server.storage.api import (
    BlocksEvicted,
    BlocksLoaded,
    Inventory,
    KvTarget,
    Outcome,
    StorageFailure,
    StorageTrouble,
    Ticket,
)

_ATTEMPT_LIMIT = 3
"""Plans tried for one prompt; after these it is prefilled even if the tree has a match."""


@dataclasses.dataclass(slots=True)
class Restore:
    """A restore under way. Times are `Clock.monotonic` readings."""

    sequence: Sequence
    began_time: float
    plan: Plan
    spent_s: float = 0.0
    """Time that the inference thread worked on it, without the time between."""
    attempt_count: int = 1
    has_failed: bool = False
    needs_plan: bool = False
    """Whether its load has failed, so that the plan is void."""
    with_ssd: bool = True
    """False after the read queue was full or memory short: the next plan uses RAM alone."""
    kv_memory: KvTarget | None = None
    """Pages that kv is read into from SSD; None for a model whose kv is not in pages."""
    loaded: BlocksLoaded | None = None
    read: dict[BlockHash, dict[RegionKind, Region]] = dataclasses.field(default_factory=dict)
    """Regions that were read from SSD, on the device."""
    is_begun: bool = False

    @property
    def is_unread(self) -> bool:
        """Whether blocks are still to be read from SSD."""
        return bool(self.plan.to_load) and self.loaded is None

    def plan_again(self, plan: Plan) -> None:
        """Start over with another plan; drop what was read for the last one."""
        self.attempt_count += 1
        self.plan, self.loaded, self.is_begun, self.needs_plan = plan, None, False, False
        self.read = {}
        self.release_memory()

    def reserve_memory(self, runner: CacheRunner, *, shares_blocks: bool) -> bool:
        """Reserve pages for the kv on SSD if blocks share pages; False without enough of them."""
        wanted = [block for block in self.plan.to_load if RegionKind.KV in block.regions]
        if wanted and shares_blocks:
            self.kv_memory = runner.begin_load(wanted)
            if self.kv_memory is None:
                return False
            self.sequence.loading_token_count = sum(block.header.token_count for block in wanted)
        return True

    def release_memory(self) -> None:
        """Release the reserved pages; reads that have not returned keep theirs."""
        self.kv_memory = None
        self.sequence.loading_token_count = 0

    def make_input(self, runner: CacheRunner) -> RestoreInput:
        """Combine the regions in RAM with those read from SSD."""
        if self.loaded is not None:
            self._put_on_device(self.loaded, runner)
        blocks = (
            dataclasses.replace(block, regions={**block.regions, **self.read.get(node.hash, {})})
            for block, node in zip(self.plan.placed, self.plan.nodes, strict=True)
        )
        return RestoreInput(tuple(blocks), self.plan.token_count)

    def _put_on_device(self, loaded: BlocksLoaded, runner: CacheRunner) -> None:
        self.read = {
            block.header.hash: {region.kind: runner.from_host(region) for region in block.regions}
            for block in loaded.blocks
        }
        if self.kv_memory is not None:
            wanted = [b.header.hash for b in self.plan.to_load if RegionKind.KV in b.regions]
            for name, region in zip(wanted, runner.end_load(self.kv_memory), strict=True):
                self.read[name][RegionKind.KV] = region
            self.kv_memory = None


class CacheController:
    """Restores a sequence's caches from cached blocks, and captures the blocks that it computes.

    Others on the inference thread may use `cache` itself, and submit commands to `commands`.
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
        """Least time in a step for rebuilding caches from loaded blocks."""
        self._restores: dict[SequenceId, Restore] = {}
        self._ready: list[Sequence] = []
        """Sequences whose wait for SSD has ended since the last `take_ready`."""
        self._inquired: set[SequenceId] = set()
        """Sequences not planned yet that wait, or have waited, for facts that their plan needs."""
        self.lacks_memory = False
        """Whether a request waits for memory, as the loop saw it last."""
        self._waits_for_inventory = True
        """False once a prompt has waited too long for the first inventory: later ones do not wait for it."""
        self._shared = SharedPrefixes(cache)
        self._in_flight = InFlightPrefixes(
            cache.settings,
            cache.tree.name_of,
            can_share=cache.can_share,
            can_cut_inside=cache.facts.cuttable_inside,
        )

    # A prompt: its plan and its restore.

    @property
    def cuts_before_last_token(self) -> bool:
        """Whether prefill must stop before the last token, since some caches can only be cut at their end."""
        facts, block = self.cache.facts, self.cache.settings.block_token_count
        if not self.cache.is_supported:
            return False
        has_window = facts.window_token_count > 0
        return facts.needs_checkpoint or (has_window and not facts.holds_window(block, passed_token_count=1))

    def begin(self, sequence: Sequence) -> Phase:
        """Plan a prompt. FOLLOWING if another sequence is computing a shared prefix, LOADING if more must be
        known first, RESTORING if something is reused, PREFILLING if nothing is."""
        restore = self._restores.get(sequence.sequence_id)
        if self.cache.may_read(sequence):
            if self._waits_for_leader(sequence):
                return Phase.FOLLOWING
            if restore is None and self._waits_to_plan(sequence):
                return Phase.LOADING
        plan = self.cache.plan(sequence, with_ssd=restore is None or restore.with_ssd)
        if not plan.is_hit or (restore is not None and restore.attempt_count >= _ATTEMPT_LIMIT):
            self._begin_empty(sequence, plan.report.limit)
            return Phase.PREFILLING
        if restore is None:
            restore = Restore(sequence, self._clock.monotonic(), plan)
            self._restores[sequence.sequence_id] = restore
        else:
            restore.plan_again(plan)
        fits_ram = plan.ssd_bytes <= self.cache.settings.ram_limit_bytes
        if plan.to_load and fits_ram and self.cache.may_write(sequence):
            self._in_flight.lead_load(sequence, [block.header.hash for block in plan.to_load])
        return Phase.RESTORING

    def _waits_to_plan(self, sequence: Sequence) -> bool:
        """Whether a prompt has to wait for facts that its plan needs; it waits only once."""
        if sequence.sequence_id in self._inquired:
            self._inquired.discard(sequence.sequence_id)
            return False
        if not self._waits.follow(self._inquire(sequence)):
            return False
        self._inquired.add(sequence.sequence_id)
        return True

    def _inquire(self, sequence: Sequence) -> Steps[None]:
        """Wait for the first inventory, for blocks from other servers, and for headers."""
        token_count = len(sequence.input_token_ids)
        if self.cache.is_inventory_due and self._waits_for_inventory:
            # The model was loaded before the directory was read: a short wait can save a whole prefill.
            outcome = yield Awaited(self._waits.inventory, token_count)
            if outcome is not None and outcome.cause is StorageTrouble.LOST:
                return  # the engine ends
            self._waits_for_inventory &= outcome is None
        yield from self._shared.bring(sequence)
        yield from self.cache.read_headers(self.cache.prompt_of(sequence), token_count=token_count)
        if sequence.phase is Phase.LOADING:  # else it has ended, or had nothing to wait for
            self._ready.append(sequence)

    def _waits_for_leader(self, sequence: Sequence) -> bool:
        """Whether a sequence waits for a leader's blocks; of a leader that decodes, cut the tail instead."""
        shared = self._in_flight.shared(sequence, self.cache.quotas.root(sequence.request.scope))
        if shared is None:
            return False
        leader = shared.leader
        if leader.phase is Phase.DECODING:
            if self.cache.reusable(sequence).token_count < shared.token_count:
                self._cut_tail(leader, leader.prefill_target)
            return False
        self._in_flight.follow(sequence, shared)
        return True

    def _begin_empty(self, sequence: Sequence, limit: ReuseLimit) -> None:
        """Reuse nothing: report the failed restore, if there was one, and start an empty chain."""
        restore = self._restores.pop(sequence.sequence_id, None)
        sequence.loading_token_count = 0
        report = CacheReport(limit=limit)
        if restore is not None and restore.has_failed:
            spent_s = self._clock.monotonic() - restore.began_time
            report = CacheReport(restore_s=spent_s, limit=ReuseLimit.LOAD_FAILED)
        sequence.note_cache(report)
        self.cache.start_chain(sequence, 0)

    def awaits_load(self, sequence: Sequence) -> bool:
        """Whether blocks of a restoring sequence are still to be requested from the SSD tier."""
        restore = self._restores.get(sequence.sequence_id)
        return restore is not None and restore.is_unread

    def continue_restore(self, sequence: Sequence, *, budget_s: float) -> Phase:
        """Rebuild caches for about `budget_s`: RESTORING if more is left, LOADING if blocks must be read from
        SSD first, PREFILLING if the caches are complete, WAITING if the blocks turned out unusable and the
        prompt must be planned again."""
        restore = self._restores.get(sequence.sequence_id)
        if restore is None or restore.needs_plan:
            return Phase.WAITING
        if restore.is_unread:
            return self._load(restore)
        began_time = self._clock.monotonic()
        try:
            if not restore.is_begun:
                restore.is_begun = True
                self._runner.begin_restore(sequence.sequence_id, restore.make_input(self._runner))
            is_complete = self._runner.continue_restore(sequence.sequence_id, budget_s=budget_s)
        except StorageError:
            # The blocks do not form a cache. Any of them may be wrong, so the whole chain is removed.
            restore.has_failed = True
            self.cache.restores.failed_restore_total += 1
            self.cache.remove(restore.plan.nodes)
            self._in_flight.withdraw(sequence)
            return Phase.WAITING
        restore.spent_s += self._clock.monotonic() - began_time
        if not is_complete:
            return Phase.RESTORING
        self._adopted(restore)
        del self._restores[sequence.sequence_id]
        self._in_flight.withdraw(sequence)
        return Phase.PREFILLING

    def _load(self, restore: Restore) -> Phase:
        ticket = None
        if self._reserve_memory(restore) and self.cache.storage is not None:
            ticket = self.cache.storage.get_into(restore.plan.to_load, restore.kv_memory)
        if ticket is None:
            restore.release_memory()
            restore.with_ssd = False
            self._in_flight.withdraw(restore.sequence)
            return Phase.WAITING
        self.cache.restores.load_total += 1
        self._waits.add(ticket, partial(self._loaded, restore), token_count=restore.plan.token_count)
        return Phase.LOADING

    def _reserve_memory(self, restore: Restore) -> bool:
        """Reserve memory to read into, evicting blocks from RAM if necessary; False without enough."""
        reserve = partial(restore.reserve_memory, self._runner, shares_blocks=self.cache.facts.shares_blocks)
        return reserve() or (self.yield_ram(restore.plan.ssd_bytes) > 0 and reserve())

    def _loaded(self, restore: Restore, outcome: BlocksLoaded | StorageFailure) -> None:
        failure = outcome if isinstance(outcome, StorageFailure) else outcome.failure
        if isinstance(outcome, BlocksLoaded):
            self.cache.rates.note_read(outcome.read_bytes_per_s)
            restore.loaded = None if failure is not None else outcome
        is_waiting = self._restores.get(restore.sequence.sequence_id) is restore
        if failure is not None:
            self._load_failed(restore, failure)
            if is_waiting:
                self._in_flight.withdraw(restore.sequence)
                restore.has_failed = restore.needs_plan = True
        if is_waiting:
            self._ready.append(restore.sequence)

    def _load_failed(self, restore: Restore, failure: StorageFailure) -> None:
        """Prepare for a plan without the damaged block, or without SSD if that does not answer or memory is
        short. When memory is short the block stays known, but is not tried again at once."""
        restore.release_memory()
        self.cache.restores.failed_load_total += 1
        restore.with_ssd &= failure.cause not in (BlockDamage.MEMORY, StorageTrouble.TIMED_OUT)
        if failure.hash is not None and failure.cause is not BlockDamage.MEMORY:
            self.cache.tree.forget_stored(failure.hash)

    def _adopted(self, restore: Restore) -> None:
        """Record the finished restore: the sequence continues from its rebuilt caches."""
        sequence, plan = restore.sequence, restore.plan
        restore_s = self._clock.monotonic() - restore.began_time
        self.cache.rates.note_adopt(plan.token_count / max(restore.spent_s, 1e-9))
        limit = ReuseLimit.LOAD_FAILED if restore.has_failed else plan.report.limit
        sequence.note_cache(dataclasses.replace(plan.report, restore_s=restore_s, limit=limit))
        sequence.processed_token_count = plan.token_count
        sequence.loading_token_count = 0
        self.cache.start_chain(sequence, plan.token_count)
        if self.cache.facts.shares_blocks:
            names = {node.hash for node in plan.nodes}
            self.cache.used_by.setdefault(sequence.sequence_id, set()).update(names)
        if restore.loaded is not None:
            self.cache.restores.promoted_block_total += len(plan.to_load)
            self.cache.restores.promoted_token_total += plan.report.ssd_token_count
            if self.cache.may_write(sequence):
                self._promote(restore)

    def _promote(self, restore: Restore) -> None:
        """Put blocks read from SSD into RAM, where the next request looks first. Done at once for a warm-up,
        for blocks that others wait for, and while there is space; the rest evicts, so one with each token."""
        sequence = restore.sequence
        is_awaited = self._in_flight.has_followers(sequence)
        for node in restore.plan.nodes:
            regions = restore.read.get(node.hash)
            if regions is not None:
                sequence.unpromoted.append((node.hash, regions))
        if sequence.is_warm_up:
            self._promote_all(restore)
        while sequence.unpromoted and (is_awaited or self.cache.ram.has_space(sequence.unpromoted[0][1])):
            self._promote_next(sequence)

    def _promote_all(self, restore: Restore) -> None:
        """Put the blocks that a warm-up read into RAM, from its beginning as far as they fit. Blocks that a
        sequence uses are not evicted: that would free no memory."""
        sequence, in_use = restore.sequence, self._in_use
        while sequence.unpromoted:
            self._promote_next(sequence, protected=in_use)
        sequence.promoted_token_count = restore.plan.promoted_token_count(restore.read)

    def _promote_next(self, sequence: Sequence, *, protected: Hashes = ()) -> None:
        name, regions = sequence.unpromoted.popleft()
        node = self.cache.tree.get(name)
        if node is not None:
            self.cache.promote(sequence, node, regions, protected=protected)
        self._in_flight.complete([name])

    # What the SSD tier reports.

    def receive(self, outcome: Outcome) -> None:
        """Process a report from the SSD tier."""
        if isinstance(outcome, Ticket):
            self._waits.complete(outcome)
        elif isinstance(outcome, Inventory):
            self.cache.take_inventory(outcome)
            if outcome.is_last:
                self._waits.complete_inventory()
        elif isinstance(outcome, BlocksEvicted):
            for name in outcome.hashes:
                self.cache.tree.forget_stored(name)
        else:
            # The SSD tier is lost: sequences that wait for it are planned again without it.
            self.cache.lose_storage()
            self._waits.lose_storage()

    def leave_cores(self, *, to_decode: bool) -> None:
        """Limit loads to a small share of the cores while rows decode evenly; otherwise let them use all."""
        if self.cache.storage is not None:
            self.cache.storage.leave_cores(to_decode=to_decode)

    # What a sequence computes.

    def lead(self, sequence: Sequence) -> None:
        """Record that a sequence starts to compute the rest of its input, so that others may wait for it."""
        if self.cache.may_write(sequence):
            stop_at_borders(sequence, self.cache.facts)
            self._in_flight.lead(sequence, self.cache.quotas.root(sequence.request.scope))

    def take_ready(self) -> list[Sequence]:
        """Return the sequences whose wait for the SSD tier or a leader is over; some may have ended since."""
        ready = [*self._ready, *self._in_flight.take_ready()]
        self._ready.clear()
        return ready

    def has_to_keep(self, sequence: Sequence, *, is_end: bool) -> bool:
        """Whether a capture of this sequence would copy something."""
        size = self.cache.settings.block_token_count
        is_due = is_end or sequence.kv_token_count - len(sequence.chain) * size >= size
        return is_due and self.cache.may_write(sequence)

    def capture_input(self, sequence: Sequence) -> None:
        """Capture the complete blocks of the input, and at its end the tail.

        A tail that can also be cut later is captured now only if somebody waits for it: it stays in the
        caches while the sequence decodes, and becomes part of the next block.
        """
        self._capture(sequence, sequence.processed_token_count)
        if sequence.is_prefilled and (
            not self._can_cut_tail_later(sequence) or self._in_flight.has_followers(sequence)
        ):
            self._cut_tail(sequence, sequence.processed_token_count)

    def capture(self, sequence: Sequence, *, is_end: bool) -> None:
        """Capture the complete blocks of a decoding sequence; with `is_end` the tail too."""
        reached = sequence.kv_token_count
        has_completed = self._capture(sequence, reached)
        if is_end:
            self._cut_tail(sequence, reached)
        elif has_completed:
            self._in_flight.withdraw(sequence)  # that block contains the tail of its input

    def _capture(self, sequence: Sequence, reached: int) -> bool:
        """Capture the complete blocks, and a tail if one is wanted here; return whether there was any."""
        if sequence.unpromoted and len(sequence.output_token_ids) > 1:  # the first token goes first
            self._promote_next(sequence)
        is_point = reached in sequence.capture_points
        if is_point:
            sequence.capture_points.remove(reached)
        names = self.cache.capture(sequence, reached, is_end=is_point)
        self._in_flight.complete(names)
        return bool(names)

    def _cut_tail(self, sequence: Sequence, reached: int) -> None:
        """Capture all tokens up to `reached`, the tail included; the sequence's followers are then ready."""
        self._in_flight.complete(self.cache.capture(sequence, reached, is_end=True))
        self._in_flight.withdraw(sequence)

    def _can_cut_tail_later(self, sequence: Sequence) -> bool:
        """Whether the caches of a sequence retain the tail of its input for as long as it decodes."""
        facts = self.cache.facts
        is_append_only = facts.has_kv and facts.cuttable_inside and not facts.window_token_count
        return is_append_only and sequence.input_end > sequence.prefill_target

    # The end of a sequence.

    def end(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended or was parked: its followers are ready."""
        self.cache.used_by.pop(sequence.sequence_id, None)
        sequence.unpromoted.clear()
        self._in_flight.forget(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Drop the restore of a cancelled sequence, or capture the blocks that it has computed."""
        self._inquired.discard(sequence.sequence_id)
        if self._restores.pop(sequence.sequence_id, None) is not None:
            return
        is_decoding = sequence.phase is Phase.DECODING
        if sequence.phase is Phase.PREFILLING or (is_decoding and sequence.output_token_ids):
            self.cache.capture(sequence, sequence.kv_token_count, is_end=True)
        elif is_decoding and self._can_cut_tail_later(sequence):
            self.cache.capture(sequence, sequence.prefill_target, is_end=True)  # its first token is unknown

    def discard(self, sequence: Sequence) -> None:
        """Remove all blocks that a decoding sequence computed or began with: its logits are not finite."""
        keys = sequence.keys(0, sequence.token_count)
        self.cache.remove(self.cache.known_chain(keys, sequence.request.scope))
        sequence.unpromoted.clear()

    # Memory for others.

    def yield_ram(self, size_bytes: int, *, protected: Hashes = (), is_urgent: bool = True) -> int:
        """Release blocks in RAM that no sequence uses; return the bytes that are free now.

        With `is_urgent` they are dropped; otherwise blocks that the SSD tier takes are free once written.
        """
        protected = {*protected, *self._in_use}
        return self.cache.ram.yield_bytes(size_bytes, protected=protected, by_spilling=not is_urgent)

    def yieldable_bytes(self, *, protected: Hashes = ()) -> int:
        """Return the bytes that `yield_ram` could free, including those on their way to SSD."""
        return self.cache.ram.yieldable_bytes(protected={*protected, *self._in_use})

    @property
    def is_writing(self) -> bool:
        """Whether blocks are on their way to SSD, and may leave RAM once written."""
        return self.cache.spills.under_way_count > 0 and not self._waits.is_stalled

    def write_blocks(self, *, has_run: bool, decodes: bool) -> None:
        """Send blocks to SSD if the disk is idle, and hand over those copied by now. Called at the end of a
        step, with whether a pass `has_run` in it; only a step without one waits for copies."""
        beside = Beside.DECODE if decodes else Beside.PREFILL
        if not self.cache.is_inventory_due:
            self.cache.behind.offer(
                beside if has_run else Beside.NOTHING,
                is_restoring=bool(self._restores),
                lacks_memory=self.lacks_memory,
            )
        self.cache.spills.hand_over(may_wait=not has_run)

    @property
    def _in_use(self) -> set[BlockHash]:
        """Blocks whose arrays a restore or a sequence uses: dropping them would free nothing."""
        restoring = (node.hash for restore in self._restores.values() for node in restore.plan.nodes)
        return {*restoring, *(name for names in self.cache.used_by.values() for name in names)}
