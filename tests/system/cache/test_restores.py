"""Restores that go wrong, and storage that goes away: the prompt is prefilled and the text is the same."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
from pathlib import Path

import pytest
from icehouse_server.domain.blocks import BlockDamage
from icehouse_server.domain.cache_commands import (
    Explain,
    Explanation,
    KnownBlocks,
    ListKnown,
    Pin,
    PinReport,
    Verify,
)
from icehouse_server.domain.events import Failed, ReuseLimit
from icehouse_server.domain.ids import DEFAULT_SCOPE
from icehouse_server.domain.request import CacheUse
from icehouse_server.engine.core.sequence import Phase
from icehouse_server.engine.prefix_cache.tiers.runner_port import CacheFacts
from icehouse_server.errors import IcehouseError, Overloaded, Reason
from icehouse_server.storage.api import Inventory, StorageFailed
from icehouse_server.storage.local.block_format.header import BlockFileError
from icehouse_server.storage.local.directory.manifest import Manifest
from icehouse_server.storage.store_paths import StorePaths

from tests.fixtures.known_blocks import removal_of
from tests.fixtures.storage.faults import FaultyFiles
from tests.system.cache.stepped_server import (
    BLOCK,
    BLOCK_BYTES,
    HYBRID,
    KV,
    STATE_ONLY,
    WINDOWS,
    SteppedServer,
    prompt,
)

TOKENS = prompt(4 * BLOCK + 1)
OTHERS = prompt(len(TOKENS), salt=9)
"""As long, and nothing in common."""


def fill(directory: Path, *prompts: list[int], **how) -> None:
    with SteppedServer(directory, **how) as served:
        for tokens in prompts or [TOKENS]:
            served.ask("fill", tokens, max_output_tokens=1)


def test_blocks_that_do_not_make_a_cache_are_never_tried_again(tmp_path: Path) -> None:
    fill(tmp_path)
    with SteppedServer(tmp_path) as served:
        served.runner.refuse_restore = lambda restore: True
        assert served.ask("a", TOKENS).cache.limit is ReuseLimit.LOAD_FAILED
        served.runner.refuse_restore = lambda restore: False
        assert served.stats().promote.load_total == 1
        again = served.ask("b", TOKENS)
        assert again.cache.ram_token_count == 4 * BLOCK, "what was computed instead is used"
        served.check()


def test_refused_blocks_in_ram_are_dropped_and_computed_anew() -> None:
    with SteppedServer() as served:
        served.ask("a", TOKENS)
        served.runner.refuse_restore = lambda restore: True
        assert served.ask("b", TOKENS).cache.limit is ReuseLimit.LOAD_FAILED
        served.runner.refuse_restore = lambda restore: False
        assert served.ask("c", TOKENS).cache.ram_token_count == 4 * BLOCK
        served.check()


def test_blocks_that_nobody_could_read_for_want_of_descriptors_are_found_again(tmp_path: Path) -> None:
    fill(tmp_path)
    files = FaultyFiles("open", 1, errno.EMFILE, times=1000)
    with SteppedServer(tmp_path, files=files) as served:
        served.step_until_idle()
        files.is_armed = True
        short = served.ask("a", TOKENS, cache_use=CacheUse.READ_ONLY).cache
        assert (short.cached_token_count, short.limit) == (0, ReuseLimit.LOAD_FAILED)
        files.is_armed = False
        assert served.ask("b", TOKENS, cache_use=CacheUse.READ_ONLY).cache.ssd_token_count == 4 * BLOCK
        served.check()


def test_a_load_that_storage_never_answers_ends_with_the_storage(tmp_path: Path) -> None:
    fill(tmp_path)
    with SteppedServer(tmp_path) as served:
        served.holds_storage = True
        served.submit("a", TOKENS)
        served.submit("b", [*TOKENS[: 3 * BLOCK], *prompt(BLOCK, salt=3)])
        served.step_until_idle()
        orders = [*served.give(Verify()), *served.give(removal_of(served.cache))]
        served.mailbox.post(StorageFailed("the test broke it"))
        served.is_storage_alive = False
        served.step_until_idle()
        assert served.answer("a").cache.limit is ReuseLimit.LOAD_FAILED
        assert served.answer("b").cache.cached_token_count in (0, 3 * BLOCK)
        assert orders == [] and served.cache.storage is None
        assert served.ask("c", TOKENS).cache.ram_token_count == 4 * BLOCK
        served.check()


def test_a_tier_that_is_lost_before_a_planned_load_is_asked_for_is_planned_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, TOKENS, OTHERS)
    with SteppedServer(tmp_path) as served:
        served.submit("a", TOKENS)
        served.loop.step()
        with monkeypatch.context() as patch:
            patch.setattr(served.scheduler, "restore_s", lambda least_s: 0.0)
            served.submit("b", OTHERS)
            while len(served.controller._restores) < 2:
                served.loop.step()
        assert len(served.cache.waits._waiting) == 1, "both are planned, one is read"
        served.mailbox.post(StorageFailed("the test broke it"))
        served.is_storage_alive = False
        served.step_until_idle()
        assert [served.answer(name).cache.ssd_token_count for name in "ab"] == [0, 0]
        served.check()


def test_orders_are_answered_when_the_storage_goes_away(tmp_path: Path) -> None:
    fill(tmp_path)
    with SteppedServer(tmp_path) as served:
        served.holds_storage = True
        waiting = [served.give(Verify()), served.give(removal_of(served.cache))]
        served.loop.step()
        served.mailbox.post(StorageFailed("the test broke it"))
        served.is_storage_alive = False
        served.step_until_idle()
        for (answer,) in waiting:
            assert isinstance(answer, IcehouseError) and answer.reason is Reason.STORE_UNUSABLE
        assert served.stats().ssd is None


@pytest.mark.parametrize("steps", range(6))
def test_cancelled_at_every_step_of_a_restore(tmp_path: Path, steps: int) -> None:
    fill(tmp_path, facts=WINDOWS)
    with SteppedServer(tmp_path, facts=WINDOWS) as served:
        served.runner.slices_per_restore = 3
        served.holds_storage = steps < 2
        served.submit("gone", TOKENS, max_output_tokens=50)
        for _ in range(steps):
            if not served.holds_storage:
                served.settle_storage()
            if not (served.loop.is_idle and len(served.mailbox) == 0):
                served.loop.step()
        assert isinstance(served.cancel("gone"), Failed)
        served.holds_storage = False
        served.step_until_idle()
        assert served.runner.history == {} and served.runner._restoring == {}
        assert served.ask("again", TOKENS).cache.cached_token_count == 4 * BLOCK
        served.check()


def test_letting_go_of_what_a_restore_is_made_from_counts_as_nothing(tmp_path: Path) -> None:
    """The arrays live on in the restore, so for memory's sake such blocks are neither counted nor dropped."""
    with SteppedServer(tmp_path) as served:
        served.ask("first", TOKENS)
        served.ask("other", OTHERS)
        whole = served.controller.yieldable_bytes()
        served.runner.slices_per_restore = 3
        served.submit("again", TOKENS)
        while not served.scheduler.restoring:
            served.loop.step()
        held = 4 * BLOCK_BYTES
        assert served.controller.yieldable_bytes() == whole - held
        assert served.controller.yield_ram(10 * whole) == whole - held
        served.step_until_idle()
        assert served.answer("again").cache.ram_token_count == 4 * BLOCK
        served.check()


