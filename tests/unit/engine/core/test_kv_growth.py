"""Room of KV arrays: never too little, never far too much, and copied seldom."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from icehouse_server.engine.core.kv_growth import KvGrowth, KvLength

LENGTHS = st.builds(
    lambda count, more: KvLength(count, count + more), st.integers(1, 20_000), st.integers(0, 5_000)
)


@given(token_count=st.integers(1, 50_000), length=LENGTHS, grid=st.sampled_from([1, 256]))
def test_room_is_enough_and_its_own_class(token_count: int, length: KvLength, grid: int) -> None:
    growth = KvGrowth(grid)
    room = growth.room(token_count, length)
    assert room >= token_count and room % grid == 0
    assert growth.room(room, length) == room, "arrays that are full are not thought to be larger"
    assert room <= growth.room(token_count + 1, length), "room never shrinks"


@given(output=st.integers(1, 5_000), length=LENGTHS)
def test_a_row_that_decodes_has_room_for_little_that_it_may_not_use(output: int, length: KvLength) -> None:
    token_count = length.input_token_count + output
    room = KvGrowth().room(token_count, length)
    assert room <= max(token_count, length.limit_token_count)
    assert room - token_count <= max(128, token_count // 8)


@pytest.mark.parametrize(
    ("token_count", "length", "expected"),
    [
        (0, KvLength(500, 1524), 0),
        (1, KvLength(500, 1524), 628),
        (500, KvLength(500, 1524), 628),
        (565, KvLength(500, 1524), 628),
        (629, KvLength(500, 1524), 640),
        (641, KvLength(500, 1524), 768),
        (40, KvLength(40, 88), 88),
        (80, KvLength(40, 70), 80),
        (100, KvLength(6000, 6500), 1024),
        (1025, KvLength(6000, 6500), 2048),
        (4097, KvLength(6000, 6500), 6128),
        (6065, KvLength(6000, 6500), 6128),
        (6400, KvLength(6000, 6500), 6500),
        (3, KvLength(), 128),
    ],
)
def test_room_at_known_lengths(token_count: int, length: KvLength, expected: int) -> None:
    assert KvGrowth().room(token_count, length) == expected


def test_long_outputs_copy_a_bounded_number_of_tokens_for_each_that_comes() -> None:
    length, copied, room = KvLength(100, 1 << 20), 0, 0
    for token_count in range(101, 20_000):
        if token_count > room:
            copied += room
            room = KvGrowth().room(token_count, length)
    assert copied / 20_000 < 16
