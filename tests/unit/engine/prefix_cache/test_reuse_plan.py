"""From a match to a plan: which tier gives what, where the buffers begin, and is it worth it."""

from __future__ import annotations

import pytest
from icehouse_server.domain.blocks import RegionKind
from icehouse_server.domain.events import ReuseLimit
from icehouse_server.engine.prefix_cache.reuse_plan import Plan
from icehouse_server.engine.prefix_cache.reuse_plan import plan as plan_for
from icehouse_server.engine.prefix_cache.tiers.matching import LookupPrompt
from icehouse_server.engine.prefix_cache.tiers.storage_waits import Rates

from tests.fixtures.known_blocks import (
    FINGERPRINT,
    HYBRID,
    KV_ONLY,
    ROOT,
    SIZE,
    STATE_ONLY,
    WINDOWS,
    Shelf,
    record_of,
)

LONG = list(range(100, 100 + 5 * SIZE))


def plan(shelf: Shelf, tokens: list[int], *, with_ssd: bool = True, rates: Rates | None = None) -> Plan:
    return plan_for(shelf.tree, LookupPrompt(tuple(tokens), ROOT), rates or Rates(), with_ssd=with_ssd)


def test_all_from_ram() -> None:
    shelf = Shelf()
    shelf.chain(LONG, ram=True, ssd=True)
    found = plan(shelf, [*LONG, 1])
    assert found.to_load == () and found.is_hit
    assert (found.report.ram_token_count, found.report.ssd_token_count) == (len(LONG), 0)
    assert found.report.limit is ReuseLimit.NONE
    assert [block.start_token_index for block in found.placed] == [0, 4, 8, 12, 16]
    assert all(RegionKind.KV in block.regions for block in found.placed)


def test_head_from_ram_and_tail_from_ssd() -> None:
    shelf = Shelf()
    shelf.chain(LONG[: 2 * SIZE], ram=True)
    shelf.chain(LONG, ssd=True)
    found = plan(shelf, [*LONG[:18], 7, 7])
    assert found.token_count == 18
    assert (found.report.ram_token_count, found.report.ssd_token_count) == (8, 10)
    assert found.report.limit is ReuseLimit.DIVERGED
    assert [b.header.start_token_index for b in found.to_load] == [8, 12, 16]
    assert all(b.regions == {RegionKind.KV} for b in found.to_load)
    assert found.ssd_bytes == 300


def test_kv_in_ram_after_a_gap_is_not_read() -> None:
    shelf = Shelf()
    nodes = shelf.chain(LONG, ram=True, ssd=True)
    shelf.tree.drop(nodes[1])
    found = plan(shelf, [*LONG, 1])
    assert [b.header.start_token_index for b in found.to_load] == [4]
    assert [RegionKind.KV in block.regions for block in found.placed] == [True, False, True, True, True]
    assert (found.report.ram_token_count, found.report.ssd_token_count) == (len(LONG) - SIZE, SIZE)


def test_a_window_alone_comes_from_ssd() -> None:
    shelf = Shelf(WINDOWS)
    nodes = shelf.chain(LONG, ram=True, ssd=True)
    shelf.lose(nodes[3], RegionKind.WINDOW)
    shelf.tree.drop(nodes[4])
    found = plan(shelf, [*LONG, 1])
    assert [(b.header.start_token_index, b.regions) for b in found.to_load] == [
        (12, frozenset({RegionKind.WINDOW})),
        (16, frozenset({RegionKind.KV, RegionKind.WINDOW})),
    ]


def test_only_the_checkpoint_at_the_target_is_read() -> None:
    shelf = Shelf(HYBRID)
    shelf.chain(LONG, ssd=True)
    found = plan(shelf, [*LONG, 1])
    assert [RegionKind.CHECKPOINT in b.regions for b in found.to_load] == [False] * 4 + [True]


def test_a_state_stands_for_all_before_it() -> None:
    shelf = Shelf(STATE_ONLY)
    fourth = Shelf(STATE_ONLY).chain(LONG)[3]
    shelf.block(fourth.parent, 12, LONG[12:16], ram=False, ssd=True)
    found = plan(shelf, [*LONG, 1])
    assert found.token_count == found.report.ssd_token_count == 16 and len(found.to_load) == 1


