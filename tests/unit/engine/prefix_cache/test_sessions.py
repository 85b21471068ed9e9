"""The book of sessions: what belongs to one alone, what goes when it ends, and how little is remembered."""

from __future__ import annotations

import random

import pytest
from icehouse_server.domain.blocks import RegionKind
from icehouse_server.domain.ids import SessionKey, Tenant
from icehouse_server.engine.prefix_cache import sessions as book
from icehouse_server.engine.prefix_cache.sessions import Sessions
from icehouse_server.engine.prefix_cache.tiers.node import Node
from icehouse_server.engine.prefix_cache.tiers.runner_port import CacheFacts
from icehouse_server.pins import UNTIL_UNPINNED

from tests.fixtures.known_blocks import HYBRID, KV_ONLY, ROOT, SIZE, Shelf
from tests.fixtures.tree_check import check_tree

ALICE, BOB = Tenant("alice"), Tenant("bob")


class Bench:
    """A tree whose blocks sessions compute and use, without a loop."""

    def __init__(self, facts: CacheFacts = KV_ONLY, *, checkpoint_limit: int = 0) -> None:
        self.shelf = Shelf(facts, session_checkpoint_limit=checkpoint_limit)
        self.tree = self.shelf.tree
        self.sessions = Sessions(self.tree)

    def key(self, name: str, tenant: Tenant = ALICE) -> SessionKey | None:
        return self.sessions.key_of(tenant, name)

    def run(
        self,
        name: str,
        tokens: range | list[int],
        *,
        tenant: Tenant = ALICE,
        ssd: bool = False,
        parent: str = "",
    ) -> list[Node]:
        """Have a request of a session use what is known of these tokens and compute the rest."""
        known = {node.hash for node in self.tree}
        nodes = self.shelf.chain(list(tokens), ram=True, ssd=ssd)
        old = [node for node in nodes if node.hash in known]
        self.sessions.note_use(tenant, self.key(name, tenant), old, parent=self.key(parent, tenant))
        for node in nodes[len(old) :]:
            self.sessions.note_computed(tenant, self.key(name, tenant), node, is_new=True)
        self.tree.touch(nodes, now=1.0)
        return nodes

    def end(self, name: str, tenant: Tenant = ALICE) -> list[Node]:
        key = self.key(name, tenant)
        assert key is not None
        return self.sessions.end(key)

    def order(self) -> list[Node]:
        check_tree(self.tree)
        return list(self.tree.ram.oldest())


def test_what_an_ended_session_alone_has_used_goes_first_and_its_end_before_its_beginning() -> None:
    bench = Bench()
    old = bench.run("old", range(100, 100 + 2 * SIZE))
    ended = bench.run("ended", range(3 * SIZE), ssd=True)
    assert bench.order() == [*reversed(old), *reversed(ended)]
    assert bench.end("ended") == ended
    assert bench.order() == [*reversed(ended), *reversed(old)]


def test_what_another_session_has_used_too_stays_where_it_is() -> None:
    bench = Bench()
    shared = bench.run("first", range(2 * SIZE))
    own = bench.run("first", [*range(2 * SIZE), *range(50, 50 + SIZE)])[2:]
    bench.run("second", [*range(2 * SIZE), *range(70, 70 + SIZE)])
    before = [node for node in bench.order() if node not in own]
    assert len(bench.end("first")) == 1
    assert bench.order() == [*own, *before]
    assert all(node.session is None for node in shared)


@pytest.mark.parametrize(("name", "tenant"), [("", ALICE), ("same", BOB)])
def test_a_use_without_a_session_or_by_the_same_name_of_another_tenant_counts_as_another(
    name: str, tenant: Tenant
) -> None:
    bench = Bench()
    nodes = bench.run("same", range(2 * SIZE))
    bench.run(name, range(2 * SIZE), tenant=tenant)
    before = bench.order()
    assert bench.end("same") == []
    assert bench.order() == before == list(reversed(nodes))


def test_a_tenant_does_not_end_the_session_of_another() -> None:
    bench = Bench()
    nodes = bench.run("same", range(2 * SIZE))
    assert bench.end("same", BOB) == []
    assert not any(map(bench.sessions.has_ended, nodes))
    assert len(bench.end("same")) == 2 and all(map(bench.sessions.has_ended, nodes))


