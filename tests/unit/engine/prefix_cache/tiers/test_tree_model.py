"""The prefix tree against a model of plain dicts and lists, over whatever may happen to blocks."""

from __future__ import annotations

from typing import Any

from hypothesis import settings as bounds
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from icehouse_server.domain.blocks import RegionKind
from icehouse_server.domain.cache_commands import Tier
from icehouse_server.domain.ids import BlockHash
from icehouse_server.engine.core.block_log import Came, Left
from icehouse_server.engine.prefix_cache.tiers.node import Node
from icehouse_server.engine.prefix_cache.tiers.prefix_settings import QuotaLimits
from icehouse_server.pins import NOT_PINNED, UNTIL_UNPINNED

from tests.fixtures.known_blocks import ROOT, SIZE, Shelf, hash_of, record_of, root_of
from tests.fixtures.tree_check import check_tree

ROOTS = (ROOT, root_of("other"))
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=3 * SIZE)


class Facts:
    """A block as the model knows it."""

    def __init__(self, tokens: list[int], parent: BlockHash, start: int, owner: BlockHash | None) -> None:
        self.tokens, self.parent, self.start, self.owner = tokens, parent, start, owner
        self.ram_bytes = self.ssd_bytes = 0
        self.is_pinned = self.is_spilling = self.is_used = False

    @property
    def is_known(self) -> bool:
        return bool(self.ram_bytes or self.ssd_bytes or self.is_spilling)


