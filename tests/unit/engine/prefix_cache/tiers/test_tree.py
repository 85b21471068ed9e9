"""The one index: what it knows, what it counts, in which order blocks go, and what it tells the log."""

from __future__ import annotations

import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st
from icehouse_server.domain.blocks import RegionKind, image_keys, key_hash
from icehouse_server.domain.cache_commands import Tier
from icehouse_server.domain.ids import BlockHash, ImageDigest
from icehouse_server.engine.core.block_log import Came, Left
from icehouse_server.engine.prefix_cache.tiers.node import Node
from icehouse_server.engine.prefix_cache.tiers.prefix_settings import QuotaLimits
from icehouse_server.engine.prefix_cache.tiers.tree import NAMES_LIMIT
from icehouse_server.pins import NOT_PINNED, UNTIL_UNPINNED

from tests.fixtures.known_blocks import HYBRID, ROOT, SIZE, Shelf, record_of, root_of
from tests.fixtures.tree_check import check_tree

LONG = list(range(100, 100 + 5 * SIZE))
KV, WINDOW = RegionKind.KV, RegionKind.WINDOW
QUOTAS = QuotaLimits(ram_bytes=1 << 30, ssd_bytes=1 << 30)


PARENTS = (BlockHash(b"a" * 32), BlockHash(b"b" * 32))
KEYS = ((), (1,), (1, 2), (2, 1), image_keys(ImageDigest(b"i" * 32), (1, 2)))


def anybody(_: Node) -> bool:
    return True


@given(
    st.lists(st.tuples(st.sampled_from(PARENTS), st.sampled_from(KEYS))), st.sampled_from([b"", b"secret"])
)
def test_a_name_is_the_same_however_often_it_is_asked_for(
    asked: list[tuple[BlockHash, tuple[int, ...]]], secret: bytes
) -> None:
    tree = Shelf(name_secret=secret).tree
    for parent, keys in asked:
        assert tree.name_of(parent, keys) == key_hash(parent=parent, keys=keys, secret=secret)


def test_so_many_names_are_remembered_and_no_more() -> None:
    tree = Shelf().tree
    for number in range(NAMES_LIMIT + 10):
        tree.name_of(ROOT, (number,))
    assert tree.name_of.cache_info().currsize == NAMES_LIMIT


@pytest.mark.parametrize("is_computed", [False, True])
def test_tokens_that_become_known_of_a_stored_block_are_noted_once(is_computed: bool) -> None:
    """Whoever follows the log may have failed to read them from the file."""
    shelf, (made, *_) = Shelf(), Shelf().chain(LONG)
    shelf.log.begin()
    stored = shelf.tree.store(record_of(made, KV))
    (*_, came) = shelf.log.take(limit=10)
    assert came == Came(Tier.SSD, stored.hash, ROOT, True, SIZE, None)
    for _ in range(2):
        if is_computed:
            shelf.block(ROOT, 0, LONG[:SIZE], ram=False, ssd=False)
        else:
            shelf.tree.learn_keys(stored, tuple(LONG[:SIZE]))
    assert shelf.log.take(limit=10) == [came._replace(keys=tuple(LONG[:SIZE]))]


def test_tokens_that_become_known_are_not_noted_while_nobody_listens() -> None:
    shelf, (made, *_) = Shelf(), Shelf().chain(LONG)
    stored = shelf.tree.store(record_of(made, KV))
    shelf.tree.learn_keys(stored, tuple(LONG[:SIZE]))
    assert stored.token_ids == tuple(LONG[:SIZE]) and len(shelf.log) == 0