def test_forks_of_a_session_end_with_it_and_pinned_blocks_stay() -> None:
    bench = Bench()
    stem = list(range(2 * SIZE))
    for fork in range(3):
        nodes = bench.run("agent", [*stem, *range(50 * fork + 50, 50 * fork + 50 + SIZE)])
    bench.tree.set_pin(nodes[-1], UNTIL_UNPINNED)
    assert len(bench.end("agent")) == 4
    check_tree(bench.tree)


def test_a_session_that_goes_on_has_not_ended() -> None:
    bench = Bench()
    nodes = bench.run("agent", range(2 * SIZE))
    bench.end("agent")
    later = bench.run("other", range(100, 100 + SIZE))
    longer = bench.run("agent", range(3 * SIZE))
    assert bench.order() == [*later, *reversed(longer)]
    assert not bench.sessions.has_ended(nodes[0]) and bench.sessions.snapshot().ended_count == 0
    assert len(bench.end("agent")) == 3, "the blocks of before are still its own"


def test_of_millions_of_sessions_the_tenant_with_the_most_forgets_its_own() -> None:
    bench = Bench()
    bench.sessions.session_limit = 50
    nodes = bench.run("kept", range(SIZE), tenant=BOB)
    first = bench.run("0", range(100, 100 + SIZE))
    for number in range(1, 2_000):
        bench.sessions.note_use(ALICE, bench.key(str(number)), [])
    assert len(bench.sessions) == 50 and bench.sessions.snapshot().forgotten_total == 1_951
    assert bench.end("0") == [] and not bench.sessions.has_ended(first[0])
    assert len(bench.end("kept", BOB)) == 1 and bench.sessions.has_ended(nodes[0])


def test_as_many_tenants_as_sessions_are_forgotten_too() -> None:
    bench = Bench()
    bench.sessions.session_limit = 50
    for number in range(500):
        tenant = Tenant(str(number))
        bench.sessions.note_use(tenant, bench.key("agent", tenant), [])
    assert len(bench.sessions) == len(bench.sessions._of) == 50


def test_of_an_endless_session_a_bounded_number_of_ends_is_remembered() -> None:
    bench = Bench()
    for fork in range(10 * book.END_LIMIT):
        bench.run("agent", [1_000 + fork])
    (session,) = bench.sessions._known.values()
    assert len(session.ends) == book.END_LIMIT
    assert len(bench.end("agent")) == book.END_LIMIT
    for length in range(1, 200):
        bench.run("long", range(length * SIZE))
    key = bench.key("long")
    assert key is not None and len(bench.sessions._known[key].ends) == 1


def test_ends_that_are_gone_are_forgotten_before_those_that_are_there() -> None:
    bench = Bench()
    stays = bench.run("agent", [1, 2])
    for number in range(3 * book.END_LIMIT):
        (gone,) = bench.run("agent", [1_000 + number])
        bench.tree.drop(gone)
    assert len(bench.end("agent")) == 1 and bench.sessions.has_ended(stays[0])


# Families.


def _told(bench: Bench) -> dict[str, int]:
    """Return how many sessions there are, children and ended ones; none of them is a child of a child."""
    known = bench.sessions._known
    for key, session in known.items():
        assert session.parent is None or not session.children
        assert session.parent is None or key in known[session.parent].children
        assert all(known[child].parent == key for child in session.children)
    stats = bench.sessions.snapshot()
    return {"known": stats.session_count, "children": stats.child_count, "ended": stats.ended_count}


def test_a_childs_end_leaves_what_its_parent_has_used_and_its_parents_end_takes_all() -> None:
    bench = Bench()
    stem = list(range(2 * SIZE))
    above = bench.run("agent", stem)
    below = bench.run("sub", [*stem, *range(50, 50 + SIZE)], parent="agent")
    before = bench.order()
    assert bench.end("sub") == below[2:]
    assert bench.order() == [below[2], *(node for node in before if node is not below[2])]
    assert not any(map(bench.sessions.has_ended, above)) and bench.sessions.has_ended(below[2])
    assert bench.end("agent") == below, "the parent's beginning counts for the child"
    assert all(map(bench.sessions.has_ended, below)) and _told(bench) == {
        "known": 2,
        "children": 1,
        "ended": 2,
    }
    assert bench.sessions.snapshot().ended_total == 2, "each of them once"


