"""Prefix cache as the engine's loop uses it: plan a prompt, keep what is computed, spill, follow the SSD.

Inference thread only. A block is captured when its last token has been computed, in prefill and
in decode alike, so that a cancelled request leaves its blocks behind and no step pays for many.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as ReadSequence

from icehouse_server.clock import Clock
from icehouse_server.domain.blocks import BlockHeader, Region, RegionKind
from icehouse_server.domain.cache_commands import Explain, Explanation
from icehouse_server.domain.cache_stats import CacheStats
from icehouse_server.domain.events import CacheReport, ReuseLimit
from icehouse_server.domain.ids import BlockHash, CacheScope, RequestId
from icehouse_server.domain.request import CacheUse, GenerationRequest
from icehouse_server.engine.core.block_log import BlockLog
from icehouse_server.engine.core.block_names import BlockNames
from icehouse_server.engine.core.sequence import Sequence
from icehouse_server.engine.prefix_cache.flush import Flush
from icehouse_server.engine.prefix_cache.planner import Planner, PrefixPlan, Rates
from icehouse_server.engine.prefix_cache.stats import CountedParts, cache_stats
from icehouse_server.engine.prefix_cache.tiers.capture import CaptureRules
from icehouse_server.engine.prefix_cache.tiers.counters import PrefixCounters
from icehouse_server.engine.prefix_cache.tiers.entry import Entry, block_match
from icehouse_server.engine.prefix_cache.tiers.eviction import RamEviction
from icehouse_server.engine.prefix_cache.tiers.index import BlockIndex, IndexRules
from icehouse_server.engine.prefix_cache.tiers.ports import CacheFacts, CacheRunner
from icehouse_server.engine.prefix_cache.tiers.ram_tier import RamTier
from icehouse_server.engine.prefix_cache.tiers.settings import PrefixSettings
from icehouse_server.engine.prefix_cache.tiers.spill import Spills
from icehouse_server.engine.prefix_cache.tiers.tenant_quota import PinExcess, TenantQuotas
from icehouse_server.engine.prefix_cache.timeouts import Waits
from icehouse_server.storage.api import (
    ColdTier,
    Failure,
    KvPlace,
    Loaded,
    Names,
    NewRows,
    Persisted,
    PlannedBlock,
    Purged,
    StoredBlock,
    Ticket,
)


class PrefixCache:
    """Index, RAM tier and the way to the SSD tier. `storage` is None without one."""

    def __init__(
        self,
        *,
        settings: PrefixSettings,
        facts: CacheFacts,
        runner: CacheRunner,
        storage: ColdTier | None,
        clock: Clock,
        log: BlockLog | None = None,
    ) -> None:
        self.settings = settings
        self.facts = facts
        self._runner = runner
        self._clock = clock
        self.log = log = BlockLog() if log is None else log
        block_token_count = settings.block_token_count
        self.names = BlockNames(settings.name_secret)
        self._index = BlockIndex(IndexRules(facts, block_token_count, settings.name_secret), log, self.names)
        self._ram = RamTier(
            limit_bytes=settings.ram_limit_bytes, block_token_count=block_token_count, log=log
        )
        self.rates = Rates()
        self.waits = Waits(storage, self.rates, clock)
        """Who is told what became of what was asked of the SSD tier."""
        self._counters = PrefixCounters()
        self._quotas = TenantQuotas(settings, index=self._index, ram=self._ram, log=log)
        self._spills = Spills(
            settings,
            facts=facts,
            index=self._index,
            quotas=self._quotas,
            counters=self._counters,
            runner=runner,
            waits=self.waits,
            ended=self._spill_ended,
        )
        self._eviction = RamEviction(
            ram=self._ram, index=self._index, spills=self._spills, quotas=self._quotas
        )
        self._planner = Planner(settings, self._index, self.rates)
        self._capture_rules = CaptureRules(facts, block_token_count, settings.checkpoint_interval_tokens)
        self._is_inventory_due = storage is not None
        self._unseen: set[BlockHash] = set()
        """Blocks that were on SSD and that the inventory under way has not named yet."""

    # What may be reused, and by whom.

    @property
    def storage(self) -> ColdTier | None:
        """The SSD tier; None without one, and when it is lost."""
        return self._spills.storage

    @property
    def is_inventory_due(self) -> bool:
        """Whether nobody knows yet what the SSD holds."""
        return self._is_inventory_due

    @property
    def is_supported(self) -> bool:
        return self.settings.is_enabled and not self.facts.unsupported_detail

    @property
    def can_share(self) -> bool:
        """Whether another sequence can start at any block just computed, not only at an end."""
        return self.is_supported and self.facts.has_kv and not self.facts.needs_checkpoint

    @property
    def checkpoint_block_token_count(self) -> int:
        """Block size when prefill must stop at a prompt's last full block to take a checkpoint, else 0."""
        needs_one = self.is_supported and self.facts.needs_checkpoint
        return self.settings.block_token_count if needs_one else 0

    def may_read(self, sequence: Sequence) -> bool:
        """Whether this sequence may reuse what is cached now."""
        reads = sequence.request.cache_use in (CacheUse.READ_WRITE, CacheUse.READ_ONLY)
        return self.is_supported and reads and not sequence.measures_prompt

    def may_write(self, sequence: Sequence) -> bool:
        """Whether this request's blocks are kept for others."""
        return self.is_supported and sequence.request.cache_use in (CacheUse.READ_WRITE, CacheUse.WRITE_ONLY)

    def root(self, scope: CacheScope) -> BlockHash:
        """Return h0 for this model, tenant and adapter."""
        return self._quotas.root(scope)

    def shared_root(self, scope: CacheScope | None) -> BlockHash | None:
        """Return h0 of whose blocks may stand for missing ones; None for nobody's."""
        return None if scope is None else self.root(scope)

    # A prompt: what is known of it, and the plan.

    def ask_headers(
        self, token_ids: ReadSequence[int], *, scope: CacheScope, shared_scope: CacheScope | None
    ) -> Ticket[tuple[BlockHeader, ...]] | None:
        """Have the headers of blocks read that may begin like the rest of this prompt.

        None when nothing more is to be known of it, or the read queue is full.
        """
        if self.storage is None or self.rates.reads_hang:
            return None
        unread = self._index.unread_blocks(
            root=self.root(scope),
            token_ids=token_ids,
            token_limit=len(token_ids) - 1,
            shared_root=self.shared_root(shared_scope),
        )
        names = tuple(entry.hash for entry in unread)
        return self.storage.heads(names) if names else None

    def learn_headers(self, headers: Iterable[BlockHeader]) -> None:
        """Take in the tokens of blocks that only the SSD knew."""
        for header in headers:
            entry = self._index.get(header.hash)
            if entry is not None:
                self._index.learn_header(entry, header)

    def plan(self, sequence: Sequence, *, with_ssd: bool = True) -> PrefixPlan:
        """Say what of a prompt is reused and from where, and note the use."""
        request = sequence.request
        if not self.settings.is_enabled or request.cache_use in (CacheUse.OFF, CacheUse.WRITE_ONLY):
            return PrefixPlan((), 0, CacheReport(limit=ReuseLimit.SWITCHED_OFF))
        if not self.is_supported:
            return PrefixPlan((), 0, CacheReport(limit=ReuseLimit.UNSUPPORTED))
        if sequence.measures_prompt:
            return PrefixPlan((), 0, CacheReport(limit=ReuseLimit.PROMPT_LOGPROBS))
        root = self.root(request.scope)
        plan = self._planner.plan_with_divergence(
            root=root,
            token_ids=sequence.input_keys,
            with_ssd=with_ssd and self.storage is not None,
            shared_root=self.shared_root(request.shared_scope),
        )
        own = plan.entries
        if request.shared_tenant is not None:
            parents = {root, *self._index.chain_names(root, sequence.input_keys)}
            own = tuple(entry for entry in own if entry.parent in parents)
        self._quotas.claim(own, root)
        self._eviction.note_use(plan.entries, now=self._clock.monotonic(), request_id=request.request_id)
        return plan

    def reusable(self, sequence: Sequence) -> list[BlockHash]:
        """Return the names of the blocks that a plan for this sequence would use; nothing is counted."""
        return [entry.hash for entry in self._reusable(sequence).entries]

    def reusable_token_count(self, sequence: Sequence) -> int:
        """Return how many tokens a plan for this sequence would use; nothing is counted."""
        return self._reusable(sequence).token_count

    def _reusable(self, sequence: Sequence) -> PrefixPlan:
        root, shared_root = self.root(sequence.request.scope), self.shared_root(sequence.request.shared_scope)
        with_ssd = self.storage is not None
        return self._planner.plan(
            root=root, token_ids=sequence.input_keys, with_ssd=with_ssd, shared_root=shared_root
        )

    def explain(self, command: Explain) -> Explanation:
        """Say what would be reused of a prompt, and how long that would take; notes no use."""
        prompt = command.prompt_token_ids
        plan = self._planner.plan_with_divergence(
            root=self.root(command.scope),
            token_ids=prompt,
            with_ssd=self.storage is not None,
            shared_root=self.shared_root(command.shared_scope),
        )
        ssd_bytes = self._planner.ssd_bytes(plan)
        restore_s = self.rates.restore_s(ssd_bytes=ssd_bytes, token_count=plan.token_count)
        rest_s = self.rates.prefill_s(len(prompt) - plan.token_count)
        cold_s = self.rates.prefill_s(len(prompt))
        return Explanation(
            cache=dataclasses.replace(plan.report, restore_s=restore_s),
            blocks=tuple(block_match(entry) for entry in plan.entries),
            predicted_ttft_s=restore_s + rest_s if cold_s else None,
            predicted_cold_ttft_s=cold_s or None,
        )

    def settle(self, request: GenerationRequest, report: CacheReport) -> None:
        """Count how a lookup ended, once its restore is done or given up."""
        self._counters.note_lookup(len(request.prompt_token_ids), report)
        self.rates.untried_count += report.limit is ReuseLimit.RECOMPUTE_FASTER

    def start_chain(self, sequence: Sequence, token_count: int) -> None:
        """Note that the sequence's caches begin with `token_count` reused tokens."""
        request, tokens = sequence.request, sequence.input_keys[:token_count]
        sequence.chain[:] = self._index.chain_names(self.root(request.scope), tokens)
        shared = self.shared_root(request.shared_scope)
        sequence.shared_chain[:] = [] if shared is None else self._index.chain_names(shared, tokens)

    # A restore: what is read, whether it came, and whether it was of use.

    def load(self, blocks: ReadSequence[PlannedBlock], into: KvPlace | NewRows) -> Ticket[Loaded] | None:
        """Have blocks read from SSD; None when the read queue is full, or the tier is lost by now."""
        ticket = None if self.storage is None else self.storage.get_into(blocks, into)
        self._counters.promote.load_total += ticket is not None
        return ticket

    def may_hold(self, plan: PrefixPlan) -> bool:
        """Whether RAM has room for what a plan loads, others' blocks aside."""
        return self._planner.ssd_bytes(plan) <= self._ram.limit_bytes

    def note_load_failed(self) -> None:
        """Count a load that brought nothing."""
        self._counters.promote.failed_load_total += 1

    def note_promoted(self, plan: PrefixPlan) -> None:
        """Count what a plan had loaded and a sequence's caches were rebuilt from."""
        self._counters.promote.promoted_block_total += len(plan.to_load)
        self._counters.promote.promoted_token_total += plan.report.ssd_token_count

    def reject(self, entries: ReadSequence[Entry]) -> None:
        """Remove blocks that do not make a cache from both tiers, so that they are not tried again."""
        self._counters.promote.failed_restore_total += 1
        self.remove(entries)

    def remove(self, entries: ReadSequence[Entry]) -> None:
        """Remove blocks from both tiers, whatever keeps them there."""
        stored = tuple(entry.hash for entry in entries if entry.ssd or entry.is_spilling)
        if stored:
            self._spills.remove(stored)
        for entry in entries:
            self._purge(entry)
            self.forget_stored(entry.hash)

    def note_prefill_rate(self, tokens_per_s: float) -> None:
        """Remember how fast this machine computes prompts."""
        self.rates.prefill_tokens_per_s = tokens_per_s

    # Blocks on their way into RAM, and out of it.

    def capture(self, sequence: Sequence, reached: int, *, is_end: bool) -> list[BlockHash]:
        """Keep the blocks that are complete where its caches have `reached`, with `is_end` the tail too;
        return the names."""
        if not self.may_write(sequence):
            return []
        size = self.settings.block_token_count
        position = min(reached, sequence.token_count)
        known_count = len(sequence.chain)
        for start in range(known_count * size, position - size + 1, size):
            name = self._keep(sequence, start, start + size, reached)
            sequence.chain.append(name)
        start = len(sequence.chain) * size
        names = list(sequence.chain)
        if is_end and start < position:
            names.append(self._keep(sequence, start, position, reached))
        if len(names) == known_count:
            return []
        found = (self._index.get(name) for name in names)
        self._ram.touch([entry for entry in found if entry is not None], self._clock.monotonic())
        return names[known_count:]

    def find(self, block: BlockHash) -> Entry | None:
        """Return a known block."""
        return self._index.get(block)

    def promote(self, sequence: Sequence, entry: Entry, regions: Mapping[RegionKind, Region]) -> None:
        """Put regions that this sequence read from SSD into RAM, where they are not there again by now."""
        self._index.learn_tokens(entry, sequence.keys(entry.start_token_index, entry.end_token_index))
        missing = {kind: region for kind, region in regions.items() if kind not in entry.ram}
        self._store(sequence, entry, missing)

    def yield_ram(
        self,
        size_bytes: int,
        *,
        spared: Collection[BlockHash] = (),
        is_urgent: bool = True,
        request_id: RequestId | None = None,
    ) -> int:
        """Let go of blocks in RAM so that requests have memory; return the bytes that are free now.

        Urgent, blocks are dropped; else what the SSD tier takes, for `request_id`, is free when written.
        """
        if is_urgent:
            return self._eviction.yield_bytes(size_bytes, spared=spared)
        return self._eviction.yield_by_spilling(size_bytes, spared=spared, request_id=request_id)

    def hand_over_spills(self, *, may_wait: bool) -> None:
        """Hand blocks to the storage thread whose copies are done; with `may_wait`, which no pass waits for,
        all."""
        self._spills.hand_over(may_wait=may_wait)

    def yieldable_bytes(self, *, spared: Collection[BlockHash] = ()) -> int:
        """Return the bytes that `yield_ram` could let go of, and those that are on their way."""
        return self._eviction.yieldable_bytes(spared=spared)

    @property
    def leaving_bytes(self) -> int:
        """Bytes of blocks that go from RAM as soon as they are written."""
        return self._eviction.leaving_bytes

    def begin_flush(self) -> Flush:
        """Return what brings to SSD all that RAM holds and SSD lacks."""
        return Flush(self._spills, [entry for entry in self._ram if self._spills.wants(entry)])

    # What the SSD tier reports.

    def take_inventory(
        self, records: ReadSequence[StoredBlock], *, is_first: bool = True, is_last: bool = True
    ) -> None:
        """Take in a part of what the SSD tier holds; after the last one it holds nothing else."""
        if is_first:
            self._unseen = {entry.hash for entry in self._index if entry.ssd}
        # A chain from its beginning, so that each block finds its owner in the one before it.
        for record in sorted(records, key=lambda record: record.start_token_index):
            self._add_stored(record)
        if is_last:
            self._is_inventory_due = False
            unseen, self._unseen = self._unseen, set()
            for name in unseen:
                self.forget_stored(name)

    def forget_stored(self, block: BlockHash) -> None:
        """Note that a block is gone from SSD."""
        entry = self._index.get(block)
        if entry is not None:
            self._quotas.note_stored(entry, before_bytes=entry.ssd_bytes, after_bytes=0)
            self._index.forget_stored(block)

    def _spill_ended(self, sent: Entry, outcome: Persisted | Failure) -> None:
        """Note that a block is committed on SSD, instead of shorter ones, or was dropped on its way."""
        if isinstance(outcome, Failure):
            if self._index.get(sent.hash) is sent:
                self._eviction.spill_ended(sent, is_kept_on_ssd=bool(sent.ssd))
            return
        entry, record = self._add_stored(outcome.record), outcome.record
        if shorter := tuple(other.hash for other in self._index.superseded(entry) if other.ssd):
            self._spills.remove(shorter)
        # An order to pin it that came after the commit may have come after its eviction, too.
        is_kept = record.pinned and not self._spills.is_to_be_removed(record.hash)
        self._eviction.spill_ended(entry, is_kept_on_ssd=is_kept)

    def lose_storage(self) -> None:
        """The SSD tier is gone for good: forget it and go on with RAM alone."""
        self._is_inventory_due = False
        for entry in list(self._index):
            self.forget_stored(entry.hash)
        self._eviction.lose_storage()

    # What commands ask for.

    def blocks(self, *, limit: int | None = None) -> list[Entry]:
        """Return every known block, or so many that were used or found last; one may be there twice."""
        return list(self._index) if limit is None else [*self._ram.latest(limit), *self._index.latest(limit)]

    def known_chain(self, token_ids: ReadSequence[int], scope: CacheScope) -> list[Entry]:
        """Return every known block that is wholly part of this prompt, in order."""
        return list(self._index.known_chain(root=self.root(scope), token_ids=token_ids))

    def pin_excess(self, entries: ReadSequence[Entry]) -> PinExcess | None:
        """Say what pinning these blocks would take too much of; None when it may be done."""
        return self._quotas.pin_excess(entries)

    def keep(self, entries: ReadSequence[Entry]) -> list[Entry]:
        """Keep blocks in RAM that were to leave it; return those for which there is no room. They are gone
        if they are not written."""
        return self._eviction.keep(entries, None)

    def pin(self, entries: ReadSequence[Entry], *, pinned: bool) -> None:
        """Pin or unpin blocks, as far as this thread decides it; `pin_stored` does the rest."""
        # The head of a chain last: when it may go again, it goes behind its tail.
        for entry in reversed(entries):
            self._quotas.set_pinned(entry, pinned=pinned)

    def pin_stored(self, blocks: Names, *, pinned: bool) -> Ticket[Names] | None:
        """Have blocks on SSD, or on their way there, pinned or unpinned; None when too much waits."""
        return self._spills.pin(blocks, pinned=pinned)

    def remove_stored(self, blocks: Names) -> Ticket[Purged] | None:
        """Order blocks to be removed from SSD, after those of every order before; None: too much waits."""
        return self._spills.remove(blocks)

    @property
    def is_removing(self) -> bool:
        """Whether blocks that are forgotten here are still on SSD: a quota or an order made them go."""
        return self._spills.removal_count > 0

    def purge(self, entries: ReadSequence[Entry], *, with_ssd: bool) -> None:
        """Remove blocks from RAM, pinned ones too; from the index as well where the SSD removes them."""
        for entry in entries:
            self._quotas.set_pinned(entry, pinned=False)
            self._purge(entry)
            if with_ssd:
                # Gone for whoever asks from now on: what pins or plans next must not count on it.
                self.forget_stored(entry.hash)

    def stats(self, storage: CacheStats | None) -> CacheStats:
        """Return the counters, with the SSD tier's when they are given."""
        parts = CountedParts(self.settings, self.facts, self._ram, self._quotas, self._counters, self.rates)
        detail = self.waits.hang_detail()
        return cache_stats(parts, storage, now=self._clock.monotonic(), hang_detail=detail)

    def _purge(self, entry: Entry) -> None:
        self._ram.drop(entry, is_purge=True)
        self._index.discard_if_empty(entry)

    def _add_stored(self, record: StoredBlock) -> Entry:
        self._unseen.discard(record.hash)
        known = self._index.get(record.hash)
        before_bytes = 0 if known is None else known.ssd_bytes
        entry = self._index.add_stored(record)
        self._quotas.note_stored(entry, before_bytes=before_bytes, after_bytes=entry.ssd_bytes)
        return entry

    def _keep(self, sequence: Sequence, start: int, stop: int, reached: int) -> BlockHash:
        """Put one block of the sequence into RAM unless all of it is there; return its hash."""
        root = self.root(sequence.request.scope)
        parent = sequence.chain[-1] if sequence.chain else root
        tokens = sequence.keys(start, stop)
        kinds = self._capture_rules.kinds_at(sequence, stop, reached)
        if not kinds:
            return self._index.name_of(parent=parent, token_ids=tokens)
        entry = self._index.add(parent=parent, start_token_index=start, token_ids=tokens)
        self._quotas.claim([entry], root)
        missing = [kind for kind in kinds if kind not in entry.ram]
        if missing:
            regions = self._runner.cut(sequence.sequence_id, start=start, stop=stop, kinds=missing)
            self._store(sequence, entry, regions)
        self._eviction.supersede(entry)
        if self._spills.is_on and self._is_cut_off(sequence):
            self._spills.offer(entry, request_id=sequence.request.request_id)
        self._index.discard_if_empty(entry)
        return entry.hash

    def _store(self, sequence: Sequence, entry: Entry, regions: Mapping[RegionKind, Region]) -> None:
        """Put regions of a block of the sequence into RAM if space can be made for them."""
        spared = {entry.hash}
        if self.facts.has_kv and not self._spills.is_on:
            # Without an SSD tier a block is worth nothing once one before it is gone.
            spared.update(sequence.chain)
        has_space = self._eviction.make_space(
            sum(region.size_bytes for region in regions.values()),
            spared=spared,
            owner=entry.owner,
            request_id=sequence.request.request_id,
        )
        if has_space:
            self._ram.put(entry, regions)

    def _is_cut_off(self, sequence: Sequence) -> bool:
        """Whether some block before has its kv on SSD only: what follows is then read from there."""
        pairs = itertools.zip_longest(sequence.chain, sequence.shared_chain)
        return self.facts.has_kv and not all(self._has_kv_in_ram(pair) for pair in pairs)

    def _has_kv_in_ram(self, names: ReadSequence[BlockHash | None]) -> bool:
        found = (self._index.get(name) for name in names if name is not None)
        return any(entry is not None and RegionKind.KV in entry.ram for entry in found)