@pytest.mark.parametrize("is_shared", [True, False])
def test_letting_go_of_what_a_sequence_reads_too_counts_as_nothing_while_it_runs(is_shared: bool) -> None:
    """Where a block holds its row's own pages, no page is free before the row has ended."""
    with SteppedServer(facts=CacheFacts(shares_blocks=is_shared)) as served:
        served.ask("other", OTHERS)
        others = served.controller.yieldable_bytes()
        served.submit("runs", TOKENS, max_output_tokens=50)
        while not any(s.output_token_ids for s in served.scheduler.running):
            served.loop.step()
        kept = served.cache.tree.ram.used_bytes - others
        assert kept == 4 * BLOCK_BYTES
        free_bytes = others + (0 if is_shared else kept)
        assert served.controller.yieldable_bytes() == free_bytes
        assert served.controller.yield_ram(10 * others) == free_bytes
        served.step_until_idle()
        assert served.controller.yieldable_bytes() == served.cache.tree.ram.used_bytes > 0
        served.check()


def test_loads_leave_the_cores_to_rows_that_decode_at_an_even_pace(tmp_path: Path) -> None:
    """Not when those have ended, and not while a crowd waits for its first tokens: a load that was asked for
    beside the last token of others took half a second on an idle machine."""
    fill(tmp_path, TOKENS, *(prompt(len(TOKENS), salt=salt) for salt in (20, 21)))
    with SteppedServer(tmp_path) as served:
        assert served.storage is not None
        has_cores = served.storage._readers._has_cores
        assert has_cores.is_set()
        for name in "abcde":
            served.submit(name, prompt(5, salt=ord(name)), max_output_tokens=60)
        for _ in range(12):
            served.settle_storage()
            served.loop.step()
        assert served.scheduler.decoding_count == 5 and not has_cores.is_set()
        served.holds_storage = True
        served.submit("one", TOKENS, max_output_tokens=1)
        for _ in range(4):
            served.loop.step()
        assert served.scheduler.loading_count == 1 and not has_cores.is_set()
        for salt in (20, 21):
            served.submit(f"crowd {salt}", prompt(len(TOKENS), salt=salt), max_output_tokens=1)
        for _ in range(4):
            served.loop.step()
        assert served.scheduler.loading_count == 3 and has_cores.is_set()
        served.holds_storage = False
        served.step_until_idle()
        assert has_cores.is_set()
        served.check()


