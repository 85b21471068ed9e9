"""The model of the tiers against the service's prefix tree and against one block by block, rule by rule."""

from __future__ import annotations

import dataclasses
import math

import pytest
from icehouse_server.domain.blocks import RegionKind
from icehouse_server.domain.ids import RequestId

from bench.agents.gaps import IdleSessions
from bench.agents.rules import IDLE_SHARES, Rule
from bench.agents.simulation import Replay, limits_of
from bench.agents.tiers import Cache, Limits
from bench.agents.trace import StreamIndex, Trace, beside
from tests.fixtures.agent_traces import BLOCK, Block, blocks_of, random_trace, request
from tests.fixtures.known_blocks import ROOT, SIZE, SizedRegion
from tests.unit.engine.prefix_cache.tiers.test_spill import bench as tier_bench


def hits_of(trace: Trace, limits: Limits, rule: Rule) -> list[tuple[int, int]]:
    cache = Cache(Replay(trace).paths, limits, rule)
    found = [cache.play(number, each) for number, each in enumerate(trace.requests)]
    return [(hit.ram_count, hit.ssd_count) for hit in found]


@pytest.mark.parametrize("seed", range(6))
def test_lru_hits_what_the_services_prefix_tree_hits(seed: int) -> None:
    trace, prompts = random_trace(seed)
    limit = max(len(prompt) for prompt in prompts) + 5
    tier = tier_bench(policy="off", ram_limit_bytes=10 * limit)
    tree, ram, found = tier.shelf.tree, tier.ram, []
    for number, prompt in enumerate(prompts):
        keys = tuple(block_id for block_id in prompt for _ in range(SIZE))
        names = tree.chain_names(ROOT, keys)
        nodes = []
        for name in names:
            node = tree.get(name)
            if node is None or not node.ram:
                break
            nodes.append(node)
        # A lookup keeps back a prompt's last token; one more is what was behind these blocks.
        assert tier.shelf.matched([*keys, 99]) == len(nodes) * SIZE
        found.append(len(nodes))
        ram.note_use(nodes, now=float(number), request_id=RequestId("r"))
        for place in range(len(nodes), len(names)):
            parent = names[place - 1] if place else ROOT
            own = tuple(keys[place * SIZE : (place + 1) * SIZE])
            node = tree.insert(parent=parent, start_token_index=place * SIZE, keys=own)
            ram.put(node, {RegionKind.KV: SizedRegion()}, protected=names[:place], request_id=RequestId("r"))
        captured = [node for name in names if (node := tree.get(name)) is not None]
        tree.touch(captured, now=float(number))
    assert sum(found) > 20 and tree.ram.used_bytes == 10 * limit, "the trace fills the cache"
    assert hits_of(trace, Limits(limit, limit), Rule.LRU) == [(count, 0) for count in found]


class PlainCache:
    """The tiers block by block: lists in order of use, sets, and no segments."""

    def __init__(self, prompts: list[list[int]], sessions: list[int], limits: Limits, rule: Rule) -> None:
        self.prompts = [blocks_of(prompt) for prompt in prompts]
        self.sessions, self.limits, self.rule = sessions, limits, rule
        self.order: list[Block] = []
        """Least recently used first."""
        self.ram: list[Block] = []
        self.ssd: set[Block] = set()
        self.users: dict[Block, set[int]] = {}
        self.uses: dict[Block, int] = {}
        self.written = 0

    def play(self, number: int) -> tuple[int, int]:
        blocks, session = self.prompts[number], self.sessions[number]
        had = blocks[: next((n for n, block in enumerate(blocks) if block not in self.order), len(blocks))]
        in_ram = sum(block in self.ram for block in had)
        for block in blocks:
            self.users.setdefault(block, set()).add(session)
        for block in reversed(blocks):
            self.uses[block] = self.uses.get(block, 0) + 1
            for order in (self.order, self.ram):
                if block in order:
                    order.remove(block)
                order.append(block)
        if session not in self.sessions[number + 1 :] and self.rule in (Rule.ENDS_FIRST, Rule.ENDS_DROPPED):
            self._end(session)
        while len(self.ram) > self.limits.ram_block_count:
            block = self.ram.pop(0)
            if self.rule is Rule.SECOND_HIT and self.uses[block] < 2:
                self.order.remove(block)
            elif block not in self.ssd:
                self.ssd.add(block)
                self.written += 1
        while len(self.order) > self.limits.block_count:
            self._give_up(self._victim(number))
        return in_ram, len(had) - in_ram

    def _victim(self, number: int) -> Block:
        if self.rule is not Rule.BELADY:
            return self.order[0]
        return max(self.order, key=lambda block: (self._next_use(block, number), len(block)))

    def _next_use(self, block: Block, number: int) -> float:
        later = range(number + 1, len(self.prompts))
        return next((n for n in later if block in self.prompts[n]), math.inf)

    def _end(self, session: int) -> None:
        # What became known last comes to the very front, so that a chain's end goes before its beginning.
        for block in [block for block, users in self.users.items() if users == {session}]:
            for order in (self.order, self.ram):
                if block in order:
                    order.remove(block)
                    order.insert(0, block)
            if self.rule is Rule.ENDS_DROPPED and block in self.order:
                self._give_up(block)

    def _give_up(self, block: Block) -> None:
        self.order.remove(block)
        self.ssd.discard(block)
        if block in self.ram:
            self.ram.remove(block)


