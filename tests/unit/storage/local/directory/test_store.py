"""The store on a real directory: write, commit, reopen, read, evict, limits."""

from __future__ import annotations

import errno
import os
import stat

import pytest
from icehouse_server.domain.blocks import BlockDamage
from icehouse_server.domain.ids import BlockHash
from icehouse_server.errors import Reason, StartError
from icehouse_server.pins import UNTIL_UNPINNED
from icehouse_server.storage.api import StorageFailure
from icehouse_server.storage.files import Files
from icehouse_server.storage.local.block_format.block_file import PreparedBlock, prepare_block, read_head
from icehouse_server.storage.local.directory.manifest import BlockRecord
from icehouse_server.storage.local.directory.offline import OfflineStore
from icehouse_server.storage.local.directory.space import SECONDS_PER_DAY, ExtraFiles, Space, SpaceReclaim
from icehouse_server.storage.local.directory.store import BlockStore
from icehouse_server.storage.store_paths import StorePaths

from tests.fixtures.storage.blocks import FINGERPRINT, make_block, make_chain
from tests.fixtures.storage.faults import FaultyFiles
from tests.fixtures.storage.storage_thread import ManualClock, StorageThread, open_store, settings_for


def put(store: BlockStore, prepared: PreparedBlock) -> BlockRecord:
    """Commit a block that is not stored yet."""
    return store.finish(store.begin(prepared))


def test_a_block_survives_a_reopen(tmp_path):
    chain = make_chain(3, checkpoint=True)
    store = open_store(tmp_path)
    for block in chain:
        put(store, prepare_block(block))
    assert store.close()
    store.unlock()

    again = open_store(tmp_path)
    assert [record.hash for record in again.index.by_recency(FINGERPRINT)] == [b.header.hash for b in chain]
    assert again.report.clean
    for block in chain:
        descriptor = os.open(again.paths.block(FINGERPRINT, block.header.hash), os.O_RDONLY)
        assert read_head(Files(), descriptor).header == block.header
        os.close(descriptor)


def test_everything_is_private(tmp_path):
    store = open_store(tmp_path / "new" / "dir")
    put(store, prepare_block(make_block()))
    for folder, _, names in os.walk(store.paths.root):
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
        for name in names:
            assert stat.S_IMODE(os.stat(f"{folder}/{name}").st_mode) == 0o600, name


def test_second_owner_is_told_the_first(tmp_path):
    first = open_store(tmp_path)
    second = BlockStore(settings_for(tmp_path), files=Files(), clock=ManualClock())
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
        put(store, prepare_block(block))
    store.pin([old[1].header.hash], UNTIL_UNPINNED)
    gone: list[BlockHash] = []
    while store.reclaim(1) is SpaceReclaim.PROGRESS:
        gone.extend(store.take_gone().get(FINGERPRINT, ()))
    assert gone == [old[2].header.hash, new[1].header.hash, new[0].header.hash]
    assert [record.hash for record in store.index] == [old[0].header.hash, old[1].header.hash]


def test_a_pin_that_has_ended_holds_nothing_back(tmp_path):
    clock = ManualClock()
    store = open_store(tmp_path, clock=clock)
    head, tail = make_chain(2)
    for block in (head, tail):
        put(store, prepare_block(block))
    store.pin([tail.header.hash], clock.wall() + 10.0)
    assert store.reclaim(1) is SpaceReclaim.FULL
    clock.advance(10.0)
    assert store.reclaim(1) is SpaceReclaim.PROGRESS and store.take_gone() == {
        FINGERPRINT: [tail.header.hash]
    }


def test_the_limit_is_never_passed(tmp_path):
    size_bytes = prepare_block(make_block(head_count=64)).file_bytes
    store = open_store(tmp_path, limit_bytes=(4 << 20) + 80_000 + 4 * size_bytes)
    for seed in range(20):
        prepared = prepare_block(make_block(seed=seed, head_count=64))
        while (outcome := store.make_space(prepared.file_bytes)) is SpaceReclaim.PROGRESS:
            pass
        assert outcome is SpaceReclaim.READY
        put(store, prepared)
        on_disk = sum(os.stat(f"{f}/{n}").st_size for f, _, names in os.walk(store.paths.root) for n in names)
        assert on_disk <= store.settings.limit_bytes
        assert store.used_bytes() <= store.settings.limit_bytes
    assert store.counts[FINGERPRINT].tier.evicted_block_total > 0


