"""What every cold tier keeps to: the port's contract, against the ones on disk and the one in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from icehouse_server.domain.blocks import BlockDamage, HostBlock, RegionKind
from icehouse_server.domain.cache_stats import CacheStats, SpillDropCause
from icehouse_server.domain.ids import BlockHash, RequestId
from icehouse_server.pins import NOT_PINNED, UNTIL_UNPINNED
from icehouse_server.storage.api import (
    OVERHEAD_BYTES,
    AnyTicket,
    BlockPersisted,
    BlocksEvicted,
    BlocksLoaded,
    BlocksPurged,
    ColdTier,
    Inventory,
    LayoutMismatch,
    Outcome,
    StorageClosed,
    StorageFailure,
    TensorShape,
    Ticket,
    Verified,
)
from icehouse_server.storage.files import Files
from icehouse_server.storage.local.directory.manifest import LOG_ALLOWANCE_BYTES

from tests.fixtures.storage.blocks import BLOCK_TOKEN_LIMIT, RATES, make_block, make_chain
from tests.fixtures.storage.loading import BlockBuffers, assert_holds, plan
from tests.fixtures.storage.memory_tier import MemoryTier
from tests.fixtures.storage.object_store import SHARED, MemoryStore
from tests.fixtures.storage.sole_tier import SoleTier, TierBeside
from tests.fixtures.storage.storage_thread import ManualClock, settings_for

KV = frozenset({RegionKind.KV})


class Bench:
    """A tier on the test's own thread, and all it posts."""

    def __init__(
        self,
        make: Callable[[Callable[[Outcome], object], ManualClock], SoleTier | MemoryTier],
        damage: Callable,
        *,
        is_started: bool,
    ) -> None:
        """`is_started`: it works on threads of its own, if it has some."""
        self.posted: list[Outcome] = []
        self.clock = ManualClock()
        self._running = make(self.posted.append, self.clock)
        self.tier: ColdTier = self._running
        self._damage = damage
        self._is_started = is_started
        if is_started:
            self.tier.start()
        else:
            self._running.lock()
            self._running.open()

    def settle(self) -> list[Outcome]:
        """Do all that was asked; return what was posted since the last call."""
        while self._running.step():
            pass
        posted = self.posted[:]
        self.posted.clear()
        return posted

    def ask(self, ticket: AnyTicket | None) -> object:
        """Return what became of a ticket that has just been taken."""
        assert ticket is not None and ticket.outcome is None
        assert ticket in self.settle()
        return ticket.outcome

    def put(self, *blocks: HostBlock, **how) -> list[object]:
        return [self.ask(self.tier.put(block, **how)) for block in blocks]

    def damage(self, block: HostBlock) -> None:
        self._damage(self._running, block.header)

    def close(self) -> None:
        if not self._is_started:
            self.tier.close(deadline_time=1e9)
            assert isinstance(self.settle()[-1], StorageClosed)
        if isinstance(self._running, TierBeside):
            self._running.end(is_started=self._is_started)


def _flip(tier: SoleTier, header) -> None:
    path = Path(tier._store.paths.block(header.fingerprint, header.hash))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.fixture(params=["disk", "beside another", "memory", "shared"])
def open_bench(request, tmp_path) -> Iterator[Callable[..., Bench]]:
    opened: list[Bench] = []

    def make(
        *, limit_bytes: int = 1 << 26, queue_bytes: int = 1 << 22, count: int = 16, is_started: bool = False
    ) -> Bench:
        def on_disk(post, clock) -> SoleTier:
            settings = settings_for(
                tmp_path,
                # Beside the blocks the disk's tier keeps its manifest's log within the limit.
                limit_bytes=limit_bytes + LOG_ALLOWANCE_BYTES,
                spill_queue_limit_bytes=queue_bytes,
                load_queue_limit_count=count,
                task_queue_limit_count=count,
            )
            kind = TierBeside if request.param == "beside another" else SoleTier
            behind = {"store": MemoryStore(), "shared": SHARED, "is_inline": not is_started}
            shared = behind if request.param == "shared" else {}
            return kind(settings, files=Files(), clock=clock, post=post, **shared)

        def in_memory(post, clock) -> MemoryTier:
            return MemoryTier(
                clock=clock,
                post=post,
                limit_bytes=limit_bytes,
                queue_limit_bytes=queue_bytes,
                queue_limit_count=count,
            )

        if request.param == "memory":
            opened.append(
                Bench(in_memory, lambda tier, header: tier.damage(header.hash), is_started=is_started)
            )
        else:
            opened.append(Bench(on_disk, _flip, is_started=is_started))
        return opened[-1]

    yield make
    for bench in opened:
        bench.close()


