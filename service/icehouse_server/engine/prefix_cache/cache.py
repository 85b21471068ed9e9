"""Prefix cache as the engine's loop uses it: plan a prompt, keep what is computed, spill, follow the SSD.

Inference thread only. A block is captured when its last token has been computed, in prefill and
in decode alike, so that a cancelled request leaves its blocks behind and no step pays for many.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as ReadSequence

from icehouse_server.clock import Clock
from icehouse_server.domain.blocks import BlockHeader, Region, RegionKind, TokenKeys
from icehouse_server.domain.cache_commands import BlockMatch, Explain, Explanation, Tier
from icehouse_server.domain.cache_stats import CacheStats, DiskStats
from icehouse_server.domain.events import CacheReport, ReuseLimit
from icehouse_server.domain.ids import BlockHash, CacheScope, SequenceId
from icehouse_server.domain.request import CacheUse, GenerationRequest
from icehouse_server.engine.core.block_log import BlockLog
from icehouse_server.engine.core.block_names import BlockNames
from icehouse_server.engine.core.sequence import Sequence
from icehouse_server.engine.prefix_cache.capture import CaptureRules
from icehouse_server.engine.prefix_cache.flush import Flush
from icehouse_server.engine.prefix_cache.planner import Plan, Rates, plan, with_divergence
from icehouse_server.engine.prefix_cache.tiers.counters import PrefixCounters
from icehouse_server.engine.prefix_cache.tiers.matching import Prompt, known_chain, unread_nodes
from icehouse_server.engine.prefix_cache.tiers.node import Node
from icehouse_server.engine.prefix_cache.tiers.ram import RamTier
from icehouse_server.engine.prefix_cache.tiers.runner_port import CacheFacts, CacheRunner
from icehouse_server.engine.prefix_cache.tiers.settings import PrefixSettings
from icehouse_server.engine.prefix_cache.tiers.spill import Spills
from icehouse_server.engine.prefix_cache.tiers.tenant_quota import TenantQuotas
from icehouse_server.engine.prefix_cache.tiers.tree import PrefixTree
from icehouse_server.engine.prefix_cache.timeouts import Waits
from icehouse_server.storage.api import (
    ColdTier,
    Failure,
    KvPlace,
    Loaded,
    Persisted,
    PlannedBlock,
    StoredBlock,
    Ticket,
)


class PrefixCache:
    """The prefix tree, the RAM tier and the way to the SSD tier. `storage` is None without one."""

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
        self.names = BlockNames(settings.name_secret)
        self.tree = PrefixTree(settings, facts, BlockLog() if log is None else log, names=self.names)
        self.rates = Rates()
        self.waits = Waits(storage, self.rates, clock)
        """Who is told what became of what was asked of the SSD tier."""
        self.counters = PrefixCounters()
        self.quotas = TenantQuotas(self.tree)
        self.spills = Spills(
            self.tree,
            quotas=self.quotas,
            counters=self.counters,
            runner=runner,
            waits=self.waits,
            ended=self._spill_ended,
        )
        self.ram = RamTier(self.tree, spills=self.spills, quotas=self.quotas)
        self._capture_rules = CaptureRules(
            facts, settings.block_token_count, settings.checkpoint_interval_tokens
        )
        self.held_by: dict[SequenceId, set[BlockHash]] = {}
        """Blocks whose regions sequences read where they are: dropping one frees nothing while these live."""
        self._is_inventory_due = storage is not None
        self._unseen: set[BlockHash] = set()
        """Blocks that were on SSD and that the inventory under way has not named yet."""

    # What may be reused, and by whom.

    @property
    def storage(self) -> ColdTier | None:
        """The SSD tier; None without one, and when it is lost."""
        return self.spills.storage

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
        return self.quotas.root(scope)

    def shared_root(self, scope: CacheScope | None) -> BlockHash | None:
        """Return h0 of whose blocks may stand for missing ones; None for nobody's."""
        return None if scope is None else self.root(scope)

    def prompt(
        self, keys: ReadSequence[int], *, scope: CacheScope, shared_scope: CacheScope | None = None
    ) -> Prompt:
        """Return what is looked up for these tokens."""
        return Prompt(tuple(keys), self.root(scope), self.shared_root(shared_scope))

    def _prompt_of(self, sequence: Sequence) -> Prompt:
        request = sequence.request
        return self.prompt(sequence.input_keys, scope=request.scope, shared_scope=request.shared_scope)

    # A prompt: what is known of it, and the plan.

    def ask_headers(
        self, token_ids: ReadSequence[int], *, scope: CacheScope, shared_scope: CacheScope | None
    ) -> Ticket[tuple[BlockHeader, ...]] | None:
        """Have the headers of blocks read that may begin like the rest of this prompt.

        None when nothing more is to be known of it, or the read queue is full.
        """
        if self.storage is None or self.rates.reads_hang:
            return None
        prompt = self.prompt(token_ids, scope=scope, shared_scope=shared_scope)
        names = tuple(node.hash for node in unread_nodes(self.tree, prompt))
        return self.storage.heads(names) if names else None

    def learn_headers(self, headers: Iterable[BlockHeader]) -> None:
        """Take in the tokens of blocks that only the SSD knew."""
        for header in headers:
            self.tree.learn_header(header)

    def plan(self, sequence: Sequence, *, with_ssd: bool = True) -> Plan:
        """Say what of a prompt is reused and from where, and note the use."""
        request = sequence.request
        if not self.settings.is_enabled or request.cache_use in (CacheUse.OFF, CacheUse.WRITE_ONLY):
            return Plan((), 0, CacheReport(limit=ReuseLimit.SWITCHED_OFF))
        if not self.is_supported:
            return Plan((), 0, CacheReport(limit=ReuseLimit.UNSUPPORTED))
        if sequence.measures_prompt:
            return Plan((), 0, CacheReport(limit=ReuseLimit.PROMPT_LOGPROBS))
        prompt = self._prompt_of(sequence)
        made = plan(self.tree, prompt, self.rates, with_ssd=with_ssd and self.storage is not None)
        made = with_divergence(self.tree, prompt, made)
        own: Iterable[Node] = made.nodes
        if not prompt.is_own:
            parents = {prompt.root, *self.tree.chain_names(prompt.root, prompt.keys)}
            own = (node for node in own if node.parent in parents)
        self.tree.claim(own, prompt.root)
        self.ram.note_use(made.nodes, now=self._clock.monotonic(), request_id=request.request_id)
        return made

    def reusable(self, sequence: Sequence) -> Plan:
        """Return what `plan` would; nothing is counted."""
        return plan(self.tree, self._prompt_of(sequence), self.rates, with_ssd=self.storage is not None)

    def explain(self, command: Explain) -> Explanation:
        """Say what would be reused of a prompt, and how long that would take; notes no use."""
        keys = command.prompt_token_ids
        prompt = self.prompt(keys, scope=command.scope, shared_scope=command.shared_scope)
        made = plan(self.tree, prompt, self.rates, with_ssd=self.storage is not None)
        made = with_divergence(self.tree, prompt, made)
        restore_s = self.rates.restore_s(ssd_bytes=made.ssd_bytes, token_count=made.token_count)
        rest_s = self.rates.prefill_s(len(keys) - made.token_count)
        cold_s = self.rates.prefill_s(len(keys))
        return Explanation(
            cache=dataclasses.replace(made.report, restore_s=restore_s),
            blocks=tuple(map(_block_match, made.nodes)),
            predicted_ttft_s=restore_s + rest_s if cold_s else None,
            predicted_cold_ttft_s=cold_s or None,
        )

    def settle(self, request: GenerationRequest, report: CacheReport) -> None:
        """Count how a lookup ended, once its restore is done or given up."""
        self.counters.note_lookup(len(request.prompt_token_ids), report)
        self.rates.untried_count += report.limit is ReuseLimit.RECOMPUTE_FASTER

    def start_chain(self, sequence: Sequence, token_count: int) -> None:
        """Note that the sequence's caches begin with `token_count` reused tokens."""
        prompt = self._prompt_of(sequence)
        keys, shared = prompt.keys[:token_count], prompt.shared_root
        sequence.chain[:] = self.tree.chain_names(prompt.root, keys)
        sequence.shared_chain[:] = [] if shared is None else self.tree.chain_names(shared, keys)

    def note_prefill_rate(self, tokens_per_s: float) -> None:
        """Remember how fast this machine computes prompts."""
        self.rates.prefill_tokens_per_s = tokens_per_s

    # A restore: what is read, and whether it was of use.

    def load(self, blocks: ReadSequence[PlannedBlock], into: KvPlace | None) -> Ticket[Loaded] | None:
        """Have blocks read from SSD; None when the read queue is full, or the tier is lost by now."""
        ticket = None if self.storage is None else self.storage.get_into(blocks, into)
        self.counters.promote.load_total += ticket is not None
        return ticket

    def may_hold(self, made: Plan) -> bool:
        """Whether RAM has room for what a plan loads, others' blocks aside."""
        return made.ssd_bytes <= self.settings.ram_limit_bytes

    def note_promoted(self, made: Plan) -> None:
        """Count what a plan had loaded and a sequence's caches were rebuilt from."""
        self.counters.promote.promoted_block_total += len(made.to_load)
        self.counters.promote.promoted_token_total += made.report.ssd_token_count

    def reject(self, nodes: ReadSequence[Node]) -> None:
        """Remove blocks that do not make a cache from both tiers, so that they are not tried again."""
        self.counters.promote.failed_restore_total += 1
        self.remove(nodes)

    def remove(self, nodes: ReadSequence[Node]) -> None:
        """Remove blocks from both tiers, whatever keeps them there."""
        stored = tuple(node.hash for node in nodes if node.ssd or node.is_spilling)
        if stored:
            self.spills.remove(stored)
        self.purge(nodes, with_ssd=True)

    # Blocks on their way into RAM.

    def capture(self, sequence: Sequence, reached: int, *, is_end: bool) -> list[BlockHash]:
        """Keep the blocks that are complete where its caches have `reached`, with `is_end` the tail too;
        return the names."""
        if not self.may_write(sequence):
            return []
        size = self.settings.block_token_count
        position = min(reached, sequence.token_count)
        known_count = len(sequence.chain)
        for start in range(known_count * size, position - size + 1, size):
            sequence.chain.append(self._keep(sequence, start, start + size, reached))
        start = len(sequence.chain) * size
        names = list(sequence.chain)
        if is_end and start < position:
            names.append(self._keep(sequence, start, position, reached))
        if len(names) > known_count:
            self.tree.touch(list(self._known(names)), now=self._clock.monotonic())
        return names[known_count:]

    def promote(self, sequence: Sequence, node: Node, regions: Mapping[RegionKind, Region]) -> None:
        """Put regions that this sequence read from SSD into RAM, where they are not there again by now."""
        self.tree.learn_keys(node, sequence.keys(node.start_token_index, node.end_token_index))
        self._store(
            sequence, node, {kind: region for kind, region in regions.items() if kind not in node.ram}
        )
        self.tree.touch(list(self._known(sequence.chain)), now=self._clock.monotonic())

    def hand_over_spills(self, *, may_wait: bool) -> None:
        """Hand blocks to the storage thread whose copies are done; with `may_wait`, which no pass waits for,
        all."""
        self.spills.hand_over(may_wait=may_wait)

    def begin_flush(self) -> Flush:
        """Return what brings to SSD all that RAM holds and SSD lacks."""
        return Flush(self.spills, [node for node in self.tree.in_ram() if self.spills.wants(node)])

    # What the SSD tier reports.

    def take_inventory(
        self, records: ReadSequence[StoredBlock], *, is_first: bool = True, is_last: bool = True
    ) -> None:
        """Take in a part of what the SSD tier holds; after the last one it holds nothing else."""
        if is_first:
            self._unseen = {node.hash for node in self.tree if node.ssd}
        # A chain from its beginning, so that each block finds its owner in the one before it.
        for record in sorted(records, key=lambda record: record.start_token_index):
            self._add_stored(record)
        if is_last:
            self._is_inventory_due = False
            unseen, self._unseen = self._unseen, set()
            for name in unseen:
                self.tree.forget_stored(name)

    def _spill_ended(self, sent: Node, outcome: Persisted | Failure) -> None:
        """Note that a block is committed on SSD, instead of shorter ones, or was dropped on its way."""
        if isinstance(outcome, Failure):
            if self.tree.get(sent.hash) is sent:
                self.ram.spill_ended(sent, is_kept_on_ssd=bool(sent.ssd))
            return
        node, record = self._add_stored(outcome.record), outcome.record
        if shorter := tuple(other.hash for other in self.tree.superseded(node) if other.ssd):
            self.spills.remove(shorter)
        # An order to pin it that came after the commit may have come after its eviction, too.
        is_kept = record.pinned and not self.spills.is_to_be_removed(record.hash)
        self.ram.spill_ended(node, is_kept_on_ssd=is_kept)

    def lose_storage(self) -> None:
        """The SSD tier is gone for good: forget it and go on with RAM alone."""
        self._is_inventory_due = False
        for node in list(self.tree):
            self.tree.forget_stored(node.hash)
        self.ram.lose_storage()

    # What commands ask for.

    def known_chain(self, keys: TokenKeys, scope: CacheScope) -> list[Node]:
        """Return every known block that is wholly part of this prompt, in order."""
        return known_chain(self.tree, self.prompt(keys, scope=scope))

    def pin(self, nodes: ReadSequence[Node], *, pinned: bool) -> None:
        """Pin or unpin blocks, as far as this thread decides it; the SSD tier does the rest."""
        # The head of a chain last: when it may go again, it goes behind its tail.
        for node in reversed(nodes):
            self.tree.set_pinned(node, pinned=pinned)

    def purge(self, nodes: ReadSequence[Node], *, with_ssd: bool) -> None:
        """Remove blocks from RAM, pinned ones too; from the tree as well where the SSD removes them."""
        for node in nodes:
            self.tree.set_pinned(node, pinned=False)
            self.ram.purge(node)
            if with_ssd:
                # Gone for whoever asks from now on: what pins or plans next must not count on it.
                self.tree.forget_stored(node.hash)

    def stats(self, storage: CacheStats | None) -> CacheStats:
        """Return the counters, with the SSD tier's when they are given."""
        promote = dataclasses.replace(
            self.counters.promote,
            read_bytes_per_s=self.rates.read_bytes_per_s,
            restore_tokens_per_s=self.rates.adopt_tokens_per_s,
            recompute_tokens_per_s=self.rates.prefill_tokens_per_s,
        )
        joined = self.counters.joined(storage or CacheStats(), promote=promote)
        disk, hang_detail = joined.disk, self.waits.hang_detail()
        if hang_detail:
            disk = dataclasses.replace(disk or DiskStats(), hang_detail=hang_detail)
        return dataclasses.replace(
            joined,
            block_token_limit=self.settings.block_token_count,
            unsupported_detail=self.facts.unsupported_detail,
            ram=self.ram.snapshot(now=self._clock.monotonic()),
            spill=dataclasses.replace(joined.spill, policy=self.settings.spill_policy),
            disk=disk,
            tenants=self.quotas.snapshot(),
        )

    def _add_stored(self, record: StoredBlock) -> Node:
        self._unseen.discard(record.hash)
        return self.tree.store(record)

    def _keep(self, sequence: Sequence, start: int, stop: int, reached: int) -> BlockHash:
        """Put one block of the sequence into RAM unless all of it is there; return its hash."""
        root = self.root(sequence.request.scope)
        parent = sequence.chain[-1] if sequence.chain else root
        keys = sequence.keys(start, stop)
        kinds = self._capture_rules.kinds_at(sequence, stop, reached)
        if not kinds:
            return self.tree.name_of(parent=parent, keys=keys)
        node = self.tree.insert(parent=parent, start_token_index=start, keys=keys)
        self.tree.claim([node], root)
        missing = [kind for kind in kinds if kind not in node.ram]
        if missing:
            regions = self._runner.cut(sequence.sequence_id, start=start, stop=stop, kinds=missing)
            self._store(sequence, node, regions)
        self.ram.supersede(node)
        if self.spills.is_on and self._is_cut_off(sequence):
            self.spills.offer(node, request_id=sequence.request.request_id)
        self.tree.prune(node)
        return node.hash

    def _store(self, sequence: Sequence, node: Node, regions: Mapping[RegionKind, Region]) -> None:
        """Put regions of a block of the sequence into RAM if space can be made for them."""
        # Without an SSD tier a block is worth nothing once one before it is gone.
        spared = sequence.chain if self.facts.has_kv and not self.spills.is_on else ()
        self.ram.put(node, regions, spared=spared, request_id=sequence.request.request_id)
        if self.facts.shares_blocks:
            self.held_by.setdefault(sequence.sequence_id, set()).add(node.hash)

    def _is_cut_off(self, sequence: Sequence) -> bool:
        """Whether some block before has its kv on SSD only: what follows is then read from there."""
        pairs = itertools.zip_longest(sequence.chain, sequence.shared_chain)
        return self.facts.has_kv and not all(
            any(RegionKind.KV in node.ram for node in self._known(pair)) for pair in pairs
        )

    def _known(self, names: Iterable[BlockHash | None]) -> Iterable[Node]:
        found = (self.tree.get(name) for name in names if name is not None)
        return (node for node in found if node is not None)


def _block_match(node: Node) -> BlockMatch:
    """Return what a caller is told of a block of its prompt."""
    return BlockMatch(
        hash=node.hash,
        start_token_index=node.start_token_index,
        token_count=node.token_count,
        size_bytes=node.size_bytes,
        tier=Tier.RAM if node.ram else Tier.SSD,
        has_checkpoint=node.has(RegionKind.CHECKPOINT, with_ssd=True),
        pinned=node.is_pinned,
    )
