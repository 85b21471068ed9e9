"""A disk that hangs costs a miss, never a request: every wait for it ends, and the prompt is computed."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path

import pytest
from icehouse_server.clock import SystemClock
from icehouse_server.domain.cache_commands import (
    EvictBlocks,
    Explain,
    Explanation,
    Pin,
    Verify,
)
from icehouse_server.domain.events import ReuseLimit
from icehouse_server.engine.core.sequence import Phase
from icehouse_server.engine.prefix_cache.tiers.storage_waits import Rates
from icehouse_server.errors import Reason, StartError, StorageError
from icehouse_server.storage.api import Inventory
from icehouse_server.storage.files import Files

from tests.fixtures.models import tiny_model_dir
from tests.fixtures.patience import BOUND_S
from tests.fixtures.storage.hanging import HangingFiles, HungReader, resume, stall
from tests.fixtures.storage.sole_tier import SoleTier
from tests.fixtures.storage.storage_thread import StorageThread, settings_for
from tests.system.cache.server import CacheServer
from tests.system.cache.stepped_server import BLOCK, SteppedServer, prompt

TOKENS = prompt(4 * BLOCK + 1)
LATE_S = 6.0
"""Longer than anybody waits without progress."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[SteppedServer]:
    """A server after a restart: what it has cached is on SSD alone, its headers known."""
    with SteppedServer(tmp_path) as first:
        first.ask("fill", TOKENS, max_output_tokens=1)
    served = SteppedServer(tmp_path)
    with served:
        served.ask("headers", TOKENS[: 2 * BLOCK] + prompt(BLOCK, salt=3))
        served.holds_storage = True
        yield served
        served.holds_storage = False


def hang_a_load(served: SteppedServer, name: str) -> HungReader:
    """Have a request wait for blocks that a reader is at."""
    assert served.storage is not None
    served.submit(name, TOKENS)
    while not served.storage._readers._work.qsize():
        served.loop.step()
    reader = HungReader.of_next(served.storage)
    assert reader is not None
    served.step_until_idle()
    assert served.recorder.end_of(name) is None
    return reader


def pass_time(served: SteppedServer, seconds: float) -> None:
    served.clock.now += seconds
    served.loop.step()
    served.step_until_idle()


def test_a_load_that_hangs_is_given_up_and_the_prompt_computed(served: SteppedServer) -> None:
    reader = hang_a_load(served, "a")
    pass_time(served, LATE_S)
    assert served.answer("a").cache.limit is ReuseLimit.LOAD_FAILED
    reader.go_on()


def test_nobody_waits_for_a_disk_that_is_known_to_hang(served: SteppedServer) -> None:
    reader = hang_a_load(served, "a")
    pass_time(served, LATE_S)
    served.cache.ram.yield_bytes(1 << 30)
    assert served.ask("b", [*TOKENS, 5]).cache.limit is ReuseLimit.LOAD_FAILED
    reader.go_on()


def test_what_is_on_ssd_is_used_again_once_the_disk_answers(served: SteppedServer) -> None:
    reader = hang_a_load(served, "a")
    pass_time(served, LATE_S)
    served.cache.ram.yield_bytes(1 << 30)
    assert served.ask("hung", TOKENS).cache.ssd_token_count == 0
    served.cache.ram.yield_bytes(1 << 30)
    reader.go_on()
    served.holds_storage = False
    pass_time(served, 1.0)
    assert served.ask("b", TOKENS).cache.ssd_token_count > 0
    assert served.stats().promote.queue_count == 0, "its place among the loads is free again"


def test_a_load_that_comes_on_is_waited_for(served: SteppedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rates, "prefill_s", lambda self, token_count: 0.1 * token_count)
    reader = hang_a_load(served, "a")
    assert served.storage is not None
    pool = served.storage._readers
    ((_, job),) = pool._jobs.items()
    for _ in range(3):
        pass_time(served, 2.8)
        pool._note_progress(job)
        pass_time(served, 0.2)
    assert served.recorder.end_of("a") is None, "it came on all the time"
    pass_time(served, 2.5)
    pool._note_progress(job)
    pass_time(served, 0.2)
    assert served.answer("a").cache.limit is ReuseLimit.LOAD_FAILED, "but it took too long altogether"
    reader.go_on()


