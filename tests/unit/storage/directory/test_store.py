"""The store on a real directory: write, commit, reopen, read, evict, limits."""

from __future__ import annotations

import os
import stat

import pytest
from icehouse_server.domain.ids import BlockHash
from icehouse_server.errors import Reason, StartError
from icehouse_server.storage.block_format.file import prepare_block, read_head
from icehouse_server.storage.directory.space import Reclaim
from icehouse_server.storage.directory.store import BlockStore
from icehouse_server.storage.files import SystemFiles

from tests.fixtures.storage.blocks import FINGERPRINT, make_block, make_chain
from tests.fixtures.storage.storage_thread import ManualClock, open_store, settings_for


def test_a_block_survives_a_reopen(tmp_path):
    chain = make_chain(3, checkpoint=True)
    store = open_store(tmp_path)
    for block in chain:
        store.put(prepare_block(block))
    assert store.close()
    store.unlock()

    again = open_store(tmp_path)
    assert [record.hash for record in again.index.by_recency(FINGERPRINT)] == [b.header.hash for b in chain]
    assert again.report.clean
    for block in chain:
        descriptor = os.open(again.paths.block(FINGERPRINT, block.header.hash), os.O_RDONLY)
        assert read_head(SystemFiles(), descriptor).header == block.header
        os.close(descriptor)


def test_everything_is_private(tmp_path):
    store = open_store(tmp_path / "new" / "dir")
    store.put(prepare_block(make_block()))
    for folder, _, names in os.walk(store.paths.root):
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
        for name in names:
            assert stat.S_IMODE(os.stat(f"{folder}/{name}").st_mode) == 0o600, name


def test_second_owner_is_told_the_first(tmp_path):
    first = open_store(tmp_path)
    second = BlockStore(settings_for(tmp_path), files=SystemFiles(), clock=ManualClock())
    with pytest.raises(StartError) as caught:
        second.lock()
    assert caught.value.reason is Reason.STORE_LOCKED
    assert caught.value.metadata["owner_pid"] == str(os.getpid())
    first.unlock()
    second.lock()


def test_tails_go_before_heads_and_pins_stay(tmp_path):
    store = open_store(tmp_path)
    old, new = make_chain(3, seed=1), make_chain(2, seed=2)
    for block in old + new:
        store.put(prepare_block(block))
    store.set_pinned([old[1].header.hash], pinned=True)
    gone: list[BlockHash] = []
    while store.reclaim(1) is Reclaim.PROGRESS:
        gone.extend(store.take_gone())
    assert gone == [old[2].header.hash, new[1].header.hash, new[0].header.hash]
    assert [record.hash for record in store.index] == [old[0].header.hash, old[1].header.hash]


def test_the_limit_is_never_passed(tmp_path):
    size_bytes = prepare_block(make_block(head_count=64)).file_bytes
    store = open_store(tmp_path, limit_bytes=(4 << 20) + 80_000 + 4 * size_bytes)
    for seed in range(20):
        prepared = prepare_block(make_block(seed=seed, head_count=64))
        while (room := store.make_room(prepared.file_bytes)) is Reclaim.PROGRESS:
            pass
        assert room is Reclaim.READY
        store.put(prepared)
        on_disk = sum(os.stat(f"{f}/{n}").st_size for f, _, names in os.walk(store.paths.root) for n in names)
        assert on_disk <= store.settings.limit_bytes
        assert store.used_bytes() <= store.settings.limit_bytes
    assert store.tier.evicted_block_total > 0


def test_recency_and_pins_survive(tmp_path):
    clock = ManualClock()
    store = open_store(tmp_path, clock=clock)
    blocks = [make_block(seed=seed) for seed in range(3)]
    for block in blocks:
        store.put(prepare_block(block))
    clock.advance(10)
    store.touch([blocks[0].header.hash])
    store.set_pinned([blocks[1].header.hash], pinned=True)
    store.close()
    store.unlock()
    again = open_store(tmp_path)
    assert [r.hash for r in again.index.by_recency(FINGERPRINT)][-1] == blocks[0].header.hash
    assert again.index.get(blocks[0].header.hash).hit_count == 1
    assert again.index.get(blocks[1].header.hash).pinned
