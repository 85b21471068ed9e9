"""What of a prompt is known: chains over two tiers, ends inside blocks, tails, checkpoints, tenants."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from icehouse_server.domain import blocks
from icehouse_server.domain.blocks import RegionKind, image_keys
from icehouse_server.domain.ids import BlockHash, ImageDigest
from icehouse_server.engine.prefix_cache.tiers.matching import LookupPrompt, known_chain, unread_nodes
from icehouse_server.engine.prefix_cache.tiers.node import Node
from icehouse_server.engine.prefix_cache.tiers.runner_port import CacheFacts

from tests.fixtures.known_blocks import (
    HYBRID,
    KV_ONLY,
    ROOT,
    SHORT_WINDOWS,
    SIZE,
    STATE_ONLY,
    WINDOWS,
    Shelf,
    SizedRegion,
    record_of,
    root_of,
)

LONG = list(range(100, 100 + 5 * SIZE))


def test_nothing_is_known_at_first() -> None:
    match = Shelf().match(LONG)
    assert (match.nodes, match.token_count, match.known_token_count) == ((), 0, 0)


def test_the_last_token_always_runs() -> None:
    shelf = Shelf()
    shelf.chain(LONG, ram=True)
    assert shelf.matched(LONG) == len(LONG) - 1
    assert shelf.matched([*LONG, 1]) == len(LONG)
    assert shelf.matched(LONG[:1]) == 0


def test_a_match_ends_where_the_prompt_differs_even_inside_a_block() -> None:
    shelf = Shelf()
    shelf.chain(LONG, ram=True)
    for length in range(len(LONG)):
        assert shelf.matched([*LONG[:length], 7, 7, 7, 7, 7]) == length


@pytest.mark.parametrize("facts", [SHORT_WINDOWS, HYBRID], ids=["short windows", "hybrid"])
def test_blocks_that_cannot_be_cut_match_whole_only(facts: CacheFacts) -> None:
    shelf = Shelf(facts)
    shelf.chain(LONG, ram=True)
    for length in range(len(LONG)):
        assert shelf.matched([*LONG[:length], 7, 7, 7, 7, 7]) == length // SIZE * SIZE


def test_a_chain_over_two_tiers_is_one_match() -> None:
    shelf = Shelf()
    shelf.chain(LONG[: 2 * SIZE], ram=True)
    shelf.chain(LONG, ssd=True)
    assert shelf.matched([*LONG, 1]) == len(LONG)
    assert shelf.matched([*LONG, 1], with_ssd=False) == 2 * SIZE


def test_ram_after_a_block_that_only_the_ssd_has_is_not_used() -> None:
    shelf = Shelf()
    nodes = shelf.chain(LONG, ram=True)
    shelf.tree.store(record_of(nodes[1], RegionKind.KV))
    shelf.tree.drop(nodes[1])
    assert shelf.matched([*LONG, 1]) == 2 * SIZE
    shelf.tree.store(record_of(nodes[2], RegionKind.KV))
    assert shelf.matched([*LONG, 1]) == 3 * SIZE


def test_a_tail_in_ram_is_found_beside_a_longer_block_on_ssd() -> None:
    shelf = Shelf()
    shelf.chain(LONG[: SIZE + 2], ram=True)
    shelf.chain(LONG, ssd=True)
    assert shelf.matched([*LONG, 1], with_ssd=False) == SIZE + 2
    assert shelf.matched([*LONG, 1]) == len(LONG)


def test_the_longest_of_several_tails() -> None:
    shelf = Shelf()
    shelf.chain([1, 2, 3, 4, 5], ram=True)
    shelf.chain([1, 2, 3, 4, 5, 6, 7], ram=True)
    shelf.chain([1, 2, 3, 4, 9, 9], ram=True)
    assert shelf.matched([1, 2, 3, 4, 5, 6, 7, 8]) == 7
    assert shelf.matched([1, 2, 3, 4, 9, 8]) == 5


def test_a_stored_block_of_unknown_tokens_is_found_by_its_hash_alone() -> None:
    shelf, other = Shelf(), Shelf()
    for node in other.chain(LONG, ram=True):
        shelf.tree.store(record_of(node, RegionKind.KV))
    assert all(node.token_ids is None for node in shelf.tree)
    assert shelf.matched([*LONG, 1]) == len(LONG)
    # Whether it begins like this prompt is not known before its header was read.
    fork = [*LONG[: 2 * SIZE + 1], 7, 7, 7]
    assert shelf.matched(fork) == 2 * SIZE
    prompt = LookupPrompt(tuple(fork), ROOT)
    (unread,) = unread_nodes(shelf.tree, prompt)
    assert unread.start_token_index == 2 * SIZE
    shelf.tree.learn_keys(unread, tuple(LONG[2 * SIZE : 3 * SIZE]))
    assert shelf.matched(fork) == 2 * SIZE + 1
    assert unread_nodes(shelf.tree, prompt) == []


def test_an_equal_hash_is_not_enough() -> None:
    shelf = Shelf()
    nodes = shelf.chain(LONG, ram=True)
    nodes[1].token_ids = (9, 9, 9, 9)
    assert shelf.matched([*LONG, 1]) == SIZE
    with pytest.raises(AssertionError, match="share the hash"):
        shelf.block(nodes[0].hash, SIZE, LONG[SIZE : 2 * SIZE], ram=False, ssd=False)


def test_roots_of_tenants_never_meet() -> None:
    shelf = Shelf()
    shelf.chain(LONG, ram=True, root=root_of("one"))
    assert shelf.matched([*LONG, 1], root=root_of("one")) == len(LONG)
    for stranger in ("two", "", "on", "one "):
        assert shelf.matched([*LONG, 1], root=root_of(stranger)) == 0


def test_windows_are_asked_for_inside_the_window_only() -> None:
    shelf = Shelf(WINDOWS)
    nodes = shelf.chain(LONG, ram=True)
    for node in nodes[:3]:
        shelf.lose(node, RegionKind.WINDOW)
    # 20 tokens, window 6: from token 14 on, in the blocks that begin at 12 and 16.
    assert shelf.matched([*LONG, 1]) == len(LONG)
    # At 18 the window begins at 12; at 17 it begins at 11, in a block that has none any more.
    assert shelf.matched([*LONG[:18], 7, 7]) == 18
    assert shelf.matched([*LONG[:17], 7, 7]) == 0


def test_a_window_may_come_from_the_other_tier() -> None:
    shelf = Shelf(WINDOWS)
    nodes = shelf.chain(LONG, ram=True)
    shelf.lose(nodes[3], RegionKind.WINDOW)
    assert shelf.matched([*LONG, 1]) < len(LONG)
    shelf.tree.store(record_of(nodes[3], RegionKind.KV, RegionKind.WINDOW))
    assert shelf.matched([*LONG, 1]) == len(LONG)
    assert shelf.matched([*LONG, 1], with_ssd=False) < len(LONG)


def test_a_model_with_states_resumes_at_checkpoints_only() -> None:
    shelf = Shelf(HYBRID)
    nodes = shelf.chain(LONG, ram=True)
    for node in (nodes[1], nodes[3], nodes[4]):
        shelf.lose(node, RegionKind.CHECKPOINT)
    match = shelf.match([*LONG, 1])
    assert (match.token_count, match.known_token_count) == (3 * SIZE, len(LONG))
    assert shelf.matched([*LONG[: 2 * SIZE], 7]) == SIZE


def test_without_kv_the_blocks_between_checkpoints_may_be_unknown() -> None:
    shelf, names = Shelf(STATE_ONLY), Shelf(STATE_ONLY).chain(LONG)
    fourth = names[3]
    shelf.block(fourth.parent, 3 * SIZE, LONG[3 * SIZE : 4 * SIZE], ram=True, ssd=False)
    match = shelf.match([*LONG, 1])
    assert match.token_count == 4 * SIZE and [e.hash for e in match.nodes] == [fourth.hash]
    assert shelf.matched([7, *LONG]) == 0


def test_known_chain_names_whole_blocks_in_order() -> None:
    shelf = Shelf()
    nodes = shelf.chain(LONG[: 2 * SIZE + 2], ram=True)
    shelf.chain([*LONG[:SIZE], 7, 7, 7, 7], ram=True)
    assert known_chain(shelf.tree, LookupPrompt(tuple(LONG), ROOT)) == nodes
    assert known_chain(shelf.tree, LookupPrompt(tuple(LONG[: 2 * SIZE + 1]), ROOT)) == nodes[:2]


tokens = st.lists(st.integers(0, 2), min_size=1, max_size=4 * SIZE)


@settings(max_examples=60, deadline=None)
@given(
    known=st.lists(st.tuples(tokens, st.booleans(), st.booleans()), max_size=6),
    wanted=tokens,
    facts=st.sampled_from([KV_ONLY, WINDOWS, SHORT_WINDOWS, HYBRID, STATE_ONLY]),
    with_ssd=st.booleans(),
)
def test_a_match_is_always_a_true_prefix_that_its_tiers_can_make(known, wanted, facts, with_ssd) -> None:
    shelf = Shelf(facts)
    for stored, ram, ssd in known:
        shelf.chain(stored, ram=ram, ssd=ssd)
    match = shelf.match(wanted, with_ssd=with_ssd)
    assert match.token_count <= len(wanted) - 1
    covered: list[int] = []
    for node in match.nodes:
        assert node.start_token_index == len(covered)
        covered += node.token_ids
        for kind in facts.needed_kinds(end_token_index=node.end_token_index, token_count=match.token_count):
            assert isinstance(node.ram.get(kind), SizedRegion) or (with_ssd and kind in node.ssd)
    assert covered[: match.token_count] == wanted[: match.token_count]
    if facts == KV_ONLY and with_ssd:
        assert match.token_count >= longest_whole(known, wanted)


def longest_whole(known, wanted) -> int:
    """Return the longest common beginning with any one known sequence that is all in RAM or all on SSD."""
    best = 0
    for stored, ram, ssd in known:
        if not (ram or ssd):
            continue
        count = 0
        for a, b in zip(stored, wanted[:-1], strict=False):
            if a != b:
                break
            count += 1
        best = max(best, count)
    return best


def test_a_shared_chain_stands_for_blocks_that_are_missing() -> None:
    shelf, shared = Shelf(), root_of("shared")
    shelf.chain(LONG[: 3 * SIZE], ram=True, root=shared)
    assert shelf.matched([*LONG, 1]) == 0
    assert shelf.matched([*LONG, 1], shared_root=shared) == 3 * SIZE
    # Its own blocks go on where the shared ones end, by the names that they have without them.
    own = shelf.chain(LONG, ram=True)
    for node in own[:3]:
        shelf.tree.drop(node)
    assert shelf.matched([*LONG, 1]) == 0
    assert shelf.matched([*LONG, 1], shared_root=shared) == len(LONG)
    assert shelf.matched([*LONG, 1], root=root_of("other"), shared_root=shared) == 3 * SIZE


@pytest.mark.parametrize("own_tiers", [{"ram": True}, {"ssd": True}])
@pytest.mark.parametrize("gap", [0, 1, 2, 5])
def test_of_two_blocks_the_one_that_the_chain_can_go_on_with_is_taken(
    own_tiers: dict[str, bool], gap: int
) -> None:
    """One chain is in RAM but for one block, the other is on SSD: RAM before the gap, SSD from there on."""
    shelf, shared = Shelf(), root_of("shared")
    shared_tiers = {"ssd": True} if "ram" in own_tiers else {"ram": True}
    chains = shelf.chain(LONG, **own_tiers), shelf.chain(LONG, **shared_tiers, root=shared)
    for node in (node for chain in chains for node in chain[gap : gap + 1] if node.ram):
        shelf.tree.drop(node)
    assert shelf.matched([*LONG, 1], shared_root=shared) == len(LONG)
    assert shelf.matched([*LONG, 1], shared_root=shared, with_ssd=False) == gap * SIZE


def test_a_shared_chain_of_ones_own_changes_nothing() -> None:
    shelf = Shelf()
    shelf.chain(LONG, ram=True)
    assert shelf.match(LONG, shared_root=ROOT) == shelf.match(LONG)


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all that is hashed from here on."""
    sizes: list[int] = []
    digest = blocks._digest

    def counting(data: bytes, secret: bytes) -> BlockHash:
        sizes.append(len(data))
        return digest(data, secret)

    monkeypatch.setattr(blocks, "_digest", counting)
    return sizes