def test_letting_go_of_what_a_sequence_reads_where_it_is_counts_as_nothing(tmp_path: Path) -> None:
    """Its arrays live until the sequence ends, and only then is there memory to be had for them."""
    with SteppedServer(tmp_path, facts=dataclasses.replace(KV, shares_blocks=True)) as served:
        served.ask("first", TOKENS)
        served.ask("other", OTHERS)
        whole = served.controller.yieldable_bytes()
        served.submit("again", TOKENS, max_output_tokens=3)
        while not served.scheduler.decoding_count:
            served.loop.step()
        assert served.controller.yieldable_bytes() == whole - 4 * BLOCK_BYTES
        served.step_until_idle()
        assert served.answer("again").cache.ram_token_count == 4 * BLOCK
        assert served.controller.yieldable_bytes() >= whole
        served.check()


@pytest.mark.parametrize("end", ["cancel", "park"])
def test_what_a_sequence_read_is_let_go_of_however_it_ends(tmp_path: Path, end: str) -> None:
    with SteppedServer(tmp_path, facts=dataclasses.replace(KV, shares_blocks=True)) as served:
        served.ask("first", TOKENS)
        whole = served.controller.yieldable_bytes()
        served.submit("again", TOKENS, max_output_tokens=50)
        while not served.scheduler.decoding_count:
            served.loop.step()
        assert served.controller.yieldable_bytes() < whole
        if end == "cancel":
            assert isinstance(served.cancel("again"), Failed)
        else:
            (sequence,) = served.scheduler.running
            served.loop._park(sequence)
        assert served.controller.yieldable_bytes() >= whole
        served.step_until_idle()
        served.check()


def test_the_read_queue_is_full(tmp_path: Path) -> None:
    fill(tmp_path, TOKENS, OTHERS)
    with SteppedServer(tmp_path, load_queue_limit_count=1) as served:
        served.holds_storage = True
        served.submit("a", TOKENS)
        served.submit("b", OTHERS)
        served.step_until_idle()
        assert served.answer("b").cache.cached_token_count == 0
        served.holds_storage = False
        served.step_until_idle()
        assert served.answer("a").cache.ssd_token_count == 4 * BLOCK


def test_blocks_evicted_between_plan_and_load(tmp_path: Path) -> None:
    fill(tmp_path)
    with SteppedServer(tmp_path) as served:
        for path in sorted((tmp_path / "blocks").rglob("*.safetensors")):
            path.unlink()
        answer = served.ask("a", TOKENS)
        assert answer.cache.limit is ReuseLimit.LOAD_FAILED and answer.cache.cached_token_count == 0
        stats = served.stats()
        assert stats.integrity.missing_file_total == stats.promote.failed_load_total == 1
        served.check()


@pytest.mark.parametrize("index", range(4))
def test_one_missing_block_ends_the_match_there(tmp_path: Path, index: int) -> None:
    fill(tmp_path)
    with SteppedServer(tmp_path) as served:
        chain = sorted(served.cache.tree, key=lambda entry: entry.start_token_index)
        name = chain[index].hash.hex()
        (path,) = (tmp_path / "blocks").rglob(f"{name}.safetensors")
        path.unlink()
        answer = served.ask("a", TOKENS)
        assert answer.cache.ssd_token_count == index * BLOCK
        assert answer.cache.limit is ReuseLimit.LOAD_FAILED
        assert served.ask("b", TOKENS).cache.cached_token_count == 4 * BLOCK
        served.check()