def test_recency_and_pins_survive(tmp_path):
    clock = ManualClock()
    store = open_store(tmp_path, clock=clock)
    blocks = [make_block(seed=seed) for seed in range(3)]
    for block in blocks:
        put(store, prepare_block(block))
    clock.advance(10)
    store.touch([blocks[0].header.hash])
    store.pin([blocks[1].header.hash], UNTIL_UNPINNED)
    store.pin([blocks[2].header.hash], clock.wall() + 60.5)
    store.close()
    store.unlock()
    again = open_store(tmp_path)
    assert [r.hash for r in again.index.by_recency(FINGERPRINT)][-1] == blocks[0].header.hash
    assert again.index.get(blocks[0].header.hash).hit_count == 1
    assert again.index.get(blocks[1].header.hash).pin_end_time == UNTIL_UNPINNED
    assert again.index.get(blocks[2].header.hash).pin_end_time == clock.wall() + 61.0


def test_a_clock_that_was_wrong_once_keeps_no_block_for_ever(tmp_path):
    clock = ManualClock()
    first, second = make_block(seed=1), make_block(seed=2)
    with StorageThread(tmp_path, clock=clock) as served:
        clock.advance(10**9)
        served.spill(first)
        clock.advance(-(10**9))
        served.spill(second)
    with StorageThread(tmp_path, clock=clock) as served:
        times = [record.last_used_time for record in served.take_inventory()]
        assert max(times) <= clock.wall()
        assert served.stats().ssd.age.p50_s >= 0
    rows = OfflineStore(str(tmp_path), files=Files(), clock=clock).rows().records
    assert max(row.last_used_time for row in rows) <= clock.wall()


def test_a_day_that_comes_again_has_the_budget_it_had():
    space = Space(
        settings_for("/none", daily_write_limit_bytes=100), ExtraFiles(Files(), StorePaths("/none"))
    )
    space.note_written(80, now_time=SECONDS_PER_DAY * 5.0)
    assert space.written_bytes(SECONDS_PER_DAY * 6.0) == 0
    assert space.written_bytes(SECONDS_PER_DAY * 5.5) == 80


def test_a_manifest_put_aside_counts_and_goes_before_any_block(tmp_path):
    block = make_block(seed=1)
    with StorageThread(tmp_path) as served:
        served.spill(block)
    (tmp_path / "manifest.damaged.sqlite3").write_bytes(bytes(50_000))
    store = open_store(tmp_path)
    assert store.extras.size_bytes == 50_000
    assert store.reclaim(1) is SpaceReclaim.PROGRESS
    assert store.extras.size_bytes == 0 and len(store.index) == 1
    assert not (tmp_path / "manifest.damaged.sqlite3").exists()
    store.close()
    store.unlock()


def test_what_was_read_of_a_file_that_was_replaced_retires_nothing(tmp_path):
    block = make_block(seed=1)
    store = open_store(tmp_path)
    record = put(store, prepare_block(block))
    for failure in (
        StorageFailure(BlockDamage.CHECKSUM, "of the file before", record.hash, header_checksum=1),
        StorageFailure(BlockDamage.MISSING, "between two names", record.hash),
    ):
        store.retire(failure)
        assert record.hash in store.index
    store.retire(StorageFailure(BlockDamage.CHECKSUM, "of this one", record.hash, record.header_checksum))
    assert record.hash not in store.index and len(store.extras.quarantined) == 1
    store.close()
    store.unlock()


@pytest.mark.parametrize("error_number", [errno.EPERM, errno.EBUSY])
def test_what_was_put_aside_and_cannot_be_removed_keeps_no_block_from_being_written(tmp_path, error_number):
    """Else the directory would be given up and walked again, for every block there is no room for."""
    files = FaultyFiles("unlink", 1, error_number, times=2)
    (tmp_path / "manifest.damaged.sqlite3").write_bytes(b"old")
    store = open_store(tmp_path, files=files)
    records = [put(store, prepare_block(make_block(seed=seed))) for seed in range(3)]
    store.put_in_quarantine(records[0])
    files.is_armed = True
    assert [store.reclaim(1) for _ in range(3)] == [SpaceReclaim.PROGRESS] * 3
    assert files.failed_count == 2 and len(store.index) == 1
    assert store.extras.size_bytes == records[0].file_bytes + 3, "it counts for as long as it is there"
    store.maintain()
    assert store.extras.size_bytes == 0
    assert not os.listdir(tmp_path / "quarantine") and not (tmp_path / "manifest.damaged.sqlite3").exists()
