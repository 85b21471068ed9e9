"""Ranks that hang, stand still or do not come: the others notice, say so and end; so does a signal."""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from icehouse_server.engine.runner import rank as rank_module
from icehouse_server.group import follower_loop
from icehouse_server.group.follower import Follower
from icehouse_server.storage.files import Files

from tests.fixtures.models import tiny_model_dir
from tests.fixtures.patience import BOUND_S
from tests.system.crash.crashing_server import ServerProcess
from tests.system.group.rank_group import BLOCK, RankGroup, question
from tests.system.group.signals import die_in_join, signal_at_record

pytestmark = pytest.mark.group

PROMPT = [(13 * n) % 90 + 5 for n in range(6 * BLOCK)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture
def group(folder: Path, tmp_path: Path) -> Iterator[RankGroup]:
    with RankGroup(folder, tmp_path) as started:
        started.serving.wait_until_serving()
        yield started


def code_when(group: RankGroup, act: Callable[[], object]) -> grpc.StatusCode:
    """Return what a caller is told whose stream runs when something happens."""
    with group.stub() as stub:
        stream = stub.Stream(question(PROMPT, count=2000), timeout=BOUND_S)
        while next(stream).WhichOneof("event") != "delta":
            pass
        act()
        with pytest.raises(grpc.RpcError) as refused:
            for _ in stream:
                pass
    return refused.value.code()  # type: ignore[no-any-return]


def stop(process: ServerProcess) -> None:
    """Have a process stand still, as on a machine that hangs."""
    os.kill(process.pid, signal.SIGSTOP)


def test_a_follower_that_stands_still_ends_the_streams(group: RankGroup) -> None:
    assert code_when(group, lambda: stop(group.ranks[1])) is grpc.StatusCode.UNAVAILABLE
    assert group.serving.wait() == 1
    assert "nothing came from it for 3.0 s" in group.log(0)


def test_a_follower_whose_rank_0_stands_still_ends(group: RankGroup) -> None:
    stop(group.serving)
    assert group.ranks[1].wait() == 1
    assert "rank_0_lost" in group.log(1)


def hang_in_a_pass(fifo: Path) -> None:
    """Plant a fault: in its eighth pass this rank waits for a file that nobody writes."""
    follower_loop.ORDER_S = 2.0
    carried_out = Follower._do_run

    def hang(self: Follower, order: Any) -> None:
        if self.pass_count == 8:
            fifo.read_bytes()
        carried_out(self, order)

    Follower._do_run = hang  # type: ignore[method-assign]


def test_a_follower_that_hangs_and_still_says_that_it_lives_ends_the_streams(
    folder: Path, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "fifo")
    broken = {1: functools.partial(hang_in_a_pass, tmp_path / "fifo")}
    with RankGroup(folder, tmp_path, break_rank=broken) as group:
        group.serving.wait_until_serving()
        assert code_when(group, lambda: None) is grpc.StatusCode.UNAVAILABLE
        assert [process.wait() for process in group.ranks] == [1, 1]
    assert "it has been at one order (run) for 2 s" in group.log(0)


def hang_reads(fifo: Path) -> None:
    """Plant a fault: what this rank reads of blocks does not come."""
    read = Files.read_into

    def hang(self: Files, descriptor: int, parts: Any, *, offset: int) -> int:
        if threading.current_thread().name.startswith("storage-reader"):
            fifo.read_bytes()
        return read(self, descriptor, parts, offset=offset)

    Files.read_into = hang  # type: ignore[method-assign]


def test_a_followers_disk_that_hangs_costs_recomputation_and_rank_0_says_whose(
    folder: Path, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "fifo")
    with RankGroup(folder, tmp_path) as group:
        group.serving.wait_until_serving()
        expected = list(group.ask(PROMPT).token_ids)
        group.stop()
    broken = {1: functools.partial(hang_reads, tmp_path / "fifo")}
    with RankGroup(folder, tmp_path, break_rank=broken) as group:
        group.serving.wait_until_serving()
        answer = group.ask(PROMPT)
        assert list(answer.token_ids) == expected and answer.cache.cached_tokens == 0
    assert 'rank_ssd_hangs rank=1 detail="1 reads hang"' in group.log(0)


def join_for_a_moment() -> None:
    """Join the ring for a shorter time than in earnest."""
    rank_module._JOIN_S = 3.0


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_as_the_ring_is_joined_keeps_no_other_waiting(
    folder: Path, tmp_path: Path, victim: int
) -> None:
    broken = {victim: die_in_join, 1 - victim: join_for_a_moment}
    with RankGroup(folder, tmp_path, break_rank=broken) as group:
        assert group.ranks[victim].wait() == -signal.SIGKILL
        assert group.ranks[1 - victim].wait() == 1
        assert group.start_again_until_serving() == 2
        group.ask(PROMPT)


NEVER_THERE = functools.partial(signal_at_record, signal.SIGKILL, "open_files_allowed")


def test_a_follower_that_is_told_to_stop_alone_ends_well_and_the_group_as_after_a_loss(
    group: RankGroup,
) -> None:
    expected = list(group.ask(PROMPT).token_ids)
    assert code_when(group, group.ranks[1].terminate) is grpc.StatusCode.UNAVAILABLE
    assert [process.wait() for process in group.ranks] == [1, 0]
    assert 'detail="it was told to stop, and rank 0 was not"' in group.log(0)
    group.start()
    group.serving.wait_until_serving()
    assert list(group.ask(PROMPT).token_ids) == expected


def test_a_follower_that_is_told_to_stop_while_it_has_nothing_to_do_writes_what_it_has(
    group: RankGroup,
) -> None:
    group.ranks[1].terminate()
    assert [process.wait() for process in group.ranks] == [1, 0]
    assert "group_ended" in group.log(1)


def test_ranks_that_are_all_told_to_stop_finish_what_runs(group: RankGroup) -> None:
    with group.stub() as stub:
        stream = stub.Stream(question(PROMPT, count=60), timeout=BOUND_S)
        next(stream)
        for process in reversed(group.ranks):
            process.terminate()
        kinds = [event.WhichOneof("event") for event in stream]
    assert kinds[-1] == "finished"
    assert [process.wait() for process in group.ranks] == [0, 0]


def test_a_signal_ends_a_rank_0_that_waits_for_ranks(folder: Path, tmp_path: Path) -> None:
    broken = {0: functools.partial(signal_at_record, signal.SIGTERM, "rank_joined"), 2: NEVER_THERE}
    with RankGroup(folder, tmp_path, world=3, break_rank=broken) as group:
        assert [process.wait() for process in group.ranks] == [0, 0, -signal.SIGKILL]


def test_a_signal_ends_a_follower_that_waits_for_rank_0(folder: Path, tmp_path: Path) -> None:
    broken = {1: functools.partial(signal_at_record, signal.SIGTERM, "rank_0_missing"), 0: NEVER_THERE}
    with RankGroup(folder, tmp_path, break_rank=broken) as group:
        assert [process.wait() for process in group.ranks] == [-signal.SIGKILL, 0]