@pytest.mark.parametrize("tier", list(Tier))
def test_a_block_with_an_image_is_noted_with_the_keys_that_tell_it_apart(tier: Tier) -> None:
    shelf = Shelf()
    shelf.log.begin()
    keys = image_keys(ImageDigest(bytes(32)), [7] * SIZE)
    text, image = shelf.chain([*LONG[:SIZE], *keys], ram=tier is Tier.RAM, ssd=tier is Tier.SSD)
    assert shelf.log.take(limit=10)[2:] == [
        Came(tier, text.hash, ROOT, True, SIZE, tuple(LONG[:SIZE])),
        Came(tier, image.hash, text.hash, False, SIZE, keys),
    ]


def test_a_block_comes_to_a_tier_and_leaves_it_once() -> None:
    shelf = Shelf()
    (node,) = shelf.chain(LONG[:SIZE])
    shelf.log.begin()
    shelf.hold(node, KV)
    shelf.hold(node, WINDOW)
    assert shelf.tree.drop(node) and not shelf.tree.drop(node)
    assert shelf.log.take(limit=10)[2:] == [
        Came(Tier.RAM, node.hash, ROOT, True, SIZE, tuple(LONG[:SIZE])),
        Left(Tier.RAM, node.hash),
    ]


def test_a_node_lives_as_long_as_a_tier_has_it() -> None:
    shelf = Shelf()
    (node,) = shelf.chain(LONG[:SIZE], ram=True, ssd=True)
    shelf.tree.drop(node)
    assert shelf.tree.get(node.hash) is node
    shelf.tree.begin_spill(node, size_bytes=10)
    shelf.tree.forget_stored(node.hash)
    assert len(shelf.tree) == 1 and list(shelf.tree.spilling) == [node]
    shelf.tree.end_spill(node)
    assert not shelf.tree.spilling and not node.is_spilling
    assert len(shelf.tree) == 0 and shelf.tree.children(ROOT) == []
    shelf.tree.forget_stored(node.hash)
    check_tree(shelf.tree)


def test_what_the_row_says_is_kept() -> None:
    shelf = Shelf()
    (node,) = Shelf().chain(LONG[:SIZE])
    stored = shelf.tree.store(record_of(node, KV, pin_end_time=UNTIL_UNPINNED))
    assert stored.is_pinned and stored.ssd == {KV: 100} and stored.ssd_bytes == 1000
    shelf.tree.set_pin(stored, NOT_PINNED)
    assert not shelf.tree.store(record_of(node, KV, pin_end_time=UNTIL_UNPINNED)).is_pinned
    check_tree(shelf.tree)


def test_bytes_are_asked_of_a_region_once_and_are_those_of_all_regions() -> None:
    shelf = Shelf()
    nodes = shelf.chain(LONG[: 3 * SIZE], ram=True)
    assert (shelf.tree.ram.block_count, shelf.tree.ram.used_bytes) == (3, 30)
    shelf.hold(nodes[0], WINDOW, size_bytes=5)
    assert (shelf.tree.ram.block_count, shelf.tree.ram.used_bytes, nodes[0].ram_bytes) == (3, 35, 15)
    shelf.hold(nodes[0], WINDOW, size_bytes=7)
    assert shelf.tree.ram.used_bytes == 37
    shelf.tree.drop(nodes[0])
    assert (shelf.tree.ram.block_count, shelf.tree.ram.used_bytes, nodes[0].ram) == (2, 20, {})
    check_tree(shelf.tree)


def test_two_blocks_may_hold_the_same_region() -> None:
    """A page that two tails share: it is there until the last of them lets go of it."""
    shelf = Shelf()

    class Page:
        size_bytes = 10

    (one,), (other,) = shelf.chain([1, 2, 3]), shelf.chain([1, 2])
    page = Page()
    alive = weakref.ref(page)
    for node in (one, other):
        shelf.tree.add_regions(node, {KV: page})
    del page
    shelf.tree.drop(one)
    assert alive() is not None and other.ram[KV] is alive()
    shelf.tree.drop(other)
    assert alive() is None