def test_a_load_in_the_queue_is_dropped_before_it_is_read(served: SteppedServer) -> None:
    served.holds_storage = False
    read_before_bytes = served.stats().promote.read_byte_total
    served.holds_storage = True
    reader = hang_a_load(served, "a")
    served.submit("b", TOKENS[: 3 * BLOCK + 1])
    served.step_until_idle()
    pass_time(served, LATE_S)
    assert served.answer("a") and served.answer("b")
    reader.go_on()
    served.holds_storage = False
    promote = served.stats().promote
    assert (promote.read_byte_total, promote.queue_count) == (read_before_bytes, 0)


def test_headers_that_hang_are_given_up(tmp_path: Path) -> None:
    with SteppedServer(tmp_path) as first:
        first.ask("fill", TOKENS, max_output_tokens=1)
    with SteppedServer(tmp_path) as served:
        served.holds_storage = True
        served.submit("a", TOKENS[: 2 * BLOCK + 2])
        explained = served.give(Explain(tuple(TOKENS)))
        while not served.storage._readers._work.qsize():
            served.loop.step()
        reader = HungReader.of_next(served.storage)
        assert reader is not None
        served.step_until_idle()
        assert served.recorder.end_of("a") is None
        pass_time(served, LATE_S)
        served.answer("a")
        assert isinstance(explained[0], Explanation)
        reader.go_on()
        served.holds_storage = False


def test_a_directory_that_never_opens_keeps_nobody_waiting(tmp_path: Path) -> None:
    with SteppedServer(tmp_path) as first:
        first.ask("fill", TOKENS, max_output_tokens=1)
    served = SteppedServer(tmp_path)
    assert served.storage is not None
    served.storage.lock()
    stall(served.storage)
    served.holds_storage = True
    served.submit("early", TOKENS)
    explained, verified = served.give(Explain(tuple(TOKENS))), served.give(Verify())
    served.step_until_idle()
    assert served.recorder.end_of("early") is None and not explained
    pass_time(served, LATE_S)
    assert served.answer("early").cache.limit is ReuseLimit.NO_MATCH
    assert isinstance(explained[0], Explanation)
    assert isinstance(verified[0], StorageError) and verified[0].reason is Reason.STORE_UNUSABLE
    served.ask("at once", prompt(3 * BLOCK, salt=5))
    served.cache.ram.yield_bytes(1 << 30)
    resume(served.storage)
    served.holds_storage = False
    served.storage.open()
    served.step_until_idle()
    assert served.ask("later", TOKENS).cache.ssd_token_count > 0
    served.stop()


def test_counters_come_without_a_storage_thread_that_hangs(served: SteppedServer) -> None:
    served.holds_storage = False
    before = served.stats()
    served.holds_storage = True
    stall(served.storage)
    answers: list = []
    served.loop._commands.query(answers.append)
    served.step_until_idle()
    assert not answers
    pass_time(served, 1.5)
    assert answers[0].ssd == before.ssd and not answers[0].disk.hang_detail
    pass_time(served, LATE_S)
    assert "storage thread" in served.stats().disk.hang_detail
    resume(served.storage)
    served.holds_storage = False
    pass_time(served, 1.0)
    assert not served.stats().disk.hang_detail


def test_orders_that_need_a_storage_thread_that_hangs_are_refused(served: SteppedServer) -> None:
    stall(served.storage)
    served.clock.now += LATE_S
    for order in (EvictBlocks(()), Pin(tuple(TOKENS)), Verify()):
        refusal = served.order(order)
        assert isinstance(refusal, StorageError) and refusal.reason is Reason.STORE_UNUSABLE, order
    resume(served.storage)


def test_hanging_reads_are_told_in_the_counters_and_the_log(
    served: SteppedServer, caplog: pytest.LogCaptureFixture
) -> None:
    reader = hang_a_load(served, "a")
    pass_time(served, LATE_S)
    pass_time(served, 1.0)
    assert "1 reads hang" in served.cache.stats(None).disk.hang_detail
    reader.go_on()
    served.holds_storage = False
    pass_time(served, 1.0)
    assert not served.stats().disk.hang_detail
    assert [r.message for r in caplog.records if r.message.startswith("ssd_")] == [
        "ssd_hangs",
        "ssd_answers_again",
    ]


