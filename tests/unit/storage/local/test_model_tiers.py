"""Several models in one directory: what one does is done beside the others and told to it alone."""

from __future__ import annotations

import dataclasses
import errno
import queue
from collections.abc import Iterator
from pathlib import Path

import pytest
from icehouse_server.domain.cache_stats import SpillDropCause
from icehouse_server.domain.ids import Fingerprint
from icehouse_server.errors import StartError
from icehouse_server.pins import UNTIL_UNPINNED
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
    StorageTrouble,
    Ticket,
    Verified,
)
from icehouse_server.storage.files import Files
from icehouse_server.storage.local.directory.manifest import LOG_ALLOWANCE_BYTES
from icehouse_server.storage.local.model_tiers import ModelTiers

from tests.fixtures.patience import BOUND_S
from tests.fixtures.storage.blocks import FINGERPRINT as A
from tests.fixtures.storage.blocks import OTHER_FINGERPRINT as B
from tests.fixtures.storage.blocks import RATES, make_block, make_chain
from tests.fixtures.storage.faults import FaultyFiles
from tests.fixtures.storage.loading import assert_holds, plan
from tests.fixtures.storage.model_house import ModelHouse, names_of
from tests.fixtures.storage.storage_thread import ManualClock, settings_for

FAR_TIME = 1e12


@pytest.fixture
def house(tmp_path: Path) -> Iterator[ModelHouse]:
    made = ModelHouse(tmp_path)
    yield made
    made.close()


def test_each_model_has_its_own_inventory_and_tickets(house: ModelHouse) -> None:
    a, b = house.open(A), house.open(B)
    assert a.take() == [Inventory(())] and b.take() == [Inventory(())]
    chains = make_chain(3), make_chain(3, fingerprint=B)
    tickets = [(a.tier.put(mine), b.tier.put(theirs)) for mine, theirs in zip(*chains, strict=True)]
    assert [a.take(), b.take()] == [list(each) for each in zip(*tickets, strict=True)]
    for model, chain in zip((a, b), chains, strict=True):
        assert model.known == set(names_of(chain))
        loaded = model.ask(model.tier.get_into(*plan(chain)))
        assert isinstance(loaded, BlocksLoaded)
        assert_holds(loaded, chain)
        stats = model.ask(model.tier.stats())
        assert (stats.ssd.block_count, stats.disk.other_model_block_count) == (3, 3)
        assert (stats.spill.persisted_block_total, stats.integrity.verified_block_total) == (3, 3)
        heads = model.ask(model.tier.heads(names_of(chain)))
        assert heads == tuple(block.header for block in chain)


