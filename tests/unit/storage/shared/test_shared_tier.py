"""Shared tier: what one server stores another one finds by name, and nothing a store does harms a reader."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import queue
import threading
from typing import Any

import pytest
from icehouse_server.clock import SystemClock
from icehouse_server.domain.blocks import HostBlock
from icehouse_server.domain.ids import BlockHash
from icehouse_server.storage.api import (
    BlocksEvicted,
    BlocksLoaded,
    ChainFound,
    Fetched,
    Inventory,
    StorageClosed,
)
from icehouse_server.storage.local.directory.manifest import LOG_ALLOWANCE_BYTES
from icehouse_server.storage.local.encryption.aes_gcm import Cipher
from icehouse_server.storage.shared.object_store import StoreError
from icehouse_server.storage.store_paths import StorePaths

from tests.fixtures.patience import BOUND_S
from tests.fixtures.storage.blocks import (
    FINGERPRINT,
    OTHER_FINGERPRINT,
    make_block,
    make_chain,
)
from tests.fixtures.storage.hanging import HangingFiles
from tests.fixtures.storage.loading import assert_holds, plan
from tests.fixtures.storage.model_house import ModelHouse
from tests.fixtures.storage.object_store import SHARED, MemoryStore, SharingThread
from tests.fixtures.storage.sole_tier import SoleTier
from tests.fixtures.storage.storage_thread import settings_for

KEY, OTHER_KEY = Cipher(b"k" * 32), Cipher(b"o" * 32)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def names_of(blocks) -> tuple[BlockHash, ...]:
    return tuple(block.header.hash for block in blocks)


def key_of(block: HostBlock) -> str:
    return f"{block.header.fingerprint.hex()}/{block.header.hash.hex()}"


def ask(server: SharingThread, ticket) -> object:
    assert ticket is not None
    server.settle()
    return ticket.outcome


def find(server: SharingThread, blocks) -> ChainFound:
    found = ask(server, server.storage.find(names_of(blocks), limit_s=BOUND_S))
    assert isinstance(found, ChainFound)
    return found


def fetch(server: SharingThread, blocks) -> int:
    fetched = ask(server, server.storage.fetch(names_of(blocks)))
    assert isinstance(fetched, Fetched)
    return fetched.block_count


def shared_stats(server: SharingThread):
    shared = server.stats().shared
    assert shared is not None
    return shared


def fill(store: MemoryStore, directory, blocks, **how) -> None:
    """Have a server of its own store blocks, and end."""
    with SharingThread(directory, store=store, **how) as writer:
        writer.spill(*blocks)


def files_of(server: SharingThread) -> list[str]:
    folder = server.storage._store.paths.folder(FINGERPRINT)
    return os.listdir(folder)


@pytest.mark.parametrize("cipher", [None, KEY], ids=["in the clear", "under a key"])
def test_what_one_server_computed_another_one_finds_and_loads(tmp_path, store, cipher) -> None:
    chain = make_chain(5, cipher=cipher)
    fill(store, tmp_path / "a", chain, cipher=cipher)
    with SharingThread(tmp_path / "b", store=store, cipher=cipher) as reader:
        found = find(reader, chain)
        assert found.block_count == 5
        assert found.size_bytes == sum(len(data) for data in store.objects.values())
        reader.outcomes.clear()
        assert fetch(reader, chain) == 5
        arrived = [each for each in reader.outcomes if isinstance(each, Inventory)]
        assert [record.hash for part in arrived for record in part.records] == list(names_of(chain))
        assert not any(part.is_first or part.is_last for part in arrived), "it replaces nothing"
        loaded = ask(reader, reader.storage.get_into(*plan(chain)))
        assert isinstance(loaded, BlocksLoaded) and loaded.failure is None
        assert_holds(loaded, chain)
        stats = shared_stats(reader)
        assert (stats.lookup_total, stats.hit_total, stats.fetched_block_total) == (1, 1, 5)
        assert store.put_count == 5, "what came from the store is not sent there again"
    with SharingThread(tmp_path / "b", store=store, cipher=cipher) as again:
        assert {record.hash for record in again.take_inventory()} == set(names_of(chain))


def test_another_key_finds_nothing(tmp_path, store) -> None:
    fill(store, tmp_path / "a", make_chain(2, cipher=KEY), cipher=KEY)
    with SharingThread(tmp_path / "b", store=store, cipher=OTHER_KEY) as other:
        assert find(other, make_chain(2, cipher=OTHER_KEY)).block_count == 0
    assert not any(b"token_ids" in data for data in store.objects.values())


@pytest.mark.parametrize("stored_count", [0, 1, 7, 40])
def test_how_far_a_chain_goes_is_found_with_few_requests(tmp_path, store, stored_count) -> None:
    chain = make_chain(40)
    fill(store, tmp_path / "a", chain[:stored_count])
    store.request_count = 0
    with SharingThread(tmp_path / "b", store=store) as reader:
        assert find(reader, chain).block_count == stored_count
        assert store.request_count <= 22
        asked_count = store.request_count
        if stored_count == 0:
            assert reader.storage.find(names_of(chain), limit_s=1.0) is None, "it was not there just now"
            reader.clock.advance(11.0)
            assert find(reader, chain).block_count == 0
            assert store.request_count > asked_count


def test_tails_stay_here(tmp_path, store) -> None:
    tail = make_block(token_ids=(1, 2, 3))
    fill(store, tmp_path / "a", [tail])
    assert not store.objects


def test_a_block_that_is_there_is_not_sent_again(tmp_path, store) -> None:
    block = make_block()
    fill(store, tmp_path / "a", [block])
    with SharingThread(tmp_path / "b", store=store) as second:
        second.spill(block)
        assert shared_stats(second).known_block_total == 1
    assert store.put_count == 1


def test_of_two_who_store_one_name_at_once_one_does(tmp_path, store) -> None:
    block = make_block()
    with SharingThread(tmp_path / "a", store=store) as a, SharingThread(tmp_path / "b", store=store) as b:
        a.storage.put(block)
        b.storage.put(block)
        for _ in range(1000):
            a.storage.step()
            b.storage.step()
        totals = [
            (shared_stats(each).stored_block_total, shared_stats(each).known_block_total) for each in (a, b)
        ]
    assert sorted(totals) == [(0, 1), (1, 0)]
    with SharingThread(tmp_path / "c", store=store) as reader:
        assert fetch(reader, [block]) == 1


def test_a_block_with_a_later_checkpoint_replaces_the_one_without(tmp_path, store) -> None:
    whole = make_block(checkpoint=True)
    poorer = dataclasses.replace(whole, regions=whole.regions[:1])
    fill(store, tmp_path / "a", [poorer])
    fill(store, tmp_path / "b", [whole])
    fill(store, tmp_path / "c", [poorer])
    with SharingThread(tmp_path / "d", store=store) as reader:
        assert fetch(reader, [whole]) == 1
        loaded = ask(reader, reader.storage.get_into(*plan([whole])))
        assert isinstance(loaded, BlocksLoaded) and loaded.failure is None


def _other_fingerprint(store: MemoryStore, chain, tmp_path) -> bytes:
    other = make_block(fingerprint=OTHER_FINGERPRINT)
    fill(store, tmp_path / "other", [other], fingerprint=OTHER_FINGERPRINT)
    return store.objects[key_of(other)]


LIES = {
    "truncated": lambda store, chain, _: store.objects[key_of(chain[1])][:-7],
    "a flipped bit": lambda store, chain, _: _flipped(store.objects[key_of(chain[1])]),
    "another block": lambda store, chain, _: store.objects[key_of(chain[0])],
    "another model": _other_fingerprint,
    "no block": lambda store, chain, _: b"<html>hello</html>",
    "longer": lambda store, chain, _: store.objects[key_of(chain[1])] + b"\0" * 8,
    "endless": lambda store, chain, _: bytes(SHARED.object_limit_bytes + 1),
}


def _flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize("lie", LIES)
def test_a_store_that_lies_costs_a_miss_until_the_block_is_computed_again(tmp_path, store, lie) -> None:
    chain = make_chain(3)
    fill(store, tmp_path / "a", chain)
    store.objects[key_of(chain[1])] = LIES[lie](store, chain, tmp_path)
    with SharingThread(tmp_path / "b", store=store) as reader:
        reader.take()
        assert fetch(reader, chain) == 1
        arrived = {r.hash for o in reader.outcomes if isinstance(o, Inventory) for r in o.records}
        assert names_of(chain)[1] not in arrived
        assert not any(name.endswith(".partial") for name in files_of(reader))
        assert shared_stats(reader).refused_block_total == 1
        asked_count = store.request_count
        assert reader.storage.find(names_of(chain[1:]), limit_s=1.0) is None
        assert fetch(reader, chain[1:2]) == 0 and store.request_count == asked_count, "it is not read again"
        reader.spill(chain[1])
    with SharingThread(tmp_path / "c", store=store) as another:
        assert fetch(another, chain) == 3, "the one who computed it has replaced it"


def test_under_a_key_nobody_without_it_can_make_a_block(tmp_path, store) -> None:
    block, planted = make_block(cipher=KEY), make_block()
    fill(store, tmp_path / "a", [planted])
    store.objects[key_of(block)] = store.objects[key_of(planted)]
    with SharingThread(tmp_path / "b", store=store, cipher=KEY) as reader:
        assert fetch(reader, [block]) == 0
        assert shared_stats(reader).refused_block_total == 1


def test_a_store_that_does_not_answer_costs_three_lookups_and_is_then_left_alone(tmp_path, store) -> None:
    chain = make_chain(3)
    fill(store, tmp_path / "a", chain)
    with SharingThread(tmp_path / "b", store=store) as reader:
        store.hangs = True
        for _ in range(3):
            assert find(reader, chain).block_count == 0
        asked_count = store.request_count
        assert reader.storage.find(names_of(chain), limit_s=1.0) is None, "no request waits for it now"
        assert store.request_count == asked_count
        stats = shared_stats(reader)
        assert (stats.late_lookup_total, stats.failure_total) == (3, 3)
        assert stats.read_pause_detail == "the object store did not answer in time"
        reader.clock.advance(1.0)
        assert find(reader, chain).block_count == 0, "one tries"
        assert reader.storage.find(names_of(chain), limit_s=1.0) is None
        reader.clock.advance(1.9)
        assert reader.storage.find(names_of(chain), limit_s=1.0) is None, "the pause is longer now"
        store.hangs = False
        reader.clock.advance(0.1)
        assert find(reader, chain).block_count == 3
        assert shared_stats(reader).read_pause_detail == "" and fetch(reader, chain) == 3


def test_a_store_that_hangs_in_the_middle_of_an_object_costs_the_rest(tmp_path, store) -> None:
    chain = make_chain(3)
    fill(store, tmp_path / "a", chain)
    with SharingThread(tmp_path / "b", store=store) as reader:
        store.hangs_behind_bytes = 1024
        assert fetch(reader, chain) == 0
        store.hangs_behind_bytes = None
        assert not files_of(reader), "nothing is left of them"
        assert shared_stats(reader).failure_total == 3
        reader.clock.advance(1.0)
        assert fetch(reader, chain) == 1, "the trial succeeds; the others had been refused by then"
        assert fetch(reader, chain[1:]) == 2


def test_a_store_that_refuses_is_left_alone(tmp_path, store) -> None:
    chain = make_chain(2)
    with SharingThread(tmp_path / "a", store=store) as server:
        store.refusal = "the object store refuses these credentials"
        for _ in range(3):
            assert find(server, chain).block_count == 0
        server.spill(*chain)
        stats = shared_stats(server)
        assert stats.read_pause_detail == stats.write_pause_detail == store.refusal
        assert server.storage.find(names_of(chain), limit_s=1.0) is None
        loaded = ask(server, server.storage.get_into(*plan(chain)))
        assert isinstance(loaded, BlocksLoaded), "what is here is here"
        store.refusal = ""


def test_a_full_store_is_still_read_and_gets_the_blocks_once_there_is_room(tmp_path, store) -> None:
    known, new = make_chain(2), make_block(seed=9)
    fill(store, tmp_path / "a", known)
    with SharingThread(tmp_path / "b", store=store) as server:
        store.put_refusal = "the object store is full"
        server.spill(new)
        stats = shared_stats(server)
        assert stats.write_pause_detail == store.put_refusal and stats.queue_count == 1
        assert find(server, known).block_count == 2 and fetch(server, known) == 2
        store.put_refusal = ""
        server.clock.advance(1.0)
        server.settle()
        assert shared_stats(server).stored_block_total == 1 and key_of(new) in store.objects


@pytest.mark.parametrize("fault", [MemoryError(), RuntimeError("a fault of the store's library")])
def test_what_fails_in_an_unforeseen_way_is_logged_and_costs_one_block(
    tmp_path, store, caplog, fault
) -> None:
    chain = make_chain(3)
    put = store.put

    async def fail_once(name: str, data: bytes, *, replaces: bool) -> bool:
        store.put = put
        raise fault

    store.put = fail_once
    with SharingThread(tmp_path, store=store) as server:
        server.spill(*chain)
        assert len(store.objects) == 2
        stats = shared_stats(server)
        assert (stats.dropped_block_total, stats.queue_count) == (1, 0)
        (lost,) = [block for block in chain if key_of(block) not in store.objects]
        server.storage.touch(names_of([lost]))
        server.settle()
        assert len(store.objects) == 3
    assert [record.message for record in caplog.records].count("shared_store_failed") == 1


def test_what_could_not_be_stored_is_offered_again_when_it_is_used(tmp_path, store) -> None:
    block = make_block()
    with SharingThread(tmp_path / "a", store=store) as server:
        store.put_refusal = "no"
        server.spill(block)
        for _ in range(4):
            server.clock.advance(100.0)
            server.settle()
        assert shared_stats(server).dropped_block_total == 1
        store.put_refusal = ""
        server.clock.advance(100.0)
        server.storage.touch(names_of([block]))
        server.settle()
        assert key_of(block) in store.objects


def test_blocks_that_nobody_is_to_use_again_go_from_the_store_too(tmp_path, store) -> None:
    chain = make_chain(2)
    with SharingThread(tmp_path / "a", store=store) as server:
        server.spill(*chain)
        server.storage.delete(names_of(chain[:1]))
        server.settle()
        assert len(store.objects) == 2, "eviction for others' sake concerns this server alone"
        server.storage.delete(names_of(chain), is_final=True)
        server.settle()
        assert not store.objects and shared_stats(server).deleted_block_total == 2
        assert server.storage.find(names_of(chain), limit_s=1.0) is None
        server.spill(chain[0])
        assert key_of(chain[0]) in store.objects, "computed again, it is another matter"


def test_all_of_a_large_cache_is_deleted_by_order(tmp_path, store) -> None:
    names = [BlockHash(number.to_bytes(32)) for number in range(9000)]
    with SharingThread(tmp_path / "a", store=store) as server:
        for first in range(0, len(names), 1000):
            server.storage.delete(tuple(names[first : first + 1000]), is_final=True)
        server.settle()
        assert shared_stats(server).deleted_block_total == len(names)


def test_a_block_that_is_to_go_as_it_is_being_stored_goes_and_may_be_stored_again(tmp_path, store) -> None:
    block = make_block()
    put = store.put

    async def put_late(name: str, data: bytes, *, replaces: bool) -> bool:
        server.storage.delete(names_of([block]), is_final=True)
        await asyncio.sleep(0)  # the order is taken
        store.put = put
        return await put(name, data, replaces=replaces)

    store.put = put_late
    with SharingThread(tmp_path / "a", store=store) as server:
        server.spill(block)
        assert not store.objects and shared_stats(server).deleted_block_total == 1
        assert server.storage.find(names_of([block]), limit_s=1.0) is None
        server.spill(block)
        assert key_of(block) in store.objects


def test_an_order_to_delete_outlasts_a_store_that_is_down(tmp_path, store) -> None:
    chain = make_chain(2)
    with SharingThread(tmp_path / "a", store=store) as server:
        server.spill(*chain)
        store.refusal = "down"
        server.storage.delete(names_of(chain), is_final=True)
        for _ in range(20):
            server.settle()
            server.clock.advance(100.0)
        store.refusal = ""
        server.settle()
        assert not store.objects and shared_stats(server).deleted_block_total == 2


def test_a_store_that_lets_nobody_delete_is_stored_to(tmp_path, store) -> None:
    chain = make_chain(8)

    async def refuse(name: str) -> None:
        raise StoreError("the object store refuses these credentials")

    store.delete = refuse
    with SharingThread(tmp_path / "a", store=store) as server:
        server.storage.delete(names_of(chain[:2]), is_final=True)
        server.spill(*chain[2:])
        for _ in range(20):
            server.settle()
            server.clock.advance(100.0)
        assert len(store.objects) == 6


def test_what_was_to_be_deleted_is_not_fetched_while_the_store_is_down(tmp_path, store) -> None:
    block = make_block()
    fill(store, tmp_path / "a", [block])
    with SharingThread(tmp_path / "b", store=store) as server:
        store.refusal = "down"
        server.storage.delete(names_of([block]), is_final=True)
        server.settle()
        store.refusal = ""
        assert fetch(server, [block]) == 0


def test_a_download_that_a_crash_cut_off_is_removed_at_the_next_start(tmp_path, store) -> None:
    block = make_block()
    fill(store, tmp_path / "a", [block])
    with SharingThread(tmp_path / "b", store=store) as server:
        paths = server.storage._store.paths
        partial = paths.fetched(FINGERPRINT, block.header.hash)
    with open(partial, "wb") as file:
        file.write(store.objects[key_of(block)][:100])
    os.unlink(paths.clean_mark)
    with SharingThread(tmp_path / "b", store=store) as server:
        assert not os.path.exists(partial)
        assert fetch(server, [block]) == 1


async def nothing_more(name: str):
    """Read an object of which nothing comes behind its beginning."""
    yield memoryview(bytes(100))
    await asyncio.get_running_loop().create_future()


async def broken(name: str):
    """Read an object in a way that nobody foresaw."""
    yield memoryview(bytes(100))
    raise RuntimeError("a fault of the store's library")


@pytest.mark.parametrize("read", [nothing_more, broken])
def test_a_download_that_does_not_end_well_leaves_no_file_behind(tmp_path, store, read) -> None:
    """A start after an orderly end looks at no files, so it would stay for good, and count nowhere."""
    block = make_block()
    fill(store, tmp_path / "a", [block])
    store.read = read
    with SharingThread(tmp_path / "b", store=store) as server:
        assert server.storage.fetch(names_of([block])) is not None
        for _ in range(1000):
            server.storage.step()
        if read is nothing_more:
            assert len(files_of(server)) == 1, "it is under way"
    with SharingThread(tmp_path / "b", store=store) as server:
        assert files_of(server) == []


def test_a_block_that_is_to_go_as_it_comes_does_not_stay(tmp_path, store) -> None:
    block = make_block()
    fill(store, tmp_path / "a", [block])
    with SharingThread(tmp_path / "b", store=store) as server:
        server.settle()
        fetched = server.storage.fetch(names_of([block]))
        tier: Any = server.storage.model
        loop = server.storage._loop
        while loop._inbox.empty():
            tier.step()
        on_its_way = loop._inbox.get_nowait()
        purged = server.storage.delete(names_of([block]), is_final=True)
        while purged.outcome is None or store.objects:
            server.storage.step()
        loop.send(on_its_way)
        server.settle()
        assert fetched is not None and fetched.outcome == Fetched(0, 0)
        assert server.take_inventory() == () and files_of(server) == [] and not store.objects


@pytest.mark.parametrize("ends", ["the tier", "the directory"])
def test_a_download_that_is_yet_to_be_taken_in_at_the_end_leaves_no_file_behind(
    tmp_path, store, ends
) -> None:
    block = make_block()
    fill(store, tmp_path / "a", [block])
    with SharingThread(tmp_path / "b", store=store) as server:
        server.settle()
        assert server.storage.fetch(names_of([block])) is not None
        tier: Any = server.storage.model
        while server.storage._loop._inbox.empty():
            tier.step()
        assert len(files_of(server)) == 1, "it is there, and nobody has taken it in"
        if ends == "the tier":
            server.storage.model.close(deadline_time=server.clock.monotonic())
            server.settle()
            assert isinstance(server.outcomes[-1], StorageClosed)
    with SharingThread(tmp_path / "b", store=store) as server:
        assert server.stats().last_reconcile.clean and files_of(server) == []


def test_a_download_that_comes_once_its_model_has_ended_leaves_no_file_behind(tmp_path, store) -> None:
    block = make_block()
    fill(store, tmp_path / "a", [block])
    with SharingThread(tmp_path / "b", store=store) as server:
        server.settle()
        assert server.storage.fetch(names_of([block])) is not None
        tier: Any = server.storage.model
        loop = server.storage._loop
        while loop._inbox.empty():
            tier.step()
        on_its_way = loop._inbox.get_nowait()
        tier.close(deadline_time=server.clock.monotonic())
        server.settle()
        assert len(files_of(server)) == 1
        loop.send(on_its_way)
        server.settle()
        assert files_of(server) == []


class WatchedFiles(HangingFiles):
    """Hangs as it makes the file of a download, and counts the files that are open."""

    def __init__(self) -> None:
        super().__init__(["create"])
        self.open_count = 0

    def create(self, path: str) -> int:
        make = self.__getattr__("create") if path.endswith(".fetched.partial") else self._system.create
        descriptor = make(path)
        self.open_count += 1
        return descriptor

    def close(self, descriptor: int) -> None:
        self._system.close(descriptor)
        self.open_count -= 1

    def open(self, path: str, *args: Any, **options: Any) -> int:
        descriptor = self._system.open(path, *args, **options)
        self.open_count += 1
        return descriptor

    def lock(self, path: str, **how: Any) -> int:
        descriptor = self._system.lock(path, **how)
        self.open_count += 1
        return descriptor


def test_a_download_that_is_called_off_as_its_file_is_made_leaves_none_behind(tmp_path, store) -> None:
    block, files = make_block(), WatchedFiles()
    posted: queue.SimpleQueue[object] = queue.SimpleQueue()
    fill(store, tmp_path / "a", [block])
    parts = {"store": store, "shared": SHARED}
    settings = settings_for(tmp_path / "b")
    tier = SoleTier(settings, files=files, clock=SystemClock(), post=posted.put, **parts)
    tier.start()
    assert isinstance(posted.get(timeout=BOUND_S), Inventory)
    files.hang()
    assert tier.fetch(names_of([block])) is not None
    assert files.has_hung.wait(BOUND_S)
    tier.model.close(deadline_time=0.0)
    tier.tiers.close(deadline_time=0.0)
    assert tier.tiers.join(timeout_s=BOUND_S)
    files.go_on()
    for thread in threading.enumerate():
        if thread.name.startswith("storage-shared"):
            thread.join(BOUND_S)
    assert files.open_count == 0
    assert os.listdir(StorePaths(str(tmp_path / "b")).folder(FINGERPRINT)) == []


def test_fetched_blocks_keep_to_the_tier_s_limits(tmp_path, store) -> None:
    blocks = [make_block(seed=seed, head_count=2048) for seed in range(4)]
    old, *new = blocks
    fill(store, tmp_path / "a", new)
    limit_bytes = LOG_ALLOWANCE_BYTES + 7 * old.size_bytes // 2
    with SharingThread(tmp_path / "b", store=store, limit_bytes=limit_bytes) as server:
        server.spill(old)
        server.take()
        assert fetch(server, new) == 3
        assert any(
            isinstance(each, BlocksEvicted) and old.header.hash in each.hashes for each in server.outcomes
        )
        assert server.stats().disk.used_bytes <= limit_bytes


def test_one_download_serves_all_who_wait_for_it(tmp_path, store) -> None:
    chain = make_chain(3)
    fill(store, tmp_path / "a", chain)
    with SharingThread(tmp_path / "b", store=store) as server:
        first, second = (server.storage.fetch(names_of(chain)) for _ in range(2))
        server.settle()
        assert first.outcome.block_count == second.outcome.block_count == 3
        assert shared_stats(server).fetched_block_total == 3


def test_a_download_goes_on_for_those_who_wait_when_the_first_one_gives_up(tmp_path, store) -> None:
    chain = make_chain(3)
    fill(store, tmp_path / "a", chain)
    with SharingThread(tmp_path / "b", store=store) as server:
        first, second = (server.storage.fetch(names_of(chain)) for _ in range(2))
        server.storage.abandon(first)
        server.settle()
        assert second.outcome.block_count == 3


def test_what_comes_is_progress_for_all_who_wait_for_it(tmp_path, store) -> None:
    """Else the others would give up a download that goes on."""
    block = make_block()
    fill(store, tmp_path / "a", [block])
    read = store.read
    silences: list[list[float]] = []

    async def read_slowly(name: str):
        async for chunk in read(name):
            server.clock.advance(1.0)
            yield chunk
            silences.append([server.storage.silence_s(ticket) for ticket in tickets])

    store.read = read_slowly
    with SharingThread(tmp_path / "b", store=store) as server:
        tickets = [server.storage.fetch(names_of([block])) for _ in range(2)]
        server.settle()
    assert silences == [[0.0, 0.0]] * len(silences) != []


def test_a_fetch_that_nobody_waits_for_begins_nothing_new(tmp_path, store) -> None:
    chain = make_chain(3)
    fill(store, tmp_path / "a", chain)
    with SharingThread(tmp_path / "b", store=store) as server:
        ticket = server.storage.fetch(names_of(chain))
        server.storage.abandon(ticket)
        asked_count = store.request_count
        server.settle()
        assert store.request_count == asked_count


def test_before_the_start_and_after_the_end_nobody_is_asked(tmp_path, store) -> None:
    block = make_block()
    server = SharingThread(tmp_path / "a", store=store)
    assert server.storage.fetch(names_of([block])) is None
    with server:
        pass
    assert server.storage.find(names_of([block]), limit_s=1.0) is None


def test_two_models_share_a_store_and_one_may_end_before_the_other(tmp_path, store) -> None:
    mine, theirs = make_chain(3), make_chain(2, fingerprint=OTHER_FINGERPRINT)
    fill(store, tmp_path / "a", mine)
    fill(store, tmp_path / "b", theirs, fingerprint=OTHER_FINGERPRINT)
    parts = {"store": store, "shared": SHARED, "is_inline": True}
    house = ModelHouse(tmp_path / "c", shared=parts)
    a, b = house.open(FINGERPRINT), house.open(OTHER_FINGERPRINT)
    for model, chain in ((a, mine), (b, theirs)):
        assert model.ask(model.tier.fetch(names_of(chain))).block_count == len(chain)
        assert model.known == set(names_of(chain))
    a.tier.close(deadline_time=house.clock.monotonic())
    house.settle()
    assert a.posted[-1] == StorageClosed(was_clean=True) and a.tier.fetch(names_of(mine)) is None
    b.put(make_block(seed=9, fingerprint=OTHER_FINGERPRINT))
    assert len(store.objects) == 6, "it still stores what it writes"
    stats = b.ask(b.tier.stats()).shared
    assert (stats.fetched_block_total, stats.stored_block_total) == (2, 1)
    house.close()
