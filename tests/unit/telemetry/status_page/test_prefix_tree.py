"""The tree of shared prefixes: what is one node, what is shown, and how much at most."""

from __future__ import annotations

from icehouse_server.domain.blocks import TokenKeys
from icehouse_server.domain.cache_commands import RecentBlock
from icehouse_server.domain.ids import BlockHash
from icehouse_server.telemetry.status_page.page import (
    BRANCH_LIMIT,
    DEPTH_LIMIT,
    HEAD_TOKEN_LIMIT,
    NODE_LIMIT,
    PrefixNode,
    shared_prefixes,
)

SIZE = 256


def block(
    name: str, parent: str, number: int, hits: int, *, on_ssd: bool = False, keys: TokenKeys | None = None
) -> RecentBlock:
    return RecentBlock(
        hash=BlockHash(name.encode()),
        parent=BlockHash(parent.encode()),
        start_token_index=number * SIZE,
        token_count=SIZE,
        hit_count=hits,
        is_in_ram=not on_ssd,
        is_on_ssd=on_ssd,
        token_keys=keys,
    )


def count(nodes: tuple[PrefixNode, ...]) -> int:
    return sum(1 + count(node.children) for node in nodes)


def ends(nodes: tuple[PrefixNode, ...]) -> list[BlockHash]:
    return [node.blocks[-1].hash for node in nodes]


def depth(nodes: tuple[PrefixNode, ...]) -> int:
    return max((1 + depth(node.children) for node in nodes), default=0)


def test_blocks_reused_together_are_one_node_and_a_fork_begins_others() -> None:
    blocks = [
        block("a", "root", 0, 9),
        block("b", "a", 1, 9, on_ssd=True),
        block("left", "b", 2, 5),
        block("right", "b", 2, 3),
        block("once", "b", 2, 0),
    ]
    [top] = shared_prefixes(reversed(blocks))
    assert [block.hash for block in top.blocks] == [b"a", b"b"] and top.branch_count == 3
    assert ends(top.children) == [b"left", b"right"]


def test_a_node_ends_where_less_than_half_of_its_prompts_go_on() -> None:
    blocks = [block("a", "root", 0, 40), block("b", "a", 1, 20), block("c", "b", 2, 19)]
    [top] = shared_prefixes(blocks)
    assert ends((top,)) == [b"b"] and ends(top.children) == [b"c"]


def test_what_nobody_reused_is_not_shown() -> None:
    assert shared_prefixes([block("a", "root", 0, 0), block("b", "a", 1, 0)]) == ()


def test_a_chain_whose_beginning_is_not_among_the_blocks_begins_where_it_is_known() -> None:
    [top] = shared_prefixes([block("c", "b", 2, 4)])
    assert top.blocks[0].start_token_index == 2 * SIZE


def test_trees_come_in_the_order_of_what_they_saved_with_all_below_them() -> None:
    blocks = [
        block("wide", "r", 0, 5),
        block("small", "r", 0, 3),
        block("below small", "small", 1, 2),
        block("beside it", "small", 1, 1),
    ]
    assert ends(shared_prefixes(blocks)) == [b"small", b"wide"]


def test_the_tree_is_bounded_in_nodes_branches_and_depth() -> None:
    comb = [block("0", "root", 0, 1 << 20)]
    for number in range(1, 200):
        comb += [block(f"{number}", f"{number - 1}", number, (1 << 20) - number)]
        comb += [block(f"{number}-{i}", f"{number - 1}", number, 2) for i in range(10)]
    tops = [block(f"t{i}", "root", 0, 1) for i in range(100)]
    nodes = shared_prefixes([*comb, *tops])
    assert count(nodes) == NODE_LIMIT and depth(nodes) == DEPTH_LIMIT
    assert len(nodes[0].children) == BRANCH_LIMIT and nodes[0].branch_count == 11


def test_blocks_that_name_each_other_as_parents_end_nothing() -> None:
    circle = [block("a", "b", 1, 1), block("b", "a", 1, 1), block("c", "c", 0, 1)]
    assert shared_prefixes(circle) == ()


def test_a_node_begins_with_the_first_tokens_of_its_own_blocks_as_far_as_they_are_known() -> None:
    half = tuple(range(HEAD_TOKEN_LIMIT // 2))
    blocks = [
        block("a", "root", 0, 9, keys=half),
        block("b", "a", 1, 9, keys=half),
        block("c", "b", 2, 9, keys=half),
        block("left", "c", 3, 5, keys=(7, 8)),
        block("left end", "left", 4, 5),
        block("right", "c", 3, 4),
        block("right end", "right", 4, 4, keys=(9,)),
    ]
    [top] = shared_prefixes(blocks)
    left, right = top.children
    assert (top.head, left.head, right.head) == (half + half, (7, 8), None)
    assert str(half) not in repr(top) and str(half) not in repr(blocks)
