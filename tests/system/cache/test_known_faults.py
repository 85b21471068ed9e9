"""The faults this kind of cache is known for elsewhere, each shown not to be here.

One test per fault, at the height where a caller would notice it. The parts are proved deeper down:
`tests/unit/engine/kv_cache` for arrays and cache classes, `tests/unit/storage` for queues and counters,
the other files beside this one for the rest.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from icehouse_server.domain.cache_stats import SpillDropCause
from icehouse_server.domain.events import ReuseLimit
from icehouse_server.engine.kv.paged_cache import PagedWindowCache
from icehouse_server.engine.kv.runner_blocks import RunnerBlocks
from mlx_lm.models.cache import QuantizedKVCache, RotatingKVCache

from tests.fixtures.known_blocks import removal_of
from tests.fixtures.models import tiny_model_dir
from tests.system.cache.server import BLOCK as REAL_BLOCK
from tests.system.cache.server import CacheServer
from tests.system.cache.stepped_server import BLOCK, HYBRID, STATE_ONLY, SteppedServer, prompt


def real_prompt() -> list[int]:
    return prompt(4 * REAL_BLOCK + 3)


def restored_caches(monkeypatch: pytest.MonkeyPatch) -> list:
    """Collect the caches of every restore from here on."""
    caches: list = []
    original = RunnerBlocks.continue_restore

    def continue_restore(self, sequence_id, *, budget_s):
        is_done = original(self, sequence_id, budget_s=budget_s)
        if is_done:
            caches.extend(self._sequences.caches(sequence_id))
        return is_done

    monkeypatch.setattr(RunnerBlocks, "continue_restore", continue_restore)
    return caches


def test_spilling_never_touches_mlx_off_the_inference_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    callers: dict[str, set[str]] = {}
    names = {
        "cut",
        "begin_to_host",
        "from_host",
        "begin_load",
        "end_load",
        "begin_restore",
        "continue_restore",
    }
    for name in names:
        original = getattr(RunnerBlocks, name)

        def noted(self, *args, name=name, original=original, **kwargs):
            callers.setdefault(name, set()).add(threading.current_thread().name)
            return original(self, *args, **kwargs)

        monkeypatch.setattr(RunnerBlocks, name, noted)
    folder = tiny_model_dir(tmp_path, "gemma3_text")
    for turn in range(2):
        with CacheServer(folder, tmp_path / "blocks") as served:
            served.ask(f"turn {turn}", real_prompt())
    assert set(callers) == names
    assert set.union(*callers.values()) == {"inference"}


def test_bfloat16_that_numpy_cannot_hold_is_spilled_all_the_same(tmp_path: Path) -> None:
    folder = tiny_model_dir(tmp_path, "llama", dtype="bfloat16")
    with CacheServer(folder, tmp_path / "blocks") as served:
        cold = served.ask("cold", real_prompt())
    with CacheServer(folder, tmp_path / "blocks") as served:
        ssd = served.ask("ssd", real_prompt())
    assert ssd.tokens == cold.tokens and ssd.cache.ssd_token_count == len(real_prompt()) - 1
    (some, *_) = (tmp_path / "blocks").rglob("*.safetensors")
    assert b'"BF16"' in some.read_bytes()


def test_quantized_layers_are_tuples_and_stay_quantized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_model_dir(tmp_path, "llama")
    with CacheServer(folder, tmp_path / "blocks", kv_bits=4) as served:
        cold = served.ask("cold", real_prompt())
    caches = restored_caches(monkeypatch)
    with CacheServer(folder, tmp_path / "blocks", kv_bits=4) as served:
        ssd = served.ask("ssd", real_prompt())
    assert ssd.tokens == cold.tokens and ssd.cache.ssd_token_count == len(real_prompt()) - 1
    assert {type(cache) for cache in caches} == {QuantizedKVCache}


def test_a_sliding_window_comes_back_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_model_dir(tmp_path, "gemma3_text")
    with CacheServer(folder, tmp_path / "blocks") as served:
        cold = served.ask("cold", real_prompt(), max_output_tokens=2 * REAL_BLOCK)
    caches = restored_caches(monkeypatch)
    with CacheServer(folder, tmp_path / "blocks") as served:
        ssd = served.ask("ssd", real_prompt(), max_output_tokens=2 * REAL_BLOCK)
    assert ssd.tokens == cold.tokens
    windows = [cache for cache in caches if type(cache) in (RotatingKVCache, PagedWindowCache)]
    assert windows and all(cache.max_size == 24 for cache in windows)


@pytest.mark.parametrize("facts", [HYBRID, STATE_ONLY], ids=["hybrid", "state"])
def test_the_state_at_a_boundary_is_taken_as_prefill_passes_it(facts) -> None:
    # The very first prompt: no block of it is known to anybody while it is prefilled.
    with SteppedServer(facts=facts, checkpoint_interval_tokens=2 * BLOCK) as served:
        served.ask("first", prompt(5 * BLOCK + 2))
        fork = [*prompt(4 * BLOCK), *prompt(BLOCK, salt=1)]
        assert served.ask("fork", fork).cache.ram_token_count == 4 * BLOCK


def test_evictions_never_wait_in_the_write_queue_and_every_credit_comes_back(tmp_path: Path) -> None:
    with SteppedServer(
        tmp_path, ram_blocks=3, limit_bytes=6 << 20, spill_queue_limit_bytes=1 << 18
    ) as served:
        for turn in range(8):
            served.ask(f"turn {turn}", prompt(4 * BLOCK, salt=turn))
        served.holds_storage = True
        served.ask("busy", prompt(4 * BLOCK, salt=9))
        space = served.storage._state.spill_queue.free
        assert served.storage._state.spill_queue.try_reserve(space)
        answers = served.give(removal_of(served.cache))
        served.loop.step()
        served.holds_storage = False
        served.step_until_idle()
        assert len(answers) == 1, "an order needs no credit"
        served.storage._state.spill_queue.release(space)
        spill = served.stats().spill
        assert spill.accepted_block_total > 0
        assert (spill.queue_count, spill.queue_bytes) == (0, 0)


def test_the_end_of_a_request_does_not_race_the_writer(tmp_path: Path) -> None:
    with SteppedServer(tmp_path, spill_policy="write_behind") as served:
        served.ask("first", prompt(4 * BLOCK), max_output_tokens=0)
        served.holds_storage = True
        served.write_behind()
        served.submit("second", prompt(4 * BLOCK), max_output_tokens=50)
        while not served.runner.decoding:
            served.loop.step()
        served.cancel("second")
        assert served.runner.history == {} and served.cache.spills.under_way_count > 0
        served.holds_storage = False
        served.step_until_idle()
    with SteppedServer(tmp_path) as served:
        # The text is compared with a run without a cache, and every byte with its checksum.
        assert served.ask("third", prompt(4 * BLOCK)).cache.ssd_token_count == 4 * BLOCK - 1


def test_a_short_hit_in_ram_never_hides_a_long_one_on_ssd(tmp_path: Path) -> None:
    with SteppedServer(tmp_path) as served:
        served.ask("long", prompt(8 * BLOCK + 1))
    with SteppedServer(tmp_path) as served:
        served.ask("short", prompt(2 * BLOCK + 1), max_output_tokens=4)
        answer = served.ask("long", prompt(8 * BLOCK + 1))
    assert answer.cache.ram_token_count > 0
    assert answer.cache.cached_token_count == 8 * BLOCK


def test_a_hit_on_ssd_is_promoted_when_ram_is_full(tmp_path: Path) -> None:
    with SteppedServer(tmp_path, ram_blocks=5) as served:
        served.ask("old", prompt(4 * BLOCK))
        served.ask("new", prompt(4 * BLOCK, salt=1))
        again = served.ask("old", prompt(4 * BLOCK), max_output_tokens=8)
        assert again.cache.ssd_token_count > 0 and again.cache.limit is ReuseLimit.NONE
        assert served.ask("old", prompt(4 * BLOCK)).cache.ram_token_count == 4 * BLOCK - 1


def test_what_is_queued_is_not_counted_as_written(tmp_path: Path) -> None:
    with SteppedServer(tmp_path, spill_policy="write_behind", daily_write_limit_bytes=1500) as served:
        served.ask("once", prompt(4 * BLOCK + 1), max_output_tokens=0)
        served.holds_storage = True
        served.write_behind()
        assert served.cache.spills.under_way_count == 4
        served.holds_storage = False
        stats = served.stats()
        dropped = {drop.cause: drop.block_total for drop in stats.spill.drops}
        assert stats.spill.accepted_block_total == 4
        assert 0 < stats.spill.persisted_block_total < 4
        assert dropped == {SpillDropCause.DAILY_BUDGET: 4 - stats.spill.persisted_block_total}
        assert stats.ssd.block_count == stats.spill.persisted_block_total
        assert served.cache.spills.under_way_count == 0