def test_memory_of_blocks_that_are_never_written_is_not_waited_for(tmp_path: Path) -> None:
    with SteppedServer(tmp_path, ram_blocks=4) as served:
        served.holds_storage = True
        served.ask("a", TOKENS)
        served.ask("b", prompt(len(TOKENS), salt=2))
        assert served.controller.is_writing
        stall(served.storage)
        served.clock.now += LATE_S
        assert not served.controller.is_writing
        resume(served.storage)
        served.holds_storage = False


def test_cancelled_while_its_load_hangs(served: SteppedServer) -> None:
    reader = hang_a_load(served, "a")
    served.cancel("a")
    pass_time(served, LATE_S)
    reader.go_on()
    served.holds_storage = False
    served.step_until_idle()
    served.check()
    assert all(s.phase is not Phase.LOADING for s in served.scheduler.running)


def test_a_server_whose_reads_hang_answers_and_ends(model_dir: Path, tmp_path: Path) -> None:
    """Real threads, a real model: reads hang for good, then the server is told to stop."""
    tokens = [3 + i % 50 for i in range(200)]
    with CacheServer(model_dir, tmp_path / "cache") as first:
        cold = first.ask("cold", tokens)
    files = HangingFiles({"read_into"})
    try:
        with CacheServer(model_dir, tmp_path / "cache", files=files) as served:
            files.hang()
            assert served.ask("hung", tokens).tokens == cold.tokens
            assert files.has_hung.is_set(), "nothing was read at all"
            _, stats = served.stats()
            assert stats.disk is not None and "reads hang" in stats.disk.hang_detail
            assert served.ask("at once", [*tokens, 7]).cache.ssd_token_count == 0
    finally:
        files.go_on()


def test_a_server_whose_directory_hangs_answers_and_ends(model_dir: Path, tmp_path: Path) -> None:
    """Writes never end: requests are answered, and RAM is not waited for to be written when it stops."""
    files = HangingFiles({"fsync", "fsync_dir"})
    served = CacheServer(model_dir, tmp_path / "cache", files=files)
    assert served.storage is not None
    served.__enter__()
    files.hang()
    try:
        for number in range(3):
            assert served.ask(f"{number}", [number + 1 + i % 50 for i in range(100)]).tokens
        served.engine.drain(grace_s=BOUND_S)
        served.thread.end()
        assert served.thread.join(timeout_s=BOUND_S), "the flush goes on"
        assert files.has_hung.is_set(), "nothing was written at all"
        served.storage.close(deadline_time=SystemClock().monotonic() + 1.0)
        assert not served.storage.join(timeout_s=BOUND_S), "it hangs, and says so"
    finally:
        files.go_on()
        for thread in served.storage._threads:
            thread.join(BOUND_S)


def test_a_disk_that_hangs_at_the_start_does_not_stop_it(tmp_path: Path) -> None:
    files = HangingFiles({"lock"})
    outcomes: queue.Queue = queue.Queue()
    storage = SoleTier(settings_for(tmp_path), files=files, clock=SystemClock(), post=outcomes.put)
    files.hang()
    try:
        storage.start(lock_timeout_s=0.2)
        assert files.has_hung.is_set() and outcomes.empty()
    finally:
        files.go_on()
    assert isinstance(outcomes.get(timeout=BOUND_S), Inventory)
    storage.close(deadline_time=SystemClock().monotonic() + BOUND_S)
    assert storage.join(timeout_s=BOUND_S)


def test_a_directory_of_another_process_is_refused_at_the_start(tmp_path: Path) -> None:
    with StorageThread(tmp_path):
        second = SoleTier(settings_for(tmp_path), files=Files(), clock=SystemClock(), post=print)
        with pytest.raises(StartError) as refused:
            second.start()
        assert refused.value.reason is Reason.STORE_LOCKED
