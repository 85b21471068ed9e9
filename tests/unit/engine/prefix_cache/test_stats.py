"""CacheStats: every number is the one of its name, on both sides of the door."""

from __future__ import annotations

from pathlib import Path

import pytest
from icehouse_server.domain.cache_commands import Pin
from icehouse_server.domain.cache_stats import AgePercentiles, MissTokens, SpillDropCause
from icehouse_server.domain.events import ReuseLimit
from icehouse_server.domain.request import CacheUse

from tests.fixtures.known_blocks import removal_of
from tests.system.cache.stepped_server import BLOCK, BLOCK_BYTES, SteppedServer, prompt


def test_lookups_are_counted_in_tokens_by_tier_and_by_reason(tmp_path: Path) -> None:
    long = prompt(4 * BLOCK + 1)
    with SteppedServer(tmp_path) as served:
        served.ask("fill", long, max_output_tokens=0)
    with SteppedServer(tmp_path) as served:
        served.ask("new", prompt(2 * BLOCK + 1, salt=1), max_output_tokens=0)
        served.ask("ssd", long, max_output_tokens=1)
        served.ask("off", prompt(6), cache_use=CacheUse.OFF)
        served.ask("fork", [*prompt(2 * BLOCK + 1, salt=1)[:7], 99, 99], cache_use=CacheUse.READ_ONLY)
        lookups = served.stats().lookups
    assert (lookups.lookup_total, lookups.hit_total) == (4, 2)
    assert (lookups.ram_token_total, lookups.ssd_token_total) == (7, 4 * BLOCK)
    assert lookups.miss_tokens == (
        MissTokens(ReuseLimit.NONE, 1),
        MissTokens(ReuseLimit.NO_MATCH, 2 * BLOCK + 1),
        MissTokens(ReuseLimit.DIVERGED, 2),
        MissTokens(ReuseLimit.SWITCHED_OFF, 6),
    )
    everything = lookups.ram_token_total + lookups.ssd_token_total + lookups.miss_token_total
    assert everything == (2 * BLOCK + 1) + (4 * BLOCK + 1) + 6 + 9


def test_tiers_count_blocks_tails_pins_tokens_and_bytes(tmp_path: Path) -> None:
    with SteppedServer(tmp_path, ram_blocks=10) as served:
        served.ask("a", prompt(2 * BLOCK + 3), max_output_tokens=0)
        served.order(Pin(tuple(prompt(BLOCK))))
        ram = served.stats().ram
        assert (ram.block_count, ram.tail_count, ram.pinned_block_count) == (3, 1, 1)
        assert (ram.token_count, ram.size_bytes, ram.limit_bytes) == (10, 40, 10 * BLOCK_BYTES)
    with SteppedServer(tmp_path) as served:
        ssd = served.stats().ssd
        assert ssd is not None
        assert (ssd.block_count, ssd.tail_count, ssd.pinned_block_count, ssd.token_count) == (3, 1, 1, 10)
        assert ssd.size_bytes == sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
        served.order(removal_of(served.cache))
        ssd = served.stats().ssd
        assert ssd is not None
        assert (ssd.block_count, ssd.size_bytes, ssd.purged_block_total) == (0, 0, 3)


def test_ages_are_of_the_last_use() -> None:
    with SteppedServer() as served:
        served.ask("old", prompt(2 * BLOCK + 1), max_output_tokens=0)
        served.clock.now += 100.0
        served.ask("young", prompt(4 * BLOCK + 1, salt=1), max_output_tokens=0)
        served.clock.now += 10.0
        age = served.stats().ram.age
    assert (age.p50_s, age.p90_s, age.p99_s) == (10.0, 110.0, 110.0)
    assert AgePercentiles.of([5.0]).p50_s == 5.0 and AgePercentiles.of([]).p99_s == 0.0
    hundred = AgePercentiles.of([float(n) for n in range(100)])
    assert (hundred.p50_s, hundred.p90_s, hundred.p99_s) == (50.0, 90.0, 99.0)


def test_accepted_persisted_and_dropped_are_three_numbers(tmp_path: Path) -> None:
    how = {
        "spill_policy": "write_behind",
        "daily_write_limit_bytes": 1500,
        "spill_queue_limit_bytes": 1 << 18,
    }
    with SteppedServer(tmp_path, **how) as served:
        served.ask("a", prompt(4 * BLOCK + 1), max_output_tokens=0)
        assert served.stats().spill.behind_waiting_count == 4
        served.write_behind()
        spill = served.stats().spill
        dropped = {drop.cause: drop.block_total for drop in spill.drops}
        assert spill.policy == "write_behind" and spill.queue_limit_bytes == 1 << 18
        # Room for three at once; the fourth stays in RAM and is no drop.
        assert spill.accepted_block_total == 3
        assert spill.persisted_block_total == 2 and dropped == {SpillDropCause.DAILY_BUDGET: 1}
        assert spill.persisted_byte_total == spill.written_today_bytes <= spill.daily_limit_bytes == 1500
        assert (spill.behind_block_total, spill.behind_byte_total) == (2, spill.persisted_byte_total)
        assert spill.behind_waiting_count == 1


def test_loads_count_what_was_promoted_and_what_failed(tmp_path: Path) -> None:
    long = prompt(4 * BLOCK + 1)
    with SteppedServer(tmp_path) as served:
        served.ask("fill", long, max_output_tokens=0)
    with SteppedServer(tmp_path) as served:
        served.ask("good", long, cache_use=CacheUse.READ_ONLY)
        promote = served.stats().promote
        assert (promote.load_total, promote.failed_load_total) == (1, 0)
        assert (promote.promoted_block_total, promote.promoted_token_total) == (4, 4 * BLOCK)
        assert promote.read_byte_total == 4 * BLOCK_BYTES and promote.queue_count == 0
        chain = sorted(served.cache.tree, key=lambda entry: entry.start_token_index)
        (path,) = tmp_path.rglob(f"{chain[1].hash.hex()}.safetensors")
        path.unlink()
        served.ask("bad", long, cache_use=CacheUse.READ_ONLY)
        stats = served.stats()
    assert (stats.promote.load_total, stats.promote.failed_load_total) == (3, 1)
    assert stats.promote.promoted_block_total == 5
    assert stats.integrity.missing_file_total == 1 and stats.integrity.checksum_failure_total == 0


@pytest.mark.parametrize("has_ssd", [True, False])
def test_a_tier_that_is_not_there_is_none(tmp_path: Path, has_ssd: bool) -> None:
    with SteppedServer(tmp_path if has_ssd else None) as served:
        stats = served.stats()
    assert (stats.ssd is not None, stats.disk is not None, stats.last_reconcile is not None) == (has_ssd,) * 3
    assert stats.block_token_limit == BLOCK
