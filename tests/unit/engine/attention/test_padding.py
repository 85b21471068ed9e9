"""Shapes of attention repeat, whatever the lengths of chunks are and wherever they begin."""

from __future__ import annotations

import random

from icehouse_server.engine.attention.padding import LONG_BORDER, padding_of


def test_random_chunks_have_few_shapes() -> None:
    draw = random.Random(7)
    shapes = set()
    for _ in range(10_000):
        begin = draw.randrange(8_000)
        # As planned: a chunk ends at the second border at the latest.
        count = draw.randint(1, 2 * LONG_BORDER - begin % LONG_BORDER)
        padding = padding_of(begin, count)
        shapes.add((padding.query_count, padding.key_count))
    assert len(shapes) <= 64


def test_every_token_of_a_chunk_sees_what_is_before_it_and_no_more() -> None:
    draw = random.Random(8)
    for _ in range(2_000):
        begin, count = draw.randrange(9_000), draw.randint(1, 5_000)
        padding = padding_of(begin, count)
        last_key = padding.key_count - padding.query_count + padding.front_count
        assert last_key == begin, "the chunk's first query ends at its own key under the causal rule"
        assert padding.front_count + count <= padding.query_count
        assert begin + count <= padding.key_count
