"""One life of the server process: engine loop, prefix cache, SSD tier, all stepped by hand."""

from __future__ import annotations

import dataclasses
import gc
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from icehouse_server.domain.blocks import HostBlock
from icehouse_server.domain.ids import BlockHash, Fingerprint
from icehouse_server.engine.core.mailbox import DrainEngine, Mailbox, Message
from icehouse_server.engine.core.memory_budget import MemoryBudget
from icehouse_server.engine.engine_loop import EngineLoop
from icehouse_server.engine.prefix_cache.controller import CacheController
from icehouse_server.engine.prefix_cache.prefix_cache import PrefixCache
from icehouse_server.engine.scheduling.memory_guard import MemoryGuard
from icehouse_server.engine.scheduling.preemption import SchedulingParts
from icehouse_server.engine.scheduling.scheduler import Scheduler
from icehouse_server.engine.scheduling.waiting_queue import WaitingQueue
from icehouse_server.errors import Reason, Unavailable
from icehouse_server.storage.api import BlocksEvicted, Names, Outcome, StorageClosed, StorageFailed
from icehouse_server.storage.local.tier import LocalTier
from icehouse_server.storage.shared.object_store import SharedSettings
from icehouse_server.storage.shared.shared_tier import SharedTier
from icehouse_server.storage.storage_settings import Codec

from tests.fixtures.engine import FakeDecoder, Recorder, model_info
from tests.fixtures.storage.hanging import HungReader, resume, stall
from tests.fixtures.storage.sole_tier import SoleTier
from tests.system.sim.clock import SimClock
from tests.system.sim.disk import SimDisk
from tests.system.sim.ledger import Ledger
from tests.system.sim.model import CONTEXT_TOKEN_LIMIT
from tests.system.sim.runner import SimRunner
from tests.system.sim.setup import BLOCK, Setup, fingerprint

Gone = Mapping[Fingerprint, Sequence[BlockHash]]
_REST_STEP_LIMIT = 20_000
_SHARED = SharedSettings(
    lookup_timeout_s=0.5, write_bytes_per_s=0, object_limit_bytes=1 << 24, silence_s=1.0, put_timeout_s=3.0
)
_PADDING_BYTES = 96
"""Makes a region shrink by a quarter in byte planes."""


class MailboxWithoutWaiting(Mailbox[Message]):
    """A mailbox that never waits for messages."""

    def __init__(self, *, changed: threading.Condition | None = None) -> None:
        super().__init__(limit=1000, changed=changed)

    def take_all(self, *, timeout_s: float) -> list[Message]:
        return super().take_all(timeout_s=0.0)


class WatchedStorage:
    """The SSD tier's port; it notes every block that is handed over."""

    def __init__(self, storage: SoleTier | LocalTier, ledger: Ledger) -> None:
        self._storage = storage
        self._ledger = ledger

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def delete(self, blocks: Names, *, is_final: bool = False) -> Any:
        ticket = self._storage.delete(blocks, is_final=is_final)
        self._ledger.ordered_away.update(blocks if is_final and ticket is not None else ())
        return ticket

    def put(self, block: HostBlock, **rest: Any) -> Any:
        self._ledger.note_spill(block.header)
        return self._storage.put(block, **rest)


@dataclasses.dataclass(frozen=True, slots=True)
class Life:
    """The start conditions of one life; the next life of the same directory shares most of them."""

    number: int
    model: int
    directory: Path
    mtime_ns: int


