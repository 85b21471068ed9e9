"""A RAM tier that is too small: who goes, who stays, and what is still found."""

from __future__ import annotations

from pathlib import Path

import pytest
from icehouse_server.domain.cache_commands import Pin, PinReport
from icehouse_server.domain.cache_stats import SpillDropCause
from icehouse_server.domain.events import Finished, ReuseLimit
from icehouse_server.domain.ids import CacheScope
from icehouse_server.domain.request import CacheUse

from tests.system.cache.stepped_server import BLOCK, BLOCK_BYTES, HYBRID, SteppedServer, prompt


def test_tails_of_a_chain_go_before_its_head() -> None:
    with SteppedServer(ram_blocks=5) as served:
        served.ask("long", prompt(4 * BLOCK + 1), max_output_tokens=1)
        assert served.ram_starts()[::-1] == [0, 4, 8, 12, 16]
        served.ask("other", prompt(BLOCK + 1, salt=1), max_output_tokens=1)
        served.check()
        # The other prompt took two places, a block and a tail, from the end of the longer chain.
        assert (
            served.ask("again", prompt(4 * BLOCK + 1), max_output_tokens=1).cache.ram_token_count == 3 * BLOCK
        )


def test_without_an_ssd_tier_a_chain_never_pushes_out_its_own_beginning() -> None:
    with SteppedServer(ram_blocks=3) as served:
        served.ask("long", prompt(6 * BLOCK + 1))
        served.check()
        assert served.ask("again", prompt(6 * BLOCK + 1)).cache.ram_token_count == 3 * BLOCK


def test_a_chain_longer_than_ram_is_found_whole_on_both_tiers(tmp_path: Path) -> None:
    with SteppedServer(tmp_path, ram_blocks=3) as served:
        served.ask("long", prompt(8 * BLOCK + 1))
        served.check()
        again = served.ask("again", prompt(8 * BLOCK + 1))
        served.check()
        assert again.cache.cached_token_count == 8 * BLOCK
        assert again.cache.ram_token_count > 0 and again.cache.ssd_token_count > 0


def test_a_short_hit_in_ram_does_not_hide_a_longer_one_on_ssd(tmp_path: Path) -> None:
    with SteppedServer(tmp_path) as served:
        served.ask("long", prompt(6 * BLOCK + 1))
    with SteppedServer(tmp_path) as served:
        served.ask("short", prompt(2 * BLOCK), max_output_tokens=1)
        answer = served.ask("long", prompt(6 * BLOCK + 1))
    assert answer.cache.cached_token_count == 6 * BLOCK


def test_promotion_makes_room_when_ram_is_full(tmp_path: Path) -> None:
    with SteppedServer(tmp_path, ram_blocks=4) as served:
        served.ask("first", prompt(4 * BLOCK))
        served.ask("second", prompt(4 * BLOCK, salt=1))
        served.ask("first again", prompt(4 * BLOCK), max_output_tokens=6)
        served.check()
        assert served.ask("first once more", prompt(4 * BLOCK)).cache.ram_token_count >= 2 * BLOCK
        assert served.cache.tree.ram.used_bytes <= 4 * BLOCK_BYTES


def test_what_follows_a_block_that_is_not_in_ram_can_be_used_at_once(tmp_path: Path) -> None:
    first = prompt(4 * BLOCK + 1)
    second = [*first, *prompt(3 * BLOCK, salt=1)]
    third = [*second, *prompt(BLOCK, salt=2)]
    with SteppedServer(tmp_path) as served:
        served.ask("first", first)
    with SteppedServer(tmp_path) as served:
        served.ask("second", second, max_output_tokens=1)
        answer = served.ask("third", third)
        assert answer.cache.limit is not ReuseLimit.LOAD_FAILED
        assert answer.cache.cached_token_count >= len(second) // BLOCK * BLOCK


def test_making_room_for_a_region_spares_the_block_that_gets_it() -> None:
    with SteppedServer(facts=HYBRID, ram_blocks=13, checkpoint_interval_tokens=1000) as served:
        served.ask("first", prompt(3 * BLOCK + 1), max_output_tokens=1)
        # Ends a block earlier: the second block, which has kv in RAM, gets a checkpoint as well.
        served.ask("second", prompt(2 * BLOCK + 1), max_output_tokens=1)
        served.check()
        assert served.ask("again", prompt(2 * BLOCK + 1)).cache.ram_token_count == 2 * BLOCK


def test_a_block_that_can_never_fit_pushes_nobody_out() -> None:
    with SteppedServer(facts=HYBRID, ram_blocks=12, checkpoint_interval_tokens=1000) as served:
        served.ask("small", prompt(BLOCK + 1), max_output_tokens=1)
        held = {entry.hash for entry in served.cache.tree.in_ram()}
        assert held
        served.runner._checkpoint_padding_bytes = 100 * BLOCK_BYTES
        served.ask("huge", prompt(BLOCK + 1, salt=1), max_output_tokens=1)
        served.check()
        assert held <= {entry.hash for entry in served.cache.tree.in_ram()}


