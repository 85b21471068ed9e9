"""Faults that scenarios have found, each as a test of its own."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from icehouse_server.domain.cache_commands import (
    CacheAnswer,
    CacheCommand,
    EvictReport,
    Pin,
    PinReport,
    Verify,
)
from icehouse_server.domain.events import Finished
from icehouse_server.domain.ids import CacheScope, RequestId
from icehouse_server.domain.request import GenerationRequest
from icehouse_server.domain.sampling import SamplingParams
from icehouse_server.engine.core.mailbox import Command, Submit
from icehouse_server.engine.prefix_cache.tiers import tenant_quota
from icehouse_server.engine.scheduling.limits import SchedulerLimits
from icehouse_server.errors import IcehouseError, NotFound, Overloaded
from icehouse_server.pins import UNTIL_UNPINNED
from icehouse_server.storage.local.directory.manifest import LOG_ALLOWANCE_BYTES

from tests.fixtures.known_blocks import removal_of
from tests.system.sim.checks import check_agreement, check_pins_agree, check_ram, check_rest
from tests.system.sim.clock import SimClock
from tests.system.sim.event_watch import EventWatch
from tests.system.sim.images import drawn_image, ids_and_spans
from tests.system.sim.ledger import Ledger, Promise
from tests.system.sim.model import ModelSpec, reference_reply
from tests.system.sim.server import Life, SimServer
from tests.system.sim.setup import BLOCK, Setup, make_setup


class Bench:
    """A server whose setup a test changes; requests are checked when they end."""

    def __init__(self, directory: Path, spec: ModelSpec, **changes: object) -> None:
        self.setup: Setup = dataclasses.replace(
            make_setup(random.Random(0)), specs=(spec, spec), has_storage=True, **changes
        )
        self.ledger = Ledger()
        self.clock = SimClock()
        self._directory = directory
        self._life_count = 0
        self.served = self._open()

    def _open(self) -> SimServer:
        life = Life(self._life_count, 0, self._directory, 10**18)
        self._life_count += 1
        served = SimServer(self.setup, life, clock=self.clock, ledger=self.ledger, dice=random.Random(0))
        served.open()
        return served

    def restart(self) -> None:
        self.served.stop(grace_s=1.0, flush_s=60.0)
        self.served = self._open()
        self.served.come_to_rest()

    def submit(self, prompt: Sequence[int], *, max_output_tokens: int = 4) -> Promise:
        token_ids, images = ids_and_spans(tuple(prompt))
        request = GenerationRequest(
            request_id=RequestId(f"r{len(self.ledger.promises)}"),
            prompt_token_ids=token_ids,
            images=images,
            max_output_tokens=max_output_tokens,
            sampling=SamplingParams(),
            stop=(),
            arrival_time=self.clock.monotonic(),
        )
        promise = Promise(request, reference_reply(self.setup.specs[0], request), 0)
        self.ledger.promises.append(promise)
        assert self.served.mailbox.offer(Submit(request))
        return promise

    def ask(self, prompt: bytes, *, max_output_tokens: int = 4) -> Finished:
        """Submit a request, let everything settle, and check the reply and all accounts."""
        promise = self.submit(prompt, max_output_tokens=max_output_tokens)
        self.served.come_to_rest()
        events = self.served.recorder.events[promise.request.request_id]
        self.ledger.check_end(promise, events)
        check_ram(self.served)
        check_rest(self.served)
        check_agreement(self.served)
        assert isinstance(events[-1], Finished)
        return events[-1]

    def order(self, order: CacheCommand) -> CacheAnswer | IcehouseError:
        answers: list[CacheAnswer | IcehouseError] = []
        self.served.mailbox.post(Command(order, answers.append))
        self.served.come_to_rest()
        (answer,) = answers
        return answer


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "cache"


@pytest.mark.parametrize("window", [BLOCK - 1, BLOCK, BLOCK + 1])
def test_a_block_that_ends_with_the_prompt_is_captured_one_token_late(directory: Path, window: int) -> None:
    """The first decode step runs two tokens; a short window has then passed the block's beginning."""
    bench = Bench(directory, ModelSpec(1, True, window, False), ram_limit_bytes=100_000)
    prompt = b"abcdabcdabcd"
    bench.ask(prompt)
    assert bench.ask(prompt).usage.cache.cached_token_count == len(prompt) - 1