class SimServer:
    """Built in memory by `SimServer`, on its directory by `open`; ended by `stop` or `die`."""

    def __init__(
        self,
        setup: Setup,
        life: Life,
        *,
        clock: SimClock,
        ledger: Ledger,
        dice: random.Random,
        disk: SimDisk | None = None,
    ) -> None:
        """`disk` is that of the previous process on this machine; without it all files are durable."""
        self.setup, self.life, self.clock, self.ledger = setup, life, clock, ledger
        self.recorder = Recorder()
        self.mailbox = MailboxWithoutWaiting()
        self.disk = disk.heir(life.directory) if disk else SimDisk(life.directory, mtime_ns=life.mtime_ns)
        self.storage: SoleTier | None = None
        if setup.has_storage:
            self.storage = self._make_tier()
            self.storage._store.take_gone = self._note_strangers(self.storage._store.take_gone)
        self.is_storage_dead = False
        self.is_closed = False
        self.reads_hang = False
        """Whether the reader stops in the middle of its next order."""
        self.hung_reader: HungReader | None = None
        self.store_hangs = False
        self.runner = SimRunner(
            setup.specs[life.model],
            block_token_count=BLOCK,
            dice=dice,
            padding_bytes=_PADDING_BYTES if setup.codec is Codec.PLANES else 0,
        )
        self.cache = PrefixCache(
            settings=setup.prefix_settings(life.model),
            facts=self.runner.facts(),
            runner=self.runner,
            storage=WatchedStorage(self.storage, ledger) if self.storage is not None else None,
            clock=clock,
        )
        self.cache.sessions.session_limit = setup.session_limit
        # Few lives have enough loads for a decision to recompute; here the first one is enough.
        self.cache.rates.load_count = 2
        self.controller = CacheController(
            cache=self.cache, runner=self.runner, clock=clock, adopt_budget_s=0.001
        )
        self.budget = MemoryBudget(setup.memory_limit_bytes)
        self.guard = MemoryGuard(
            self.runner.memory_model(),
            share=self.budget.enter(),
            weight_bytes=0,
            chunk_token_count=setup.limits.prefill_chunk_token_count,
        )
        self.room = WaitingQueue(setup.waiting)
        self.scheduler = Scheduler(
            dataclasses.replace(
                setup.limits,
                chunk_ends_at_last_block=self.cache.checkpoint_block_token_count,
                cuts_before_last_token=self.controller.cuts_before_last_token,
                layer_count=self.runner.layer_count(),
                whole_token_count=0,
            ),
            self.room,
        )
        self.loop = EngineLoop(
            runner=self.runner,
            prefix=self.controller,
            scheduling=SchedulingParts(self.scheduler, self.guard),
            model=model_info(context_token_limit=CONTEXT_TOKEN_LIMIT),
            tokenizer=FakeDecoder(),
            mailbox=self.mailbox,
            listener=self.recorder,
            clock=clock,
        )

    def _make_tier(self) -> SoleTier:
        store = self.setup.store
        shared = {} if store is None else {"store": store, "shared": _SHARED, "is_inline": True}
        return SoleTier(
            self.setup.storage_settings(str(self.life.directory)),
            files=self.disk,
            clock=self.clock,
            post=self._post,
            fingerprint=fingerprint(self.life.model),
            cipher=self.setup.cipher,
            **shared,
        )

    @property
    def store(self) -> Any:
        """The SSD tier's internals, for checks only."""
        assert self.storage is not None
        return self.storage._store

    def open(self) -> None:
        """Lock and open the directory."""
        self.life.directory.mkdir(exist_ok=True)
        if self.storage is not None:
            self.storage.lock()
            self.storage.open()
        if self.storage is not None and self.setup.store is not None:
            # Timers use the story's clock too, so that a story is the same on a slow machine.
            vars(self.storage._traffic._loop).update(time=self.clock.monotonic)

    def step_engine(self) -> None:
        """Run one step of the inference thread."""
        self.loop.step()

    def step_storage(self) -> bool:
        """Run one piece of work of the storage thread and of the readers."""
        if self.storage is None or self.is_storage_dead or self.is_closed:
            return False
        if not self.is_hanging:
            return self.storage.step()
        has_read = False
        if self.reads_hang and self.hung_reader is None:
            self.hung_reader = HungReader.of_next(self.storage)
        elif not self.reads_hang:
            has_read = self.storage._readers.step()
        return (not self.store_hangs and self.storage._loop.step()) or has_read

    @property
    def is_hanging(self) -> bool:
        """Whether the disk does not answer one of the threads."""
        return self.reads_hang or self.store_hangs

    def hang_store(self) -> None:
        """Stop the storage thread in the middle of a piece of work."""
        if self.storage is not None and not self.is_storage_dead:
            self.store_hangs = True
            stall(self.storage)

    def go_on(self) -> None:
        """Let the disk answer again."""
        assert self.storage is not None
        self.reads_hang = self.store_hangs = False
        resume(self.storage)
        reader, self.hung_reader = self.hung_reader, None
        if reader is not None and not self.is_storage_dead:
            reader.go_on()

    def kill_storage(self) -> None:
        """Break the storage thread: it reports that, and neither it nor the readers do anything more."""
        self.is_storage_dead = True
        self._post(StorageFailed("injected"))

    def come_to_rest(self) -> None:
        """Work until nothing is left to do anywhere."""
        for _ in range(_REST_STEP_LIMIT):
            self.step_engine()
            is_busy = self.step_storage()
            has_sequences = self.scheduler.waiting_count or self.scheduler.running
            if not (is_busy or has_sequences or len(self.mailbox)):
                return
            if self.is_hanging or self.setup.store is not None:
                self.clock.now += 0.05
        raise AssertionError(f"the house never comes to rest; scheduler {vars(self.scheduler)}")

    def stop(self, *, grace_s: float, flush_s: float) -> None:
        """Stop cleanly: drain, flush, close. Raises what the storage thread raises, a crash included."""
        self.mailbox.post(DrainEngine(self.clock.monotonic() + grace_s))
        for _ in range(_REST_STEP_LIMIT):
            if self.loop.is_done:
                break
            self.step_engine()
            self.step_storage()
        assert self.loop.is_done, "the drain does not end"
        for _ in self.loop.flush(deadline_time=self.clock.monotonic() + flush_s):
            self.clock.now += 0.01
            self.step_storage()
        self.loop.fail_all(Unavailable(Reason.DRAINING, "the server is shutting down"))
        self.runner.close()
        if self.storage is not None and not self.is_storage_dead:
            self.go_on()
            self.storage.close(deadline_time=self.clock.monotonic() + flush_s)
            for _ in range(_REST_STEP_LIMIT):
                if self.is_closed:
                    break
                self.storage.step()
            assert self.is_closed, "the directory is never closed"
        self.end_traffic()
        self.disk.release()

    def die(self, copy: Path, *, is_kill: bool) -> None:
        """End the process, and unless `is_kill` the power; the directory that remains is `copy`."""
        self.end_traffic()
        if self.storage is not None and self.store._manifest is None:
            # A connection that a crash left open must not checkpoint its log while that is copied.
            gc.collect()
        if is_kill:
            self.disk.kill(copy)
        else:
            self.disk.crash(copy)
        if self.storage is not None and self.store._manifest is not None:
            self.store._manifest._database.conn.close()
        self.disk.release()

    def end_traffic(self) -> None:
        """Cancel all transfers to and from the object store."""
        if self.storage is not None and isinstance(self.storage.model, SharedTier):
            self.storage._traffic.end()

    def spilling(self) -> Sequence[BlockHash]:
        """Return the blocks that wait to be written."""
        return [entry.hash for entry in self.cache.tree.spilling]

    def _note_strangers(self, take: Callable[[], Gone]) -> Callable[[], Gone]:
        """Report to the ledger when blocks of the other model leave: no engine hears of that."""

        def take_gone() -> Gone:
            gone = take()
            for name, hashes in gone.items():
                if name != fingerprint(self.life.model):
                    self.ledger.note_outcome(BlocksEvicted(tuple(hashes)), self)
            return gone

        return take_gone

    def _post(self, outcome: Outcome) -> None:
        self.is_closed = self.is_closed or isinstance(outcome, StorageClosed)
        self.ledger.note_outcome(outcome, self)
        self.mailbox.post(outcome)