def crowd(count: int, *, is_known: bool) -> Shelf:
    """Return the index of so many short prompts below one block; known are their tokens, or only names."""
    shelf = Shelf()
    (stem,) = shelf.chain(LONG[:SIZE], ram=True, ssd=True)
    for number in range(count):
        tail = (number, *range(number % (SIZE - 1)))
        node = shelf.tree.insert(parent=stem.hash, start_token_index=SIZE, keys=tail)
        shelf.tree.store(record_of(node, RegionKind.KV))
        if not is_known:
            node.token_ids = None
    return shelf


@pytest.mark.parametrize("count", [10, 20_000])
def test_a_crowd_of_siblings_costs_a_capture_one_hash_for_each_length(count: int, hashed: list[int]) -> None:
    shelf = crowd(count, is_known=True)
    stem = shelf.tree.get(shelf.tree.chain_names(ROOT, tuple(LONG))[0])
    assert stem is not None
    new = shelf.block(stem.hash, SIZE, (5, 0, 1, 2), ram=True, ssd=False)
    hashed.clear()
    assert [other.token_ids for other in shelf.tree.superseded(new)] == [(5, 0, 1)]
    assert len(hashed) <= SIZE - 1


@pytest.mark.parametrize("is_known", [True, False], ids=["seen", "after a restart"])
@pytest.mark.parametrize("count", [10, 20_000])
def test_a_crowd_of_siblings_costs_a_match_one_hash_for_each_length(
    count: int, is_known: bool, hashed: list[int]
) -> None:
    shelf = crowd(count, is_known=is_known)
    hashed.clear()
    # An old one: the first to come are found as the last.
    assert shelf.matched([*LONG[:SIZE], 2, 0, 1, 9]) == SIZE + 3
    # The names of the two levels, and one for each shorter length.
    assert len(hashed) <= 2 + SIZE - 1


