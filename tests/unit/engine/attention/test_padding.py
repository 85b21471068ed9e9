"""Shapes of attention repeat, whatever the lengths of chunks and contexts."""

from __future__ import annotations

import pytest
from icehouse_server.engine.attention.padding import padded_key_length, padded_query_length


@pytest.mark.parametrize(
    ("token_count", "padded"),
    [(1, 64), (64, 64), (65, 256), (256, 256), (257, 1024), (1025, 2048), (2048, 2048), (2049, 4096)],
)
def test_queries_are_padded_to_the_next_usual_length(token_count: int, padded: int) -> None:
    assert padded_query_length(token_count) == padded


@pytest.mark.parametrize(
    ("token_count", "padded"),
    [(1, 64), (64, 64), (65, 96), (97, 128), (129, 192), (193, 256), (1025, 1536), (1537, 2048)],
)
def test_keys_are_padded_to_a_power_of_two_or_half_as_much_again(token_count: int, padded: int) -> None:
    assert padded_key_length(token_count) == padded


def test_keys_are_padded_by_less_than_half() -> None:
    for token_count in range(64, 40_000):
        assert token_count <= padded_key_length(token_count) < 1.5 * token_count


def test_there_are_at_most_64_shapes_up_to_32_000_tokens_of_context() -> None:
    shapes = set()
    for start in range(0, 32_000, 64):
        for token_count in (1, 64, 65, 256, 257, 1024, 1025, 2048):
            queries = padded_query_length(min(token_count, 32_000 - start))
            shapes.add((queries, padded_key_length(start + queries)))
    assert len(shapes) <= 64
    assert all(queries <= keys for queries, keys in shapes)
