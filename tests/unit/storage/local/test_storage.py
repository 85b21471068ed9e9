"""The SSD tier through its door: spill, load, tasks, limits, failures; threads and steps."""

from __future__ import annotations

import dataclasses
import os
import queue
from pathlib import Path

import pytest
from icehouse_server.domain.blocks import BlockDamage, HostBlock, RegionKind
from icehouse_server.domain.cache_stats import UNRECORDED_CODE, CacheStats, IntegrityStats, SpillDropCause
from icehouse_server.pins import NOT_PINNED, UNTIL_UNPINNED
from icehouse_server.storage.api import (
    OVERHEAD_BYTES,
    BlockPersisted,
    BlocksEvicted,
    BlocksLoaded,
    BlocksPurged,
    Inventory,
    StorageClosed,
    StorageFailed,
    StorageFailure,
    Verified,
    WriteBudget,
)
from icehouse_server.storage.files import Files
from icehouse_server.storage.local.directory.manifest import LOG_ALLOWANCE_BYTES
from icehouse_server.storage.local.storage_state import note_damage

from tests.fixtures.patience import BOUND_S
from tests.fixtures.storage.blocks import OTHER_FINGERPRINT, RATES, make_block, make_chain
from tests.fixtures.storage.loading import assert_holds, plan
from tests.fixtures.storage.sole_tier import SoleTier
from tests.fixtures.storage.storage_thread import StorageThread, drops


def test_spill_then_load_gives_the_same_bytes(tmp_path):
    with StorageThread(tmp_path) as served:
        chain = make_chain(4, checkpoint=True)
        served.spill(*chain)
        assert [type(o) for o in served.take()] == [Inventory] + [BlockPersisted] * 4
        assert served.storage.get_into(*plan(chain))
        (loaded,) = served.take()
        assert loaded.failure is None
        assert [region.kind for region in loaded.blocks[0].regions] == [
            RegionKind.KV,
            RegionKind.WINDOW,
            RegionKind.CHECKPOINT,
        ]
        assert_holds(loaded, chain)
        assert loaded.read_bytes == sum(block.size_bytes for block in chain)


def test_load_after_restart_in_part(tmp_path):
    chain = make_chain(3)
    with StorageThread(tmp_path) as served:
        served.spill(*chain)
    with StorageThread(tmp_path) as served:
        (inventory,) = served.take()
        assert {record.hash for record in inventory.records} == {block.header.hash for block in chain}
        served.storage.get_into(*plan(chain[1:], regions=frozenset({RegionKind.KV})))
        (loaded,) = served.take()
        assert [[region.kind for region in block.regions] for block in loaded.blocks] == 2 * [[RegionKind.KV]]
        assert_holds(loaded, chain[1:])


def test_a_tail_is_loaded_behind_full_blocks(tmp_path):
    chain = make_chain(2)
    tail = make_block(parent=chain[-1].header.hash, start=32, token_ids=(9, 8, 7))
    with StorageThread(tmp_path) as served:
        served.spill(*chain, tail)
        served.take()
        served.storage.get_into(*plan([*chain, tail]))
        (loaded,) = served.take()
        assert_holds(loaded, [*chain, tail])


def flip(path: str, position: int) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 0x10]))


def damage_of(served: StorageThread, block: HostBlock) -> BlockDamage:
    """Load a damaged block and return the cause, having checked that it is gone from the tier."""
    served.take()
    served.storage.get_into(*plan([block]))
    outcomes = served.take()
    failed = next(o for o in outcomes if isinstance(o, StorageFailure))
    assert BlocksEvicted((block.header.hash,)) in outcomes
    stats = served.stats()
    found = stats.integrity
    assert stats.ssd.block_count == 0 and found.quarantined_block_total == found.quarantined_file_count == 1
    counted = IntegrityStats()
    note_damage(counted, failed)
    assert found.damaged_block_total == counted.damaged_block_total == 1
    assert isinstance(failed.cause, BlockDamage)
    return failed.cause