def test_a_block_used_while_it_was_to_leave_does_not_push_ram_over_its_budget(directory: Path) -> None:
    bench = Bench(directory, ModelSpec(1, True, 0, False), ram_limit_bytes=200, spill_policy="on_evict")
    for prompt in (b"aaaabbbbc", b"ccccddddc", b"aaaabbbbc"):
        bench.submit(prompt, max_output_tokens=0)
        for _ in range(10):
            bench.served.step_engine()
            check_ram(bench.served)
    assert bench.served.spilling()
    bench.served.come_to_rest()
    check_rest(bench.served)


def test_a_block_pinned_while_it_was_to_leave_stays_when_the_disk_does_not_take_it(directory: Path) -> None:
    bench = Bench(
        directory,
        ModelSpec(1, True, 0, False),
        ram_limit_bytes=200,
        disk_limit_bytes=1,
        spill_policy="on_evict",
    )
    for prompt in (b"aaaabbbbc", b"ccccddddc"):
        bench.submit(prompt, max_output_tokens=0)
        for _ in range(10):
            bench.served.step_engine()
    (leaving,) = bench.served.spilling()
    answer = bench.order(Pin(tuple(b"aaaabbbbc")))
    assert isinstance(answer, PinReport) and answer.block_count == 2
    entry = bench.served.cache.tree.get(leaving)
    assert entry is not None and entry.ram and entry.is_pinned


@pytest.mark.parametrize("is_written_first", [False, True])
def test_a_block_pinned_while_it_was_to_leave_outlives_a_full_disk(
    directory: Path, is_written_first: bool
) -> None:
    """Between a block's commit and its pin, the next block on its way may replace it on the disk."""
    bench = Bench(
        directory,
        ModelSpec(1, True, 0, False),
        ram_limit_bytes=200,
        disk_limit_bytes=LOG_ALLOWANCE_BYTES + 5_000,
        spill_policy="on_evict",
    )
    served = bench.served
    for prompt in (b"aaaabbbbc", b"ccccddddc", b"bbbbaaaac"):
        bench.submit(prompt, max_output_tokens=0)
        for _ in range(10):
            served.step_engine()
    block, *_ = served.spilling()
    served.mailbox.post(Command(Pin(tuple(b"aaaabbbb")), lambda _: None))
    if not is_written_first:
        served.step_engine()
    while served.step_storage():
        pass
    assert (block in bench.ledger.removed) is is_written_first
    served.come_to_rest()
    entry = served.cache.tree.get(block)
    assert entry is not None and entry.is_pinned
    assert entry.ram if is_written_first else block in bench.ledger.committed
    check_ram(served)
    check_pins_agree(served)


