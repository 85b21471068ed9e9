"""A store on a test's own directory, with a clock that stands still."""

from __future__ import annotations

import dataclasses
import os

from icehouse_server.storage.directory.store import BlockStore
from icehouse_server.storage.files import SystemFiles
from icehouse_server.storage.messages import Evicted, Inventory, Persisted, StatsAnswer, StorageClosed
from icehouse_server.storage.paths import StorePaths
from icehouse_server.storage.settings import StorageSettings
from icehouse_server.storage.worker.storage import Storage

from tests.storage.blocks import FINGERPRINT


@dataclasses.dataclass
class ManualClock:
    """Both readings move only when told."""

    now_s: float = 1_000_000.0

    def monotonic(self) -> float:
        return self.now_s

    def wall(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


def settings_for(directory, **changes) -> StorageSettings:
    """Return settings with room for everything unless changed."""
    settings = StorageSettings(
        directory=os.fspath(directory),
        fingerprint=FINGERPRINT,
        fingerprint_details=(("architecture", "test"),),
        limit_bytes=1 << 30,
        free_floor_bytes=0,
        daily_write_limit_bytes=0,
        spill_queue_limit_bytes=1 << 24,
        load_queue_limit_count=16,
        task_queue_limit_count=64,
        reader_thread_count=2,
    )
    return dataclasses.replace(settings, **changes)


def open_store(directory, *, files=None, clock=None, vault=None, **changes) -> BlockStore:
    """Return a locked, open store."""
    store = BlockStore(
        settings_for(directory, **changes),
        files=files or SystemFiles(),
        clock=clock or ManualClock(),
        vault=vault,
    )
    store.lock()
    store.open()
    return store


class StorageHouse:
    """The whole tier on the test's own thread: outcomes are kept until taken."""

    def __init__(self, directory, *, files=None, clock=None, vault=None, **changes) -> None:
        self.settings = settings_for(directory, **changes)
        self.clock = clock or ManualClock()
        self.files = files or SystemFiles()
        self.outcomes: list = []
        self.storage = Storage(
            self.settings, files=self.files, clock=self.clock, post=self.outcomes.append, vault=vault
        )

    def __enter__(self) -> StorageHouse:
        self.storage.lock()
        self.storage.open()
        return self

    def __exit__(self, kind, error, trace) -> None:
        if kind is None:
            self.storage.close(deadline_time=self.clock.monotonic() + 60)
            self.settle()
            assert isinstance(self.outcomes[-1], StorageClosed), self.outcomes[-1]

    def settle(self) -> None:
        """Work until nothing is left to do."""
        for _ in range(100_000):
            if not self.storage.step():
                return
        raise AssertionError("the tier never comes to rest")

    def take(self) -> list:
        """Settle, then return the outcomes since the last call."""
        self.settle()
        taken = list(self.outcomes)
        self.outcomes.clear()
        return taken

    def take_inventory(self) -> tuple:
        """Return the records of the last inventory less what was evicted since; outcomes stay."""
        self.settle()
        records: dict = {}
        for outcome in self.outcomes:
            if isinstance(outcome, Inventory):
                records = {record.hash: record for record in outcome.records}
            elif isinstance(outcome, Persisted):
                records[outcome.record.hash] = outcome.record
            elif isinstance(outcome, Evicted):
                for block_hash in outcome.hashes:
                    records.pop(block_hash, None)
        return tuple(records.values())

    def spill(self, *blocks) -> None:
        """Hand blocks over and settle."""
        for block in blocks:
            credit = self.storage.try_reserve(block.size_bytes)
            assert credit is not None
            self.storage.spill(block, credit)
            self.settle()

    def stats(self):
        """Return the counters; other outcomes stay where they are."""
        self.storage.request_stats()
        self.settle()
        answer = next(o for o in reversed(self.outcomes) if isinstance(o, StatsAnswer))
        self.outcomes.remove(answer)
        return answer.stats

    def path(self, block) -> str:
        """Return where a block's file is."""
        paths = StorePaths(os.path.abspath(self.settings.directory))
        return paths.block(block.header.fingerprint, block.header.hash)