def test_children_end_with_their_parent_and_what_they_have_in_common_is_its() -> None:
    bench = Bench()
    stem = list(range(2 * SIZE))
    common = bench.run("one", stem, parent="agent")
    chains = [bench.run(name, [*stem, ord(name[0])], parent="agent") for name in ("one", "two")]
    assert {node.session for node in common} == {bench.key("agent")}
    assert bench.end("two") == chains[1][2:]
    assert len(bench.end("agent")) == 4 and all(map(bench.sessions.has_ended, chains[0]))


def test_what_a_child_and_a_stranger_have_used_is_nobodys() -> None:
    bench = Bench()
    nodes = bench.run("sub", range(2 * SIZE), parent="agent")
    bench.run("stranger", range(2 * SIZE))
    bench.run("other", range(2 * SIZE), parent="stranger")
    assert bench.end("agent") == bench.end("stranger") == [] and {node.session for node in nodes} == {None}


def test_a_child_that_goes_on_has_its_parent_go_on() -> None:
    bench = Bench()
    nodes = bench.run("agent", range(2 * SIZE))
    bench.end("agent")
    bench.run("sub", range(3 * SIZE), parent="agent")
    assert not any(map(bench.sessions.has_ended, nodes))


def test_chains_and_circles_of_parents_lead_to_one_family_of_two_generations() -> None:
    bench = Bench()
    for number in range(200):
        bench.run(str(number), [1_000 + number], parent=str(number - 1))
        _told(bench)
    assert _told(bench) == {"known": 201, "children": 200, "ended": 0}
    bench.run("-1", [7], parent="199")
    bench.run("itself", [8], parent="itself")
    bench.run("5", [9], parent="itself")
    assert _told(bench) == {"known": 202, "children": 200, "ended": 0}, "a session keeps its first parent"
    assert len(bench.end("-1")) == 202 and bench.end("itself")


def test_a_parent_of_another_tenant_is_another_session() -> None:
    bench = Bench()
    nodes = bench.run("agent", range(2 * SIZE), tenant=BOB)
    bench.run("sub", range(50, 50 + SIZE), parent="agent")
    assert len(bench.end("agent")) == 1 and not any(map(bench.sessions.has_ended, nodes))
    assert len(bench.end("agent", BOB)) == 2


@pytest.mark.parametrize("limit", [1, 2, 3, 50])
def test_families_are_forgotten_like_any_sessions(limit: int) -> None:
    bench = Bench()
    bench.sessions.session_limit = limit
    dice = random.Random(limit)
    for _ in range(2_000):
        name, parent = (str(dice.randrange(2 * limit + 2)) for _ in range(2))
        bench.sessions.note_use(ALICE, bench.key(name), [], parent=bench.key(parent))
        if not dice.randrange(10):
            bench.end(name)
        assert _told(bench)["known"] <= limit


# The budget of checkpoints.


class Checkpoints(Bench):
    """A session's chains, of which every block leaves a checkpoint."""

    def compute(
        self, tokens: range | list[int], *, name: str = "agent", resumed: Node | None = None
    ) -> list[list[int]]:
        """Compute what is not known of a chain; return for each new block where the surplus ends."""
        told, parent, keys = [], ROOT, tuple(tokens)
        for start in range(0, len(keys), SIZE):
            node = self.tree.insert(parent=parent, start_token_index=start, keys=keys[start : start + SIZE])
            parent = node.hash
            if node.ram:
                continue
            self.shelf.hold(node, *self.shelf.kinds())
            self.sessions.note_computed(ALICE, self.key(name), node, is_new=True)
            surplus: list[Node] = []
            if self.sessions.has_surplus(node):
                surplus = self.sessions.take_surplus(node, resumed=resumed)
            for other in surplus:
                self.tree.drop_region(other, RegionKind.CHECKPOINT)
            check_tree(self.tree)
            told.append([other.end_token_index for other in surplus])
        return told


def test_a_session_keeps_as_many_checkpoints_as_its_budget_has_spread_over_its_chain() -> None:
    bench = Checkpoints(HYBRID, checkpoint_limit=3)
    assert bench.compute(range(5 * SIZE)) == [[], [], [], [SIZE], [3 * SIZE]]
    assert bench.sessions.snapshot().dropped_checkpoint_total == 2
    assert bench.tree.ram.used_bytes == 5 * 10 + 3 * 10