@pytest.fixture
def bench(open_bench) -> Bench:
    return open_bench()


def names_of(blocks: Sequence[HostBlock]) -> tuple[BlockHash, ...]:
    return tuple(block.header.hash for block in blocks)


def test_a_tier_that_was_started_writes_what_was_put_before_it_ends(open_bench) -> None:
    bench = open_bench(is_started=True)
    block = make_block()
    put = bench.tier.put(block)
    bench.tier.close(deadline_time=bench.clock.monotonic() + 1.0)
    assert bench.tier.join(timeout_s=1.0)
    first, *rest, last = bench.posted
    assert isinstance(first, Inventory) and isinstance(last, StorageClosed) and last.was_clean
    assert rest == [put] and isinstance(put.outcome, BlockPersisted)


def test_the_first_that_is_posted_is_the_inventory(bench: Bench) -> None:
    assert bench.settle() == [Inventory(())]


def test_what_was_put_comes_back_and_its_record_says_what_it_is(bench: Bench) -> None:
    chain = make_chain(3, checkpoint=True)
    (first, *_) = bench.put(*chain, request_id=RequestId("r"))
    assert isinstance(first, BlockPersisted) and first.request_id == "r"
    header, record = chain[0].header, first.record
    assert (record.hash, record.parent) == (header.hash, header.parent)
    assert (record.start_token_index, record.token_count) == (0, BLOCK_TOKEN_LIMIT)
    sizes = [region.size_bytes for region in chain[0].regions]
    assert [record.kv_bytes, record.window_bytes, record.checkpoint_bytes] == sizes
    assert sum(sizes) <= record.file_bytes <= sum(sizes) + OVERHEAD_BYTES
    assert (record.pin_end_time, record.hit_count) == (NOT_PINNED, 0)
    loaded = bench.ask(bench.tier.get_into(*plan(chain)))
    assert isinstance(loaded, BlocksLoaded) and loaded.failure is None
    assert loaded.read_bytes == sum(block.size_bytes for block in chain)
    assert_holds(loaded, chain)


def test_putting_again_is_done_and_nobodys(bench: Bench) -> None:
    block = make_block()
    first, again = bench.put(block, block, request_id=RequestId("r"))
    assert isinstance(first, BlockPersisted) and isinstance(again, BlockPersisted)
    assert (first.request_id, again.request_id) == ("r", None) and first.record.hash == again.record.hash


def test_putting_again_with_more_regions_replaces_it_and_keeps_its_pin(bench: Bench) -> None:
    block = make_block(checkpoint=True)
    poorer = dataclasses.replace(block, regions=block.regions[:1])
    bench.put(poorer, pin_end_time=UNTIL_UNPINNED)
    (put,) = bench.put(block)
    assert (
        isinstance(put, BlockPersisted)
        and put.record.checkpoint_bytes
        and put.record.pin_end_time == UNTIL_UNPINNED
    )


def test_a_pin_of_what_is_there_already_comes_with_the_put(bench: Bench) -> None:
    block = make_block()
    _, again = [*bench.put(block), *bench.put(block, pin_end_time=UNTIL_UNPINNED)]
    assert isinstance(again, BlockPersisted) and again.record.pin_end_time == UNTIL_UNPINNED


