"""The eviction order against a model of it that is slow and plain."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from icehouse_server.domain.cache_stats import AgePercentiles, TierStats
from icehouse_server.domain.ids import BlockHash, Fingerprint
from icehouse_server.pins import NOT_PINNED, UNTIL_UNPINNED
from icehouse_server.storage.local.directory import disk_index
from icehouse_server.storage.local.directory.disk_index import DiskIndex
from icehouse_server.storage.local.directory.manifest import BlockRecord


def record(name: int, parent: int) -> BlockRecord:
    return BlockRecord(
        hash=BlockHash(name.to_bytes(32, "big")),
        parent=BlockHash(parent.to_bytes(32, "big")),
        fingerprint=Fingerprint(bytes(32)),
        start_token_index=0,
        token_count=1,
        block_token_limit=1,
        kv_bytes=1,
        window_bytes=0,
        checkpoint_bytes=0,
        file_bytes=name,
        mtime_ns=0,
        inode=0,
        layout_abi=1,
        header_checksum=0,
        created_time=0.0,
        last_used_time=0.0,
        hit_count=0,
        pin_end_time=NOT_PINNED,
    )


class IndexMachine(RuleBasedStateMachine):
    """Random trees of blocks, touched, demoted, pinned and removed in any order."""

    names = Bundle("names")

    def __init__(self) -> None:
        super().__init__()
        self.index = DiskIndex()
        self.order: list[BlockRecord] = []
        self.pinned: set[BlockHash] = set()
        self.count = 0

    @rule(target=names, parent=st.one_of(st.just(0), names))
    def add(self, parent):
        self.count += 1
        added = record(self.count, parent)
        self.index.put(added)
        self.order.append(added)
        return self.count

    @rule(name=names)
    def touch(self, name):
        block_hash = BlockHash(name.to_bytes(32, "big"))
        is_known = any(r.hash == block_hash for r in self.order)
        assert self.index.touch(block_hash, now_time=1.0) == is_known
        self.order.sort(key=lambda r: r.hash == block_hash)

    @rule(name=names)
    def demote(self, name):
        block_hash = BlockHash(name.to_bytes(32, "big"))
        self.index.demote(block_hash)
        self.order.sort(key=lambda r: r.hash != block_hash)

    @rule(name=names, pinned=st.booleans())
    def pin(self, name, pinned):
        block_hash = BlockHash(name.to_bytes(32, "big"))
        if block_hash in self.index:
            self.index.set_pin(block_hash, UNTIL_UNPINNED if pinned else NOT_PINNED)
            (self.pinned.add if pinned else self.pinned.discard)(block_hash)

    @rule(name=consumes(names))
    def remove(self, name):
        block_hash = BlockHash(name.to_bytes(32, "big"))
        removed = self.index.remove(block_hash)
        assert (removed is not None) == any(r.hash == block_hash for r in self.order)
        self.order = [r for r in self.order if r.hash != block_hash]
        self.pinned.discard(block_hash)

    @invariant()
    def next_victim_is_the_oldest_free_leaf(self):
        parents = {r.parent for r in self.order}
        free = [r for r in self.order if r.hash not in parents and r.hash not in self.pinned]
        victim = self.index.next_victim()
        assert (victim.hash if victim else None) == (free[0].hash if free else None)
        assert self.index.block_bytes == sum(r.file_bytes for r in self.order)
        assert len(self.index) == len(self.order)

    @invariant()
    def counts_are_those_of_the_blocks(self):
        stats = self.index.fill(TierStats(), Fingerprint(bytes(32)), now=1.0)
        assert stats.block_count == stats.token_count == len(self.order)
        assert stats.pinned_block_count == len(self.pinned)


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_an_index_of_records_evicts_in_their_order():
    records = [record(1, 0), record(2, 1), record(3, 0), record(4, 0)._replace(pin_end_time=UNTIL_UNPINNED)]
    index = DiskIndex(records)
    gone = []
    while (victim := index.next_victim()) is not None:
        index.remove(victim.hash)
        gone.append(victim.file_bytes)
    assert gone == [2, 1, 3]
    assert [r.file_bytes for r in index] == [4]


def test_an_index_of_records_counts_each_models_own():
    other = Fingerprint(b"o" * 32)
    records = [
        record(1, 0),
        record(2, 1)._replace(block_token_limit=2),
        record(3, 0)._replace(pin_end_time=UNTIL_UNPINNED),
    ]
    index = DiskIndex([*records, record(4, 0)._replace(fingerprint=other)])
    stats = index.fill(TierStats(), Fingerprint(bytes(32)), now=0.0)
    assert (stats.block_count, stats.tail_count, stats.pinned_block_count) == (3, 1, 1)
    assert index.fill(TierStats(), other, now=0.0).block_count == 1
    assert index.fill(TierStats(), Fingerprint(b"n" * 32), now=0.0) == TierStats()


def test_a_block_that_is_put_again_replaces_the_one_before():
    index = DiskIndex([record(1, 0), record(2, 0)])
    index.put(record(1, 0)._replace(file_bytes=10, pin_end_time=UNTIL_UNPINNED))
    stats = index.fill(TierStats(), Fingerprint(bytes(32)), now=0.0)
    assert (index.block_bytes, stats.block_count, stats.pinned_block_count) == (12, 2, 1)
    index.set_pin(record(1, 0).hash, NOT_PINNED)
    victim = index.next_victim()
    assert victim is not None and victim.hash == record(2, 0).hash


def test_ages_are_those_of_all_blocks_or_of_an_even_sample(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(disk_index, "_SAMPLE_LIMIT", 64)

    def ages(count: int) -> AgePercentiles:
        index = DiskIndex(record(name, 0)._replace(last_used_time=float(name)) for name in range(count))
        return index.fill(TierStats(), Fingerprint(bytes(32)), now=10_000.0).age

    assert ages(60) == AgePercentiles.of(10_000.0 - name for name in range(60))
    assert abs(ages(9_000).p50_s - 5_500.0) < 300.0


def test_pinning_again_and_again_leaves_nothing_behind():
    index, only = DiskIndex(), record(1, 0)
    index.put(only)
    for _ in range(10_000):
        index.set_pin(only.hash, UNTIL_UNPINNED)
        index.set_pin(only.hash, NOT_PINNED)
    assert len(index._leaves) < 100
    victim = index.next_victim()
    assert victim is not None and victim.hash == only.hash
