"""Open model: the storage thread's state for one model while its blocks are in use.

The engine's thread reserves places in its queues, and the storage thread does the rest. The first thread that
learns of its end reports it, once.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

from icehouse_server.domain.cache_stats import CacheStats, DiskStats, SpillDrops
from icehouse_server.domain.ids import BlockHash, Fingerprint
from icehouse_server.errors import Reason, StartError
from icehouse_server.storage.api import Inventory, Outcome, StorageClosed, StorageFailed, Ticket
from icehouse_server.storage.local.directory.store import BlockStore, ModelCounts
from icehouse_server.storage.local.storage_state import QueueLimit, StorageState
from icehouse_server.storage.storage_settings import StorageSettings


@dataclasses.dataclass(frozen=True, slots=True)
class TierOrder:
    """Work that waits, or is done piece by piece."""

    ticket: Ticket[Any]
    work: Generator[None, None, Any]
    spill_count: int
    """The model's blocks accepted before it, which are on SSD or dropped before it begins."""
    path: str = ""
    """The file that it is to adopt, if any; the file is removed if the order fails."""


class OpenModel:
    """A fingerprint with its listener, its queues and its orders."""

    def __init__(
        self,
        fingerprint: Fingerprint,
        details: Mapping[str, str],
        *,
        settings: StorageSettings,
        post: Callable[[Outcome], object],
    ) -> None:
        self.fingerprint = fingerprint
        self.details = details
        self.counts = ModelCounts()
        self.post = post
        self.spill_queue = QueueLimit(settings.spill_queue_limit_bytes)
        """Bytes of its blocks to be written; they also count in the queue of all models."""
        self.read_queue = QueueLimit(settings.load_queue_limit_count)
        self.order_queue = QueueLimit(settings.task_queue_limit_count)
        self.is_started = False
        self.is_admitted = False
        """Whether the directory has a folder and a row for its fingerprint."""
        self.close_time: float | None = None
        """Deadline for its spills (`Clock.monotonic`); None until it is closed."""
        self.changed_code: tuple[str, ...] = ()
        self.last_verified: BlockHash | None = None
        """The last verified block; blocks are verified in hash order."""
        self.orders: collections.deque[TierOrder] = collections.deque()
        self.checks: collections.deque[TierOrder] = collections.deque()
        self.adoptions: collections.deque[TierOrder] = collections.deque()
        self.stats_tickets: list[Ticket[CacheStats]] = []
        """Requests for the counters: all get the same copy."""
        self._parts: Iterator[Inventory] = iter(())
        """Parts of the inventory that have yet to be posted."""
        self._has_begun = False
        self._has_inventory = False
        """Whether the engine has ever got a complete inventory, and so waits for none."""
        self._end = threading.Lock()
        """Acquired by the thread that reports the end; never released."""
        self.ended = threading.Event()
        """Set once the end was reported."""

    @property
    def is_over(self) -> bool:
        return self._end.locked()

    def send(self, outcome: Outcome) -> None:
        """Post an outcome for this model, unless it is over. Any thread."""
        if not self.is_over:
            self.post(outcome)

    def end(self, last: StorageClosed | StorageFailed) -> None:
        """Post the last outcome, unless one was posted already. Any thread."""
        if self._end.acquire(blocking=False):
            self.post(last)
            self.ended.set()

    def begin_inventory(self, parts: Iterator[Inventory]) -> None:
        """Post the first part of an inventory; `step_inventory` posts the others."""
        self._parts, self._has_begun = parts, False
        self.step_inventory()

    def step_inventory(self) -> bool:
        """Post the next part; False if there is none."""
        part = next(self._parts, None)
        if part is not None:
            self._has_begun = True
            self._has_inventory |= part.is_last
            self.send(part)
        return part is not None

    def give_up_inventory(self) -> None:
        """Report that nothing is stored if a complete inventory never came: requests wait for its last part,
        and the directory may never be opened again. After a later failure the engine keeps its inventory,
        since files may still be readable."""
        rest = iter(()) if self._has_inventory else iter([Inventory((), is_first=not self._has_begun)])
        self._parts = rest
        self.step_inventory()

    def stats(self, store: BlockStore, state: StorageState) -> CacheStats:
        """Return a copy of what this thread knows; the engine fills in the rest.

        Reads only the free space from the disk, and looks at no more than some thousands of blocks.
        """
        settings, space, now = store.settings, store.space, store.clock.wall()
        # Blocks are counted for this model; bytes are those of all models, like the limit.
        tier = store.index.fill(self.counts.tier, self.fingerprint, now=now)
        free_bytes = 0
        with contextlib.suppress(OSError):
            free_bytes = store.files.free_bytes(store.paths.root)
        return CacheStats(
            ssd=dataclasses.replace(
                tier, size_bytes=store.index.block_bytes, limit_bytes=settings.limit_bytes
            ),
            spill=dataclasses.replace(
                self.counts.spill,
                drops=SpillDrops.of(self.counts.drops),
                queue_count=self.counts.queued_spill_count,
                queue_bytes=self.spill_queue.used,
                queue_limit_bytes=self.spill_queue.limit,
                written_today_bytes=space.written_bytes(now),
                daily_limit_bytes=settings.daily_write_limit_bytes,
                write_bytes_per_s=state.write_bytes_per_s,
            ),
            promote=dataclasses.replace(
                self.counts.promote, queue_count=self.read_queue.used, queue_limit=self.read_queue.limit
            ),
            integrity=dataclasses.replace(
                self.counts.integrity,
                quarantined_file_count=len(store.extras.quarantined),
                quarantined_bytes=sum(store.extras.quarantined.values()),
            ),
            disk=DiskStats(
                used_bytes=store.used_bytes(),
                manifest_bytes=space.manifest_bytes,
                limit_bytes=settings.limit_bytes,
                free_bytes=free_bytes,
                free_floor_bytes=settings.free_floor_bytes,
                other_model_block_count=len(store.index) - tier.block_count,
                writes_off_detail=state.detail,
                is_encrypted=store.cipher is not None,
                block_bytes=store.index.block_bytes,
                raw_block_bytes=store.index.raw_bytes,
                decompress_bytes_per_s=state.codec.decode_bytes_per_s,
                is_compressing=state.codec.has_planes,
            ),
            last_reconcile=dataclasses.replace(store.report, changed_code=self.changed_code),
        )