@pytest.mark.parametrize(
    "where", ["length", "magic", "checksum", "metadata", "entry", "kv", "window", "checkpoint", "end"]
)
def test_one_flipped_bit_is_seen(tmp_path, where):
    block = make_block(checkpoint=True)
    with StorageThread(tmp_path) as served:
        served.spill(block)
        path = served.path(block)
        text = Path(path).read_bytes()
        data = 8 + int.from_bytes(text[:8], "little")
        kv, window = block.regions[0].size_bytes, block.regions[1].size_bytes
        position = {
            "length": 0,
            "magic": 12,
            "checksum": 45,
            "metadata": text.index(b"token_ids") + 20,
            "entry": text.index(b"kv.003.k") + 3,
            "kv": data + kv // 2,
            "window": data + kv + 3,
            "checkpoint": data + kv + window,
            "end": len(text) - 1,
        }[where]
        flip(path, position)
        cause = damage_of(served, block)
    expected = BlockDamage.CHECKSUM if where in ("kv", "window", "checkpoint", "end") else BlockDamage.HEADER
    assert cause is expected


@pytest.mark.parametrize("left_bytes", [0, 5, 100, -1])
def test_truncation_is_seen(tmp_path, left_bytes):
    block = make_block()
    with StorageThread(tmp_path) as served:
        served.spill(block)
        size_bytes = os.path.getsize(served.path(block))
        os.truncate(served.path(block), left_bytes if left_bytes >= 0 else size_bytes - 1)
        assert damage_of(served, block) is BlockDamage.TRUNCATED


def test_a_swapped_file_is_seen(tmp_path):
    block, other = make_block(seed=1), make_block(seed=2)
    with StorageThread(tmp_path) as served:
        served.spill(block, other)
        os.replace(served.path(other), served.path(block))
        served.take()
        served.storage.get_into(*plan([block]))
        served.storage.get_into(*plan([other]))
        causes = [o.cause for o in served.take() if isinstance(o, StorageFailure)]
        assert causes == [BlockDamage.MISMATCH, BlockDamage.MISSING]
        assert served.stats().ssd.block_count == 0


def test_the_verified_beginning_of_a_damaged_chain_is_delivered(tmp_path):
    chain = make_chain(4)
    with StorageThread(tmp_path) as served:
        served.spill(*chain)
        flip(served.path(chain[2]), os.path.getsize(served.path(chain[2])) - 1)
        served.take()
        served.storage.get_into(*plan(chain))
        loaded = next(o for o in served.take() if isinstance(o, BlocksLoaded))
        assert loaded.failure.hash == chain[2].header.hash and loaded.failure.cause is BlockDamage.CHECKSUM
        assert_holds(loaded, chain[:2])


def test_counters_tell_accepted_from_persisted_from_dropped(tmp_path):
    block, large = make_block(seed=1), make_block(seed=2, head_count=4096)
    with StorageThread(tmp_path, limit_bytes=5 << 20) as served:
        served.spill(block, block, large)
        outcomes = served.take()
        first, again = (o for o in outcomes if isinstance(o, BlockPersisted))
        assert first.record == again.record, "it was there already"
        assert drops(outcomes) == [StorageFailure(SpillDropCause.DISK_FULL, hash=large.header.hash)]
        stats = served.stats()
        assert (stats.spill.accepted_block_total, stats.spill.persisted_block_total) == (3, 1)
        assert sum(drop.block_total for drop in stats.spill.drops) == 2
        assert stats.spill.queue_bytes == 0
        written_bytes = os.path.getsize(served.path(block))
        assert stats.spill.persisted_byte_total == written_bytes == stats.spill.written_today_bytes


def test_credit_bounds_what_waits(tmp_path):
    block = make_block()
    size_bytes = block.size_bytes + OVERHEAD_BYTES
    with StorageThread(tmp_path, spill_queue_limit_bytes=2 * size_bytes) as served:
        assert served.storage.queue_space_bytes == 2 * size_bytes
        served.storage.put(block)
        assert served.storage.queue_space_bytes == size_bytes
        served.storage.put(block)
        assert served.storage.queue_space_bytes == 0
        refused = served.storage.put(block)
        served.settle()
        assert refused.outcome == StorageFailure(SpillDropCause.NO_CREDIT, hash=block.header.hash)
        assert served.storage.queue_space_bytes == 2 * size_bytes


def test_the_daily_budget_lasts_a_day_and_over_restarts(tmp_path):
    blocks = [make_block(seed=seed) for seed in range(4)]
    served = StorageThread(tmp_path, daily_write_limit_bytes=8000)
    with served:
        assert served.storage.write_budget == WriteBudget(8000, 8000)
        served.spill(*blocks[:3])
        assert [o.cause for o in drops(served.take())] == [SpillDropCause.DAILY_BUDGET]
        written_bytes = served.stats().spill.written_today_bytes
        assert served.storage.write_budget == WriteBudget(8000, 8000 - written_bytes) and written_bytes
    with StorageThread(tmp_path, clock=served.clock, daily_write_limit_bytes=8000) as again:
        again.spill(blocks[2])
        assert [o.cause for o in drops(again.take())] == [SpillDropCause.DAILY_BUDGET]
        again.clock.advance(86_400)
        again.spill(blocks[2])
        assert [type(o) for o in again.take()] == [BlockPersisted]
    with StorageThread(tmp_path) as unlimited:
        assert unlimited.storage.write_budget is None


