"""Prefix cache as the engine's loop uses it: it plans prompts, captures blocks and follows the SSD tier.

Inference thread only. A block is captured as soon as its last token has been computed, in prefill and in
decode alike, so that a cancelled request leaves its blocks behind and no step has to capture many.
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
from icehouse_server.engine.prefix_cache.tiers.matching import Prompt, known_chain, match, unread_nodes
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
from icehouse_server.storage.api import ColdTier, Failure, Inventory, Persisted, StoredBlock


class PrefixCache:
    """The prefix tree, the RAM tier and the spills to the SSD tier. `storage` is None without one."""

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
        """Blocks whose regions live sequences share: to drop one frees nothing before these end."""
        self.is_inventory_due = storage is not None
        """Whether the content of the SSD tier is still unknown."""
        self._unseen: set[BlockHash] = set()
        """Blocks that were on SSD and that the inventory under way has not named yet."""

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
        """Whether this request's blocks are cached for others."""
        return self.is_supported and sequence.request.cache_use in (CacheUse.READ_WRITE, CacheUse.WRITE_ONLY)

    def prompt(
        self, keys: ReadSequence[int], *, scope: CacheScope, shared_scope: CacheScope | None = None
    ) -> Prompt:
        """Return tokens as a prompt to look up; blocks of `shared_scope` may replace missing ones."""
        shared_root = None if shared_scope is None else self.quotas.root(shared_scope)
        return Prompt(tuple(keys), self.quotas.root(scope), shared_root)

    def prompt_of(self, sequence: Sequence) -> Prompt:
        """Return a sequence's input as a prompt to look up."""
        request = sequence.request
        return self.prompt(sequence.input_keys, scope=request.scope, shared_scope=request.shared_scope)

    # A prompt: what is known of it, and the plan.

    def read_headers(self, prompt: Prompt, *, token_count: int) -> Steps[None]:
        """Have the headers read of blocks that may begin like the rest of this prompt, so that it may match
        inside one: after a restart their names are known, but not their tokens. Each is read once; none
        where the read queue is full."""
        if self.storage is None or self.rates.reads_hang:
            return
        names = tuple(node.hash for node in unread_nodes(self.tree, prompt))
        ticket = self.storage.heads(names) if names else None
        if ticket is not None:
            outcome = yield Awaited(ticket, token_count)
            for header in () if isinstance(outcome, Failure) else outcome:
                self.tree.learn_header(header)

    def plan(self, sequence: Sequence, *, with_ssd: bool = True) -> Plan:
        """Plan what of a prompt is reused and from where, and record the use."""
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
        """Return the blocks that a sequence which has not begun would start from."""
        nodes = self.reusable(sequence).nodes if self.may_read(sequence) else ()
        return frozenset(node.hash for node in nodes)

    def reusable(self, sequence: Sequence) -> Plan:
        """Return the same plan without recording a use."""
        return plan(self.tree, self.prompt_of(sequence), self.rates, with_ssd=self.storage is not None)

    def explain(self, command: Explain) -> Explanation:
        """Return what would be reused of a prompt, and how long that would take; records no use."""
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
        """Count the outcome of a lookup, once its restore is done or given up."""
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
        """Have what was learned of speed kept for the next start."""
        learned = self.rates.learned
        if learned is not None and self.storage is not None:
            self.storage.keep_rates(learned)  # where its queue is full, the next load tells more

    def start_chain(self, sequence: Sequence, token_count: int) -> None:
        """Record that the sequence's caches begin with `token_count` reused tokens."""
        prompt = self.prompt_of(sequence)
        keys, shared = prompt.keys[:token_count], prompt.shared_root
        sequence.chain[:] = self.tree.chain_names(prompt.root, keys)
        sequence.shared_chain[:] = [] if shared is None else self.tree.chain_names(shared, keys)

    # Blocks on their way into RAM and to SSD.

    def capture(self, sequence: Sequence, reached: int, *, is_end: bool) -> list[BlockHash]:
        """Cache the blocks complete where its caches have `reached`, at its end the tail too, by name."""
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
        """Put regions that this sequence read from SSD into RAM, unless they are there by now. `protected`
        blocks do not go for them."""
        self.tree.learn_keys(node, sequence.keys(node.start_token_index, node.end_token_index))
        missing = {kind: region for kind, region in regions.items() if kind not in node.ram}
        self._put(sequence, node, missing, protected=protected)
        self._touch(sequence, sequence.chain)

    def _capture_block(self, sequence: Sequence, start: int, stop: int, reached: int) -> BlockHash:
        """Put one block of the sequence into RAM unless all of it is there; return its name."""
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
        elif node.token_count == self.settings.block_token_count:  # a tail is soon part of a longer block
            self.behind.note([node], Turn.LIKELY if sequence.request.session_id else Turn.OTHER)
        self.tree.prune(node)
        return node.hash

    def _note_computed(self, sequence: Sequence, node: Node, reached: int, *, is_new: bool) -> None:
        """Tell the sequence's session of a block, and drop the checkpoints that are too many then."""
        key = self._session_of(sequence)
        self.sessions.note_computed(sequence.request.tenant, key, node, is_new=is_new)
        if self.sessions.has_surplus(node):
            resumed = self._resumed(sequence, reached)
            for surplus in self.sessions.take_surplus(node, resumed=resumed):
                self._drop_checkpoint(surplus)

    def _resumed(self, sequence: Sequence, reached: int) -> Node | None:
        """Return the block whose checkpoint the same prompt would resume from, as far as it is computed."""
        keys = sequence.keys(0, min(reached + 1, len(sequence.request.prompt_token_ids)))
        prompt = self.prompt(keys, scope=sequence.request.scope)
        nodes = match(self.tree, prompt, with_ssd=self.storage is not None).nodes
        return nodes[-1] if nodes else None

    def _drop_checkpoint(self, node: Node) -> None:
        """Drop a block's checkpoint, and all of the block where nothing else of it is of use.

        A block on SSD that others follow keeps its checkpoint there: it is in the same file.
        """
        is_full = node.token_count == self.settings.block_token_count
        if is_full and (self.facts.has_kv or self.facts.window_token_count):
            self.tree.drop_region(node, RegionKind.CHECKPOINT)
            return
        if (node.ssd or node.is_spilling) and self.spills.remove((node.hash,)) is not None:
            self.tree.forget_stored(node.hash)
        self.tree.drop(node)

    def end_session(self, tenant: Tenant, session_id: str) -> SessionEndReport:
        """Have the blocks that only this session and its children have used evicted first."""
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
        # Without an SSD tier a block is useless once one before it is gone.
        chain = sequence.chain if self.facts.has_kv and not self.spills.is_on else ()
        stay = {*protected, *chain}
        self.ram.put(node, regions, protected=stay, request_id=sequence.request.request_id)
        if self.facts.shares_blocks:
            self.used_by.setdefault(sequence.sequence_id, set()).add(node.hash)

    def _is_cut_off(self, sequence: Sequence) -> bool:
        """Whether some block before has its kv on SSD only: those that follow are then read from there."""
        pairs = itertools.zip_longest(sequence.chain, sequence.shared_chain)
        return self.facts.has_kv and not all(
            any(RegionKind.KV in node.ram for node in self._known(pair)) for pair in pairs
        )

    def _touch(self, sequence: Sequence, names: Iterable[BlockHash]) -> None:
        """Record that a chain is used by this sequence, and so by its session."""
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
        """Record a part of what the SSD tier contains; after the last part it contains nothing else."""
        if part.rates is not None:
            self.rates.recall(part.rates)
        if part.is_first:
            self._unseen = {node.hash for node in self.tree if node.ssd}
        # A chain from its beginning, so that each block gets its owner from the one before it.
        for record in sorted(part.records, key=lambda record: record.start_token_index):
            self._add_stored(record)
        if part.is_last:
            self.is_inventory_due = False
            unseen, self._unseen = self._unseen, set()
            for name in unseen:
                self.tree.forget_stored(name)

    def _spill_ended(self, sent: Node, outcome: Persisted | Failure) -> None:
        """Record that a block is committed on SSD, instead of shorter ones, or was dropped on its way."""
        self.behind.note_end(sent, outcome)
        if isinstance(outcome, Failure):
            if self.tree.get(sent.hash) is sent:
                self.ram.end_spill(sent, is_pinned_on_ssd=bool(sent.ssd))
            return
        node, record = self._add_stored(outcome.record), outcome.record
        if shorter := tuple(other.hash for other in self.tree.superseded(node) if other.ssd):
            self.spills.remove(shorter)
        if self.sessions.has_ended(node):
            self.spills.demote([node])
        # A pin that was ordered after the commit may also have come after the block's eviction.
        is_pinned = record.pin_end_time > NOT_PINNED and not self.spills.is_to_be_removed(record.hash)
        self.ram.end_spill(node, is_pinned_on_ssd=is_pinned)

    def _add_stored(self, record: StoredBlock) -> Node:
        self._unseen.discard(record.hash)
        return self.tree.store(record)

    def lose_storage(self) -> None:
        """The SSD tier is gone for good: forget its blocks and continue with RAM alone."""
        self.is_inventory_due = False
        for node in list(self.tree):
            self.tree.forget_stored(node.hash)
        self.ram.lose_storage()
        self.behind.lose_storage()

    def close(self) -> None:
        """Drop every block in RAM: the model is going."""
        for node in list(self.tree.in_ram()):
            self.tree.drop(node)

    # What commands ask for.

    def known_chain(self, keys: TokenKeys, scope: CacheScope) -> list[Node]:
        """Return every known block that is wholly part of this prompt, in order."""
        return known_chain(self.tree, self.prompt(keys, scope=scope))

    def pin(self, nodes: ReadSequence[Node], end_time: float) -> None:
        """Pin or unpin blocks in the tree; the SSD tier does so by itself."""
        # The head of a chain last, so that once unpinned it goes after its tail.
        for node in reversed(nodes):
            self.tree.set_pin(node, pin_end_time(node.pin_end_time, end_time))
        if end_time != NOT_PINNED:
            self.behind.note(nodes, Turn.PINNED)

    def remove(self, nodes: ReadSequence[Node]) -> None:
        """Remove blocks from all tiers, pinned ones too, and from what other servers share."""
        self.spills.remove(tuple(node.hash for node in nodes), is_final=True)
        self.purge(nodes, with_ssd=True)

    def purge(self, nodes: ReadSequence[Node], *, with_ssd: bool) -> None:
        """Drop blocks from RAM, pinned ones too; from the tree as well where the SSD tier removes them."""
        for node in nodes:
            self.tree.set_pin(node, NOT_PINNED)
            self.ram.purge(node)
            if with_ssd:
                # Gone from now on: the next pin or plan must not count on it.
                self.tree.forget_stored(node.hash)

    def stats(self, storage: CacheStats | None) -> CacheStats:
        """Return the counters, with the SSD tier's where they are given."""
        theirs = storage or CacheStats()
        promote = dataclasses.replace(
            self.restores,
            read_bytes_per_s=self.rates.read_bytes_per_s,
            restore_tokens_per_s=self.rates.adopt_tokens_per_s,
            recompute_tokens_per_s=self.rates.prefill_tokens_per_s,
        )
        # Each number is counted by one thread, and 0 with the other.
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
    """Return what a caller is shown of a block of its prompt: its session only where the block is its own."""
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