def test_nothing_is_counted_as_dropped_on_its_way_to_an_ssd_that_is_not_there() -> None:
    with SteppedServer(ram_blocks=2) as served:
        served.ask("a", prompt(4 * BLOCK))
        served.ask("b", prompt(4 * BLOCK, salt=1))
        stats = served.stats()
    assert stats.spill.drops == () and stats.ram.evicted_block_total > 0


def test_a_longer_tail_takes_the_place_of_a_shorter_one_without_being_an_eviction() -> None:
    with SteppedServer() as served:
        served.ask("a", prompt(BLOCK + 2), max_output_tokens=1)
        served.ask("b", prompt(BLOCK + 3), max_output_tokens=1)
        stats = served.stats()
        served.check()
    assert stats.ram.tail_count == 1
    assert stats.ram.evicted_block_total == 0 and stats.ram.purged_block_total == 0


def test_tails_on_ssd_go_when_the_whole_block_is_there(tmp_path: Path) -> None:
    with SteppedServer(tmp_path) as served:
        served.ask("turn", prompt(BLOCK + 3), max_output_tokens=0)
    with SteppedServer(tmp_path, ram_blocks=1) as served:
        assert served.stats().ssd.tail_count == 1
        served.ask("next turn", prompt(3 * BLOCK + 1), max_output_tokens=0)
    with SteppedServer(tmp_path) as served:
        stats = served.stats()
        assert stats.ssd.block_count - stats.ssd.tail_count == 3
        assert stats.ssd.tail_count == 0
        assert served.ask("again", prompt(3 * BLOCK + 1)).cache.ssd_token_count == 3 * BLOCK


def test_a_block_in_use_again_is_not_dropped_when_its_spill_ends(tmp_path: Path) -> None:
    with SteppedServer(tmp_path, ram_blocks=3) as served:
        served.ask("a", prompt(2 * BLOCK + 1), max_output_tokens=0)
        served.holds_storage = True
        served.ask("b", prompt(2 * BLOCK + 1, salt=1), max_output_tokens=0)
        assert served.cache.spills.under_way_count > 0
        assert served.ask("a", prompt(2 * BLOCK + 1), max_output_tokens=0).cache.ram_token_count == 2 * BLOCK
        served.holds_storage = False
        served.step_until_idle()
        served.check()
        assert served.ask("once more", prompt(2 * BLOCK + 1)).cache.cached_token_count == 2 * BLOCK


def test_no_credit_is_counted_once_and_the_block_is_gone(tmp_path: Path) -> None:
    with SteppedServer(tmp_path, ram_blocks=2, spill_queue_limit_bytes=10) as served:
        served.ask("a", prompt(2 * BLOCK), max_output_tokens=1)
        served.ask("b", prompt(2 * BLOCK, salt=1), max_output_tokens=1)
        stats = served.stats()
        served.check()
        dropped = {drop.cause: drop.block_total for drop in stats.spill.drops}
        assert dropped[SpillDropCause.NO_CREDIT] == stats.ram.evicted_block_total > 0
        assert stats.spill.accepted_block_total == 0 == stats.spill.persisted_block_total
        # At the end too, though what is left can never be sent.
    assert served.closed is not None


def test_a_prefix_below_the_minimum_stays_off_the_ssd(tmp_path: Path) -> None:
    how = {"min_prefix_token_count": 3 * BLOCK}
    with SteppedServer(tmp_path, spill_policy="write_behind", **how) as served:
        for turn in range(3):
            served.ask(f"short {turn}", prompt(2 * BLOCK), max_output_tokens=1)
        served.ask("long", prompt(4 * BLOCK, salt=1), max_output_tokens=1)
        # It is in RAM all the time, so nothing was dropped.
        assert served.stats().spill.drops == ()
    with SteppedServer(tmp_path, **how) as served:
        assert served.ask("short", prompt(2 * BLOCK)).cache.limit is ReuseLimit.NO_MATCH
        assert served.ask("long", prompt(4 * BLOCK, salt=1)).cache.ssd_token_count == 4 * BLOCK - 1


def test_write_behind_writes_each_complete_block_once_and_keeps_it_in_ram(tmp_path: Path) -> None:
    with SteppedServer(tmp_path, spill_policy="write_behind") as served:
        served.ask("once", prompt(3 * BLOCK + 1), max_output_tokens=1)
        assert served.stats().spill.accepted_block_total == 0
        served.write_behind()
        stats = served.stats()
        assert stats.spill.persisted_block_total == stats.spill.accepted_block_total == 3
        assert stats.spill.behind_block_total == 3 and stats.spill.behind_waiting_count == 0
        assert served.ask("twice", prompt(3 * BLOCK + 1)).cache.ram_token_count == 3 * BLOCK
        served.write_behind()
        assert served.stats().spill.accepted_block_total == 3
        served.check()


def test_a_sessions_blocks_are_written_before_those_of_a_single_prompt(tmp_path: Path) -> None:
    with SteppedServer(tmp_path, spill_policy="write_behind") as served:
        served.ask("alone", prompt(2 * BLOCK + 1), max_output_tokens=0)
        served.ask("turn", prompt(2 * BLOCK + 1, salt=1), max_output_tokens=0, session_id="s")
        served.holds_storage = True
        served.write_behind()
        turn = served.cache.known_chain(tuple(prompt(2 * BLOCK + 1, salt=1)), CacheScope())
        sent = [node.hash for node in served.cache.tree.spilling]
        assert len(sent) == 4 and sent[:2] == [node.hash for node in turn[:2]]
        served.holds_storage = False
        served.step_until_idle()