def test_a_long_prompt_of_small_blocks_is_matched_in_one_pass_over_its_chain(hashed: list[int]) -> None:
    """No candidate is usable: each is judged by itself, not by all the blocks before it."""
    shelf = Shelf(HYBRID)
    prompt = list(range(2_000 * SIZE))
    asked = []

    class Counted(Node):
        __slots__ = ()

        def has(self, kind: RegionKind, *, with_ssd: bool) -> bool:
            asked.append(kind)
            return Node.has(self, kind, with_ssd=with_ssd)

    for node in shelf.chain(prompt, ram=True):
        node.ram = {RegionKind.KV: node.ram[RegionKind.KV]}
        node.__class__ = Counted
    hashed.clear()
    assert shelf.matched([*prompt, 1]) == 0
    assert len(asked) <= 2 * 2_000 and len(hashed) <= 2_001


@pytest.mark.slow
@pytest.mark.parametrize("count", [1_000, 1_000_000])
def test_a_million_blocks_cost_a_lookup_what_a_thousand_do(count: int, hashed: list[int]) -> None:
    """Half of them below one popular block, the others in chains of eight; known by their names only."""
    shelf = crowd(count // 2, is_known=False)
    pattern = record_of(next(iter(shelf.tree)), RegionKind.KV)
    parent = BlockHash(bytes(32))
    for number in range(count // 2):
        name = BlockHash((number + 1).to_bytes(32, "big"))
        shelf.tree.store(pattern._replace(hash=name, parent=parent, start_token_index=number % 8 * SIZE))
        parent = name if number % 8 < 7 else BlockHash((number + count).to_bytes(32, "little"))
    assert len(shelf.tree) > 0.9 * count
    hashed.clear()
    assert shelf.matched([*LONG[:SIZE], 2, 0, 1, 9]) == SIZE + 3
    assert len(known_chain(shelf.tree, LookupPrompt((*LONG[:SIZE], 2, 0, 1), ROOT))) >= 2
    assert len(hashed) <= 3 * (1 + SIZE)


def test_a_match_ends_inside_a_block_where_the_image_is_another() -> None:
    shelf = Shelf()
    cat, dog = (ImageDigest(bytes([number]) * 32) for number in (1, 2))
    head, span, rest = LONG[:3], [7] * 6, LONG[3:6]
    shelf.chain([*head, *image_keys(cat, span), *rest], ram=True)
    assert shelf.matched([*head, *image_keys(cat, span), *rest, 1]) == 12
    assert shelf.matched([*head, *image_keys(dog, span), *rest, 1]) == len(head)
    assert shelf.matched([*head, *span, *rest, 1]) == len(head)
    assert shelf.matched([*head, *image_keys(cat, span[:4]), *image_keys(dog, span[4:]), 1]) == len(head) + 4