class TreeAgainstModel(RuleBasedStateMachine):
    """Orders are lists of names, least recently used first; sums are made anew each time."""

    @initialize(has_quotas=st.booleans())
    def begin(self, has_quotas: bool) -> None:
        self.has_quotas = has_quotas
        self.shelf = Shelf(quotas=QuotaLimits(1 << 30, 1 << 30) if has_quotas else QuotaLimits())
        self.tree = self.shelf.tree
        self.blocks: dict[BlockHash, Facts] = {}
        self.order: dict[Tier, list[BlockHash]] = {tier: [] for tier in Tier}
        self.log: list[Came | Left] = []
        self.shelf.log.begin()
        self.shelf.log.take(limit=10)
        self.time = 0.0

    def _moved(self, tier: Tier, name: BlockHash, *, is_there: bool, to_front: bool = False) -> None:
        order = self.order[tier]
        if name in order:
            order.remove(name)
        if is_there and not self.blocks[name].is_pinned:
            order.insert(0 if to_front else len(order), name)

    def _forget_empty(self) -> None:
        self.blocks = {name: facts for name, facts in self.blocks.items() if facts.is_known}

    def _came(self, tier: Tier, name: BlockHash) -> None:
        facts = self.blocks[name]
        keys = tuple(facts.tokens)
        self.log.append(Came(tier, name, facts.parent, facts.start == 0, len(keys), keys))

    def _node(self, name: BlockHash) -> Node:
        node = self.tree.get(name)
        assert node is not None
        return node

    @rule(prompt=PROMPTS, root=st.sampled_from(ROOTS), in_ram=st.booleans(), size_bytes=st.integers(1, 3))
    def come(self, prompt: list[int], root: BlockHash, in_ram: bool, size_bytes: int) -> None:
        """The last block of a prompt comes to a tier; those before it may be unknown."""
        parent, start = root, 0
        while len(prompt) - start > SIZE:
            parent = hash_of(parent, prompt[start : start + SIZE])
            start += SIZE
        tokens = prompt[start:]
        name = hash_of(parent, tokens)
        if name not in self.blocks:
            above = self.blocks.get(parent)
            self.blocks[name] = Facts(tokens, parent, start, parent if start == 0 else above and above.owner)
        facts = self.blocks[name]
        node = self.tree.insert(parent=parent, start_token_index=start, keys=tuple(tokens))
        if in_ram:
            if not facts.ram_bytes:
                self._came(Tier.RAM, name)
            facts.ram_bytes = size_bytes
            self.shelf.hold(node, RegionKind.KV, size_bytes=size_bytes)
            self._moved(Tier.RAM, name, is_there=True)
        else:
            if not facts.ssd_bytes:
                self._came(Tier.SSD, name)
            facts.ssd_bytes = size_bytes
            self.tree.store(record_of(node, RegionKind.KV)._replace(file_bytes=size_bytes))
            self._moved(Tier.SSD, name, is_there=True, to_front=not facts.is_used)

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), tier=st.sampled_from(Tier))
    def leave(self, data: Any, tier: Tier) -> None:
        name = data.draw(st.sampled_from(sorted(self.blocks)))
        facts, node = self.blocks[name], self._node(name)
        if tier is Tier.RAM:
            assert self.tree.drop(node) is bool(facts.ram_bytes)
            was_there, facts.ram_bytes = facts.ram_bytes, 0
        else:
            self.tree.forget_stored(name)
            was_there, facts.ssd_bytes = facts.ssd_bytes, 0
        self.log += [Left(tier, name)] if was_there else []
        self._moved(tier, name, is_there=False)
        self._forget_empty()

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def pin_or_unpin(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.blocks)))
        facts = self.blocks[name]
        facts.is_pinned = not facts.is_pinned
        self.tree.set_pin(self._node(name), UNTIL_UNPINNED if facts.is_pinned else NOT_PINNED)
        self._moved(Tier.RAM, name, is_there=bool(facts.ram_bytes))
        self._moved(Tier.SSD, name, is_there=bool(facts.ssd_bytes))

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def use(self, data: Any) -> None:
        names = data.draw(st.lists(st.sampled_from(sorted(self.blocks)), unique=True, max_size=3))
        self.time += 1.0
        self.tree.touch([self._node(name) for name in names], now=self.time)
        for name in reversed(names):
            self.blocks[name].is_used = True
            for tier, order in self.order.items():
                self._moved(tier, name, is_there=name in order)

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def demote(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.blocks)))
        self.tree.demote(self._node(name))
        for tier, order in self.order.items():
            self._moved(tier, name, is_there=name in order, to_front=True)

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), root=st.sampled_from(ROOTS))
    def claim(self, data: Any, root: BlockHash) -> None:
        name = data.draw(st.sampled_from(sorted(self.blocks)))
        facts = self.blocks[name]
        self.tree.claim([self._node(name)], root)
        if facts.owner is None:
            facts.owner = root
            for tier, order in self.order.items():
                self._moved(tier, name, is_there=name in order)

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def spill_or_end_it(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.blocks)))
        facts, node = self.blocks[name], self._node(name)
        facts.is_spilling = not facts.is_spilling
        if facts.is_spilling:
            self.tree.begin_spill(node, size_bytes=1)
        else:
            assert self.tree.end_spill(node) is not None
        self._forget_empty()

    @rule(prompt=PROMPTS, root=st.sampled_from(ROOTS), with_ssd=st.booleans())
    def look_up(self, prompt: list[int], root: BlockHash, with_ssd: bool) -> None:
        """What matches is the longest chain, RAM first and SSD behind it, ended by a part of one block."""
        best = self._longest(root, prompt[:-1], 0, in_ram=True, with_ssd=with_ssd)
        assert self.shelf.matched(prompt, root=root, with_ssd=with_ssd) == best

    def _longest(
        self, parent: BlockHash, rest: list[int], covered: int, *, in_ram: bool, with_ssd: bool
    ) -> int:
        best = covered
        for name, facts in self.blocks.items():
            is_had = (in_ram and facts.ram_bytes) or (with_ssd and facts.ssd_bytes)
            if facts.parent != parent or not is_had:
                continue
            pairs = zip(facts.tokens, rest, strict=False)
            common = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(rest), len(facts.tokens)))
            best = max(best, covered + common)
            if common == SIZE:
                goes_on_in_ram = in_ram and bool(facts.ram_bytes)
                found = self._longest(
                    name, rest[SIZE:], covered + SIZE, in_ram=goes_on_in_ram, with_ssd=with_ssd
                )
                best = max(best, found)
        return best

    @invariant()
    def the_tree_agrees(self) -> None:
        if not hasattr(self, "tree"):
            return
        check_tree(self.tree)
        assert {node.hash for node in self.tree} == self.blocks.keys()
        for name, facts in self.blocks.items():
            node = self._node(name)
            said = (node.ram_bytes, node.ssd_bytes, node.is_pinned, node.is_spilling, node.owner)
            assert said == (
                facts.ram_bytes,
                facts.ssd_bytes,
                facts.is_pinned,
                facts.is_spilling,
                facts.owner,
            )
            below = [other for other, each in self.blocks.items() if each.parent == name]
            assert {child.hash for child in self.tree.children(name)} == set(below)
        assert [node.hash for node in self.tree.ram.oldest()] == self.order[Tier.RAM]
        assert [node.hash for node in self.tree.ram.latest()] == self.order[Tier.RAM][::-1]
        for tier, account in ((Tier.RAM, self.tree.ram), (Tier.SSD, self.tree.ssd)):
            for owners in ({ROOT}, {*ROOTS, None}) if self.has_quotas else ():
                owned = [name for name in self.order[tier] if self.blocks[name].owner in owners]
                assert [node.hash for node in account.oldest(owners)] == owned
        assert self.shelf.log.take(limit=100) == self.log
        self.log = []


TestTreeAgainstModel = TreeAgainstModel.TestCase
TestTreeAgainstModel.settings = bounds(max_examples=60, stateful_step_count=40, deadline=None)