@pytest.mark.parametrize(
    ("tokens", "limit"),
    [
        ([7, 7, 7, 7, 7], ReuseLimit.NO_MATCH),
        ([*LONG[:6], 7, 7, 7], ReuseLimit.NO_CHECKPOINT),
        ([*LONG[:4], 7, 7, 7, 7, 7], ReuseLimit.DIVERGED),
        (LONG[:5], ReuseLimit.NONE),
    ],
)
def test_why_not_more(tokens: list[int], limit: ReuseLimit) -> None:
    shelf = Shelf(HYBRID)
    nodes = shelf.chain(LONG, ram=True)
    if limit is ReuseLimit.NO_CHECKPOINT:
        shelf.lose(nodes[1], RegionKind.CHECKPOINT)
        tokens = [*LONG[:8], 7, 7]
    assert plan(shelf, tokens).report.limit is limit


@pytest.mark.parametrize(
    ("read_bytes_per_s", "prefill_tokens_per_s", "loads"),
    [
        (0.0, 0.0, True),  # nothing was measured
        (1.0, 0.0, True),
        (0.0, 1e9, True),
        (1000.0, 100.0, False),  # 0.5 s to read, 0.2 s to compute
        (10_000.0, 100.0, True),
    ],
)
def test_the_faster_way_is_taken(read_bytes_per_s: float, prefill_tokens_per_s: float, loads: bool) -> None:
    shelf = Shelf()
    shelf.chain(LONG, ssd=True)
    rates = Rates(read_bytes_per_s=read_bytes_per_s, prefill_tokens_per_s=prefill_tokens_per_s, load_count=3)
    found = plan(shelf, [*LONG, 1], rates=rates)
    assert bool(found.to_load) is loads
    assert (found.report.limit is ReuseLimit.RECOMPUTE_FASTER) is not loads
    always = Shelf(may_recompute=False)
    always.chain(LONG, ssd=True)
    assert plan(always, [*LONG, 1], rates=rates).to_load


def test_recomputing_keeps_what_ram_has() -> None:
    shelf = Shelf()
    shelf.chain(LONG[: 2 * SIZE + 1], ram=True)
    shelf.chain(LONG, ssd=True)
    rates = Rates(read_bytes_per_s=1.0, prefill_tokens_per_s=1e6, load_count=3)
    found = plan(shelf, [*LONG, 1], rates=rates)
    assert found.to_load == () and found.token_count == 2 * SIZE + 1
    assert found.report.limit is ReuseLimit.RECOMPUTE_FASTER


def test_what_restoring_takes_is_a_product_which_every_processor_rounds_alike() -> None:
    rates = Rates(read_bytes_per_s=1.0, untried_count=3)
    assert rates.restore_s(ssd_bytes=1, token_count=0) == 0.99 * 0.99 * 0.99


def test_a_slow_first_load_is_no_reason_to_compute_for_ever() -> None:
    """It may meet cold files and fresh pages: eight prompts of 800 tokens were computed in 8 s behind such a
    one, where reading them takes half a second."""
    shelf = Shelf()
    shelf.chain(LONG, ssd=True)
    rates = Rates(prefill_tokens_per_s=100.0)
    for _ in range(2):
        rates.note_read(100.0)
        assert plan(shelf, [*LONG, 1], rates=rates).to_load, "one or two loads say too little"
    rates.note_read(100.0)
    assert not plan(shelf, [*LONG, 1], rates=rates).to_load
    while not plan(shelf, [*LONG, 1], rates=rates).to_load:
        rates.untried_count += 1
        assert rates.untried_count < 1000, "it is never tried again"
    assert rates.untried_count > 50, "what takes several times as long is tried rarely"
    rates.note_read(100.0)
    assert not plan(shelf, [*LONG, 1], rates=rates).to_load, "it is as slow as before"


def test_restoring_is_reading_and_adopting() -> None:
    rates = Rates(read_bytes_per_s=100.0, adopt_tokens_per_s=10.0, prefill_tokens_per_s=2.0)
    assert rates.restore_s(ssd_bytes=50, token_count=20) == pytest.approx(2.5)
    assert rates.prefill_s(20) == pytest.approx(10.0)
    assert Rates().restore_s(ssd_bytes=50, token_count=20) == 0.0 == Rates().prefill_s(20)


def test_the_header_of_a_block_of_unknown_tokens_is_made_from_the_prompt() -> None:
    shelf, other = Shelf(KV_ONLY), Shelf(KV_ONLY)
    for node in other.chain(LONG, ram=True):
        shelf.tree.store(record_of(node, RegionKind.KV))
    found = plan(shelf, [*LONG, 1])
    assert [b.header.token_ids for b in found.to_load] == [
        tuple(LONG[start : start + SIZE]) for start in range(0, len(LONG), SIZE)
    ]
    assert all(b.header.fingerprint == FINGERPRINT for b in found.to_load)