class OpenModels:
    """The open models by fingerprint. Any thread adds one, the storage thread removes it."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._models: dict[Fingerprint, OpenModel] = {}
        self._last: StorageClosed | StorageFailed | None = None
        """The last outcome of all models, once everything has ended."""

    def __len__(self) -> int:
        return len(self._models)

    def __contains__(self, fingerprint: Fingerprint) -> bool:
        return fingerprint in self._models

    def __iter__(self) -> Iterator[OpenModel]:
        # Over a copy: another thread may add one meanwhile.
        return iter(list(self._models.values()))

    def get(self, fingerprint: Fingerprint) -> OpenModel | None:
        return self._models.get(fingerprint)

    def claim(self, model: OpenModel) -> None:
        """Add a model. Raises `StartError` if its fingerprint is open already, unless everything has ended:
        then it will be told so."""
        if self._last is None and self._models.setdefault(model.fingerprint, model) is not model:
            raise StartError(
                Reason.STORE_LOCKED,
                f"another model of this server keeps its blocks in {self._directory} under fingerprint "
                f"{model.fingerprint.hex()[:16]} too; serve these weights with these settings only once",
                metadata={"directory": self._directory, "fingerprint": model.fingerprint.hex()},
            )

    def end(self, last: StorageClosed | StorageFailed) -> None:
        """Report the last outcome to all models, and to those that come later."""
        self._last = last
        for model in self:
            model.end(last)

    def end_late(self, model: OpenModel) -> None:
        """Report the end to a model if everything has ended: nobody works for it any more."""
        if self._last is not None:
            model.end(self._last)

    def end_one(self, model: OpenModel, last: StorageClosed) -> None:
        """Remove a model and report its end. Its listener may then open it again."""
        del self._models[model.fingerprint]
        model.end(last)
