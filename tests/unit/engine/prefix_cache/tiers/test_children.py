"""Blocks by parent: order, lengths, and what is left when they go."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from icehouse_server.domain.ids import BlockHash
from icehouse_server.engine.prefix_cache.tiers.node import Node
from icehouse_server.engine.prefix_cache.tiers.tree import Children

PARENT = BlockHash(b"p" * 32)


def entry(number: int, token_count: int, parent: BlockHash = PARENT) -> Node:
    return Node(BlockHash(number.to_bytes(32, "big")), parent, 0, token_count)


def test_nobody_has_children_at_first() -> None:
    children = Children()
    assert [*children.latest(PARENT), *children.lengths(PARENT)] == []


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(1, 4)), max_size=40))
def test_they_are_those_that_came_and_did_not_go(steps: list[tuple[int, int]]) -> None:
    """Each step adds the child of this number, or removes it if it is there."""
    children = Children()
    there: dict[int, Node] = {}
    for number, token_count in steps:
        if number in there:
            children.remove(there.pop(number))
        else:
            there[number] = entry(number, token_count)
            children.add(there[number])
        expected = tuple(there.values())
        assert list(children.latest(PARENT)) == list(reversed(expected))
        assert sorted(children.lengths(PARENT)) == sorted({child.token_count for child in expected})


def test_families_do_not_mix() -> None:
    children = Children()
    other = BlockHash(b"o" * 32)
    one, two = entry(1, 3), entry(2, 4, other)
    children.add(one)
    children.add(two)
    assert (list(children.latest(PARENT)), list(children.latest(other))) == ([one], [two])
