"""Restores that go wrong, and storage that goes away: the prompt is prefilled and the text is the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from icehouse_server.domain.cache_commands import Evict, EvictReport, Explain, Explanation, Verify
from icehouse_server.domain.events import Failed, ReuseLimit
from icehouse_server.domain.request import CacheUse
from icehouse_server.errors import IcehouseError, Overloaded, Reason
from icehouse_server.storage.messages import StorageFailed

from tests.cache.step_house import BLOCK, KV, WINDOWS, StepHouse, prompt

TOKENS = prompt(4 * BLOCK + 1)


def fill(directory: Path, **how) -> None:
    with StepHouse(directory, **how) as house:
        house.ask("fill", TOKENS, max_output_tokens=1)


def test_blocks_that_do_not_make_a_cache_are_never_tried_again(tmp_path: Path) -> None:
    fill(tmp_path)
    with StepHouse(tmp_path) as house:
        house.runner.refuse_restore = lambda restore: True
        assert house.ask("a", TOKENS).cache.limit is ReuseLimit.LOAD_FAILED
        house.runner.refuse_restore = lambda restore: False
        assert house.stats().promote.load_total == 1
        again = house.ask("b", TOKENS)
        assert again.cache.ram_token_count == 4 * BLOCK, "what was computed instead is used"
        house.check()


def test_refused_blocks_in_ram_are_dropped_and_computed_anew() -> None:
    with StepHouse() as house:
        house.ask("a", TOKENS)
        house.runner.refuse_restore = lambda restore: True
        assert house.ask("b", TOKENS).cache.limit is ReuseLimit.LOAD_FAILED
        house.runner.refuse_restore = lambda restore: False
        assert house.ask("c", TOKENS).cache.ram_token_count == 4 * BLOCK
        house.check()


def test_a_load_that_storage_never_answers_ends_with_the_storage(tmp_path: Path) -> None:
    fill(tmp_path)
    with StepHouse(tmp_path) as house:
        house.holds_storage = True
        house.submit("a", TOKENS)
        house.submit("b", [*TOKENS[: 3 * BLOCK], *prompt(BLOCK, salt=3)])
        house.step_until_idle()
        orders = [*house.give(Verify()), *house.give(Evict(None))]
        house.mailbox.post(StorageFailed("the test broke it"))
        house.is_storage_alive = False
        house.step_until_idle()
        assert house.answer("a").cache.limit is ReuseLimit.LOAD_FAILED
        assert house.answer("b").cache.cached_token_count in (0, 3 * BLOCK)
        assert orders == [] and house.cache.storage is None
        assert house.ask("c", TOKENS).cache.ram_token_count == 4 * BLOCK
        house.check()


def test_orders_are_answered_when_the_storage_goes_away(tmp_path: Path) -> None:
    fill(tmp_path)
    with StepHouse(tmp_path) as house:
        house.holds_storage = True
        waiting = [house.give(Verify()), house.give(Evict(None))]
        house.loop.step()
        house.mailbox.post(StorageFailed("the test broke it"))
        house.is_storage_alive = False
        house.step_until_idle()
        for (answer,) in waiting:
            assert isinstance(answer, IcehouseError) and answer.reason is Reason.STORE_UNUSABLE
        assert house.stats().ssd is None


@pytest.mark.parametrize("steps", range(6))
def test_cancelled_at_every_step_of_a_restore(tmp_path: Path, steps: int) -> None:
    fill(tmp_path, facts=WINDOWS)
    with StepHouse(tmp_path, facts=WINDOWS) as house:
        house.runner.slices_per_restore = 3
        house.holds_storage = steps < 2
        house.submit("gone", TOKENS, max_output_tokens=50)
        for _ in range(steps):
            if not house.holds_storage:
                house.settle_storage()
            if not (house.scheduler.is_blocked and len(house.mailbox) == 0):
                house.loop.step()
        assert isinstance(house.cancel("gone"), Failed)
        house.holds_storage = False
        house.step_until_idle()
        assert house.runner.history == {} and house.runner._restoring == {}
        assert house.ask("again", TOKENS).cache.cached_token_count == 4 * BLOCK
        house.check()


def test_the_read_queue_is_full(tmp_path: Path) -> None:
    fill(tmp_path)
    with StepHouse(tmp_path, load_queue_limit_count=1) as house:
        house.holds_storage = True
        house.submit("a", TOKENS)
        house.submit("b", TOKENS)
        house.step_until_idle()
        assert house.answer("b").cache.cached_token_count == 0
        house.holds_storage = False
        house.step_until_idle()
        assert house.answer("a").cache.ssd_token_count == 4 * BLOCK


def test_blocks_evicted_between_plan_and_load(tmp_path: Path) -> None:
    fill(tmp_path)
    with StepHouse(tmp_path) as house:
        for path in sorted((tmp_path / "blocks").rglob("*.safetensors")):
            path.unlink()
        answer = house.ask("a", TOKENS)
        assert answer.cache.limit is ReuseLimit.LOAD_FAILED and answer.cache.cached_token_count == 0
        stats = house.stats()
        assert stats.integrity.missing_file_total == stats.promote.failed_load_total == 1
        house.check()


@pytest.mark.parametrize("index", range(4))
def test_one_missing_block_ends_the_match_there(tmp_path: Path, index: int) -> None:
    fill(tmp_path)
    with StepHouse(tmp_path) as house:
        chain = sorted(house.cache.index, key=lambda entry: entry.start_token_index)
        name = chain[index].hash.hex()
        (path,) = (tmp_path / "blocks").rglob(f"{name}.safetensors")
        path.unlink()
        answer = house.ask("a", TOKENS)
        assert answer.cache.ssd_token_count == index * BLOCK
        assert answer.cache.limit is ReuseLimit.LOAD_FAILED
        assert house.ask("b", TOKENS).cache.cached_token_count == 4 * BLOCK
        house.check()


@pytest.mark.parametrize("use", list(CacheUse))
def test_what_a_request_may_do(tmp_path: Path, use: CacheUse) -> None:
    fill(tmp_path)
    fresh = prompt(3 * BLOCK, salt=5)
    with StepHouse(tmp_path, facts=KV) as house:
        known = house.ask("known", TOKENS, cache_use=use, max_output_tokens=1)
        house.ask("fresh", fresh, cache_use=use, max_output_tokens=1)
        reads = use in (CacheUse.READ_WRITE, CacheUse.READ_ONLY)
        writes = use in (CacheUse.READ_WRITE, CacheUse.WRITE_ONLY)
        assert known.cache.cached_token_count == (4 * BLOCK if reads else 0)
        assert (known.cache.limit is ReuseLimit.SWITCHED_OFF) is not reads
        assert (house.ask("later", fresh).cache.cached_token_count > 0) is writes
        house.check()


def test_identical_prompts_side_by_side() -> None:
    with StepHouse() as house:
        for name in "abc":
            house.submit(name, TOKENS, max_output_tokens=5)
        house.step_until_idle()
        answers = [house.answer(name).tokens for name in "abc"]
        assert answers[0] == answers[1] == answers[2]
        assert house.stats().ram.block_count == len({entry.hash for entry in house.cache.ram})
        house.check()


def test_restored_or_recomputed_by_measured_rates(tmp_path: Path) -> None:
    fill(tmp_path)
    with StepHouse(tmp_path, may_recompute=True) as house:
        rates = house.cache.rates
        rates.read_bytes_per_s, rates.adopt_tokens_per_s, rates.prefill_tokens_per_s = 1.0, 1e9, 1e9
        slow_disk = house.ask("slow disk", TOKENS, cache_use=CacheUse.READ_ONLY)
        assert slow_disk.cache.limit is ReuseLimit.RECOMPUTE_FASTER
        rates.read_bytes_per_s, rates.prefill_tokens_per_s = 1e9, 1.0
        fast_disk = house.ask("fast disk", TOKENS, cache_use=CacheUse.READ_ONLY)
        assert fast_disk.cache.ssd_token_count == 4 * BLOCK
        assert house.stats().promote.recompute_chosen_total == 1


def test_a_prompt_that_comes_before_the_inventory_waits_for_it(tmp_path: Path) -> None:
    fill(tmp_path)
    house = StepHouse(tmp_path)
    assert house.storage is not None
    house.storage.lock()
    house.submit("early", TOKENS)
    house.submit("gone", TOKENS)
    house.submit("cold", TOKENS, cache_use=CacheUse.OFF)
    house.holds_storage = True
    house.step_until_idle()
    assert house.recorder.end_of("early") is None
    assert house.answer("cold").cache.limit is ReuseLimit.SWITCHED_OFF, "it has nothing to wait for"
    house.cancel("gone")
    house.holds_storage = False
    house.storage.open()
    house.step_until_idle()
    assert house.answer("early").cache.ssd_token_count == 4 * BLOCK
    house.check()
    house.stop()


def test_orders_that_come_before_the_inventory_wait_for_it(tmp_path: Path) -> None:
    fill(tmp_path)
    house = StepHouse(tmp_path)
    assert house.storage is not None
    house.storage.lock()
    house.holds_storage = True
    explained, evicted = house.give(Explain(tuple(TOKENS))), house.give(Evict(None))
    house.step_until_idle()
    assert not explained and not evicted
    house.holds_storage = False
    house.storage.open()
    house.step_until_idle()
    assert isinstance(explained[0], Explanation) and explained[0].cache.ssd_token_count == 4 * BLOCK
    assert isinstance(evicted[0], EvictReport) and evicted[0].ssd_block_count == 5, "a tail too"
    assert house.ask("later", TOKENS).cache.limit is ReuseLimit.NO_MATCH
    house.check()
    house.stop()


def test_orders_that_wait_for_an_inventory_that_never_comes(tmp_path: Path) -> None:
    house = StepHouse(tmp_path)
    house.holds_storage = True
    explained, verified = house.give(Explain(tuple(TOKENS))), house.give(Verify())
    house.step_until_idle()
    house.mailbox.post(StorageFailed("the test broke it"))
    house.step_until_idle()
    assert isinstance(explained[0], Explanation) and isinstance(verified[0], IcehouseError)


def test_early_orders_are_bounded_and_answered_when_the_engine_ends(tmp_path: Path) -> None:
    house = StepHouse(tmp_path)
    house.holds_storage = True
    answers = [house.give(Evict(None)) for _ in range(300)]
    house.step_until_idle()
    refused = [a[0] for a in answers if a]
    assert len(refused) == 44
    assert all(isinstance(answer, Overloaded) for answer in refused)
    error = IcehouseError(Reason.ENGINE_FAILED, "the test ended it")
    house.loop.fail_all(error)
    assert [a[0] for a in answers].count(error) == 256


def test_a_prompt_that_waits_for_an_inventory_that_never_comes(tmp_path: Path) -> None:
    house = StepHouse(tmp_path)
    house.submit("early", TOKENS)
    house.holds_storage = True
    house.step_until_idle()
    house.mailbox.post(StorageFailed("the test broke it"))
    house.step_until_idle()
    assert house.answer("early").cache.limit is ReuseLimit.NO_MATCH
    assert house.ask("later", TOKENS).cache.ram_token_count == 4 * BLOCK
