"""Counts of a tier against counting, and how little is looked at of very many blocks."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from icehouse_server.domain.cache_stats import AgePercentiles, TierStats
from icehouse_server.domain.ids import BlockHash
from icehouse_server.storage import tier_counts
from icehouse_server.storage.tier_counts import TierCounts


def name(number: int) -> BlockHash:
    return BlockHash(hashlib.sha256(number.to_bytes(8, "big")).digest())


class Tier:
    """Blocks of which every third is a tail and every fifth pinned; the n-th was last used at second n."""

    def __init__(self) -> None:
        self.numbers: dict[BlockHash, int] = {}
        self.counts = TierCounts(lambda: self.numbers)

    def add(self, number: int) -> None:
        self.numbers[name(number)] = number
        self.counts.add(
            (name(number),), token_count=number, tail_count=number % 3 == 0, pinned_count=number % 5 == 0
        )

    def remove(self, number: int) -> None:
        del self.numbers[name(number)]
        self.counts.remove(
            name(number), token_count=number, is_tail=number % 3 == 0, is_pinned=number % 5 == 0
        )

    def told(self) -> TierStats:
        return self.counts.fill(TierStats(), used_time=lambda item: float(self.numbers[item]), now=10_000.0)

    def counted(self) -> TierStats:
        numbers = self.numbers.values()
        return TierStats(
            block_count=len(numbers),
            tail_count=sum(number % 3 == 0 for number in numbers),
            pinned_block_count=sum(number % 5 == 0 for number in numbers),
            token_count=sum(numbers),
            age=AgePercentiles.of(10_000.0 - number for number in numbers),
        )


@given(st.lists(st.integers(0, 60)))
def test_few_blocks_are_told_as_they_are(numbers: list[int]) -> None:
    tier = Tier()
    for number in numbers:
        (tier.remove if name(number) in tier.numbers else tier.add)(number)
        assert tier.told() == tier.counted() and len(tier.counts) == len(tier.numbers)


def test_of_very_many_a_fair_part_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_counts, "_SAMPLE_LIMIT", 64)
    tier = Tier()
    for number in range(9_000):
        tier.add(number)
        assert len(tier.counts._sample) <= 128
    told, counted = tier.told(), tier.counted()
    assert (told.block_count, told.token_count, told.tail_count) == (9_000, counted.token_count, 3_000)
    assert abs(told.age.p50_s - counted.age.p50_s) < 2_000
    # When few are left they are all looked at again.
    for number in range(8_960):
        tier.remove(number)
        assert len(tier.counts._sample) <= 128
    assert tier.told() == tier.counted()


def test_a_tier_that_shrinks_is_looked_through_once_for_each_half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_counts, "_SAMPLE_LIMIT", 64)
    looks: list[int] = []
    tier = Tier()
    tier.counts = TierCounts(lambda: looks.append(len(tier.numbers)) or tier.numbers)  # type: ignore[func-returns-value]
    for number in range(9_000):
        tier.add(number)
    for number in range(9_000):
        tier.remove(number)
    assert 0 < sum(looks) < 9_000