def test_evict_and_verify(tmp_path):
    chain = make_chain(3)
    foreign = make_block(seed=9, fingerprint=OTHER_FINGERPRINT)
    with StorageThread(tmp_path) as served:
        served.spill(*chain)
        served.storage.delete((chain[2].header.hash,))
        evicted, purged = served.take()[-2:]
        assert evicted == BlocksEvicted((chain[2].header.hash,)) and (purged.block_count, type(purged)) == (
            1,
            BlocksPurged,
        )
        flip(served.path(chain[1]), os.path.getsize(served.path(chain[1])) - 1)
        served.storage.verify()
        verified = next(o for o in served.take() if isinstance(o, Verified))
        assert verified.checked_count == 2
        assert [failure.cause for failure in verified.damaged] == [BlockDamage.CHECKSUM]
        served.storage.delete((foreign.header.hash,))
        assert served.take()[-1].block_count == 0
        served.storage.delete(tuple(block.header.hash for block in chain))
        assert served.take()[-1].block_count == 1
        assert os.listdir(os.path.dirname(served.path(chain[0]))) == []


@pytest.mark.parametrize("order", ["with it", "behind it"])
def test_a_block_that_is_pinned_on_its_way_is_never_there_without_its_pin(tmp_path, order):
    """Its row and its pin used to be two orders; on a full disk the next spill took it in between."""
    first, second, third = (make_block(seed=seed, head_count=2048) for seed in range(3))
    limit_bytes = LOG_ALLOWANCE_BYTES + 7 * first.size_bytes // 4
    with StorageThread(tmp_path, limit_bytes=limit_bytes) as served:
        for block in (first, second):
            served.storage.put(
                block, pin_end_time=UNTIL_UNPINNED if block is first and order == "with it" else NOT_PINNED
            )
        if order == "behind it":
            served.storage.pin((first.header.hash,), UNTIL_UNPINNED)
        outcomes = served.take()
        assert [
            o.record.pin_end_time == UNTIL_UNPINNED for o in outcomes if isinstance(o, BlockPersisted)
        ] == [True]
        assert [o.hash for o in drops(outcomes)] == [second.header.hash]
        assert not any(isinstance(o, BlocksEvicted) for o in outcomes)
        served.storage.pin((first.header.hash,), NOT_PINNED)
        served.spill(third)
        assert [type(o) for o in served.take()] == [tuple, BlocksEvicted, BlockPersisted]


def test_a_block_that_is_unpinned_on_its_way_may_go(tmp_path):
    block = make_block()
    with StorageThread(tmp_path) as served:
        served.storage.put(block, pin_end_time=UNTIL_UNPINNED)
        served.storage.pin((block.header.hash,), NOT_PINNED)
        assert [
            o.record.pin_end_time == UNTIL_UNPINNED for o in served.take() if isinstance(o, BlockPersisted)
        ] == [False]


def test_a_full_queue_of_tasks_refuses(tmp_path):
    with StorageThread(tmp_path, task_queue_limit_count=2) as served:
        assert served.storage.touch(()) and served.storage.stats() is not None
        assert not (served.storage.touch(()) or served.storage.keep_rates(RATES))
        assert served.storage.verify() is None
        served.settle()
        assert served.storage.touch(())


def test_what_waits_is_dropped_at_the_deadline_of_the_end(tmp_path):
    blocks = [make_block(seed=seed) for seed in range(3)]
    with StorageThread(tmp_path) as served:
        served.take()
        for block in blocks:
            served.storage.put(block)
        served.storage.close(deadline_time=served.clock.monotonic() + 5)
        served.storage.step()
        served.clock.advance(6)
        served.settle()
        outcomes = served.outcomes
        assert [type(o) for o in outcomes] == [BlockPersisted, StorageFailure, StorageFailure, StorageClosed]
        assert outcomes[1].cause is SpillDropCause.SHUTDOWN