def test_a_model_that_is_opened_again_knows_its_blocks_from_the_index(
    house: ModelHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = house.open(A), house.open(B)
    a.put(*make_chain(2))
    a.tier.close(deadline_time=FAR_TIME)
    assert a.take()[-1] == StorageClosed(was_clean=True)
    monkeypatch.setattr(Files, "list", lambda *_: pytest.fail("it looks at the files again"))
    again = house.open(A)
    (inventory,) = again.take()
    assert isinstance(inventory, Inventory) and {r.hash for r in inventory.records} == a.known
    assert b.posted == [Inventory(())]


def test_what_was_learned_of_speed_comes_with_the_next_inventory(tmp_path: Path) -> None:
    house = ModelHouse(tmp_path)
    a, b = house.open(A), house.open(B)
    learned = dataclasses.replace(RATES, measured_on="where A ran")
    assert a.tier.keep_rates(RATES) and a.tier.keep_rates(learned)
    a.tier.close(deadline_time=FAR_TIME)
    a.take()
    assert house.open(A).take() == [Inventory((), rates=learned)], "the process goes on"
    assert b.take() == [Inventory(())], "nobody learned anything of this one"
    b.tier.keep_rates(RATES)
    house.settle()
    house.close()
    house = ModelHouse(tmp_path)
    assert house.open(A).take() == [Inventory((), rates=learned)]
    assert house.open(B).take() == [Inventory((), rates=RATES)]


def test_a_process_that_is_killed_leaves_what_it_had_learned_some_seconds_before(tmp_path: Path) -> None:
    house = ModelHouse(tmp_path)
    a, later = house.open(A), dataclasses.replace(RATES, read_bytes_per_s=1.0)
    a.tier.keep_rates(RATES)
    house.clock.advance(10.0)
    house.settle()
    a.tier.keep_rates(later)
    house.settle()
    house.die()
    assert ModelHouse(tmp_path).open(A).take() == [Inventory((), rates=RATES)]


def test_a_directory_that_was_opened_anew_has_what_was_learned_meanwhile(tmp_path: Path) -> None:
    house = ModelHouse(tmp_path)
    a = house.open(A)
    a.take()
    a.tier.keep_rates(RATES)
    house.settle()
    house.die()
    house.tiers.open_directory()
    assert a.take() == [Inventory((), rates=RATES)]
    house.close()
    assert ModelHouse(tmp_path).open(A).take() == [Inventory((), rates=RATES)]


def test_one_fingerprint_is_open_once(house: ModelHouse) -> None:
    a = house.open(A)
    with pytest.raises(StartError, match=A.hex()[:16]):
        house.open(A)
    a.tier.close(deadline_time=FAR_TIME)
    with pytest.raises(StartError):
        house.open(A)
    house.settle()
    assert house.open(A).take() == [Inventory(())]


def test_a_close_writes_what_was_used_and_leaves_no_work_behind(house: ModelHouse) -> None:
    turn_count = len(house.tiers._loop._turns)
    a, block = house.open(A), make_block()
    a.put(block)
    a.tier.touch(names_of([block]))
    a.tier.close(deadline_time=FAR_TIME)
    house.settle()
    ((row,), _) = house.tiers._store.manifest.load()
    assert row.hit_count == 1
    assert len(house.tiers._loop._turns) == turn_count and not house.tiers._store.counts


def test_a_model_that_was_never_started_can_be_closed(house: ModelHouse) -> None:
    posted: list[object] = []
    tier = house.tiers.open(A, {}, posted.append)
    tier.close(deadline_time=FAR_TIME)
    house.settle()
    assert posted == [StorageClosed(was_clean=True)] and tier.join(timeout_s=0)
    assert house.open(A).take() == [Inventory(())]


def test_a_close_writes_what_was_put_and_the_others_go_on(house: ModelHouse) -> None:
    a, b = house.open(A), house.open(B)
    mine, theirs = make_chain(4), make_chain(4, fingerprint=B)
    for block, other in zip(mine, theirs, strict=True):
        a.tier.put(block)
        b.tier.put(other)
    a.tier.close(deadline_time=FAR_TIME)
    house.settle()
    assert a.posted[-1] == StorageClosed(was_clean=True) and a.known == set(names_of(mine))
    assert b.known == set(names_of(theirs)) and not any(isinstance(o, StorageClosed) for o in b.posted)
    assert a.tier.join(timeout_s=0) and not b.tier.join(timeout_s=0)
    assert all(isinstance(done, BlockPersisted) for done in b.put(make_block(fingerprint=B, seed=77)))


def test_a_deadline_drops_the_blocks_of_the_model_that_closes_alone(house: ModelHouse) -> None:
    a, b = house.open(A), house.open(B)
    a.take()
    mine = [a.tier.put(block) for block in make_chain(4)]
    theirs = [b.tier.put(block) for block in make_chain(4, fingerprint=B)]
    more = [a.tier.put(make_block(seed=50))]
    # The first is being written: it is committed.
    house.tiers.step()
    a.tier.close(deadline_time=house.clock.monotonic())
    house.settle()
    dropped = [t.outcome.cause for t in [*mine, *more] if isinstance(t.outcome, StorageFailure)]
    assert dropped and set(dropped) == {SpillDropCause.SHUTDOWN}
    assert all(isinstance(ticket.outcome, BlockPersisted) for ticket in theirs)
    assert isinstance(a.posted[-1], StorageClosed)
    assert a.known == {t.outcome.record.hash for t in mine if isinstance(t.outcome, BlockPersisted)}
    assert b.tier.queue_space_bytes == b.tier.block_limit_bytes, "all that was reserved is free again"


def test_an_order_waits_for_its_own_models_blocks_alone(house: ModelHouse) -> None:
    a, b = house.open(A), house.open(B)
    stored = make_block(seed=9)
    a.put(stored)
    b.take()
    puts = [b.tier.put(block) for block in make_chain(8, fingerprint=B)]
    order = a.tier.delete(names_of([stored]))
    late = b.tier.delete(())
    assert order is not None and late is not None
    while order.outcome is None:
        house.tiers.step()
    assert sum(ticket.outcome is None for ticket in puts) > 4 and late.outcome is None
    assert b.take()[-1] is late and all(isinstance(ticket.outcome, BlockPersisted) for ticket in puts)


def test_a_long_check_of_one_model_holds_up_no_check_of_another(house: ModelHouse) -> None:
    a, b = house.open(A), house.open(B)
    a.put(*make_chain(30))
    b.put(make_block(fingerprint=B))
    slow, quick = a.tier.verify(), b.tier.verify()
    assert slow is not None and quick is not None
    while quick.outcome is None:
        house.tiers.step()
    assert slow.outcome is None and quick.outcome.checked_count == 1  # type: ignore[union-attr]
    assert a.ask(slow).checked_count == 30


def evicting_house(directory: Path, *, block_count: float) -> ModelHouse:
    """Return one with space for about so many blocks of `large`."""
    size_bytes = large(A, 0).size_bytes
    return ModelHouse(directory, limit_bytes=int(LOG_ALLOWANCE_BYTES + 60_000 + block_count * size_bytes))


def large(fingerprint: Fingerprint, seed: int):  # type: ignore[no-untyped-def]
    return make_block(fingerprint=fingerprint, seed=seed, head_count=1024)


def test_the_least_recently_used_goes_whoever_it_is_and_its_model_alone_is_told(tmp_path: Path) -> None:
    house = evicting_house(tmp_path, block_count=3.5)
    a, b = house.open(A), house.open(B)
    first, second, third, fourth, fifth = (large(fp, n) for n, fp in enumerate((A, B, A, A, B)))
    a.put(first)
    b.put(second)
    a.put(third)
    a.tier.touch(names_of([first]))
    b.take(), a.take()
    put = a.tier.put(fourth)
    assert a.take() == [put] and b.take() == [BlocksEvicted(names_of([second]))]
    assert a.known == set(names_of([first, third, fourth]))
    stats = [model.ask(model.tier.stats()).ssd.evicted_block_total for model in (a, b)]
    assert stats == [0, 1]
    a.tier.close(deadline_time=FAR_TIME)
    told = a.take()
    b.put(fifth)
    assert a.posted == [] and told[-1] == StorageClosed(was_clean=True)
    again = house.open(A)
    house.settle()
    assert again.known == set(names_of([first, fourth])), "what went meanwhile is not in its inventory"
    assert b.ask(b.tier.stats()).ssd.evicted_block_total == 2, "of nobody's blocks the first one counts"
    house.close()


def test_a_pin_of_one_model_holds_against_another(tmp_path: Path) -> None:
    house = evicting_house(tmp_path, block_count=1.5)
    a, b = house.open(A), house.open(B)
    a.put(large(A, 0), pin_end_time=UNTIL_UNPINNED)
    (refused,) = b.put(large(B, 1))
    assert isinstance(refused, StorageFailure) and refused.cause is SpillDropCause.DISK_FULL
    a.tier.demote(names_of([large(A, 0)]))
    a.ask(a.tier.pin(names_of([large(A, 0)]), 0.0))
    (done,) = b.put(large(B, 1))
    assert isinstance(done, BlockPersisted) and a.known == set()
    house.close()


def test_a_day_has_one_budget(tmp_path: Path) -> None:
    block = make_block()
    house = ModelHouse(tmp_path, daily_write_limit_bytes=3 * block.size_bytes)
    a, b = house.open(A), house.open(B)
    assert isinstance(a.put(block)[0], BlockPersisted)
    assert a.tier.write_budget == b.tier.write_budget
    refused = b.put(make_block(fingerprint=B, seed=1), make_block(fingerprint=B, seed=2))[-1]
    assert isinstance(refused, StorageFailure) and refused.cause is SpillDropCause.DAILY_BUDGET
    house.close()


def test_no_model_takes_the_whole_queue_from_another(tmp_path: Path) -> None:
    block = make_block()
    size_bytes = block.size_bytes + OVERHEAD_BYTES
    house = ModelHouse(tmp_path, spill_queue_limit_bytes=9 * size_bytes)
    a = house.open(A)
    assert a.tier.queue_space_bytes == 9 * size_bytes, "alone it has all of it"
    b = house.open(B)
    seeds = iter(range(100))
    while a.tier.queue_space_bytes >= size_bytes:
        a.tier.put(make_block(seed=next(seeds)))
    assert b.tier.queue_space_bytes >= 4 * size_bytes
    while b.tier.queue_space_bytes >= size_bytes:
        b.tier.put(make_block(fingerprint=B, seed=next(seeds)))
    c = house.open(Fingerprint(b"\x33" * 32))
    assert c.tier.queue_space_bytes >= 2 * size_bytes
    house.settle()
    assert {model.tier.queue_space_bytes for model in (a, b, c)} == {9 * size_bytes}
    house.close()


def test_a_block_is_dropped_where_another_model_has_filled_the_queue_since_there_was_space(
    tmp_path: Path,
) -> None:
    """A block is copied for some steps between the question whether there is space and `put`."""
    block, late = make_block(), make_block(fingerprint=B, seed=1)
    size_bytes = block.size_bytes + OVERHEAD_BYTES
    house = ModelHouse(tmp_path, spill_queue_limit_bytes=2 * size_bytes)
    a, b = house.open(A), house.open(B)
    house.settle()
    assert a.tier.queue_space_bytes == b.tier.queue_space_bytes == 2 * size_bytes
    first, second = a.tier.put(block), a.tier.put(make_block(seed=2))
    refused = b.ask(b.tier.put(late))
    assert refused == StorageFailure(SpillDropCause.NO_CREDIT, hash=late.header.hash)
    assert isinstance(first.outcome, BlockPersisted) and isinstance(second.outcome, BlockPersisted)
    counts = b.ask(b.tier.stats()).spill
    assert counts.accepted_block_total == sum(drop.block_total for drop in counts.drops) == 1
    assert a.tier.queue_space_bytes == b.tier.queue_space_bytes == 2 * size_bytes
    assert isinstance(b.put(late)[0], BlockPersisted)
    house.close()


def test_names_and_checks_are_of_ones_own_blocks_and_of_nobodys(house: ModelHouse) -> None:
    a, b, c = house.open(A), house.open(B), house.open(Fingerprint(b"\x33" * 32))
    mine, theirs = make_chain(2), make_chain(3, fingerprint=B)
    nobodys = make_block(fingerprint=Fingerprint(b"\x33" * 32))
    a.put(*mine), b.put(*theirs), c.put(nobodys)
    assert set(a.ask(a.tier.names(block_limit=0))) == set(names_of(mine))
    c.tier.close(deadline_time=FAR_TIME)
    house.settle()
    assert set(a.ask(a.tier.names(block_limit=0))) == set(names_of([*mine, nobodys]))
    checked = b.ask(b.tier.verify())
    assert isinstance(checked, Verified) and checked.checked_count == 4
    assert b.ask(b.tier.delete(names_of(theirs))) == BlocksPurged(3, checked.checked_bytes * 3 // 4)
    assert a.known == set(names_of(mine)) and b.known == set()


def test_readers_leave_cores_while_any_model_decodes(house: ModelHouse) -> None:
    a, b = house.open(A), house.open(B)
    has_cores = house.tiers._readers._has_cores
    a.tier.leave_cores(to_decode=True)
    b.tier.leave_cores(to_decode=True)
    b.tier.leave_cores(to_decode=False)
    assert not has_cores.is_set()
    a.tier.close(deadline_time=FAR_TIME)
    assert has_cores.is_set(), "a model that is closed decodes nothing"


def test_a_disk_that_fails_is_told_to_all_and_all_begin_again(tmp_path: Path) -> None:
    files = FaultyFiles("fsync", 1, errno.EIO)
    house = ModelHouse(tmp_path, files=files)
    a, b = house.open(A), house.open(B)
    a.put(make_block(seed=1)), b.put(make_block(fingerprint=B, seed=1))
    a.take(), b.take()
    files.is_armed = True
    (failed,) = a.put(make_block(seed=2))
    assert isinstance(failed, StorageFailure) and failed.cause is SpillDropCause.WRITE_FAILED
    for model, fingerprint in ((a, A), (b, B)):
        (off,) = model.put(make_block(fingerprint=fingerprint, seed=3))
        assert isinstance(off, StorageFailure) and off.cause is SpillDropCause.WRITES_OFF
        assert "Disk refused" in model.ask(model.tier.stats()).disk.writes_off_detail
        unusable = model.ask(model.tier.delete(()))
        assert isinstance(unusable, StorageFailure) and unusable.cause is StorageTrouble.UNUSABLE
    c = house.open(Fingerprint(b"\x33" * 32))
    assert c.take() == [Inventory(())], "nobody waits for a directory that may never be opened again"
    a.take(), b.take()
    house.clock.advance(2.0)
    for model in (a, b, c):
        (inventory,) = model.take()
        assert isinstance(inventory, Inventory) and inventory.is_first and inventory.is_last
    assert [len(model.known) for model in (a, b, c)] == [1, 1, 0]
    assert isinstance(c.put(make_block(fingerprint=Fingerprint(b"\x33" * 32)))[0], BlockPersisted)
    house.close()


@pytest.mark.parametrize("error_number", [errno.ENOSPC, errno.EIO])
def test_a_model_that_finds_no_place_for_its_blocks(tmp_path: Path, error_number: int) -> None:
    files = FaultyFiles("make_dir", 1, error_number)
    house = ModelHouse(tmp_path, files=files)
    a = house.open(A)
    block = make_block()
    a.put(block)
    a.take()
    files.is_armed = True
    b = house.open(B)
    assert b.take() == [Inventory(())]
    (dropped,) = b.put(make_block(fingerprint=B))
    assert isinstance(dropped, StorageFailure) and dropped.cause is SpillDropCause.WRITES_OFF
    checked = a.ask(a.tier.verify())
    # A full disk can be read; of one that refuses, nothing is taken for granted.
    assert checked == (Verified(1, checked.checked_bytes, ()) if error_number == errno.ENOSPC else checked)
    house.clock.advance(2.0)
    house.settle()
    assert isinstance(b.put(make_block(fingerprint=B))[0], BlockPersisted)
    assert a.known == set(names_of([block]))
    house.close()


def test_when_the_storage_thread_dies_all_are_told_and_those_that_come_later(tmp_path: Path) -> None:
    told: dict[Fingerprint, queue.Queue] = {each: queue.Queue() for each in (A, B)}
    tiers = ModelTiers(settings_for(tmp_path), files=Files(), clock=ManualClock())
    a, b = (tiers.open(each, {}, told[each].put) for each in (A, B))
    a.start()
    tiers.start()
    assert isinstance(told[A].get(timeout=BOUND_S), Inventory)
    tiers._loop.send(lambda: 1 / 0)
    assert told[A].get(timeout=BOUND_S) == told[B].get(timeout=BOUND_S)
    assert tiers.join(timeout_s=BOUND_S)
    b.start()
    posted: list[object] = []
    a.close(deadline_time=FAR_TIME)
    late = tiers.open(A, {}, posted.append)
    late.start()
    assert [type(each) for each in posted] == [StorageFailed], "a model loads all the same, without SSD"
    assert told[A].empty() and told[B].empty(), "each is told once"
    assert late.join(timeout_s=BOUND_S)


def test_models_come_and_go_beside_each_other_on_real_threads(tmp_path: Path) -> None:
    told: queue.Queue = queue.Queue()
    tiers = ModelTiers(settings_for(tmp_path), files=Files(), clock=ManualClock())
    tiers.start()
    a = tiers.open(A, {}, told.put)
    a.start()
    assert isinstance(told.get(timeout=BOUND_S), Inventory)
    mine, theirs = make_chain(12), make_chain(3, fingerprint=B)
    tickets = [a.put(block) for block in mine]
    for _ in range(3):
        others: queue.Queue = queue.Queue()
        b = tiers.open(B, {}, others.put)
        b.start()
        first = others.get(timeout=BOUND_S)
        assert isinstance(first, Inventory)
        puts = [b.put(block) for block in theirs]
        b.close(deadline_time=FAR_TIME)
        assert b.join(timeout_s=BOUND_S)
        assert [others.get(timeout=BOUND_S) for _ in puts] == puts
        assert others.get(timeout=BOUND_S) == StorageClosed(was_clean=True)
    assert {record.hash for record in first.records} == set(names_of(theirs))
    assert [told.get(timeout=BOUND_S) for _ in tickets] == tickets
    load = a.get_into(*plan(mine))
    assert told.get(timeout=BOUND_S) is load
    tiers.close(deadline_time=FAR_TIME)
    assert tiers.join(timeout_s=BOUND_S) and told.get(timeout=BOUND_S) == StorageClosed(was_clean=True)


def test_nothing_comes_after_the_end_not_even_a_read(house: ModelHouse) -> None:
    a, b = house.open(A), house.open(B)
    chain = make_chain(2)
    a.put(*chain)
    load = a.tier.get_into(*plan(chain))
    a.tier.close(deadline_time=FAR_TIME)
    while house.tiers._loop.step():
        pass
    assert isinstance(a.take()[-1], StorageClosed) and isinstance(load, Ticket)
    assert b.ask(b.tier.stats()).ssd.block_count == 0
