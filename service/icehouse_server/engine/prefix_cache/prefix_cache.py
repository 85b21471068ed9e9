"""Prefix cache as the engine's loop uses it: it plans prompts, captures blocks and follows the SSD tier.

Inference thread only. A block is captured as soon as its last token is computed, in prefill and in decode
alike. So a cancelled request still leaves its blocks, and no step has to capture many.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as ReadSequence

from icehouse_server.clock import Clock
from icehouse_server.domain.blocks import RegionKind, TokenKeys
from icehouse_server.domain.cache_commands import BlockMatch, Explain, Explanation, SessionEndReport, Tier
from icehouse_server.domain.cache_stats import (
    CacheStats,
    DiskStats,
    LookupStats,
    MissTokens,
    PromoteStats,
    SpillDrops,
)
from icehouse_server.domain.events import CacheReport, ReuseLimit
from icehouse_server.domain.ids import BlockHash, CacheScope, SequenceId, SessionKey, Tenant
from icehouse_server.domain.request import CacheUse, GenerationRequest
from icehouse_server.engine.core.block_log import BlockLog
from icehouse_server.engine.core.sequence import Sequence
from icehouse_server.engine.prefix_cache.capture import captured_kinds
from icehouse_server.engine.prefix_cache.prefetched import PrefetchedTokens
from icehouse_server.engine.prefix_cache.reuse_plan import Plan, plan, with_divergence
from icehouse_server.engine.prefix_cache.sessions import Sessions
from icehouse_server.engine.prefix_cache.tiers.account import Owner
from icehouse_server.engine.prefix_cache.tiers.matching import LookupPrompt, known_chain, match, unread_nodes
from icehouse_server.engine.prefix_cache.tiers.node import Hashes, Node, Regions
from icehouse_server.engine.prefix_cache.tiers.prefix_settings import PrefixSettings
from icehouse_server.engine.prefix_cache.tiers.ram import RamTier
from icehouse_server.engine.prefix_cache.tiers.runner_port import CacheFacts, CacheRunner
from icehouse_server.engine.prefix_cache.tiers.spill import Spills
from icehouse_server.engine.prefix_cache.tiers.storage_waits import Awaited, Rates, Steps, StorageWaits
from icehouse_server.engine.prefix_cache.tiers.tenant_quota import TenantQuotas
from icehouse_server.engine.prefix_cache.tiers.tree import PrefixTree
from icehouse_server.engine.prefix_cache.tiers.write_behind import Turn, WriteBehind
from icehouse_server.pins import NOT_PINNED, pin_end_time
from icehouse_server.storage.api import BlockPersisted, ColdTier, Inventory, StorageFailure, StoredBlock


class PrefixCache:
    """The prefix tree, the RAM tier and the spills. `storage` is the SSD tier, or None without one."""

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
        self.runner = runner
        self._clock = clock
        self.tree = PrefixTree(settings, facts, BlockLog() if log is None else log)
        self.rates = Rates(settings.measured_on)
        self.waits = StorageWaits(storage, self.rates, clock)
        self.lookups = LookupStats()
        self.restores = PromoteStats()
        self.prefetched = PrefetchedTokens(has_kv=facts.has_kv)
        self.miss_token_totals: Counter[ReuseLimit] = Counter()
        self.quotas = TenantQuotas(self.tree)
        self.spills = Spills(
            self.tree, quotas=self.quotas, runner=runner, waits=self.waits, ended=self._spill_ended
        )
        self.behind = WriteBehind(self.tree, spills=self.spills, clock=clock)
        self.ram = RamTier(self.tree, spills=self.spills, quotas=self.quotas)
        self.sessions = Sessions(self.tree)
        self.spills.is_over = self.sessions.has_ended
        self.used_by: dict[SequenceId, set[BlockHash]] = {}
        """Blocks whose regions live sequences share: dropping one frees nothing until these end."""
        self.is_inventory_due = storage is not None
        """Whether the content of the SSD tier is still unknown."""
        self._unseen: set[BlockHash] = set()
        """Blocks known to be on SSD that the current inventory has not named yet."""

    # What may be reused, and by whom.

    @property
    def storage(self) -> ColdTier | None:
        """The SSD tier; None without one, and once it is lost."""
        return self.waits.storage

    @property
    def is_supported(self) -> bool:
        return self.settings.is_enabled and not self.facts.unsupported_detail

    @property
    def can_share(self) -> bool:
        """Whether another sequence can start after any computed block, not only after a checkpoint."""
        return self.is_supported and self.facts.has_kv and not self.facts.needs_checkpoint

    @property
    def checkpoint_block_token_count(self) -> int:
        """The block size if prefill must stop at a prompt's last full block for a checkpoint, else 0."""
        needs_one = self.is_supported and self.facts.needs_checkpoint
        return self.settings.block_token_count if needs_one else 0

    def may_read(self, sequence: Sequence) -> bool:
        """Whether this sequence may reuse cached blocks."""
        reads = sequence.request.cache_use in (CacheUse.READ_WRITE, CacheUse.READ_ONLY)
        return self.is_supported and reads and not sequence.measures_prompt

    def may_write(self, sequence: Sequence) -> bool:
        """Whether this request's blocks are cached for others."""
        return self.is_supported and sequence.request.cache_use in (CacheUse.READ_WRITE, CacheUse.WRITE_ONLY)

    def prompt(
        self, keys: ReadSequence[int], *, scope: CacheScope, shared_scope: CacheScope | None = None
    ) -> LookupPrompt:
        """Return tokens as a prompt to look up; blocks of `shared_scope` may stand in for missing ones."""
        shared_root = None if shared_scope is None else self.quotas.root(shared_scope)
        return LookupPrompt(tuple(keys), self.quotas.root(scope), shared_root)

    def prompt_of(self, sequence: Sequence) -> LookupPrompt:
        """Return a sequence's input as a prompt to look up."""
        request = sequence.request
        return self.prompt(sequence.input_keys, scope=request.scope, shared_scope=request.shared_scope)

    # A prompt: what is known of it, and the plan.

    def read_headers(self, prompt: LookupPrompt, *, token_count: int) -> Steps[None]:
        """Read the headers of blocks that may begin like the rest of this prompt, so that it can match inside
        one: after a restart their names are known, but not their tokens. Each is read once; none if the read
        queue is full."""
        if self.storage is None or self.rates.reads_hang:
            return
        names = tuple(node.hash for node in unread_nodes(self.tree, prompt))
        ticket = self.storage.heads(names) if names else None
        if ticket is not None:
            outcome = yield Awaited(ticket, token_count)
            for header in () if isinstance(outcome, StorageFailure) else outcome:
                self.tree.learn_header(header)

    def plan(self, sequence: Sequence, *, with_ssd: bool = True) -> Plan:
        """Plan how much of a prompt is reused and from which tier, and record the use."""
        request = sequence.request
        if not self.settings.is_enabled or request.cache_use in (CacheUse.OFF, CacheUse.WRITE_ONLY):
            return Plan((), 0, CacheReport(limit=ReuseLimit.SWITCHED_OFF))
        if not self.is_supported:
            return Plan((), 0, CacheReport(limit=ReuseLimit.UNSUPPORTED))
        if sequence.measures_prompt:
            return Plan((), 0, CacheReport(limit=ReuseLimit.PROMPT_LOGPROBS))
        prompt = self.prompt_of(sequence)
        made = plan(self.tree, prompt, self.rates, with_ssd=with_ssd and self.storage is not None)
        made = with_divergence(self.tree, prompt, made)
        own: Iterable[Node] = made.nodes
        if not prompt.is_own:
            parents = {prompt.root, *self.tree.chain_names(prompt.root, prompt.keys)}
            own = (node for node in own if node.parent in parents)
        self.tree.claim(own, prompt.root)
        self.ram.note_use(made.nodes, now=self._clock.monotonic(), request_id=request.request_id)
        parent = self.sessions.key_of(request.tenant, request.parent_session_id)
        self.sessions.note_use(request.tenant, self._session_of(sequence), made.nodes, parent=parent)
        self.behind.note(made.nodes, Turn.LIKELY)
        self.prefetched.note_use(sequence, made)
        return made

    def planned_blocks(self, sequence: Sequence) -> frozenset[BlockHash]:
        """Return the blocks that a sequence would reuse if it began now."""
        nodes = self.reusable(sequence).nodes if self.may_read(sequence) else ()
        return frozenset(node.hash for node in nodes)

    def reusable(self, sequence: Sequence) -> Plan:
        """Return the plan that `plan` would make, without recording a use."""
        return plan(self.tree, self.prompt_of(sequence), self.rates, with_ssd=self.storage is not None)

    def explain(self, command: Explain) -> Explanation:
        """Return how much of a prompt would be reused, and how long that would take; records no use."""
        keys = command.prompt_token_ids
        prompt = self.prompt(keys, scope=command.scope, shared_scope=command.shared_scope)
        made = plan(self.tree, prompt, self.rates, with_ssd=self.storage is not None)
        made = with_divergence(self.tree, prompt, made)
        restore_s = self.rates.restore_s(ssd_bytes=made.ssd_bytes, token_count=made.token_count)
        rest_s = self.rates.prefill_s(len(keys) - made.token_count)
        cold_s = self.rates.prefill_s(len(keys))
        return Explanation(
            cache=dataclasses.replace(made.report, restore_s=restore_s),
            blocks=tuple(_block_match(node, readers=self.quotas.kin_of(prompt.root)) for node in made.nodes),
            predicted_ttft_s=restore_s + rest_s if cold_s else None,
            predicted_cold_ttft_s=cold_s or None,
        )

    def settle(self, request: GenerationRequest, report: CacheReport) -> None:
        """Count the outcome of a lookup once its restore has finished or failed."""
        if request.is_prefetch:
            return  # nobody waits for it
        lookups = self.lookups
        is_recomputed = report.limit is ReuseLimit.RECOMPUTE_FASTER
        lookups.lookup_total += 1
        lookups.hit_total += report.cached_token_count > 0
        lookups.ram_token_total += report.ram_token_count
        lookups.ssd_token_total += report.ssd_token_count
        self.restores.recompute_chosen_total += is_recomputed
        self.miss_token_totals[report.limit] += len(request.prompt_token_ids) - report.cached_token_count
        self.rates.untried_count += is_recomputed
        if is_recomputed or report.ssd_token_count:
            self.keep_rates()

    def keep_rates(self) -> None:
        """Store the measured rates on SSD for the next start."""
        learned = self.rates.learned
        if learned is not None and self.storage is not None:
            self.storage.keep_rates(learned)  # if its queue is full, the next load tries again

    def start_chain(self, sequence: Sequence, token_count: int) -> None:
        """Record that the sequence's caches begin with `token_count` reused tokens."""
        prompt = self.prompt_of(sequence)
        keys, shared = prompt.keys[:token_count], prompt.shared_root
        sequence.chain[:] = self.tree.chain_names(prompt.root, keys)
        sequence.shared_chain[:] = [] if shared is None else self.tree.chain_names(shared, keys)

    # Blocks on their way into RAM and to SSD.

    def capture(self, sequence: Sequence, reached: int, *, is_end: bool) -> list[BlockHash]:
        """Capture the blocks completed by position `reached`, at the end the tail too; return new names."""
        if not self.may_write(sequence):
            return []
        size = self.settings.block_token_count
        position = min(reached, sequence.token_count)
        known_count = len(sequence.chain)
        for start in range(known_count * size, position - size + 1, size):
            sequence.chain.append(self._capture_block(sequence, start, start + size, reached))
        start = len(sequence.chain) * size
        names = list(sequence.chain)
        if is_end and start < position:
            names.append(self._capture_block(sequence, start, position, reached))
        if len(names) > known_count:
            self._touch(sequence, names)
        return names[known_count:]

    def promote(self, sequence: Sequence, node: Node, regions: Regions, *, protected: Hashes = ()) -> None:
        """Put regions that this sequence read from SSD into RAM, unless they are there by now. No `protected`
        block is evicted for them."""
        self.tree.learn_keys(node, sequence.keys(node.start_token_index, node.end_token_index))
        missing = {kind: region for kind, region in regions.items() if kind not in node.ram}
        self._put(sequence, node, missing, protected=protected)
        self._touch(sequence, sequence.chain)

    def _capture_block(self, sequence: Sequence, start: int, stop: int, reached: int) -> BlockHash:
        """Put the missing regions of one block of the sequence into RAM; return its name."""
        root = self.quotas.root(sequence.request.scope)
        parent = sequence.chain[-1] if sequence.chain else root
        keys = sequence.keys(start, stop)
        kinds = captured_kinds(self.settings, self.facts, sequence, stop=stop, reached=reached)
        if not kinds:
            return self.tree.name_of(parent, keys)
        node = self.tree.insert(parent=parent, start_token_index=start, keys=keys)
        is_new = not (node.ram or node.ssd or node.spill)
        self.tree.claim([node], root)
        missing = [kind for kind in kinds if kind not in node.ram]
        if missing:
            regions = self.runner.cut(sequence.sequence_id, start=start, stop=stop, kinds=missing)
            self._put(sequence, node, regions)
        self.ram.supersede(node)
        if is_new:
            self.prefetched.note_computed(sequence, node)
        self._note_computed(sequence, node, reached, is_new=is_new)
        if self.spills.is_on and self._is_cut_off(sequence):
            self.spills.offer(node, request_id=sequence.request.request_id)
        elif node.token_count == self.settings.block_token_count:  # a longer block soon replaces a tail
            self.behind.note([node], Turn.LIKELY if sequence.request.session_id else Turn.OTHER)
        self.tree.prune(node)
        return node.hash

    def _note_computed(self, sequence: Sequence, node: Node, reached: int, *, is_new: bool) -> None:
        """Record a block in the sequence's session, and drop checkpoints beyond the session's limit."""
        key = self._session_of(sequence)
        self.sessions.note_computed(sequence.request.tenant, key, node, is_new=is_new)
        if self.sessions.has_surplus(node):
            resumed = self._resumed(sequence, reached)
            for surplus in self.sessions.take_surplus(node, resumed=resumed):
                self._drop_checkpoint(surplus)

    def _resumed(self, sequence: Sequence, reached: int) -> Node | None:
        """Return the block whose checkpoint the same prompt, as far as computed, would resume from."""
        keys = sequence.keys(0, min(reached + 1, len(sequence.request.prompt_token_ids)))
        prompt = self.prompt(keys, scope=sequence.request.scope)
        nodes = match(self.tree, prompt, with_ssd=self.storage is not None).nodes
        return nodes[-1] if nodes else None

    def _drop_checkpoint(self, node: Node) -> None:
        """Drop a block's checkpoint from RAM, or the whole block from both tiers if the rest is useless.

        In the first case the checkpoint stays on SSD: it is in the same file as the rest of the block.
        """
        is_full = node.token_count == self.settings.block_token_count
        if is_full and (self.facts.has_kv or self.facts.window_token_count):
            self.tree.drop_region(node, RegionKind.CHECKPOINT)
            return
        if (node.ssd or node.is_spilling) and self.spills.remove((node.hash,)) is not None:
            self.tree.forget_stored(node.hash)
        self.tree.drop(node)

    def end_session(self, tenant: Tenant, session_id: str) -> SessionEndReport:
        """Make the blocks that only this session and its children have used the next to be evicted."""
        key = self.sessions.key_of(tenant, session_id)
        nodes = [] if key is None else self.sessions.end(key)
        self.spills.demote(nodes)
        return SessionEndReport(
            block_count=len(nodes),
            ram_bytes=sum(node.ram_bytes for node in nodes),
            ssd_bytes=sum(node.ssd_bytes for node in nodes),
        )

    def _put(self, sequence: Sequence, node: Node, regions: Regions, *, protected: Hashes = ()) -> None:
        """Put regions of a block of the sequence into RAM if space can be made for them."""
        # Without an SSD tier a block is useless once one before it is evicted.
        chain = sequence.chain if self.facts.has_kv and not self.spills.is_on else ()
        stay = {*protected, *chain}
        self.ram.put(node, regions, protected=stay, request_id=sequence.request.request_id)
        if self.facts.shares_blocks:
            self.used_by.setdefault(sequence.sequence_id, set()).add(node.hash)

    def _is_cut_off(self, sequence: Sequence) -> bool:
        """Whether an earlier block has its kv on SSD only: all blocks after it are then read from SSD too."""
        pairs = itertools.zip_longest(sequence.chain, sequence.shared_chain)
        return self.facts.has_kv and not all(
            any(RegionKind.KV in node.ram for node in self._known(pair)) for pair in pairs
        )

    def _touch(self, sequence: Sequence, names: Iterable[BlockHash]) -> None:
        """Record that this sequence, and so its session, uses a chain."""
        nodes = self._known(names)
        self.tree.touch(nodes, now=self._clock.monotonic())
        self.sessions.share(self._session_of(sequence), nodes)

    def _session_of(self, sequence: Sequence) -> SessionKey | None:
        return self.sessions.key_of(sequence.request.tenant, sequence.request.session_id)

    def _known(self, names: Iterable[BlockHash | None]) -> list[Node]:
        nodes = (self.tree.get(name) for name in names if name is not None)
        return [node for node in nodes if node is not None]

    # What the SSD tier reports.

    def take_inventory(self, part: Inventory) -> None:
        """Record part of the SSD tier's content; after the last part, forget blocks that no part named."""
        if part.rates is not None:
            self.rates.recall(part.rates)
        if part.is_first:
            self._unseen = {node.hash for node in self.tree if node.ssd}
        # Parents first, so that each block gets its owner from its parent.
        for record in sorted(part.records, key=lambda record: record.start_token_index):
            self._add_stored(record)
        if part.is_last:
            self.is_inventory_due = False
            unseen, self._unseen = self._unseen, set()
            for name in unseen:
                self.tree.forget_stored(name)

    def _spill_ended(self, sent: Node, outcome: BlockPersisted | StorageFailure) -> None:
        """Record that a block is committed on SSD, replacing shorter ones, or was dropped on its way."""
        self.behind.note_end(sent, outcome)
        if isinstance(outcome, StorageFailure):
            if self.tree.get(sent.hash) is sent:
                self.ram.end_spill(sent, is_pinned_on_ssd=bool(sent.ssd))
            return
        node, record = self._add_stored(outcome.record), outcome.record
        if shorter := tuple(other.hash for other in self.tree.superseded(node) if other.ssd):
            self.spills.remove(shorter)
        if self.sessions.has_ended(node):
            self.spills.demote([node])
        # The pin may have been ordered after the commit, and thus after the block's eviction.
        is_pinned = record.pin_end_time > NOT_PINNED and not self.spills.is_to_be_removed(record.hash)
        self.ram.end_spill(node, is_pinned_on_ssd=is_pinned)

    def _add_stored(self, record: StoredBlock) -> Node:
        self._unseen.discard(record.hash)
        return self.tree.store(record)

    def lose_storage(self) -> None:
        """The SSD tier is lost for good: forget its blocks and continue with RAM alone."""
        self.is_inventory_due = False
        for node in list(self.tree):
            self.tree.forget_stored(node.hash)
        self.ram.lose_storage()
        self.behind.lose_storage()

    def close(self) -> None:
        """Drop every block in RAM: the model is being unloaded."""
        for node in list(self.tree.in_ram()):
            self.tree.drop(node)

    # What commands ask for.

    def known_chain(self, keys: TokenKeys, scope: CacheScope) -> list[Node]:
        """Return every known block that is wholly part of this prompt, in order."""
        return known_chain(self.tree, self.prompt(keys, scope=scope))

    def pin(self, nodes: ReadSequence[Node], end_time: float) -> None:
        """Pin or unpin blocks in the tree; the SSD tier does so by itself."""
        # The head of a chain last, so that once unpinned it is evicted after its tail.
        for node in reversed(nodes):
            self.tree.set_pin(node, pin_end_time(node.pin_end_time, end_time))
        if end_time != NOT_PINNED:
            self.behind.note(nodes, Turn.PINNED)

    def remove(self, nodes: ReadSequence[Node]) -> None:
        """Remove blocks, pinned ones too, from all tiers and from the store shared with other servers."""
        self.spills.remove(tuple(node.hash for node in nodes), is_final=True)
        self.purge(nodes, with_ssd=True)

    def purge(self, nodes: ReadSequence[Node], *, with_ssd: bool) -> None:
        """Drop blocks from RAM, pinned ones too; `with_ssd`, if SSD removes them, from the tree too."""
        for node in nodes:
            self.tree.set_pin(node, NOT_PINNED)
            self.ram.purge(node)
            if with_ssd:
                # Gone from now on: the next pin or plan must not count on it.
                self.tree.forget_stored(node.hash)

    def stats(self, storage: CacheStats | None) -> CacheStats:
        """Return the counters, including the SSD tier's if given."""
        theirs = storage or CacheStats()
        promote = dataclasses.replace(
            self.restores,
            read_bytes_per_s=self.rates.read_bytes_per_s,
            restore_tokens_per_s=self.rates.adopt_tokens_per_s,
            recompute_tokens_per_s=self.rates.prefill_tokens_per_s,
        )
        # One thread counts each number; the other thread has 0 for it.
        names = [field.name for field in dataclasses.fields(PromoteStats)]
        both = {name: getattr(promote, name) + getattr(theirs.promote, name) for name in names}
        drops = Counter({drop.cause: drop.block_total for drop in theirs.spill.drops})
        disk, hang_detail = theirs.disk, self.waits.hang_detail()
        if hang_detail:
            disk = dataclasses.replace(disk or DiskStats(), hang_detail=hang_detail)
        return dataclasses.replace(
            theirs,
            block_token_limit=self.settings.block_token_count,
            unsupported_detail=self.facts.unsupported_detail,
            lookups=dataclasses.replace(self.lookups, miss_tokens=MissTokens.of(self.miss_token_totals)),
            ram=self.ram.snapshot(now=self._clock.monotonic()),
            spill=dataclasses.replace(
                theirs.spill,
                drops=SpillDrops.of(drops + self.spills.drop_totals),
                policy=self.settings.spill_policy,
                behind_block_total=self.behind.block_total,
                behind_byte_total=self.behind.byte_total,
                behind_waiting_count=self.behind.waiting_count,
            ),
            promote=PromoteStats(**both),
            disk=disk,
            sessions=self.sessions.snapshot(),
            prefetch=self.prefetched.snapshot(),
            tenants=self.quotas.snapshot(),
        )


def _block_match(node: Node, *, readers: frozenset[Owner]) -> BlockMatch:
    """Return what a caller sees of a block of its prompt; the session only if the block is the caller's."""
    return BlockMatch(
        hash=node.hash,
        start_token_index=node.start_token_index,
        token_count=node.token_count,
        size_bytes=node.size_bytes,
        tier=Tier.RAM if node.ram else Tier.SSD,
        has_checkpoint=node.has(RegionKind.CHECKPOINT, with_ssd=True),
        pinned=node.is_pinned,
        session=node.session if node.owner in readers else None,
    )