def test_room_is_taken_by_what_waits_and_comes_back(open_bench) -> None:
    block = make_block()
    size_bytes = block.size_bytes + OVERHEAD_BYTES
    bench = open_bench(queue_bytes=2 * size_bytes)
    first = bench.tier.put(block)
    assert bench.tier.queue_space_bytes <= size_bytes
    second, third = bench.tier.put(block), bench.tier.put(block)
    bench.settle()
    assert isinstance(first.outcome, BlockPersisted) and isinstance(second.outcome, BlockPersisted)
    assert third.outcome == StorageFailure(SpillDropCause.NO_CREDIT, hash=block.header.hash)
    assert bench.tier.queue_space_bytes == 2 * size_bytes


class Pages:
    """Memory of the caller's in another shape: pages of a few tokens, each with all tensors of its layer."""

    def __init__(self, *, page_tokens: int, token_count: int) -> None:
        self.page_tokens = page_tokens
        self.pages = [bytearray(0) for _ in range(token_count // page_tokens)]
        self.tensors: list[TensorShape] = []

    def segments(
        self, tensors: Sequence[TensorShape], *, start_token_index: int, token_count: int
    ) -> list[memoryview]:
        if [t.dtype for t in tensors] != ["BF16", "BF16", "F32"]:
            raise LayoutMismatch("not the tensors of this test's blocks")
        self.tensors = list(tensors)
        rows = [t.size_bytes // (t.shape[1] * token_count) for t in tensors]
        page_bytes = sum(row * t.shape[1] for row, t in zip(rows, tensors, strict=True)) * self.page_tokens
        first = start_token_index // self.page_tokens
        count = token_count // self.page_tokens
        for number in range(first, first + count):
            self.pages[number] = bytearray(page_bytes)
        segments = []
        offset = 0
        for tensor, row in zip(tensors, rows, strict=True):
            head_bytes = row * self.page_tokens
            for head in range(tensor.shape[1]):
                begin = offset + head * head_bytes
                segments += [
                    memoryview(self.pages[number])[begin : begin + head_bytes]
                    for number in range(first, first + count)
                ]
            offset += head_bytes * tensor.shape[1]
        return segments

    def tensor(self, index: int) -> np.ndarray:
        """Return one tensor of all tokens, [1, heads, tokens, row bytes]."""
        sizes = [t.size_bytes // (t.shape[2] // self.page_tokens) for t in self.tensors]
        begin, heads = sum(sizes[:index]), self.tensors[index].shape[1]
        parts = [
            np.frombuffer(page, np.uint8)[begin : begin + sizes[index]].reshape(heads, self.page_tokens, -1)
            for page in self.pages
        ]
        return np.concatenate(parts, axis=1)[None]


def test_kv_is_read_into_memory_of_any_shape(bench: Bench) -> None:
    """As it is into pages: the caller says for each block where its bytes go, in the file's order."""
    chain = make_chain(3)
    bench.put(*chain)
    pages = Pages(page_tokens=4, token_count=3 * BLOCK_TOKEN_LIMIT)
    blocks, _ = plan(chain, regions=KV)
    loaded = bench.ask(bench.tier.get_into(blocks, pages))
    assert isinstance(loaded, BlocksLoaded) and len(loaded.blocks) == 3
    assert not any(block.regions for block in loaded.blocks), "it is there, and nowhere else"
    for index in range(3):
        sources = [block.regions[0].tensors[index] for block in chain]
        rows = [np.frombuffer(t.data, np.uint8).reshape((*t.shape[:-1], -1)) for t in sources]
        assert np.array_equal(pages.tensor(index), np.concatenate(rows, axis=2))


def test_memory_of_another_layout_is_refused_and_the_first_blocks_are_there(bench: Bench) -> None:
    first = make_block(seed=1)
    second = make_block(seed=2, parent=first.header.hash, start=BLOCK_TOKEN_LIMIT, head_count=4)
    bench.put(first, second)
    blocks, _ = plan([first, second], regions=KV)

    class OfTwoHeads(BlockBuffers):
        def segments(self, tensors: Sequence[TensorShape], **where: int) -> list[memoryview]:
            if tensors[0].shape[1] != 2:
                raise LayoutMismatch("more heads than two")
            return super().segments(tensors, **where)

    loaded = bench.ask(bench.tier.get_into(blocks, OfTwoHeads(blocks)))
    assert isinstance(loaded, BlocksLoaded) and loaded.failure is not None
    assert loaded.failure.cause is BlockDamage.LAYOUT and len(loaded.blocks) == 1


def test_what_is_not_there_or_damaged_fails_and_is_gone(bench: Bench) -> None:
    chain = make_chain(3)
    bench.put(*chain)
    bench.damage(chain[2])
    ticket = bench.tier.get_into(*plan(chain))
    posted = bench.settle()
    assert ticket is not None and isinstance(ticket.outcome, BlocksLoaded)
    assert ticket.outcome.failure is not None and ticket.outcome.failure.hash == chain[2].header.hash
    assert ticket.outcome.failure.cause is BlockDamage.CHECKSUM and len(ticket.outcome.blocks) == 2
    assert BlocksEvicted(names_of(chain[2:])) in posted
    missing = bench.ask(bench.tier.get_into(*plan(chain[2:])))
    assert isinstance(missing, StorageFailure) and missing.cause is BlockDamage.MISSING


def test_heads_are_those_that_are_sound(bench: Bench) -> None:
    chain = make_chain(2)
    bench.put(*chain)
    unknown = make_block(seed=77).header.hash
    assert bench.ask(bench.tier.heads((*names_of(chain), unknown))) == tuple(b.header for b in chain)


def test_the_least_recently_used_tail_goes_for_what_is_put_and_never_what_is_pinned(open_bench) -> None:
    old, young, pinned, new = (make_block(seed=seed, head_count=2048) for seed in range(4))
    bench = open_bench(limit_bytes=7 * old.size_bytes // 2, queue_bytes=1 << 26)
    bench.put(old, young)
    bench.put(pinned, pin_end_time=UNTIL_UNPINNED)
    bench.tier.touch(names_of([old]))
    ticket = bench.tier.put(new)
    assert BlocksEvicted(names_of([young])) in bench.settle() and isinstance(ticket.outcome, BlockPersisted)
    assert bench.ask(bench.tier.pin(names_of([old, new]), UNTIL_UNPINNED)) == ()
    (full,) = bench.put(young)
    assert full == StorageFailure(SpillDropCause.DISK_FULL, hash=young.header.hash)


def test_what_was_demoted_goes_first_until_it_is_used(open_bench) -> None:
    blocks = [make_block(seed=seed, head_count=2048) for seed in range(5)]
    first, second, third, *new = blocks
    bench = open_bench(limit_bytes=7 * first.size_bytes // 2, queue_bytes=1 << 26)
    bench.put(first, second, third)
    unknown = make_block(seed=77).header.hash
    assert bench.tier.demote((*names_of([second]), unknown, *names_of([third])))
    bench.tier.put(new[0])
    assert BlocksEvicted(names_of([third])) in bench.settle()
    bench.tier.touch(names_of([second]))
    bench.tier.put(new[1])
    assert BlocksEvicted(names_of([first])) in bench.settle()


def test_a_pin_with_an_end_is_prolonged_and_over_then(open_bench) -> None:
    pinned, put_pinned, new = (make_block(seed=seed, head_count=2048) for seed in range(3))
    bench = open_bench(limit_bytes=5 * pinned.size_bytes // 2, queue_bytes=1 << 26)
    end_time = bench.clock.wall() + 60.0
    bench.put(pinned)
    bench.put(put_pinned, pin_end_time=end_time + 60.0)
    for earlier in (end_time, end_time - 30.0):
        assert bench.ask(bench.tier.pin(names_of([pinned]), earlier)) == ()
    bench.clock.advance(59.0)
    (full,) = bench.put(new)
    assert full == StorageFailure(SpillDropCause.DISK_FULL, hash=new.header.hash)
    bench.clock.advance(1.0)
    (put,) = bench.put(new)
    assert isinstance(put, BlockPersisted) and put.record.pin_end_time == NOT_PINNED
    missing = names_of([pinned])
    assert bench.ask(bench.tier.pin((*missing, *names_of([put_pinned])), UNTIL_UNPINNED)) == missing


def test_a_pin_reaches_what_waits_to_be_written_and_names_what_is_neither(bench: Bench) -> None:
    block, other = make_block(seed=1), make_block(seed=2)
    put = bench.tier.put(block)
    missing = bench.ask(bench.tier.pin(names_of([block, other]), UNTIL_UNPINNED))
    assert missing == names_of([other])
    bench.settle()
    assert isinstance(put.outcome, BlockPersisted) and put.outcome.record.pin_end_time == UNTIL_UNPINNED


def test_an_order_comes_after_the_blocks_put_before_it(bench: Bench) -> None:
    chain = make_chain(2)
    tickets = [bench.tier.put(block) for block in chain]
    purged = bench.ask(bench.tier.delete(names_of(chain)))
    assert all(isinstance(ticket.outcome, BlockPersisted) for ticket in tickets)
    assert isinstance(purged, BlocksPurged) and purged.block_count == 2 and purged.size_bytes > 0
    assert bench.ask(bench.tier.names(block_limit=0)) == ()


def test_an_order_for_no_block_waits_for_all_that_was_put(bench: Bench) -> None:
    puts = [bench.tier.put(block) for block in make_chain(3)]
    nothing = bench.tier.delete(())
    assert nothing is not None and nothing.outcome is None
    told = [each for each in bench.settle() if isinstance(each, Ticket)]
    assert told == [*puts, nothing] and nothing.outcome == BlocksPurged(0, 0)


def test_a_removal_is_told_before_its_ticket_and_outranks_a_pin(bench: Bench) -> None:
    block = make_block()
    bench.put(block, pin_end_time=UNTIL_UNPINNED)
    ticket = bench.tier.delete(names_of([block]))
    assert bench.settle() == [BlocksEvicted(names_of([block])), ticket]


def test_a_check_reads_all_and_removes_what_is_damaged(bench: Bench) -> None:
    chain = make_chain(3)
    bench.put(*chain)
    bench.damage(chain[2])
    checked = bench.ask(bench.tier.verify())
    assert isinstance(checked, Verified) and checked.checked_count == 3 and checked.checked_bytes > 0
    assert [(f.hash, f.cause) for f in checked.damaged] == [(chain[2].header.hash, BlockDamage.CHECKSUM)]
    assert bench.ask(bench.tier.verify(names_of(chain[2:]))) == Verified(0, 0, ())


def test_names_come_round_those_that_were_checked_last_at_the_end(bench: Bench) -> None:
    blocks = [make_block(seed=seed) for seed in range(4)]
    bench.put(*blocks)
    ordered = sorted(names_of(blocks))
    assert bench.ask(bench.tier.names(block_limit=3)) == tuple(ordered[:3])
    bench.ask(bench.tier.verify(tuple(ordered[:2])))
    assert bench.ask(bench.tier.names(block_limit=0)) == (*ordered[2:], *ordered[:2])


def test_a_full_queue_refuses_and_leaves_nothing_behind(open_bench) -> None:
    bench = open_bench(count=2)
    block = make_block()
    bench.put(block)
    assert bench.tier.keep_rates(RATES)
    bench.settle()
    for take in (bench.tier.stats, bench.tier.verify, lambda: bench.tier.heads(names_of([block]))):
        tickets = [take() for _ in range(2)]
        assert None not in tickets and take() is None
        bench.settle()
        assert all(isinstance(t, Ticket) and t.outcome is not None for t in tickets)


def test_the_counters_say_what_is_there(bench: Bench) -> None:
    bench.put(*make_chain(2))
    stats = bench.ask(bench.tier.stats())
    assert isinstance(stats, CacheStats) and stats.ssd is not None and stats.ssd.block_count == 2
