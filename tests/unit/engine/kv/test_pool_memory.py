"""Pool memory that models share: how far pools grow, and what they give back without losing a page."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from icehouse_server.device import Backend, find_backend
from icehouse_server.engine.attention.cpu.attention import CpuAttention
from icehouse_server.engine.attention.gather import GatherAttention
from icehouse_server.engine.attention.port import PagedAttention, PoolShape
from icehouse_server.engine.kv import pool as kv_pool
from icehouse_server.engine.kv.page_groups import GroupFacts
from icehouse_server.engine.kv.page_table import PageGroup
from icehouse_server.engine.kv.pool import Page, PassClock, numbers_of
from icehouse_server.engine.kv.pool_memory import PoolMemory, make_groups

SHAPE = PoolShape(layer_count=2, kv_head_count=3, head_size=4, page_token_count=8, dtype=mx.float32)
SIZE = SHAPE.page_bytes


def group_with(attention: PagedAttention, *, size_bytes: int = 0) -> PageGroup:
    facts = GroupFacts(SHAPE, {0: 0, 1: 1}, None)
    [group] = make_groups([(facts, attention)], [size_bytes], passes=PassClock())
    return group


def numbered(group: PageGroup, pages: list[Page]) -> None:
    """Fill each page with its place in the list."""
    content = mx.broadcast_to(
        mx.arange(len(pages), dtype=mx.float32).reshape(-1, 1, 1, 1, 1, 1),
        (len(pages), *group.pool.array.shape[1:]),
    )
    group.attention.fill_pages(group.pool, content, numbers_of(pages))


def content_of(group: PageGroup, pages: list[Page]) -> list[float]:
    """Return the places by what is in the pages."""
    read = group.attention.read_pages(group.pool, numbers_of(pages))
    return [float(each) for each in np.array(read[:, 1, 1, 2, 7, 3])]


def attentions() -> list[PagedAttention]:
    return [GatherAttention(), *([CpuAttention()] if find_backend() is Backend.CPU else [])]


@pytest.mark.parametrize("attention", attentions(), ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("is_unified", [True, False])
def test_free_pages_are_given_back_and_the_others_keep_what_they_hold(
    attention: PagedAttention, is_unified: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = group_with(attention)
    pool, memory = group.pool, PoolMemory([group])
    pages: list[Page | None] = [*pool.take(100)]
    numbered(group, [page for page in pages if page is not None])
    if not is_unified:
        monkeypatch.setattr(kv_pool, "find_backend", lambda: Backend.CUDA)
    before_bytes = memory.held_bytes
    kept = [page for page in pages if page is not None][60::2]
    expected = content_of(group, kept)
    pages.clear()
    assert memory.used_bytes == 20 * SIZE
    assert memory.give_back(SIZE) == before_bytes - 20 * SIZE == before_bytes - memory.held_bytes
    assert content_of(group, kept) == expected == [float(number) for number in range(60, 100, 2)]
    # Those that come then are others' pages.
    more = pool.take(30)
    numbered(group, more)
    assert content_of(group, kept) == expected and len({page.number for page in (*kept, *more)}) == 50
    del kept, more
    assert memory.used_bytes == 0
    assert memory.give_back(SIZE) and memory.held_bytes == 16 * SIZE, "the least that a pool has"


def test_a_page_that_is_let_go_of_after_a_move_is_free_where_it_lies() -> None:
    group = group_with(GatherAttention())
    pages = group.pool.take(50)
    kept = pages[30:]
    del pages
    assert PoolMemory([group]).give_back(1)
    held = kept.pop()
    number = held.number
    del held
    taken = group.pool.take(1)
    assert number < 20 and taken[0].number == number
    assert len({page.number for page in (*kept, *taken)}) == 20


def test_nothing_moves_while_a_row_knows_its_pages_by_their_numbers() -> None:
    group = group_with(GatherAttention())
    has_rows = [True]
    memory = PoolMemory([group], has_rows=lambda: has_rows[0])
    group.pool.take(100)
    assert memory.give_back(SIZE) == 0 and not memory.can_move
    has_rows[0] = False
    assert memory.give_back(SIZE)


def test_nothing_moves_without_room_for_the_copy() -> None:
    group = group_with(GatherAttention())
    room_bytes = [1 << 20]
    memory = PoolMemory([group])
    memory.bound(lambda: room_bytes[0])
    kept = group.pool.take(100)[:40]
    room_bytes[0] = 39 * SIZE
    assert memory.give_back(SIZE) == 0
    room_bytes[0] = 40 * SIZE
    assert memory.give_back(SIZE) and memory.held_bytes == len(kept) * SIZE
    kept.clear()
    room_bytes[0] = 0
    assert memory.give_back(SIZE), "an empty pool goes before the next one comes"


def test_a_pool_doubles_only_into_what_is_free() -> None:
    group = group_with(GatherAttention())
    memory, pool = PoolMemory([group]), group.pool
    room_bytes = [20 * SIZE]
    memory.bound(lambda: room_bytes[0])
    pages = pool.take(pool.page_count)
    assert pool.take_spare(5) is None, "a copy of 16 pages and five more is one too many"
    pages += pool.take_spare(2) or ()
    assert pool.page_count == 20 and len(pages) == 18
    room_bytes[0] = 1 << 30
    pages += pool.take(3)
    assert pool.page_count == 40


def test_a_reservation_grows_once_and_says_before_what_it_copies() -> None:
    group = group_with(GatherAttention())
    has_rows = [False]
    memory, pool = PoolMemory([group], has_rows=lambda: has_rows[0]), group.pool
    assert memory.copied_bytes(16 * SIZE) == memory.missing_bytes(16 * SIZE) == 0
    assert (memory.missing_bytes(100 * SIZE), memory.copied_bytes(100 * SIZE)) == (84 * SIZE, 0)
    memory.reserve(100 * SIZE)
    generation = pool.generation
    pages = pool.take(100)
    assert pool.generation == generation
    has_rows[0] = True
    del pages[50:]
    assert memory.copied_bytes(200 * SIZE) == memory.held_bytes
    has_rows[0] = False
    assert memory.copied_bytes(200 * SIZE) == 50 * SIZE == memory.used_bytes


def test_pools_of_a_fixed_size_are_nobodys_but_their_own() -> None:
    memory = PoolMemory([group_with(GatherAttention(), size_bytes=100 * SIZE)])
    assert memory.held_bytes == memory.give_back(SIZE) == memory.missing_bytes(1 << 30) == 0
    memory.reserve(1 << 30)