def test_a_touched_chain_ends_with_its_head() -> None:
    shelf = Shelf()
    nodes = shelf.chain(LONG[: 4 * SIZE], ram=True)
    shelf.tree.touch(nodes[:3], now=5.0)
    assert list(shelf.tree.in_ram()) == nodes[::-1]
    assert [node.last_used_time for node in nodes] == [5.0, 5.0, 5.0, 0.0]


def test_the_recent_ones_are_pinned_ones_then_those_touched_last_then_those_known_last() -> None:
    shelf = Shelf()
    nodes = shelf.chain(LONG[: 4 * SIZE], ram=True)
    (stored,) = shelf.chain([7], ssd=True)
    shelf.tree.touch(nodes[:2], now=5.0)
    shelf.tree.set_pin(nodes[2], UNTIL_UNPINNED)
    assert shelf.tree.recent(3) == [nodes[2], nodes[0], nodes[1]]
    assert shelf.tree.recent(5) == [nodes[2], nodes[0], nodes[1], nodes[3], stored]
    assert shelf.tree.recent(100) == shelf.tree.recent(5)


def test_victims_are_the_oldest_that_make_just_enough_room() -> None:
    shelf = Shelf()
    nodes, ram = shelf.chain(range(10 * SIZE), ram=True), shelf.tree.ram
    assert ram.victims(0, may_go=anybody) == ram.victims(-50, may_go=anybody) == []
    assert ram.victims(1, may_go=anybody) == nodes[:1]
    assert ram.victims(25, may_go=anybody) == nodes[:3]
    assert ram.victims(100, may_go=anybody) == nodes
    assert ram.victims(101, may_go=anybody) is None, "not even all of them would do"
    assert ram.victims(20, may_go=lambda node: node is not nodes[1]) == [nodes[0], nodes[2]]


def test_who_looks_for_victims_passes_no_pinned_one() -> None:
    shelf = Shelf()
    nodes, tree = shelf.chain(range(10 * SIZE), ram=True), shelf.tree
    for node in nodes[:8]:
        tree.set_pin(node, UNTIL_UNPINNED)
    assert list(tree.ram.oldest()) == nodes[8:] and list(tree.in_ram()) == nodes[8:] + nodes[:8]
    assert (tree.ram.block_count, tree.ram.used_bytes, tree.ram.pinned_by[ROOT]) == (10, 100, 80)
    shelf.hold(nodes[0], WINDOW, size_bytes=5)
    assert tree.ram.pinned_by[ROOT] == 85 and nodes[0] in tree.pinned_in_ram
    # One that may go again is the most recently used, and one that is gone counts no more.
    tree.set_pin(nodes[0], NOT_PINNED)
    assert list(tree.ram.oldest()) == [*nodes[8:], nodes[0]] and tree.ram.pinned_by[ROOT] == 70
    tree.drop(nodes[1])
    assert tree.ram.pinned_by[ROOT] == 60 and len(tree.pinned_in_ram) == 6
    check_tree(tree)


def test_an_owners_blocks_come_in_their_order_and_go_with_it() -> None:
    shelf = Shelf(quotas=QUOTAS)
    tree, other = shelf.tree, root_of("other")
    nodes = shelf.chain(LONG[: 4 * SIZE], ram=True)
    tree.touch(nodes[:2], now=3.0)
    assert list(tree.ram.oldest([ROOT])) == [nodes[2], nodes[3], nodes[1], nodes[0]]
    (theirs,) = shelf.chain([1], ram=True, root=other)
    assert list(tree.ram.oldest([other])) == [theirs] and tree.ram.used_by == {ROOT: 40, other: 10}
    assert list(tree.ram.oldest()) == [*tree.ram.oldest([ROOT]), theirs]
    tree.touch(nodes, now=4.0)
    assert next(tree.ram.oldest([other, ROOT])) is theirs is next(tree.ram.oldest())
    assert next(tree.ram.latest()) is nodes[0]
    assert list(tree.ram.oldest([root_of("nobody")])) == []
    check_tree(tree)