def test_what_the_prompt_resumes_from_stays_while_its_reply_leaves_others() -> None:
    bench = Checkpoints(HYBRID, checkpoint_limit=2)
    bench.compute(range(2 * SIZE))
    resumed = bench.shelf.chain(list(range(2 * SIZE)))[-1]
    told = bench.compute(range(6 * SIZE), resumed=resumed)
    assert told == [[SIZE], [3 * SIZE], [4 * SIZE], [5 * SIZE]]
    assert bench.shelf.matched([*range(2 * SIZE), 7]) == 2 * SIZE


def test_one_that_was_resumed_from_outlasts_those_that_were_not() -> None:
    bench = Checkpoints(HYBRID, checkpoint_limit=3)
    bench.compute(range(3 * SIZE))
    for resumed in ([], [], [], bench.shelf.chain(list(range(SIZE)))):
        bench.sessions.note_use(ALICE, bench.key("agent"), resumed)
    assert bench.compute([*range(SIZE), *range(50, 50 + 2 * SIZE)]) == [[2 * SIZE], [3 * SIZE]]
    assert bench.shelf.matched(range(SIZE + 1)) == SIZE


def test_one_that_little_is_lost_with_goes_before_one_that_was_used_less_recently() -> None:
    bench = Checkpoints(HYBRID, checkpoint_limit=2)
    stem = list(range(4 * SIZE))
    for node in bench.shelf.chain(stem):
        bench.shelf.hold(node, RegionKind.KV)
    last = bench.shelf.chain(stem)[-1]
    bench.shelf.hold(last, RegionKind.CHECKPOINT)
    bench.sessions.note_computed(ALICE, bench.key("agent"), last, is_new=True)
    bench.sessions.note_use(ALICE, bench.key("agent"), [])
    bench.compute([*stem, 1])
    assert bench.compute([*stem, 1, 2]) == [[4 * SIZE + 1]], "a token behind the stem, and it is a tail"


def test_those_that_others_have_used_or_that_are_pinned_count_for_nobody() -> None:
    bench = Checkpoints(HYBRID, checkpoint_limit=2)
    bench.compute(range(2 * SIZE))
    shared, pinned = bench.shelf.chain(list(range(2 * SIZE)))
    bench.sessions.note_use(ALICE, bench.key("other"), [shared])
    bench.tree.set_pin(pinned, UNTIL_UNPINNED)
    assert bench.compute(range(5 * SIZE)) == [[], [], [3 * SIZE]]
    assert RegionKind.CHECKPOINT in shared.ram and RegionKind.CHECKPOINT in pinned.ram


def test_a_parents_checkpoint_that_a_child_resumes_from_is_the_parents_and_used_by_then() -> None:
    bench = Checkpoints(HYBRID, checkpoint_limit=3)
    bench.compute(range(3 * SIZE))
    for _ in range(3):
        bench.sessions.note_use(ALICE, bench.key("agent"), [])
    forked = bench.shelf.chain(list(range(SIZE)))
    bench.sessions.note_use(ALICE, bench.key("sub"), forked, parent=bench.key("agent"))
    assert bench.compute([*range(SIZE), 50], name="sub") == [[]], "a child has a budget of its own"
    told = bench.compute([*range(SIZE), *range(60, 60 + 2 * SIZE)])
    assert told == [[2 * SIZE], [3 * SIZE]], "as one that its own session resumed from"


def test_without_a_budget_or_a_session_all_stay() -> None:
    assert Checkpoints(HYBRID).compute(range(20 * SIZE)) == [[]] * 20
    assert Checkpoints(HYBRID, checkpoint_limit=2).compute(range(20 * SIZE), name="") == [[]] * 20


def test_a_session_of_many_forks_remembers_no_more_checkpoints_than_its_budget() -> None:
    bench = Checkpoints(HYBRID, checkpoint_limit=8)
    for fork in range(100):
        bench.compute([1_000 + fork])
    (session,) = bench.sessions._known.values()
    assert len(session.checkpoints) == 8


def test_an_endless_session_without_a_budget_remembers_no_checkpoints() -> None:
    bench = Checkpoints(HYBRID)
    for fork in range(100):
        bench.compute([1_000 + fork])
    (session,) = bench.sessions._known.values()
    assert session.checkpoints == {}
