"""The next spill's file is written while the disk makes the one before it durable."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import pytest
from icehouse_server.domain.cache_stats import SpillDropCause
from icehouse_server.storage.api import BlockPersisted, BlocksEvicted
from icehouse_server.storage.local.directory.manifest import GROWTH_ALLOWANCE_BYTES, LOG_ALLOWANCE_BYTES
from icehouse_server.storage.store_paths import PARTIAL_SUFFIX

from tests.fixtures.storage.blocks import make_block, make_chain
from tests.fixtures.storage.faults import FaultyFiles
from tests.fixtures.storage.storage_thread import StorageThread, drops


class SlowDisk(Executor):
    """Syncs a file at the moment when somebody waits for it; keeps which partials were there then."""

    def __init__(self, directory: str) -> None:
        self.partials: list[int] = []
        self._directory = directory

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        disk = self

        class Sync(Future[Any]):
            def result(self, timeout: float | None = None) -> Any:
                disk.partials.append(partial_count(disk._directory))
                return fn(*args, **kwargs)

        return Sync()


def partial_count(directory: str) -> int:
    return sum(name.endswith(PARTIAL_SUFFIX) for _, _, names in os.walk(directory) for name in names)


def hand_over(served: StorageThread, *blocks) -> None:
    for block in blocks:
        served.storage.put(block)


def test_the_next_file_is_written_before_one_is_durable(tmp_path):
    with StorageThread(tmp_path) as served:
        disk = served.storage._store.syncs = SlowDisk(os.fspath(tmp_path))
        hand_over(served, *make_chain(3))
        assert [type(o) for o in served.take()[1:]] == 3 * [BlockPersisted]
        assert disk.partials == [2, 2, 1] and partial_count(os.fspath(tmp_path)) == 0
        assert served.storage._store.space.partial_bytes == 0


def test_nothing_is_written_ahead_beyond_the_size_limit(tmp_path):
    chain = make_chain(2, head_count=2048)
    beside_bytes = LOG_ALLOWANCE_BYTES + GROWTH_ALLOWANCE_BYTES
    with StorageThread(tmp_path, limit_bytes=beside_bytes + 7 * chain[0].size_bytes // 4) as served:
        disk = served.storage._store.syncs = SlowDisk(os.fspath(tmp_path))
        hand_over(served, *chain)
        served.take()
        assert disk.partials == [1, 1]


@pytest.mark.parametrize("verb", ["fsync", "write"])
def test_a_broken_disk_leaves_no_file_of_either(tmp_path, verb):
    # A block is written in three calls: the fourth is the second block's.
    files = FaultyFiles(verb, 1 if verb == "fsync" else 4, errno.EIO)
    chain = make_chain(2)
    with StorageThread(tmp_path, files=files) as served:
        served.take()
        files.is_armed = True
        hand_over(served, *chain)
        dropped = drops(served.take())
        assert files.failed_count == 1
        assert [drop.hash for drop in dropped] == [block.header.hash for block in chain]
        assert dropped[-1].cause is SpillDropCause.WRITES_OFF
        assert partial_count(os.fspath(tmp_path)) == 0
        assert served.storage._store.space.partial_bytes == 0
        assert served.storage.queue_space_bytes == served.settings.spill_queue_limit_bytes


def test_a_disk_found_full_at_the_sync_is_tried_again_and_so_is_the_next_block(tmp_path):
    files = FaultyFiles("fsync", 1, errno.ENOSPC)
    old, chain = make_block(seed=9), make_chain(2)
    with StorageThread(tmp_path, files=files) as served:
        served.spill(old)
        served.take()
        files.is_armed = True
        hand_over(served, *chain)
        assert [type(o) for o in served.take()] == [BlocksEvicted, BlockPersisted, BlockPersisted]
        assert served.storage._store.space.partial_bytes == 0
