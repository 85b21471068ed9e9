"""Prefix cache as the engine's loop uses it: plan a prompt, keep what is computed, spill, follow the SSD.

Inference thread only. A block is captured when its last token has been computed, in prefill and
in decode alike, so that a cancelled request leaves its blocks behind and no step pays for many.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from collections.abc import Sequence as ReadSequence

from icehouse_server.clock import Clock
from icehouse_server.domain.blocks import Region, RegionKind
from icehouse_server.domain.events import CacheReport, ReuseLimit
from icehouse_server.domain.ids import BlockHash, CacheScope
from icehouse_server.domain.request import CacheUse, GenerationRequest
from icehouse_server.engine.core.sequence import Sequence
from icehouse_server.engine.prefix_cache.planner import Planner, PrefixPlan, Rates
from icehouse_server.engine.prefix_cache.tiers.capture import CaptureRules
from icehouse_server.engine.prefix_cache.tiers.counters import PrefixCounters
from icehouse_server.engine.prefix_cache.tiers.entry import Entry
from icehouse_server.engine.prefix_cache.tiers.eviction import RamEviction
from icehouse_server.engine.prefix_cache.tiers.index import BlockIndex, IndexRules
from icehouse_server.engine.prefix_cache.tiers.ports import CacheFacts, CacheRunner, StoragePort
from icehouse_server.engine.prefix_cache.tiers.ram_tier import RamTier
from icehouse_server.engine.prefix_cache.tiers.settings import PrefixSettings
from icehouse_server.engine.prefix_cache.tiers.spill import Spills
from icehouse_server.engine.prefix_cache.tiers.tenant_quota import TenantQuotas
from icehouse_server.storage.record import BlockRecord


class PrefixCache:
    """Index, RAM tier and the way to the SSD tier. `storage` is None without one."""

    def __init__(
        self,
        *,
        settings: PrefixSettings,
        facts: CacheFacts,
        runner: CacheRunner,
        storage: StoragePort | None,
        clock: Clock,
    ) -> None:
        self.settings = settings
        self.facts = facts
        self.index = BlockIndex(
            IndexRules(
                block_token_count=settings.block_token_count,
                has_kv=facts.has_kv,
                cuttable_inside=facts.cuttable_inside,
                needs_checkpoint=facts.needs_checkpoint,
                window_token_count=facts.window_token_count,
                name_secret=settings.name_secret,
            )
        )
        self.ram = RamTier(limit_bytes=settings.ram_limit_bytes)
        self.rates = Rates()
        self.counters = PrefixCounters()
        self.shares = TenantQuotas(
            limits=settings.shares,
            fingerprint=settings.fingerprint,
            adapters=settings.adapters,
            index=self.index,
            ram=self.ram,
        )
        self.spills = Spills(
            index=self.index,
            facts=facts,
            fingerprint=settings.fingerprint,
            policy=settings.spill_policy,
            min_prefix_token_count=settings.min_prefix_token_count,
            runner=runner,
            storage=storage,
            counters=self.counters,
            shares=self.shares,
        )
        self.eviction = RamEviction(ram=self.ram, index=self.index, spills=self.spills, shares=self.shares)
        self.planner = Planner(
            self.index,
            settings.fingerprint,
            self.rates,
            settings.may_recompute,
            settings.min_reuse_token_count,
        )
        self._runner = runner
        self._clock = clock
        self._capture_rules = CaptureRules(
            facts, settings.block_token_count, settings.checkpoint_interval_tokens
        )

    @property
    def storage(self) -> StoragePort | None:
        """The SSD tier; None without one, and when it is lost."""
        return self.spills.storage

    @property
    def is_supported(self) -> bool:
        return self.settings.is_enabled and not self.facts.unsupported_detail

    def root(self, scope: CacheScope) -> BlockHash:
        """Return h0 for this model, tenant and adapter."""
        return self.shares.root(scope)

    def shared_root(self, scope: CacheScope | None) -> BlockHash | None:
        """Return h0 of whose blocks may stand for missing ones; None for nobody's."""
        return None if scope is None else self.root(scope)

    def may_read(self, sequence: Sequence) -> bool:
        """Whether this sequence may reuse what is cached now."""
        reads = sequence.request.cache_use in (CacheUse.READ_WRITE, CacheUse.READ_ONLY)
        return self.is_supported and reads and not sequence.measures_prompt

    def plan(self, sequence: Sequence, *, with_ssd: bool = True) -> PrefixPlan:
        """Say what of a prompt is reused and from where, and count the lookup."""
        request = sequence.request
        if not self.settings.is_enabled or request.cache_use in (CacheUse.OFF, CacheUse.WRITE_ONLY):
            return PrefixPlan((), 0, CacheReport(limit=ReuseLimit.SWITCHED_OFF))
        if not self.is_supported:
            return PrefixPlan((), 0, CacheReport(limit=ReuseLimit.UNSUPPORTED))
        if sequence.measures_prompt:
            return PrefixPlan((), 0, CacheReport(limit=ReuseLimit.PROMPT_LOGPROBS))
        root = self.root(request.scope)
        plan = self.planner.plan(
            root=root,
            token_ids=sequence.input_token_ids,
            with_ssd=with_ssd and self.storage is not None,
            shared_root=self.shared_root(request.shared_scope),
        )
        own = plan.entries
        if request.shared_tenant is not None:
            parents = {root, *self.index.chain_names(root, sequence.input_token_ids)}
            own = tuple(entry for entry in own if entry.parent in parents)
        self.shares.claim(own, root)
        self._note_use(plan.entries)
        return plan

    def reusable(self, sequence: Sequence) -> list[BlockHash]:
        """Return the names of the blocks that a plan for this sequence would use; nothing is counted."""
        request = sequence.request
        plan = self.planner.plan(
            root=self.root(request.scope),
            token_ids=sequence.input_token_ids,
            with_ssd=self.storage is not None,
            shared_root=self.shared_root(request.shared_scope),
        )
        return [entry.hash for entry in plan.entries]

    def settle(self, request: GenerationRequest, report: CacheReport) -> None:
        """Count how a lookup ended, once its restore is done or given up."""
        self.counters.note_lookup(len(request.prompt_token_ids), report)

    def capture(self, sequence: Sequence, *, is_end: bool) -> None:
        """Keep the blocks that are complete at the sequence's position; with `is_end` the tail too."""
        if not self.may_write(sequence):
            return
        size = self.settings.block_token_count
        position = min(sequence.kv_token_count, sequence.token_count)
        known_count = len(sequence.chain)
        for start in range(known_count * size, position - size + 1, size):
            name = self._keep(sequence, start, start + size)
            sequence.chain.append(name)
        start = len(sequence.chain) * size
        names = list(sequence.chain)
        if is_end and start < position:
            names.append(self._keep(sequence, start, position))
        if len(names) == known_count:
            return
        found = (self.index.get(name) for name in names)
        self.ram.touch([entry for entry in found if entry is not None], self._clock.monotonic())

    def take_inventory(self, records: ReadSequence[BlockRecord]) -> None:
        """Replace what is known of the SSD tier."""
        for entry in list(self.index):
            if entry.ssd:
                self.forget_stored(entry.hash)
        # A chain from its beginning, so that each block finds its owner in the one before it.
        for record in sorted(records, key=lambda record: record.start_token_index):
            self._add_stored(record)

    def forget_stored(self, block: BlockHash) -> None:
        """Note that a block is gone from SSD."""
        entry = self.index.get(block)
        if entry is not None:
            self.shares.note_stored(entry, change_bytes=-entry.ssd_bytes)
            self.index.forget_stored(block)

    def note_persisted(self, record: BlockRecord) -> None:
        """Note that a block is committed on SSD: pinned there as here, and instead of shorter ones."""
        entry = self._add_stored(record)
        if self.storage is not None:
            if entry.is_pinned and not record.pinned:
                self.storage.pin([entry.hash])
            shorter = [other.hash for other in self._superseded(entry) if other.ssd]
            if shorter:
                self.storage.evict(shorter)
        self.spill_ended(record.hash)

    def lose_storage(self) -> None:
        """The SSD tier is gone for good: forget it and go on with RAM alone."""
        self.spills.lose_storage()
        for entry in list(self.index):
            self.forget_stored(entry.hash)
        self.eviction.lose_storage()

    @property
    def can_share(self) -> bool:
        """Whether any block that one sequence just computed lets another one start there; else only what was
        captured at the end of a prompt, or of a sequence, does."""
        return self.is_supported and self.facts.has_kv and not self.facts.needs_checkpoint

    def start_chain(self, sequence: Sequence, token_count: int) -> None:
        """Note that the sequence's caches begin with `token_count` reused tokens."""
        request, tokens = sequence.request, sequence.input_token_ids[:token_count]
        sequence.chain[:] = self.index.chain_names(self.root(request.scope), tokens)
        shared = self.shared_root(request.shared_scope)
        sequence.shared_chain[:] = [] if shared is None else self.index.chain_names(shared, tokens)

    def drop(self, entry: Entry) -> None:
        """Remove a block from RAM by order."""
        self.ram.drop(entry, by_order=True)
        self.index.discard_if_empty(entry)

    def reject(self, entries: ReadSequence[Entry]) -> None:
        """Remove blocks that do not make a cache from both tiers, so that they are not tried again."""
        stored = [entry.hash for entry in entries if entry.ssd or entry.is_spilling]
        if stored and self.storage is not None:
            self.storage.evict(stored)
        for entry in entries:
            self.drop(entry)
            self.forget_stored(entry.hash)

    def spill_ended(self, block: BlockHash) -> None:
        """Note that a spill was persisted or dropped; the RAM copy of an evicted block goes now."""
        entry = self.index.get(block)
        if entry is None:
            return
        self.spills.end(entry)
        self.eviction.spill_ended(entry)
        self.index.discard_if_empty(entry)

    def _add_stored(self, record: BlockRecord) -> Entry:
        known = self.index.get(record.hash)
        before_bytes = 0 if known is None else known.ssd_bytes
        entry = self.index.add_stored(record)
        self.shares.note_stored(entry, change_bytes=entry.ssd_bytes - before_bytes)
        return entry

    def _keep(self, sequence: Sequence, start: int, stop: int) -> BlockHash:
        """Put one block of the sequence into RAM unless all of it is there; return its hash."""
        parent = sequence.chain[-1] if sequence.chain else self.root(sequence.request.scope)
        tokens = sequence.tokens(start, stop)
        kinds = self._capture_rules.kinds_at(sequence, stop)
        if not kinds:
            return self.index.name_of(parent=parent, token_ids=tokens)
        entry = self.index.add(parent=parent, start_token_index=start, token_ids=tokens)
        self.shares.claim([entry], self.root(sequence.request.scope))
        missing = [kind for kind in kinds if kind not in entry.ram]
        if missing:
            regions = self._runner.cut(sequence.sequence_id, start=start, stop=stop, kinds=missing)
            self.store(entry, regions, chain=sequence.chain)
        self._supersede(entry)
        if self._is_cut_off(sequence) and self.spills.wants(entry) and self.spills.has_credit(entry):
            self.spills.send(entry)
        self.index.discard_if_empty(entry)
        return entry.hash

    def store(
        self, entry: Entry, regions: Mapping[RegionKind, Region], *, chain: ReadSequence[BlockHash]
    ) -> None:
        """Put regions into RAM if room can be made for them; `chain` is what the block follows."""
        spared = {entry.hash}
        if self.facts.has_kv and not self.spills.is_on:
            # Without an SSD tier a block is worth nothing once one before it is gone.
            spared.update(chain)
        size_bytes = sum(region.size_bytes for region in regions.values())
        if self.eviction.make(size_bytes, spared=spared, owner=entry.owner):
            self.ram.put(entry, regions)

    def _is_cut_off(self, sequence: Sequence) -> bool:
        """Whether some block before has its kv on SSD only: what follows is then read from there."""
        pairs = itertools.zip_longest(sequence.chain, sequence.shared_chain)
        return self.facts.has_kv and not all(self._has_kv_in_ram(pair) for pair in pairs)

    def _has_kv_in_ram(self, names: ReadSequence[BlockHash | None]) -> bool:
        found = (self.index.get(name) for name in names if name is not None)
        return any(entry is not None and RegionKind.KV in entry.ram for entry in found)

    def _supersede(self, entry: Entry) -> None:
        """Let go of shorter blocks in RAM that this one can stand for."""
        if entry.ram:
            for other in self._superseded(entry):
                self.ram.forget(other)
                self.index.discard_if_empty(other)

    def _superseded(self, entry: Entry) -> list[Entry]:
        """Return the shorter blocks with the same beginning that nobody pinned."""
        tokens = entry.token_ids
        if tokens is None or not self.facts.cuttable_inside:
            return []
        return [
            other
            for other in self.index.children(entry.parent)
            if other.token_count < entry.token_count
            and not other.is_pinned
            and all(entry.has(kind, with_ssd=True) for kind in (*other.ram, *other.ssd))
            and other.hash == self.index.name_of(parent=entry.parent, token_ids=tokens[: other.token_count])
        ]

    def _note_use(self, entries: ReadSequence[Entry]) -> None:
        now = self._clock.monotonic()
        self.ram.touch(entries, now)
        stored = [entry.hash for entry in reversed(entries) if entry.ssd]
        if stored and self.storage is not None:
            self.storage.touch(stored)
        spared = [entry.hash for entry in entries]
        for entry in entries:
            entry.hit_count += 1
            self.eviction.keep(entry)
            is_early = self.settings.spill_policy == "write_behind"
            if is_early and self.spills.wants(entry) and self.spills.has_credit(entry):
                self.spills.send(entry, spared=spared)

    def may_write(self, sequence: Sequence) -> bool:
        """Whether this request's blocks are kept for others."""
        return self.is_supported and sequence.request.cache_use in (CacheUse.READ_WRITE, CacheUse.WRITE_ONLY)
