"""Storage loop: one inbox, one small piece of work at a time.

It owns the `BlockStore`. A step empties the inbox, then does one piece of work that is due: a spill or a
batch of evictions for it, a batch of an ordered removal, one file of a verify, upkeep (recency, a
slice of the deferred scan). These take turns, and so do the open models, so that none waits for the queue
of another to empty; an order waits only for its model's spills accepted before it. Reads never wait
here (see `reader_pool`). No disk error ends the loop: after a failure nothing is written, and
the directory is reopened at the next retry.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import queue
import sqlite3
from collections.abc import Callable, Generator, Iterator
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from icehouse_server.domain.blocks import BlockDamage
from icehouse_server.domain.cache_stats import CacheStats, SpillDropCause
from icehouse_server.domain.ids import BlockHash
from icehouse_server.errors import StartError
from icehouse_server.storage.api import (
    BlockPersisted,
    BlocksEvicted,
    BlocksPurged,
    Inventory,
    LearnedRates,
    Names,
    StorageClosed,
    StorageFailure,
    StorageTrouble,
    Ticket,
)
from icehouse_server.storage.disk_error import DiskErrorKind, classify, outline
from icehouse_server.storage.local.directory.manifest import GROWTH_ALLOWANCE_BYTES
from icehouse_server.storage.local.directory.store import BlockStore
from icehouse_server.storage.local.open_model import OpenModel, OpenModels, TierOrder
from icehouse_server.storage.local.reader_pool import ReadReport
from icehouse_server.storage.local.spiller import Spiller
from icehouse_server.storage.local.storage_state import StorageState, StoreStatus, note_damage

_log = logging.getLogger(__name__)

_UPKEEP_S = 5.0
"""Recency is written at most this often; a crash loses no more than this much of it."""
_INVENTORY_PART_COUNT = 2048
"""Blocks posted to the engine at a time: some milliseconds of the inference thread."""
_DEFERRED_SLICE_COUNT = 64
"""Files checked per idle step after a clean start."""


Call = Callable[[], object]
"""A message of the inbox: a method of the loop with its arguments."""
_Result = TypeVar("_Result")


class StorageLoop:
    """Everything the storage thread does, callable step by step."""

    def __init__(self, store: BlockStore, state: StorageState) -> None:
        self.is_closed = False
        self.store = store
        self.state = state
        self.models = OpenModels(store.paths.root)
        self._inbox: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._clock = store.clock
        self.spiller = Spiller(store, state, finish=self._finish)
        self._turns: collections.deque[Callable[[], bool]] = collections.deque(
            (self._step_upkeep, self._step_inventories, self._step_spill)
        )
        """Functions that may do the next piece; the last to have had its turn is at the end."""
        self._model_turns: dict[OpenModel, list[partial[bool]]] = {}
        """The turns of the models that this thread works for."""
        self._close_time: float | None = None
        """Deadline for spills (`Clock.monotonic`); None until `close`."""
        self._deferred: Iterator[BlockHash] = iter(())
        self._piece_time: float | None = None
        """When the current piece of work began (`Clock.monotonic`); None between two. Any thread reads it."""
        self._upkeep_time = self._clock.monotonic()

    @property
    def silence_s(self) -> float:
        """How long this thread has been at one piece of work; 0 while it waits for work. Any thread."""
        began_time = self._piece_time
        return 0.0 if began_time is None else self._clock.monotonic() - began_time

    @contextlib.contextmanager
    def piece(self) -> Iterator[None]:
        """Mark the block as one piece of work, so that others see how long the disk blocks this thread."""
        outer_time, self._piece_time = self._piece_time, self._clock.monotonic()
        try:
            yield
        finally:
            self._piece_time = outer_time

    def send(self, call: Call) -> None:
        """Have the storage thread make this call after those sent before. Any thread."""
        self._inbox.put(call)

    def open(self) -> None:
        """Open the directory and post the inventories; if the disk refuses, nothing is written."""
        with self.piece():
            for model in self.models:
                model.is_admitted = False
                if model.is_started:
                    self._register(model)
            try:
                self.store.open()
                self._log_opened()
                self.state.open()
                self._admit_all()
            except (OSError, sqlite3.Error, StartError) as error:
                self._fail(error)
            else:
                is_clean = self.store.report.clean
                self._deferred = iter([record.hash for record in self.store.index] if is_clean else ())
                for model in self._model_turns:
                    model.begin_inventory(self._inventory_parts(model))
            self._announce_gone()

    def attach(self, model: OpenModel) -> None:
        """Begin to work for a model; its inventory is posted once the directory is open."""
        if model in self._model_turns or model.is_over:
            return
        self._register(model)
        if self.state.is_usable:
            with self._failures():
                self._admit_all()
        if self.state.is_usable:
            model.begin_inventory(self._inventory_parts(model))
        elif self.state.status is StoreStatus.BROKEN:
            model.give_up_inventory()

    def close_model(self, model: OpenModel, deadline_time: float) -> None:
        """Finish a model's spills until the deadline (`Clock.monotonic`) and forget it; the others go on."""
        model.close_time = deadline_time

    def _register(self, model: OpenModel) -> None:
        if model not in self._model_turns:
            queues = (model.adoptions, model.orders, model.checks)
            turns = [partial(self._step_order, model, orders) for orders in queues]
            self._model_turns[model] = turns
            self.store.counts[model.fingerprint] = model.counts
            self._turns.extend(turns)

    def _admit_all(self) -> None:
        """Make a place for the blocks of each model that has none. If there is no space for it, nothing is
        written until there is; raises `OSError` or `sqlite3.Error` for other errors."""
        for model in self._model_turns:
            if model.is_admitted:
                continue
            try:
                model.changed_code = self.store.admit(model.fingerprint, model.details)
            except (OSError, sqlite3.Error) as error:
                if classify(error) is not DiskErrorKind.FULL:
                    raise
                self._fail(error, is_harmless=True)
                return
            model.is_admitted = True
            if model.changed_code:
                _log.warning(
                    "code_changed",
                    extra={
                        "modules": list(model.changed_code),
                        "detail": "the model's blocks were computed by another version of its code; they are "
                        "not used until that version is back",
                    },
                )

    def _log_opened(self) -> None:
        report = self.store.report
        _log.info(
            "cache_opened",
            extra={
                "blocks": len(self.store.index),
                "was_clean": report.clean,
                "repairs": report.repair_count,
                **report.repairs,
                "duration_s": round(report.duration_s, 3),
            },
        )
        if report.unencrypted_block_count:
            _log.warning(
                "unencrypted_blocks_found",
                extra={
                    "blocks": report.unencrypted_block_count,
                    "detail": "written before there was a key; to remove them, stop the server and run "
                    "icehouse cache purge --unencrypted",
                },
            )

    def _inventory_parts(self, model: OpenModel) -> Iterator[Inventory]:
        """Yield the inventory; for a large tier in parts, each looked up when its turn comes."""
        records = self.store.index.by_recency(model.fingerprint)
        if len(records) > _INVENTORY_PART_COUNT:
            # The engine finds the owner of a block through the block before it.
            records.sort(key=lambda record: record.start_token_index)
        names = [record.hash for record in records]
        for start in range(0, max(len(names), 1), _INVENTORY_PART_COUNT):
            stop = start + _INVENTORY_PART_COUNT
            # Blocks that left meanwhile were announced already.
            part = map(self.store.index.get, names[start:stop])
            stored = tuple(record for record in part if record is not None)
            rates = self.store.rates.get(model.fingerprint)
            yield Inventory(stored, is_first=start == 0, is_last=stop >= len(names), rates=rates)

    def _step_inventories(self) -> bool:
        return any(model.step_inventory() for model in self._model_turns)

    def wait(self, timeout_s: float) -> None:
        """Handle the next message, or return if none comes in time."""
        with contextlib.suppress(queue.Empty):
            call = self._inbox.get(timeout=timeout_s)
            with self.piece():
                call()

    def step(self) -> bool:
        """Empty the inbox and do one piece of work; False if none remains for now."""
        with self.piece():
            while not self._inbox.empty():
                self._inbox.get_nowait()()
            self._send_stats()
            is_busy = True
            with self._failures():
                is_busy = self._work()
            self._announce_gone()
            return is_busy and not self.is_closed

    def _work(self) -> bool:
        now = self._clock.monotonic()
        if self._close_time is not None and (not self.spiller or now >= self._close_time):
            self._end()
            return False
        for model in self.models:
            end_time = model.close_time
            if end_time is not None and (not model.counts.queued_spill_count or now >= end_time):
                self._end_model(model)
        if self.state.is_retry_due(now=now):
            self._retry(now)
        if not self.state.is_usable:
            for model in self._model_turns:
                self._give_up_orders(model)
            return self._step_spill()
        for _ in range(len(self._turns)):
            # Rotated before the call: a function that raises has had its turn too.
            self._turns.rotate(-1)
            if self._turns[-1]():
                return True
        return False

    def _step_spill(self) -> bool:
        if not self.spiller:
            return False
        self.spiller.step()
        return True

    def _step_upkeep(self) -> bool:
        now = self._clock.monotonic()
        if now - self._upkeep_time >= _UPKEEP_S:
            self._upkeep_time = now
            self.store.maintain()
        # After a clean start, check a few files at a time until all have been checked.
        hashes = list(islice(self._deferred, _DEFERRED_SLICE_COUNT))
        for block_hash in self.store.check_rows(hashes):
            _log.warning("row_mismatch_found", extra={"block": block_hash.hex()})
        return bool(hashes)

    # Messages of the inbox.

    def touch(self, model: OpenModel, blocks: Names) -> None:
        """Note that these blocks were used now, in this order."""
        model.order_queue.release(1)
        self.store.touch(blocks)

    def demote(self, model: OpenModel, blocks: Names) -> None:
        """Make these blocks the next to be evicted, the last one first."""
        model.order_queue.release(1)
        for block in blocks:
            self.store.index.demote(block)

    def keep_rates(self, model: OpenModel, rates: LearnedRates) -> None:
        """Keep a model's learned rates."""
        model.order_queue.release(1)
        self.store.keep_rates(model.fingerprint, rates)

    def begin(
        self,
        model: OpenModel,
        ticket: Ticket[_Result],
        work: Generator[None, None, _Result],
        *,
        is_check: bool = False,
    ) -> None:
        """Queue an order, to be done after the spills accepted before it. A check removes no sound block and
        may take very long; other orders do not wait for it."""
        orders = model.checks if is_check else model.orders
        orders.append(TierOrder(ticket, work, model.counts.spill.accepted_block_total))

    def adopt(
        self,
        model: OpenModel,
        ticket: Ticket[Any],
        work: Generator[None, None, BlockPersisted | BlocksPurged | StorageFailure],
        path: str,
    ) -> None:
        """Adopt a block's file, which is removed if that fails, or remove an adopted block. A request waits
        for this, so it waits for no spill."""
        model.adoptions.append(TierOrder(ticket, work, spill_count=0, path=path))
        if model not in self._model_turns:
            self._give_up_orders(model)

    def count(self, model: OpenModel, ticket: Ticket[CacheStats]) -> None:
        model.order_queue.release(1)
        model.stats_tickets.append(ticket)

    def close(self, deadline_time: float) -> None:
        """Finish the spills until the deadline (`Clock.monotonic`), close the directory and end."""
        self._close_time = deadline_time

    def pin(self, model: OpenModel, ticket: Ticket[Names], blocks: Names, end_time: float) -> None:
        """Pin or unpin; return blocks that are neither stored nor queued. Fails if the disk refuses."""
        model.order_queue.release(1)
        outcome: Names | None = None
        if self.state.is_usable:
            with self._failures():
                self.store.pin(blocks, end_time)
                queued = self.spiller.pin(frozenset(blocks), end_time)
                outcome = tuple(n for n in blocks if n not in self.store.index and n not in queued)
        self._finish(model, ticket, self._unusable() if outcome is None else outcome)

    def count_read(self, model: OpenModel, report: ReadReport) -> None:
        """Count a read, and retire the blocks that could not be used."""
        model.read_queue.release(1)
        model.counts.integrity.verified_block_total += report.block_count
        model.counts.promote.read_byte_total += report.read_bytes
        self.state.codec.note(report.rates)
        with self._failures():
            for failure in report.failures:
                note_damage(model.counts.integrity, failure)
                name = failure.hash.hex() if failure.hash is not None else ""
                _log.warning(
                    "block_not_read" if failure.cause is BlockDamage.MEMORY else "block_retired",
                    extra={"block": name, "cause": failure.cause.value, "detail": failure.detail},
                )
                if self.state.is_usable:
                    self.store.retire(failure)

    def _step_order(self, model: OpenModel, orders: collections.deque[TierOrder]) -> bool:
        """Do a piece of the first order; False if there is none, or spills before it are not finished."""
        if not orders or model.counts.finished_spill_total < orders[0].spill_count:
            return False
        outcome: Any = None
        try:
            next(orders[0].work)
        except StopIteration as ended:
            outcome = ended.value
        except (OSError, sqlite3.Error) as error:
            self._remove_file(orders[0])
            self._fail(error)
            outcome = self._unusable()
        if outcome is not None:
            self._finish_order(model, orders, outcome)
        return True

    def _give_up_orders(self, model: OpenModel) -> None:
        """Fail all orders: nobody should wait for a directory that may never come back."""
        for orders in (model.orders, model.checks, model.adoptions):
            while orders:
                self._remove_file(orders[0])
                self._finish_order(model, orders, self._unusable())

    def _remove_file(self, given_up: TierOrder) -> None:
        if given_up.path:
            self.store.extras.remove(given_up.path)

    def _finish_order(self, model: OpenModel, orders: collections.deque[TierOrder], outcome: Any) -> None:
        if orders is not model.adoptions:
            model.order_queue.release(1)
        self._finish(model, orders.popleft().ticket, outcome)

    def _unusable(self) -> StorageFailure:
        return StorageFailure(StorageTrouble.UNUSABLE, self.state.detail)

    def _send_stats(self) -> None:
        for model in self._model_turns:
            if not model.stats_tickets:
                continue
            tickets, model.stats_tickets = model.stats_tickets, []
            stats = model.stats(self.store, self.state)
            for ticket in tickets:
                self._finish(model, ticket, stats)

    def _retry(self, now: float) -> None:
        """Check whether the disk takes writes again; reopen the directory if it was given up."""
        if self.state.status is not StoreStatus.FULL:
            self.store.abandon()
            self.store.unlock()
            self.open()
            return
        needed_bytes = self.state.needed_bytes
        free_bytes = self.store.files.free_bytes(self.store.paths.root)
        if free_bytes >= needed_bytes + self.store.settings.free_floor_bytes:
            self.state.open()
            self._admit_all()
        else:
            self.state.fail(StoreStatus.FULL, self.state.detail, now=now, needed_bytes=needed_bytes)

    def _end(self) -> None:
        self.spiller.drop_all(SpillDropCause.SHUTDOWN)
        for model in self._model_turns:
            self._give_up_orders(model)
        was_clean = self.store.close()
        self.store.unlock()
        self.state.close()
        self.is_closed = True
        self._announce_gone()
        self.models.end(StorageClosed(was_clean))

    def _end_model(self, model: OpenModel) -> None:
        self.spiller.drop_of(model, SpillDropCause.SHUTDOWN)
        was_clean = False
        with self._failures():
            if self.state.is_usable:
                self.store.maintain()
                was_clean = True
        self._give_up_orders(model)
        self._announce_gone()
        for turn in self._model_turns.pop(model, ()):
            self._turns.remove(turn)
        self.store.counts.pop(model.fingerprint, None)
        self.models.end_one(model, StorageClosed(was_clean))

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """Stop writing if the disk refuses an operation in the block."""
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            self._fail(error)

    def _fail(self, error: OSError | sqlite3.Error | StartError, *, is_harmless: bool = False) -> None:
        """Stop writing. If only the manifest has no space, or a failure `is_harmless`, nothing is lost. After
        any other failure rows and memory may differ, so the directory is given up until it is reopened."""
        now = self._clock.monotonic()
        is_full = classify(error) is DiskErrorKind.FULL
        reason = "Disk is full" if is_full else "Disk refused"
        # Callers see the detail, so it names no path; the log does.
        detail = f"{reason}: {outline(error)}; nothing is written until"
        is_manifest_full = is_full and isinstance(error, sqlite3.Error) and self.state.is_usable
        stays_open = is_harmless or is_manifest_full
        _log.error(
            "cache_directory_full" if stays_open else "cache_directory_given_up",
            extra={"directory": self.store.paths.root, "detail": str(error)},
        )
        if stays_open:
            needed_bytes = GROWTH_ALLOWANCE_BYTES
            detail = f"{detail} {needed_bytes} bytes are free above the floor"
            self.state.fail(StoreStatus.FULL, detail, now=now, needed_bytes=needed_bytes)
            return
        self.state.fail(StoreStatus.BROKEN, f"{detail} the cache directory works again", now=now)
        self.spiller.undo_writings()
        self.store.abandon()
        for model in self._model_turns:
            model.give_up_inventory()

    def _announce_gone(self) -> None:
        """Report to each open model which of its blocks left the disk."""
        for fingerprint, gone in self.store.take_gone().items():
            model = self.models.get(fingerprint)
            if model in self._model_turns:
                model.send(BlocksEvicted(tuple(gone)))

    def _finish(self, model: OpenModel, ticket: Ticket[_Result], outcome: _Result | StorageFailure) -> None:
        """Post a ticket with its outcome, after announcing which blocks left the disk: one may be stored
        again under its name, and the engine must forget blocks before it reports that they are gone."""
        self._announce_gone()
        ticket.finish(outcome)
        model.send(ticket)