@pytest.mark.parametrize("use", list(CacheUse))
def test_what_a_request_may_do(tmp_path: Path, use: CacheUse) -> None:
    fill(tmp_path)
    fresh = prompt(3 * BLOCK, salt=5)
    with SteppedServer(tmp_path, facts=KV) as served:
        known = served.ask("known", TOKENS, cache_use=use, max_output_tokens=1)
        served.ask("fresh", fresh, cache_use=use, max_output_tokens=1)
        reads = use in (CacheUse.READ_WRITE, CacheUse.READ_ONLY)
        writes = use in (CacheUse.READ_WRITE, CacheUse.WRITE_ONLY)
        assert known.cache.cached_token_count == (4 * BLOCK if reads else 0)
        assert (known.cache.limit is ReuseLimit.SWITCHED_OFF) is not reads
        assert (served.ask("later", fresh).cache.cached_token_count > 0) is writes
        served.check()


def test_identical_prompts_side_by_side() -> None:
    with SteppedServer() as served:
        for name in "abc":
            served.submit(name, TOKENS, max_output_tokens=5)
        served.step_until_idle()
        answers = [served.answer(name).tokens for name in "abc"]
        assert answers[0] == answers[1] == answers[2]
        assert served.stats().ram.block_count == len({entry.hash for entry in served.cache.tree.in_ram()})
        served.check()


def test_restored_or_recomputed_by_measured_rates(tmp_path: Path) -> None:
    fill(tmp_path)
    with SteppedServer(tmp_path, may_recompute=True) as served:
        rates = served.cache.rates
        rates.load_count = 3
        rates.read_bytes_per_s, rates.adopt_tokens_per_s, rates.prefill_tokens_per_s = 1.0, 1e9, 1e9
        slow_disk = served.ask("slow disk", TOKENS, cache_use=CacheUse.READ_ONLY)
        assert slow_disk.cache.limit is ReuseLimit.RECOMPUTE_FASTER
        rates.read_bytes_per_s, rates.prefill_tokens_per_s = 1e9, 1.0
        fast_disk = served.ask("fast disk", TOKENS, cache_use=CacheUse.READ_ONLY)
        assert fast_disk.cache.ssd_token_count == 4 * BLOCK
        assert served.stats().promote.recompute_chosen_total == 1


def test_a_prompt_that_comes_before_the_inventory_waits_for_it(tmp_path: Path) -> None:
    fill(tmp_path)
    served = SteppedServer(tmp_path)
    assert served.storage is not None
    served.storage.lock()
    served.submit("early", TOKENS)
    served.submit("gone", TOKENS)
    served.submit("cold", TOKENS, cache_use=CacheUse.OFF)
    served.holds_storage = True
    served.step_until_idle()
    assert served.recorder.end_of("early") is None
    assert served.answer("cold").cache.limit is ReuseLimit.SWITCHED_OFF, "it has nothing to wait for"
    served.cancel("gone")
    served.holds_storage = False
    served.storage.open()
    served.step_until_idle()
    assert served.answer("early").cache.ssd_token_count == 4 * BLOCK
    served.check()
    served.stop()


def test_orders_that_come_before_the_inventory_wait_for_it(tmp_path: Path) -> None:
    fill(tmp_path)
    served = SteppedServer(tmp_path)
    assert served.storage is not None
    served.storage.lock()
    served.holds_storage = True
    explained, listed = served.give(Explain(tuple(TOKENS))), served.give(ListKnown(None))
    served.step_until_idle()
    assert not explained and not listed
    served.holds_storage = False
    served.storage.open()
    served.step_until_idle()
    assert isinstance(explained[0], Explanation) and explained[0].cache.ssd_token_count == 4 * BLOCK
    assert isinstance(listed[0], KnownBlocks) and len(listed[0].block_hashes) == 5, "a tail too"
    served.check()
    served.stop()