def test_a_pin_of_what_leaves_ram_is_refused_where_it_may_be_lost(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block was not on SSD yet, the disk might not take it, and RAM had no space for it: the caller was
    told that it is pinned, and then it was gone."""
    monkeypatch.setattr(tenant_quota, "_PINNED_SHARE", 2.0)
    bench = Bench(
        directory,
        ModelSpec(1, True, 0, False),
        ram_limit_bytes=200,
        disk_limit_bytes=1,
        spill_policy="on_evict",
    )
    served = bench.served
    for prompt in (b"aaaabbbbc", b"ccccddddc"):
        bench.submit(prompt, max_output_tokens=0)
        for _ in range(10):
            served.step_engine()
    (leaving,) = served.spilling()
    # Pin all other blocks, so that none can be evicted for it.
    served.cache.pin([entry for entry in served.cache.tree.in_ram() if entry.hash != leaving], UNTIL_UNPINNED)
    answers: list[CacheAnswer | IcehouseError] = []
    served.mailbox.post(Command(Pin(tuple(b"aaaabbbbc")), answers.append))
    served.step_engine()
    (answer,) = answers
    assert isinstance(answer, Overloaded) and "1 of 2 blocks" in str(answer), answer
    entry = served.cache.tree.get(leaving)
    assert entry is not None and not entry.is_pinned
    served.come_to_rest()
    assert served.cache.tree.get(leaving) is None


def test_a_pin_of_what_left_the_ssd_meanwhile_says_so(directory: Path) -> None:
    """The storage thread evicts a block before the order to pin it arrives."""
    bench = Bench(directory, ModelSpec(1, True, 0, False), ram_limit_bytes=100_000, spill_policy="on_evict")
    bench.ask(b"aaaabbbbc", max_output_tokens=0)
    bench.restart()
    served = bench.served
    records = sorted(served.store.index, key=lambda record: record.start_token_index)
    told: list[list[CacheAnswer | IcehouseError]] = [[], []]
    for answers, going in zip(told, (records[1:], records[:1]), strict=True):
        served.mailbox.post(Command(Pin(tuple(b"aaaabbbb")), answers.append))
        served.step_engine()
        assert answers == [], "an answer before anybody knows"
        served.store.remove(going)
        bench.ledger.removed.update(record.hash for record in going)
        served.come_to_rest()
    assert isinstance(told[0][0], PinReport) and told[0][0].block_count == 1
    assert isinstance(told[1][0], NotFound)
    assert not list(served.cache.tree)


def test_a_pin_of_what_was_found_damaged_meanwhile_says_so(directory: Path) -> None:
    """The block is there when the storage thread pins it, but a load at the same time finds it damaged."""
    bench = Bench(directory, ModelSpec(1, True, 0, False), ram_limit_bytes=100_000, spill_policy="on_evict")
    bench.ask(b"aaaabbbbc", max_output_tokens=0)
    bench.restart()
    served = bench.served
    records = sorted(served.store.index, key=lambda record: record.start_token_index)
    answers: list[CacheAnswer | IcehouseError] = []
    served.mailbox.post(Command(Pin(tuple(b"aaaabbbb")), answers.append))
    served.step_engine()
    while served.step_storage():
        pass
    served.store.remove(records[1:])
    bench.ledger.removed.update(record.hash for record in records[1:])
    served.cache.tree.forget_stored(records[1].hash)
    served.come_to_rest()
    (answer,) = answers
    assert isinstance(answer, PinReport) and answer.block_count == 1
    assert [entry.hash for entry in served.cache.tree] == [records[0].hash]
    check_pins_agree(served)


def test_a_window_is_not_promised_across_a_block_that_is_gone(directory: Path) -> None:
    """Without kv regions a chain may have gaps; a window may not."""
    bench = Bench(directory, ModelSpec(1, False, 2 * BLOCK + 1, False), ram_limit_bytes=100_000)
    prompt = b"abcdabcdabcdabcda"
    bench.ask(prompt, max_output_tokens=0)
    cache = bench.served.cache
    blocks = cache.known_chain(prompt, CacheScope())
    assert len(blocks) == 4
    cache.purge(blocks[2:3], with_ssd=False)
    assert bench.ask(prompt, max_output_tokens=0).usage.cache.cached_token_count == 2 * BLOCK


def test_a_pin_right_after_an_order_to_evict_finds_nothing(directory: Path) -> None:
    """Both commands wait in the mailbox; the blocks are still on SSD, but about to be removed."""
    bench = Bench(directory, ModelSpec(1, True, 0, False), ram_limit_bytes=100_000, spill_policy="on_evict")
    prompt = b"aaaabbbbc"
    bench.ask(prompt, max_output_tokens=0)
    bench.restart()
    answers: list[CacheAnswer | IcehouseError] = []
    for order in (removal_of(bench.served.cache, tuple(prompt)), Pin(tuple(prompt))):
        bench.served.mailbox.post(Command(order, answers.append))
    bench.served.come_to_rest()
    assert isinstance(answers[0], NotFound), answers
    assert isinstance(answers[1], EvictReport) and answers[1].ssd_block_count == 2, answers


def test_a_block_computed_and_pinned_again_behind_an_order_to_evict_it_stays(directory: Path) -> None:
    """The block was on its way to SSD when the command came: its row, pinned by then, is removed after it."""
    bench = Bench(directory, ModelSpec(1, True, 0, False), ram_limit_bytes=200, spill_policy="on_evict")
    served = bench.served
    for prompt in (b"aaaabbbbc", b"ccccddddc"):
        bench.submit(prompt, max_output_tokens=0)
        for _ in range(10):
            served.step_engine()
    (block,) = served.spilling()
    served.mailbox.post(Command(removal_of(served.cache), lambda _: None))
    bench.submit(b"aaaabbbbc", max_output_tokens=0)
    for _ in range(10):
        served.step_engine()
    assert served.spilling() == [block]
    assert isinstance(bench.order(Pin(tuple(b"aaaabbbb"))), PinReport)
    entry = served.cache.tree.get(block)
    assert entry is not None and entry.is_pinned and entry.ram and block in bench.ledger.removed


def test_an_order_to_evict_is_answered_when_what_another_one_removes_is_gone(directory: Path) -> None:
    bench = Bench(directory, ModelSpec(1, True, 0, False), ram_limit_bytes=100_000, spill_policy="on_evict")
    prompt = b"aaaabbbbc"
    bench.ask(prompt, max_output_tokens=0)
    bench.restart()
    answers: list[CacheAnswer | IcehouseError] = []
    order = removal_of(bench.served.cache, tuple(prompt))
    for _ in range(2):
        bench.served.mailbox.post(Command(order, answers.append))
    bench.served.step_engine()
    assert answers == [] and len(bench.served.store.index) == 2
    bench.served.come_to_rest()
    first, second = answers
    assert isinstance(first, EvictReport) and first.ssd_block_count == 2, first
    assert isinstance(second, EvictReport) and second.ssd_block_count == 0, second


def test_a_refused_pin_pins_nothing(directory: Path) -> None:
    bench = Bench(directory, ModelSpec(1, True, 0, False), ram_limit_bytes=100_000, task_queue_count=1)
    prompt = b"aaaabbbbc"
    bench.ask(prompt, max_output_tokens=0)
    bench.restart()
    answers: list[CacheAnswer | IcehouseError] = []
    for order in (Verify(), Pin(tuple(prompt))):
        bench.served.mailbox.post(Command(order, answers.append))
    bench.served.come_to_rest()
    assert isinstance(answers[0], Overloaded), answers
    assert not any(entry.is_pinned for entry in bench.served.cache.tree)


def test_pinned_blocks_that_were_to_leave_and_are_used_again_do_not_outgrow_ram(directory: Path) -> None:
    bench = Bench(directory, ModelSpec(1, True, 0, False), ram_limit_bytes=130, spill_policy="on_evict")
    bench.submit(b"aaaabbbbc", max_output_tokens=0)
    for _ in range(10):
        bench.served.step_engine()
    bench.submit(b"ccccddddc", max_output_tokens=0)
    bench.served.mailbox.post(Command(Pin(tuple(b"ccccdddd")), lambda _: None))
    for _ in range(10):
        bench.served.step_engine()
    for prompt in (b"aaaabbbbc", b"ccccddddc"):
        bench.served.mailbox.post(Command(Pin(tuple(prompt)), lambda _: None))
        bench.submit(prompt, max_output_tokens=0)
        for _ in range(10):
            bench.served.step_engine()
            check_ram(bench.served)
    bench.served.come_to_rest()
    check_ram(bench.served)


def test_a_block_whose_header_could_not_be_read_is_announced_once_a_prompt_brought_its_tokens(
    directory: Path,
) -> None:
    """If reading its header failed, gateways learned of it and later blocks only at the next listing."""
    bench = Bench(directory, ModelSpec(1, True, 0, False), ram_limit_bytes=100)
    bench.ask(b"aaaab", max_output_tokens=0)
    # Blocks that come to RAM are announced with their tokens.
    bench.setup = dataclasses.replace(bench.setup, ram_limit_bytes=1)
    bench.restart()
    served = bench.served
    watch = EventWatch(served, bench.ledger, random.Random(0))
    for _ in range(2):
        # The listing, then the question for the tokens of the blocks that it named.
        watch._turn()
        served.step_engine()
    served.disk.fail_in = 1
    served.come_to_rest()
    assert bench.ledger.io_errors(served) and not watch.feed.event_total
    served.disk.fail_in = None
    assert bench.ask(b"aaaab").usage.cache.ssd_token_count
    watch.check()
    assert watch.feed.event_total


@pytest.mark.parametrize("ram_limit_bytes", [0, 100_000])
def test_prompts_with_images_go_on_with_the_same_tokens_when_they_were_parked(
    directory: Path, ram_limit_bytes: int
) -> None:
    """Only one story in thirty reaches this: too few for the stories that are played by default."""
    bench = Bench(
        directory,
        ModelSpec(1, True, 0, False),
        ram_limit_bytes=ram_limit_bytes,
        memory_limit_bytes=8_000,
        limits=SchedulerLimits(
            running_limit=3, prefilling_limit=3, prefill_chunk_token_count=BLOCK, prefill_slice_s=0.0
        ),
    )
    served, dice = bench.served, random.Random(0)
    promises = [
        bench.submit((*b"abcd", *drawn_image(dice), *b"dcba", number), max_output_tokens=40)
        for number in b"abc"
    ]
    for _ in range(30):
        served.step_engine()
        # Another process takes the memory while two decode, and gives it back.
        served.budget.limit_bytes = 300 if len(served.runner.decoding) > 1 else 8_000
    served.budget.limit_bytes = 8_000
    served.come_to_rest()
    assert served.loop.counters.stats.parked_total > 0
    for promise in promises:
        bench.ledger.check_end(promise, served.recorder.events[promise.request.request_id])