@pytest.mark.parametrize("rule", [rule for rule in Rule if rule not in (Rule.IDLE_SESSION, *IDLE_SHARES)])
@pytest.mark.parametrize("seed", range(4))
def test_segments_are_as_good_as_blocks(rule: Rule, seed: int) -> None:
    trace, prompts = random_trace(seed)
    limits = Limits(40, 12)
    assert max(map(len, prompts)) <= limits.block_count < len({b for p in prompts for b in blocks_of(p)})
    plain = PlainCache(prompts, [each.session for each in trace.requests], limits, rule)
    cache = Cache(Replay(trace).paths, limits, rule)
    for number, each in enumerate(trace.requests):
        hit, expected = cache.play(number, each), plain.play(number)
        if rule is Rule.BELADY:
            # Of blocks that are never used again it does not matter which one goes, nor from which tier.
            assert hit.ram_count + hit.ssd_count == sum(expected)
        else:
            assert (hit.ram_count, hit.ssd_count) == expected, number
    assert rule is Rule.BELADY or cache.written_count == plain.written > 0


@pytest.mark.parametrize("seed", range(30))
def test_belady_is_never_below_any_rule(seed: int) -> None:
    trace, _ = random_trace(seed, request_count=80)
    replay = Replay(trace)
    for share in (0.05, 0.2, 0.5, 1.0):
        limits = limits_of(replay.paths, share=share, ram_share=0.3)
        best = replay.play(Rule.BELADY, limits).hit_rate
        assert all(replay.play(rule, limits).hit_rate <= best + 1e-9 for rule in Rule)


def test_a_cache_of_everything_misses_new_blocks_alone() -> None:
    trace, prompts = random_trace(5)
    replay = Replay(trace)
    known: set[Block] = set()
    expected = 0
    for prompt in prompts:
        expected += len(known & set(blocks_of(prompt)))
        known |= set(blocks_of(prompt))
    assert replay.paths.block_count == len(known)
    for rule in (Rule.LRU, Rule.BELADY, Rule.IDLE_SESSION):
        found = replay.play(rule, Limits(len(known), len(known)))
        assert found.hit_rate == pytest.approx(expected * BLOCK / trace.prompt_token_count)
        assert found.written_token_count == found.read_token_count == 0


def test_what_an_active_session_has_left_behind_stays_longer_than_an_idle_ones_blocks() -> None:
    index = StreamIndex()
    asked = [(0, [1, 2, 3]), (1, [7, 8, 9]), (0, [1, 5]), (2, [20, 21]), (0, [1, 2, 3])]
    requests = [request(index, ids, session=s, time_s=float(n)) for n, (s, ids) in enumerate(asked)]
    trace = Trace("corner", BLOCK, tuple(requests))
    lru, idle = (sum(hits_of(trace, Limits(7, 7), rule)[-1]) for rule in (Rule.LRU, Rule.IDLE_SESSION))
    assert (lru, idle) == (1, 3)


def test_a_session_goes_first_once_it_pauses_for_longer_than_its_tenants_usually_do() -> None:
    index = StreamIndex()
    steady = [request(index, [1, 3], session=0, time_s=float(number)) for number in range(30)]
    pauses = request(index, [7, 8], session=1, time_s=29.5)
    later = [request(index, [1], session=0, time_s=time_s) for time_s in (30.0, 31.0)]
    idle = IdleSessions(0.9)
    assert [idle.note(each) for each in (*steady, pauses, *later)] == [[]] * 32 + [[1]], "a second is usual"
    assert idle.note(dataclasses.replace(pauses, time_s=40.0)) == [0]
    grows = request(index, [1, 2], session=0, time_s=31.5)
    again = request(index, [1, 3], session=0, time_s=32.0)
    trace = Trace("corner", BLOCK, (*steady, pauses, *later, grows, again))
    found = {rule: sum(hits_of(trace, Limits(4, 4), rule)[-1]) for rule in (Rule.LRU, Rule.BEYOND_90)}
    assert found == {Rule.LRU: 1, Rule.BEYOND_90: 2}


def test_another_tenants_pauses_are_not_usual_here() -> None:
    index = StreamIndex()
    one = Trace("one", BLOCK, tuple(request(index, [n], session=0, time_s=float(n)) for n in range(41)))
    index = StreamIndex()
    asked = tuple(request(index, [n, 50], session=n % 2, time_s=float(n)) for n in range(21))
    both = beside(one, Trace("other", 2 * BLOCK, asked))
    assert (both.block_token_count, both.session_count) == (BLOCK, 3)
    assert [each.time_s for each in both.requests if each.tenant] == [2.0 * n for n in range(21)]
    assert Replay(both).paths.block_count == 41 + 21 * 4
    idle = IdleSessions(0.5)
    assert all(idle.note(each) == [] for each in both.requests), "each pauses as its tenant's usually do"