def test_orders_that_wait_for_an_inventory_that_never_comes(tmp_path: Path) -> None:
    served = SteppedServer(tmp_path)
    served.holds_storage = True
    explained, verified = served.give(Explain(tuple(TOKENS))), served.give(Verify())
    served.step_until_idle()
    served.mailbox.post(StorageFailed("the test broke it"))
    served.step_until_idle()
    assert isinstance(explained[0], Explanation) and isinstance(verified[0], IcehouseError)


def test_early_orders_are_bounded_and_answered_when_the_engine_ends(tmp_path: Path) -> None:
    served = SteppedServer(tmp_path)
    served.holds_storage = True
    answers = [served.give(ListKnown(None)) for _ in range(300)]
    served.step_until_idle()
    refused = [a[0] for a in answers if a]
    assert len(refused) == 44
    assert all(isinstance(answer, Overloaded) for answer in refused)
    error = IcehouseError(Reason.ENGINE_FAILED, "the test ended it")
    served.loop.fail_all(error)
    assert [a[0] for a in answers].count(error) == 256


def test_a_prompt_that_waits_for_an_inventory_that_never_comes(tmp_path: Path) -> None:
    served = SteppedServer(tmp_path)
    served.submit("early", TOKENS)
    served.holds_storage = True
    served.step_until_idle()
    served.mailbox.post(StorageFailed("the test broke it"))
    served.step_until_idle()
    assert served.answer("early").cache.limit is ReuseLimit.NO_MATCH
    assert served.ask("later", TOKENS).cache.ram_token_count == 4 * BLOCK


def test_a_prompt_that_waits_for_the_inventory_asks_for_nothing_when_the_engine_ends(tmp_path: Path) -> None:
    fill(tmp_path)
    with contextlib.closing(Manifest.open_read_only(StorePaths(str(tmp_path)).manifest)) as manifest:
        records, _ = manifest.load()
    served = SteppedServer(tmp_path)
    served.submit("early", [*TOKENS, 1])
    served.holds_storage = True
    served.mailbox.post(Inventory(tuple(records), is_last=False))
    served.step_until_idle()
    served.loop.fail_all(IcehouseError(Reason.ENGINE_FAILED, "the test ended it"))
    assert not served.cache.waits._waiting, "the headers of a tail would tell more of it"


def test_several_restores_proceed_in_one_step_and_all_reads_are_asked_for_at_once(tmp_path: Path) -> None:
    prompts = {name: prompt(4 * BLOCK + 1, salt=ord(name)) for name in "abcdef"}
    fill(tmp_path, *prompts.values())
    with SteppedServer(tmp_path) as served:
        served.holds_storage = True
        for name, tokens in prompts.items():
            served.submit(name, tokens)
        served.step_until_idle()
        assert len(served.cache.waits._waiting) == 6, "no limit on prompts in preparation holds a read back"
        served.settle_storage()
        served.runner.restored.clear()
        served.loop.step()
        assert len(served.runner.restored) == 6
        served.step_until_idle()
        assert all(served.answer(name).cache.ssd_token_count == len(TOKENS) - 1 for name in "abcdef")


@pytest.mark.parametrize("facts", [KV, WINDOWS, HYBRID, STATE_ONLY], ids=["kv", "windows", "hybrid", "state"])
@pytest.mark.parametrize("slices", [1, 3])
def test_callers_who_share_a_prefix_on_ssd_read_it_once(
    tmp_path: Path, facts: CacheFacts, slices: int
) -> None:
    fill(tmp_path, facts=facts)
    with SteppedServer(tmp_path, facts=facts) as served:
        served.runner.slices_per_restore = slices
        for i in range(6):
            served.submit(f"r{i}", TOKENS)
        served.step_until_idle()
        caches = [served.answer(f"r{i}").cache for i in range(6)]
        assert served.stats().promote.load_total == 1
        assert [cache.cached_token_count for cache in caches] == [len(TOKENS) - 1] * 6
        assert caches[0].ssd_token_count and not any(cache.ssd_token_count for cache in caches[1:])
        served.check()


def test_callers_who_wait_for_a_read_go_on_without_it_where_ram_does_not_keep_it(tmp_path: Path) -> None:
    fill(tmp_path)
    with SteppedServer(tmp_path, ram_blocks=1) as served:
        for i in range(3):
            served.submit(f"r{i}", TOKENS)
        served.step_until_idle()
        assert served.stats().promote.load_total == 3, "each reads for itself"
        served.check()