def test_a_pinned_block_gives_way_to_a_request_once_it_is_on_ssd(tmp_path: Path) -> None:
    with SteppedServer(tmp_path, spill_policy="write_behind") as served:
        served.ask("kept", prompt(20 * BLOCK), max_output_tokens=0)
        report = served.order(Pin(tuple(prompt(20 * BLOCK))))
        assert isinstance(report, PinReport) and report.block_count == 20
        served.write_behind()
        pressed(served, beside_tier_bytes=0)
        answer = served.ask("long", prompt(4 * BLOCK, salt=1), max_output_tokens=1)
        assert answer.cache.limit is ReuseLimit.NO_MATCH
        stats = served.stats()
        assert stats.ssd is not None and stats.ssd.pinned_block_count == 20 > stats.ram.pinned_block_count
        served.check()


def test_off_writes_nothing_and_still_reads(tmp_path: Path) -> None:
    with SteppedServer(tmp_path) as served:
        served.ask("a", prompt(2 * BLOCK))
    with SteppedServer(tmp_path, spill_policy="off") as served:
        served.ask("b", prompt(4 * BLOCK, salt=1))
        assert served.ask("a", prompt(2 * BLOCK)).cache.ssd_token_count == 2 * BLOCK - 1
    with SteppedServer(tmp_path) as served:
        assert served.stats().spill.persisted_block_total == 0
        assert served.ask("b", prompt(4 * BLOCK, salt=1)).cache.limit is ReuseLimit.NO_MATCH


def pressed(served: SteppedServer, *, beside_tier_bytes: int) -> None:
    """Let memory hold the tier as it is now, and so much for sequences: ten bytes a token."""
    served.runner.active_bytes = lambda: (
        served.cache.tree.ram.used_bytes + 10 * sum(map(len, served.runner.history.values()))
    )
    served.budget.limit_bytes = served.cache.tree.ram.used_bytes + beside_tier_bytes


def held(served: SteppedServer) -> set[bytes]:
    return {entry.hash for entry in served.cache.tree.in_ram()}


def start_a_long_one(served: SteppedServer) -> None:
    """Let one request of 100 tokens draw, which keeps nothing."""
    served.submit("runs", prompt(4, salt=7), max_output_tokens=96, cache_use=CacheUse.OFF)
    while not served.scheduler.decoding_count:
        served.loop.step()


@pytest.mark.parametrize("with_ssd", [False, True])
def test_the_tier_loses_nothing_for_a_request_that_cannot_start_anyway(
    tmp_path: Path, with_ssd: bool
) -> None:
    with SteppedServer(tmp_path if with_ssd else None) as served:
        served.ask("kept", prompt(40))
        before = held(served)
        tier_bytes = served.cache.tree.ram.used_bytes
        start_a_long_one(served)
        # All that the tier has would not do for the big one; the small one fits without any of it.
        pressed(served, beside_tier_bytes=1000 + 50)
        assert tier_bytes < 1000
        served.submit("big", prompt(110, salt=1), max_output_tokens=2)
        served.submit("small", prompt(2, salt=2), max_output_tokens=2)
        for _ in range(8):
            served.settle_storage()
            served.loop.step()
        assert isinstance(served.recorder.end_of("small"), Finished)
        assert served.scheduler.waiting_count == 1 and served.recorder.end_of("runs") is None
        assert before <= held(served) and served.cache.ram.stats.evicted_block_total == 0
        served.cancel("runs")
        served.budget.limit_bytes += 2000
        served.step_until_idle()
        assert isinstance(served.recorder.end_of("big"), Finished)


def test_for_one_that_may_start_others_blocks_go_by_way_of_the_ssd_and_its_own_stay(tmp_path: Path) -> None:
    own, other = prompt(4 * BLOCK + 1), prompt(8 * BLOCK + 1, salt=1)
    with SteppedServer(tmp_path) as served:
        served.ask("own", own, max_output_tokens=0)  # the least recently used
        served.ask("other", other, max_output_tokens=0)
        start_a_long_one(served)
        pressed(served, beside_tier_bytes=1000 + 10 * (len(own) + 2) - 3 * BLOCK_BYTES)
        served.submit("comes", own, max_output_tokens=2)
        while served.recorder.end_of("comes") is None:
            served.settle_storage()
            served.loop.step()
        assert served.recorder.end_of("runs") is None, "nobody had to end for it"
        assert served.answer("comes").cache.ram_token_count == 4 * BLOCK
        assert served.stats().ram.evicted_block_total >= 3
        served.budget.limit_bytes = 0
        served.step_until_idle()
        again = served.ask("other again", other, max_output_tokens=1).cache
        assert again.cached_token_count == 8 * BLOCK and again.ssd_token_count, "nothing of it was lost"
        served.check()