def test_two_fingerprints_share_a_directory_and_never_meet(tmp_path):
    mine, theirs = make_block(seed=1), make_block(seed=1, fingerprint=OTHER_FINGERPRINT)
    assert mine.header.token_ids == theirs.header.token_ids and mine.header.hash != theirs.header.hash
    with StorageThread(tmp_path) as served:
        served.spill(mine)
    with StorageThread(tmp_path, fingerprint=OTHER_FINGERPRINT) as served:
        served.spill(theirs)
        assert served.take()[0] == Inventory(())
        assert (served.stats().ssd.block_count, served.stats().disk.other_model_block_count) == (1, 1)
    with StorageThread(tmp_path) as served:
        assert [record.hash for record in served.take()[0].records] == [mine.header.hash]
        assert served.path(mine) != served.path(theirs)


OF_OTHER_CODE = [
    pytest.param({"code a": "1", "code b": "2"}, ("b",), id="a module changed"),
    pytest.param({"code a": "1", "code c": "2"}, ("b", "c"), id="one came and one went"),
    pytest.param({}, (UNRECORDED_CODE,), id="a version that kept none"),
    pytest.param({"code a": "1", "code b": "2", "weights": "w"}, (), id="another model"),
]


@pytest.mark.parametrize(("theirs", "changed"), OF_OTHER_CODE)
def test_a_model_that_begins_cold_for_its_code_alone_is_told_which(tmp_path, theirs, changed, caplog):
    facts = {"architecture": "test"}
    with StorageThread(tmp_path, fingerprint=OTHER_FINGERPRINT, details={**facts, **theirs}) as served:
        served.spill(make_block(seed=1, fingerprint=OTHER_FINGERPRINT))
    own = {**facts, "code a": "1", "code b": "1"}
    with StorageThread(tmp_path, details=own) as served:
        assert served.stats().last_reconcile.changed_code == changed
        served.spill(make_block(seed=1))
    assert [record.modules for record in caplog.records if record.msg == "code_changed"] == (
        [list(changed)] if changed else []
    )
    with StorageThread(tmp_path, details=own) as served:
        assert served.stats().last_reconcile.changed_code == (), "it has blocks of its own by now"


def test_real_threads(tmp_path):
    outcomes: queue.Queue = queue.Queue()
    served = StorageThread(tmp_path)
    storage = SoleTier(served.settings, files=Files(), clock=served.clock, post=outcomes.put)
    storage.start()
    chain = make_chain(6)
    assert isinstance(outcomes.get(timeout=BOUND_S), Inventory)
    for block in chain:
        storage.put(block)
    for _ in chain:
        assert isinstance(outcomes.get(timeout=BOUND_S).outcome, BlockPersisted)
    for _ in range(5):
        assert storage.get_into(*plan(chain))
    for _ in range(5):
        assert_holds(outcomes.get(timeout=BOUND_S).outcome, chain)
    ticket = storage.stats()
    assert outcomes.get(timeout=BOUND_S) is ticket
    assert isinstance(ticket.outcome, CacheStats) and ticket.outcome.ssd.block_count == 6
    storage.close(deadline_time=served.clock.monotonic() + 10)
    assert outcomes.get(timeout=BOUND_S) == StorageClosed(was_clean=True)
    assert storage.join(timeout_s=BOUND_S)


def test_a_broken_invariant_is_told_once(tmp_path):
    outcomes: queue.Queue = queue.Queue()
    served = StorageThread(tmp_path)
    storage = SoleTier(served.settings, files=Files(), clock=served.clock, post=outcomes.put)
    storage.start()
    assert isinstance(outcomes.get(timeout=BOUND_S), Inventory)
    block = make_block()
    lying = HostBlock(dataclasses.replace(block.header, token_ids=(1, 2)), block.regions)
    storage.put(lying)
    failed = outcomes.get(timeout=BOUND_S)
    assert isinstance(failed, StorageFailed) and "AssertionError" in failed.error
    assert storage.join(timeout_s=BOUND_S) and outcomes.empty()


def test_the_clean_start_still_finds_a_file_changed_in_place(tmp_path):
    chain = make_chain(3)
    with StorageThread(tmp_path) as served:
        served.spill(*chain)
    os.truncate(served.path(chain[1]), 100)
    with StorageThread(tmp_path) as served:
        outcomes = served.take()
        assert served.stats().last_reconcile.clean
        assert BlocksEvicted((chain[1].header.hash,)) in outcomes
        assert served.stats().integrity.quarantined_block_total == 1
