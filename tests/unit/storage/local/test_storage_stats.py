"""The SSD tier in numbers, as the storage thread fills them in."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from icehouse_server.domain.blocks import BlockDamage
from icehouse_server.domain.cache_stats import AgePercentiles, IntegrityStats
from icehouse_server.storage.api import StorageFailure
from icehouse_server.storage.local.storage_state import note_damage

from tests.fixtures.storage.blocks import make_block
from tests.fixtures.storage.storage_thread import StorageThread


def test_ages_are_those_of_the_ram_tier_by_the_same_definition(tmp_path: Path) -> None:
    with StorageThread(tmp_path) as served:
        served.spill(make_block(seed=1))
        served.clock.advance(100.0)
        served.spill(make_block(seed=2))
        served.clock.advance(10.0)
        age = served.stats().ssd.age
    assert age == AgePercentiles.of([110.0, 10.0]) == AgePercentiles(110.0, 110.0, 110.0)


def test_what_was_told_is_a_copy_that_nobody_counts_in(tmp_path: Path) -> None:
    with StorageThread(tmp_path) as served:
        before = served.stats()
        served.spill(make_block())
        after = served.stats()
    assert (before.spill.persisted_block_total, after.spill.persisted_block_total) == (0, 1)


@pytest.mark.parametrize(
    ("name", "damages"),
    [
        ("checksum_failure_total", {BlockDamage.CHECKSUM}),
        (
            "header_mismatch_total",
            {BlockDamage.MISMATCH, BlockDamage.HEADER, BlockDamage.LAYOUT, BlockDamage.OTHER_ABI},
        ),
        ("missing_file_total", {BlockDamage.MISSING, BlockDamage.TRUNCATED, BlockDamage.IO}),
        ("seal_failure_total", {BlockDamage.AUTH_TAG}),
    ],
)
def test_each_damage_counts_once_under_its_own_name(name: str, damages: set[BlockDamage]) -> None:
    for damage in damages:
        counted = IntegrityStats()
        note_damage(counted, StorageFailure(damage))
        assert counted == dataclasses.replace(IntegrityStats(), **{name: 1})


def test_want_of_memory_is_no_damage_of_the_file() -> None:
    counted = IntegrityStats()
    note_damage(counted, StorageFailure(BlockDamage.MEMORY))
    assert counted == IntegrityStats()
