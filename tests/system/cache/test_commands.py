"""Explain, pin, unpin, evict, verify: what they say is true, and they cross with everything else."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from icehouse_server.domain.blocks import TokenKeys
from icehouse_server.domain.cache_commands import (
    EvictBlocks,
    EvictReport,
    Explain,
    Explanation,
    KnownBlocks,
    ListKnown,
    ListRecent,
    ListStored,
    Pin,
    PinReport,
    RecentBlocks,
    StoredBlocks,
    Tier,
    Unpin,
    Verify,
    VerifyReport,
)
from icehouse_server.domain.events import ReuseLimit
from icehouse_server.domain.ids import BlockHash, Tenant
from icehouse_server.errors import IcehouseError, Overloaded, Reason
from icehouse_server.storage.api import StorageFailed

from tests.fixtures.known_blocks import removal_of
from tests.fixtures.storage.faults import FaultyFiles
from tests.system.cache.stepped_server import BLOCK, SteppedServer, prompt


def test_explain_tells_what_a_request_then_gets(tmp_path: Path) -> None:
    tokens = prompt(4 * BLOCK + 1)
    with SteppedServer(tmp_path) as served:
        served.ask("a", [*tokens[: 2 * BLOCK], 99])
    with SteppedServer(tmp_path) as served:
        told = served.order(Explain(tuple(tokens)))
        before = served.stats().lookups
        got = served.ask("a", tokens)
        assert isinstance(told, Explanation) and told.cache.ssd_token_count == got.cache.ssd_token_count > 0
        assert {block.tier for block in told.blocks} == {Tier.SSD} and before.lookup_total == 0
        told = served.order(Explain(tuple(tokens)))
        assert isinstance(told, Explanation)
        assert any(block.tier is Tier.RAM for block in told.blocks)
        assert 0 < told.predicted_ttft_s < told.predicted_cold_ttft_s


def test_a_pinned_prompt_outlives_every_other(tmp_path: Path) -> None:
    kept, other = prompt(2 * BLOCK + 1), [prompt(3 * BLOCK, salt=salt) for salt in range(1, 6)]
    with SteppedServer(ram_blocks=4) as served:
        served.ask("kept", kept, max_output_tokens=0)
        report = served.order(Pin(tuple(kept)))
        assert isinstance(report, PinReport) and report.block_count == 2 and report.token_count == 2 * BLOCK
        for turn, tokens in enumerate(other):
            served.ask(f"other {turn}", tokens)
        served.check()
        assert served.ask("kept again", kept).cache.ram_token_count == 2 * BLOCK
        assert served.stats().ram.pinned_block_count == 2
        unpinned = served.order(Unpin(tuple(kept)))
        assert isinstance(unpinned, PinReport) and unpinned.block_count == 2
        for turn, tokens in enumerate(other):
            served.ask(f"more {turn}", tokens)
        assert served.ask("kept no more", kept).cache.limit is ReuseLimit.NO_MATCH


def test_the_blocks_used_last_are_named_once_those_in_ram_first_with_their_hits(tmp_path: Path) -> None:
    shared, other = prompt(2 * BLOCK + 1), prompt(2 * BLOCK + 1, salt=1)
    with SteppedServer(tmp_path) as served:
        served.ask("other", other, max_output_tokens=0)
        for turn in range(3):
            served.ask(f"turn {turn}", shared, max_output_tokens=0)
        told = served.order(ListRecent(100))
        assert isinstance(told, RecentBlocks)
        blocks = {block.hash: block for block in told.blocks}
        assert len(blocks) == len(told.blocks) == served.stats().ram.block_count
        first, second = told.blocks[:2]
        assert (first.start_token_index, first.hit_count, first.is_in_ram) == (0, 2, True)
        assert (second.parent, second.end_token_index) == (first.hash, 2 * BLOCK)
        few = served.order(ListRecent(1))
        assert isinstance(few, RecentBlocks) and few.blocks == (first,)
    with SteppedServer(tmp_path) as served:
        kept = served.order(ListRecent(100))
        assert isinstance(kept, RecentBlocks) and {block.hash for block in kept.blocks} >= {first.hash}
        assert all(block.is_on_ssd and not block.is_in_ram for block in kept.blocks)


def test_tokens_of_the_blocks_used_last_are_told_where_asked_for_and_known(tmp_path: Path) -> None:
    def keys(told: object) -> set[TokenKeys | None]:
        assert isinstance(told, RecentBlocks)
        return {block.token_keys for block in told.blocks}

    shared = tuple(prompt(2 * BLOCK))
    halves = {shared[:BLOCK], shared[BLOCK:]}
    with SteppedServer(tmp_path) as served:
        served.ask("a", [*shared, 1], max_output_tokens=0)
        assert keys(served.order(ListRecent(100))) == {None}
        assert keys(served.order(ListRecent(100, with_tokens=True))) >= halves
    with SteppedServer(tmp_path) as served:
        assert keys(served.order(ListRecent(100, with_tokens=True))) == {None}, "no file is read for it"
        # They come back into RAM behind tokens that are drawn.
        served.ask("b", [*shared, 1], max_output_tokens=16)
        assert keys(served.order(ListRecent(100, with_tokens=True))) >= halves


def test_a_pin_set_in_ram_goes_with_the_block_to_ssd(tmp_path: Path) -> None:
    tokens = prompt(2 * BLOCK + 1)
    with SteppedServer(tmp_path) as served:
        served.ask("a", tokens, max_output_tokens=0)
        served.order(Pin(tuple(tokens)))
    with SteppedServer(tmp_path) as served:
        assert served.stats().ssd.pinned_block_count == 2
        told = served.order(Explain(tuple(tokens)))
        assert isinstance(told, Explanation) and all(block.pinned for block in told.blocks)


@pytest.mark.parametrize("has_ssd", [False, True], ids=["ram alone", "with ssd"])
def test_a_pin_with_a_ttl_ends_and_is_prolonged(tmp_path: Path, has_ssd: bool) -> None:
    kept, others = prompt(2 * BLOCK + 1), [prompt(3 * BLOCK, salt=salt) for salt in range(1, 6)]
    with SteppedServer(tmp_path if has_ssd else None, ram_blocks=4) as served:
        served.ask("kept", kept, max_output_tokens=0)
        for ttl_s in (60.0, 300.0, 60.0):
            report = served.order(Pin(tuple(kept), ttl_s=ttl_s))
            assert isinstance(report, PinReport) and report.block_count == 2
        for ask_number, seconds in enumerate((60.0, 239.0)):
            served.clock.now += seconds
            for turn, tokens in enumerate(others):
                served.ask(f"other {ask_number} {turn}", tokens)
            assert served.stats().ram.pinned_block_count == 2
        served.clock.now += 1.0
        assert served.stats().ram.pinned_block_count == 0
        told = served.order(Explain(tuple(kept)))
        assert isinstance(told, Explanation) and not any(block.pinned for block in told.blocks)
        for turn, tokens in enumerate(others):
            served.ask(f"more {turn}", tokens)
        served.check()
        assert served.ask("kept no more", kept).cache.ram_token_count == 0


def test_a_pin_without_an_end_is_not_shortened_by_one_with_a_ttl() -> None:
    tokens = tuple(prompt(2 * BLOCK + 1))
    with SteppedServer() as served:
        served.ask("a", tokens, max_output_tokens=0)
        served.order(Pin(tokens))
        served.order(Pin(tokens, ttl_s=1.0))
        served.clock.now += 2.0
        assert served.stats().ram.pinned_block_count == 2


def test_a_pin_with_a_ttl_lasts_as_long_across_a_restart(tmp_path: Path) -> None:
    tokens = tuple(prompt(2 * BLOCK + 1))
    with SteppedServer(tmp_path) as served:
        served.ask("a", tokens, max_output_tokens=0)
        served.order(Pin(tokens, ttl_s=60.5))
        clock = served.clock
    for seconds, count in ((59.0, 2), (2.0, 0), (1.0, 0)):
        clock.now += seconds
        with SteppedServer(tmp_path, clock=clock) as served:
            told = served.order(Explain(tokens))
            assert isinstance(told, Explanation) and sum(block.pinned for block in told.blocks) == count
            assert served.stats().ssd.pinned_block_count == count


def test_what_an_ended_pin_took_of_the_quota_may_be_pinned_again() -> None:
    with SteppedServer(ram_blocks=4) as served:
        for turn in range(3):
            tokens = tuple(prompt(3 * BLOCK + 1, salt=turn))
            served.ask(f"{turn}", tokens, max_output_tokens=0)
            assert isinstance(served.order(Pin(tokens, ttl_s=60.0)), PinReport)
            other = tuple(prompt(BLOCK + 1, salt=10 + turn))
            served.ask(f"other {turn}", other, max_output_tokens=0)
            assert isinstance(served.order(Pin(other, ttl_s=60.0)), Overloaded)
            served.clock.now += 60.0


def test_explain_knows_the_blocks_of_an_earlier_process(tmp_path: Path) -> None:
    with SteppedServer(tmp_path) as served:
        served.ask("a", prompt(2 * BLOCK + 1), max_output_tokens=0)
    # Parts from what is stored inside the second block, whose tokens stand only in its file.
    asked = (*prompt(BLOCK + BLOCK // 2), *prompt(BLOCK, salt=7))
    with SteppedServer(tmp_path) as served:
        told = served.order(Explain(asked))
        assert isinstance(told, Explanation) and told.cache.ssd_token_count == BLOCK + BLOCK // 2
        assert served.ask("b", asked).cache.ssd_token_count == told.cache.ssd_token_count


def test_an_explanation_is_given_when_the_disk_is_lost_meanwhile(tmp_path: Path) -> None:
    with SteppedServer(tmp_path) as served:
        served.ask("a", prompt(2 * BLOCK + 1), max_output_tokens=0)
    with SteppedServer(tmp_path) as served:
        served.step_until_idle()
        served.holds_storage = True
        answers = served.give(Explain((*prompt(BLOCK + 1), *prompt(BLOCK, salt=7))))
        served.loop.step()
        assert not answers
        served.mailbox.post(StorageFailed("pulled out"))
        served.is_storage_alive = False
        served.loop.step()
        assert [type(answer) for answer in answers] == [Explanation]


def test_a_pin_that_is_carried_out_after_a_reader_has_died_is_answered_once(tmp_path: Path) -> None:
    tokens = prompt(4 * BLOCK)
    with SteppedServer(tmp_path) as served:
        served.ask("a", tokens)
    with SteppedServer(tmp_path) as served:
        served.holds_storage = True
        answers = served.give(Pin(tuple(tokens)))
        served.loop.step()
        served.mailbox.post(StorageFailed("of the readers one died, the storage thread did not"))
        served.loop.step()
        served.settle_storage()
        served.ask("b", tokens)
        (answer,) = answers
        assert isinstance(answer, IcehouseError) and answer.reason is Reason.STORE_UNUSABLE
        served.check()


def test_a_pin_that_finds_nothing_says_so() -> None:
    with SteppedServer() as served:
        refused = served.order(Pin((1, 2, 3, 4, 5)))
        unpinned = served.order(Unpin((1, 2, 3, 4, 5)))
    assert isinstance(refused, IcehouseError) and refused.reason is Reason.BLOCK_NOT_FOUND
    assert isinstance(unpinned, PinReport) and unpinned.block_count == 0


def test_evict_takes_a_prompt_out_of_both_tiers(tmp_path: Path) -> None:
    tokens, other = prompt(3 * BLOCK + 1), prompt(2 * BLOCK + 1, salt=1)
    with SteppedServer(tmp_path, spill_policy="write_behind") as served:
        served.ask("a", tokens, max_output_tokens=0)
        served.ask("b", other, max_output_tokens=0)
        served.write_behind()
        report = served.order(removal_of(served.cache, tuple(tokens)))
        assert isinstance(report, EvictReport)
        assert (report.ram_block_count, report.ssd_block_count) == (3, 3)
        assert report.ram_bytes > 0 and report.ssd_bytes > 0
        stats = served.stats()
        assert stats.ram.purged_block_total == 3 == stats.ssd.purged_block_total
        assert stats.ram.evicted_block_total == 0 == stats.ssd.evicted_block_total
        assert served.ask("a", tokens).cache.limit is ReuseLimit.NO_MATCH
        assert served.ask("b", other).cache.ram_token_count == 2 * BLOCK
        served.check()


def test_evict_reaches_a_block_on_its_way_to_ssd(tmp_path: Path) -> None:
    tokens = prompt(3 * BLOCK + 1)
    with SteppedServer(tmp_path, spill_policy="write_behind") as served:
        served.ask("a", tokens, max_output_tokens=0)
        served.holds_storage = True
        served.write_behind()
        assert served.cache.spills.under_way_count == 3
        answers = served.give(removal_of(served.cache))
        served.loop.step()
        served.holds_storage = False
        served.step_until_idle()
        assert len(answers) == 1
        assert served.stats().ssd.block_count == 0 and served.stats().ram.block_count == 0
        served.check()


def test_evicting_everything_reaches_every_tenant(tmp_path: Path) -> None:
    with SteppedServer(tmp_path) as served:
        served.ask("a", prompt(2 * BLOCK + 1), tenant=Tenant("one"), max_output_tokens=0)
        served.ask("b", prompt(2 * BLOCK + 1), tenant=Tenant("two"), max_output_tokens=0)
        report = served.order(removal_of(served.cache))
        assert isinstance(report, EvictReport) and report.ram_block_count == 4
        assert len(served.cache.tree) == 0


def known(served: SteppedServer) -> tuple[BlockHash, ...]:
    """Return the names of all known blocks, in the order in which they are to go."""
    answer = served.order(ListKnown(None))
    assert isinstance(answer, KnownBlocks)
    return answer.block_hashes


def removed(served: SteppedServer, *names: BlockHash) -> tuple[int, int]:
    """Remove these blocks; return how many were in each tier."""
    report = served.order(EvictBlocks(names))
    assert isinstance(report, EvictReport)
    return report.ram_block_count, report.ssd_block_count


def test_what_a_removal_leaves_that_is_broken_off_can_be_used(tmp_path: Path) -> None:
    tokens = prompt(5 * BLOCK + 1)
    with SteppedServer(tmp_path, spill_policy="write_behind") as served:
        for name in ("one", "two"):
            served.ask("a", tokens, tenant=Tenant(name), max_output_tokens=0)
        served.write_behind()
        names = known(served)
        assert removed(served, *names[:7]) == (7, 7)
        assert known(served) == names[7:]
        # Of one prompt all is gone, of the other the end: what is left is where it begins.
        assert served.ask("a", tokens, tenant=Tenant("two")).cache.limit is ReuseLimit.NO_MATCH
        assert served.ask("a", tokens, tenant=Tenant("one")).cache.ram_token_count == 3 * BLOCK
        served.check()


def test_a_prompts_blocks_are_named_from_its_end(tmp_path: Path) -> None:
    tokens = prompt(3 * BLOCK + 1)
    with SteppedServer(tmp_path) as served:
        served.ask("a", tokens, max_output_tokens=0)
        served.ask("b", prompt(3 * BLOCK, salt=1), max_output_tokens=0)
        named = served.order(ListKnown(tuple(tokens)))
        assert isinstance(named, KnownBlocks) and len(named.block_hashes) == 3
        starts = [served.cache.tree.get(name).start_token_index for name in named.block_hashes]
        assert starts == [2 * BLOCK, BLOCK, 0]


def test_two_removals_at_once_count_each_block_once(tmp_path: Path) -> None:
    with SteppedServer(tmp_path, spill_policy="write_behind") as served:
        served.ask("a", prompt(6 * BLOCK + 1), max_output_tokens=0)
        served.write_behind()
        first, second = known(served), known(served)
        assert first == second and len(first) == 6
        served.holds_storage = True
        # What the first has ordered is on SSD still when the second, that finds nothing, asks.
        answers = [served.give(EvictBlocks(first[:4])), served.give(EvictBlocks(second[:4]))]
        for _ in range(3):
            served.loop.step()
        assert answers == [[], []], "neither says that blocks are gone which are there"
        served.holds_storage = False
        served.step_until_idle()
        assert answers == [
            [EvictReport(4, answers[0][0].ram_bytes, 4, answers[0][0].ssd_bytes)],
            [EvictReport()],
        ]
        assert removed(served, *second[4:]) == (2, 2) and removed(served, *first[4:]) == (0, 0)
        assert served.stats().ssd.block_count == 0 == served.stats().ram.block_count
        served.check()


def test_a_removal_that_a_broken_store_refuses_can_be_had_when_it_works_again(tmp_path: Path) -> None:
    files = FaultyFiles("create", 1, errno.EIO)
    with SteppedServer(tmp_path, spill_policy="write_behind", files=files) as served:
        served.ask("a", prompt(4 * BLOCK + 1), max_output_tokens=0)
        served.write_behind()
        names = known(served)
        assert removed(served, *names[:2]) == (2, 2)
        files.is_armed = True
        served.ask("b", prompt(BLOCK + 1, salt=1), max_output_tokens=0)
        served.write_behind()
        assert files.failed_count == 1
        refused = served.order(EvictBlocks(names[2:]))
        assert isinstance(refused, IcehouseError) and refused.reason is Reason.STORE_UNUSABLE
        served.clock.now += 130
        served.step_until_idle()
        # The disk has them, and so it is said.
        assert served.stats().ssd.block_count == 2 and set(names[2:]) <= set(known(served))
        assert removed(served, *known(served))[1] == 2
        assert known(served) == ()
        served.check()


def test_verify_finds_damage_and_takes_it_out(tmp_path: Path) -> None:
    tokens = prompt(3 * BLOCK + 1)
    with SteppedServer(tmp_path) as served:
        served.ask("a", tokens, max_output_tokens=0)
    with SteppedServer(tmp_path) as served:
        victim = sorted((tmp_path / "blocks").rglob("*.safetensors"))[0]
        data = bytearray(victim.read_bytes())
        data[-1] ^= 1
        victim.write_bytes(data)
        report = served.order(Verify())
        assert isinstance(report, VerifyReport)
        assert report.verified_block_count == 3
        assert [name.hex() for name in report.damaged_hashes] == [victim.stem]
        stats = served.stats()
        assert stats.integrity.quarantined_file_count == 1 and stats.ssd.block_count == 2
        assert served.ask("a", tokens).cache.cached_token_count < 3 * BLOCK


def test_listed_are_those_first_that_were_not_verified_last(tmp_path: Path) -> None:
    tokens = prompt(5 * BLOCK + 1)

    def listed(served: SteppedServer, *, block_limit: int = 0) -> tuple[BlockHash, ...]:
        answer = served.order(ListStored(block_limit))
        assert isinstance(answer, StoredBlocks)
        return answer.block_hashes

    with SteppedServer(tmp_path) as served:
        served.ask("a", tokens, max_output_tokens=0)
    with SteppedServer(tmp_path) as served:
        first = listed(served)
        assert len(first) == 5
        report = served.order(Verify(first[:2]))
        assert isinstance(report, VerifyReport) and report.verified_block_count == 2
        assert listed(served) == (*first[2:], *first[:2])
        assert listed(served, block_limit=4) == (*first[2:], *first[:1])
        # Those that are gone are passed over.
        served.order(removal_of(served.cache, tuple(tokens)))
        assert listed(served) == ()
        report = served.order(Verify(first))
        assert isinstance(report, VerifyReport) and report.verified_block_count == 0


def test_verify_without_an_ssd_tier_is_refused() -> None:
    with SteppedServer() as served:
        for order in (Verify(), ListStored()):
            refused = served.order(order)
            assert isinstance(refused, IcehouseError) and refused.reason is Reason.CACHE_UNSUPPORTED