def test_a_block_of_unknown_owner_is_claimed_by_who_uses_it() -> None:
    shelf = Shelf(quotas=QUOTAS)
    *_, last = Shelf().chain(LONG)
    stored = shelf.tree.store(record_of(last, KV))
    shelf.hold(stored, KV)
    assert stored.owner is None and list(shelf.tree.ssd.oldest([None])) == [stored]
    shelf.tree.claim([stored], ROOT)
    shelf.tree.claim([stored], root_of("late"))
    for tier in (shelf.tree.ram, shelf.tree.ssd):
        assert list(tier.oldest([None])) == [] and list(tier.oldest([ROOT])) == [stored]
    check_tree(shelf.tree)


def test_what_was_found_on_ssd_and_never_used_goes_first_tails_before_heads() -> None:
    shelf = Shelf(quotas=QUOTAS)
    first, used, second = (Shelf().chain(range(start, start + 3 * SIZE)) for start in (0, 100, 200))
    stored = [[shelf.tree.store(record_of(node, KV)) for node in made] for made in (first, used, second)]
    shelf.tree.touch(stored[1], now=5.0)
    order = list(shelf.tree.ssd.oldest([ROOT]))
    assert order[-3:] == stored[1][::-1]
    assert [node for node in order if node in stored[0]] == stored[0][::-1]
    # What comes from RAM was used in this process.
    new = shelf.chain([7], ram=True)[0]
    shelf.tree.touch([new], now=1.0)
    shelf.tree.store(record_of(new, KV))
    assert [*shelf.tree.ssd.oldest([ROOT])][-1] is new
    check_tree(shelf.tree)


def test_a_victim_costs_no_look_at_all_the_others() -> None:
    shelf = Shelf(quotas=QUOTAS)
    looked: list[Node] = []

    def may_go(node: Node) -> bool:
        looked.append(node)
        return True

    pattern = record_of(shelf.chain([1])[0], KV)
    for number in range(20_000):
        shelf.tree.store(pattern._replace(hash=BlockHash((number + 1).to_bytes(32, "big"))))
    assert len(shelf.tree.ssd.victims(3000, may_go=may_go, owners=[ROOT]) or ()) == 3 == len(looked)


def test_blocks_that_left_are_kept_by_nobody() -> None:
    """As many as ever come and go, and however often they are pinned: no order holds a stale one."""
    shelf = Shelf(quotas=QUOTAS)

    class Watched(Node):
        __slots__ = ("__weakref__",)

    pattern = record_of(shelf.chain([1])[0], KV)
    gone = []
    for number in range(1_000):
        name = BlockHash((number + 1).to_bytes(32, "big"))
        node = Watched(name, ROOT, 0, SIZE)
        shelf.tree._add(node)
        assert shelf.tree.store(pattern._replace(hash=name)) is node
        for end_time in (UNTIL_UNPINNED, NOT_PINNED):
            shelf.tree.set_pin(node, end_time)
        shelf.tree.forget_stored(name)
        gone.append(weakref.ref(node))
    del node
    assert not any(ref() for ref in gone)
    assert (shelf.tree.ssd.used_by, list(shelf.tree.ssd.oldest([ROOT]))) == ({}, [])


def test_a_region_that_is_dropped_leaves_the_others_where_they_are() -> None:
    shelf = Shelf(HYBRID)
    nodes = shelf.chain(range(3 * SIZE), ram=True)
    shelf.tree.drop_region(nodes[1], RegionKind.CHECKPOINT)
    check_tree(shelf.tree)
    assert list(shelf.tree.ram.oldest()) == nodes and shelf.tree.ram.used_bytes == 50
    assert nodes[1].ram.keys() == {RegionKind.KV}
    shelf.tree.drop_region(nodes[1], RegionKind.CHECKPOINT)
    shelf.tree.drop_region(nodes[1], RegionKind.KV)
    assert nodes[1] not in shelf.tree and shelf.tree.ram.used_bytes == 40