@pytest.mark.parametrize("steps", range(8))
def test_a_reader_that_is_cancelled_at_any_step_leaves_others_running(tmp_path: Path, steps: int) -> None:
    fill(tmp_path)
    with SteppedServer(tmp_path) as served:
        served.runner.slices_per_restore = 3
        served.submit("reader", TOKENS, max_output_tokens=50)
        served.submit("other", TOKENS)
        for _ in range(steps):
            served.settle_storage()
            served.loop.step()
        served.cancel("reader")
        served.step_until_idle()
        assert served.answer("other").cache.cached_token_count == len(TOKENS) - 1
        served.check()


def test_the_pages_that_a_load_is_read_into_are_counted_until_they_are_its_rows(tmp_path: Path) -> None:
    fill(tmp_path)
    with SteppedServer(tmp_path, facts=dataclasses.replace(KV, shares_blocks=True)) as served:
        served.holds_storage = True
        served.submit("a", TOKENS, max_output_tokens=20)
        rooms = []
        for _ in range(4):
            served.loop.step()
            rooms += [(s.phase, s.loading_token_count) for s in served.scheduler.running]
        assert rooms[-1] == (Phase.LOADING, 4 * BLOCK)
        (sequence,) = served.scheduler.running
        served.holds_storage = False
        served.step_until_idle()
        assert sequence.loading_token_count == 0
        assert served.answer("a").cache.ssd_token_count == 4 * BLOCK


@pytest.mark.parametrize("is_queue_full", [False, True])
def test_no_pages_are_kept_for_a_load_that_cannot_be(tmp_path: Path, is_queue_full: bool) -> None:
    facts = dataclasses.replace(KV, shares_blocks=True)
    fill(tmp_path)
    with SteppedServer(tmp_path, facts=facts, load_queue_limit_count=0 if is_queue_full else 1) as served:
        served.runner.has_room = lambda: is_queue_full
        served.submit("a", TOKENS, max_output_tokens=2)
        served.loop.step()
        (sequence,) = served.scheduler.running or served.scheduler.restoring
        served.step_until_idle()
        assert sequence.loading_token_count == 0
        assert served.answer("a").cache.cached_token_count == 0
        assert served.runner.asked_load_count == 1
        served.check()


def test_blocks_in_ram_make_way_where_no_pages_are_free_to_read_into(tmp_path: Path) -> None:
    fill(tmp_path)
    with SteppedServer(tmp_path, facts=dataclasses.replace(KV, shares_blocks=True)) as served:
        served.ask("others", OTHERS)
        served.runner.has_room = lambda: not served.cache.tree.ram.block_count
        assert served.ask("a", TOKENS).cache.ssd_token_count == 4 * BLOCK
        assert served.runner.asked_load_count == 2
        served.check()


def replaced(*_args, **_kwargs):
    raise BlockFileError(BlockDamage.MISSING, "it was replaced meanwhile")


def test_a_block_that_was_forgotten_and_is_still_stored_is_known_again_when_it_leaves_ram(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was dropped as a duplicate each time, and of no use until a restart."""
    fill(tmp_path)
    with SteppedServer(tmp_path, ram_blocks=5) as served:
        with monkeypatch.context() as patch:
            patch.setattr("icehouse_server.storage.local.reader_pool.open_block", replaced)
            assert served.ask("a", TOKENS).cache.limit is ReuseLimit.LOAD_FAILED
        (first, *_) = served.cache.known_chain(TOKENS, DEFAULT_SCOPE)
        assert first.ram and not first.ssd
        served.ask("others", OTHERS)
        assert not first.ram and first.ssd
        assert served.ask("b", TOKENS).cache.cached_token_count == 4 * BLOCK
        served.check()


def test_a_pin_of_a_block_that_was_forgotten_and_is_still_stored_lasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path)
    with SteppedServer(tmp_path) as served:
        with monkeypatch.context() as patch:
            patch.setattr("icehouse_server.storage.local.reader_pool.open_block", replaced)
            served.ask("a", TOKENS)
        assert served.order(Pin(tuple(TOKENS[:BLOCK]))) == PinReport(1, BLOCK, BLOCK_BYTES)
    with SteppedServer(tmp_path) as served:
        pinned = [entry.is_pinned for entry in served.cache.known_chain(TOKENS, DEFAULT_SCOPE)]
        assert pinned == [True, False, False, False]
