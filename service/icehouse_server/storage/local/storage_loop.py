"""Storage loop: one inbox, one small piece of work at a time.

Owns the `BlockStore`. A step empties the inbox, then does one piece of what is due: a spill or a
batch of evictions for it, a batch of an ordered removal, one file of a verify, upkeep (recency, a
slice of the deferred scan). They take turns, so that none waits for another one's queue to
empty; an order waits only for the spills accepted before it. Reads never wait here (see
`reader_pool`). Nothing the disk does ends the loop: after a failure nothing is written, and the
directory is opened anew at the next retry.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import queue
import sqlite3
from collections.abc import Callable, Generator, Iterator
from itertools import islice
from typing import Any, TypeVar

from icehouse_server.domain.blocks import Damage
from icehouse_server.domain.cache_stats import CacheStats, SpillDropCause
from icehouse_server.domain.ids import BlockHash
from icehouse_server.errors import StartError
from icehouse_server.storage.api import (
    Evicted,
    Failure,
    Inventory,
    Names,
    Outcome,
    Persisted,
    StorageClosed,
    Ticket,
    Trouble,
)
from icehouse_server.storage.disk_error import DiskErrorKind, classify, outline
from icehouse_server.storage.local.directory.manifest import GROWTH_ALLOWANCE_BYTES
from icehouse_server.storage.local.directory.store import BlockStore
from icehouse_server.storage.local.reader_pool import ReadReport
from icehouse_server.storage.local.spiller import Spill, Spiller
from icehouse_server.storage.local.storage_state import StorageState, StoreStatus, note_damage

_log = logging.getLogger(__name__)

_UPKEEP_S = 5.0
"""Recency is written at most this often; a crash loses no more of it."""
_INVENTORY_PART_COUNT = 2048
"""Blocks sent to the engine at a time: some milliseconds of the inference thread."""
_DEFERRED_SLICE_COUNT = 64
"""Files looked at per idle step after a clean start."""


Call = Callable[[], object]
"""What comes through the inbox: a method of the loop with its arguments."""
_Result = TypeVar("_Result")


@dataclasses.dataclass(frozen=True, slots=True)
class _Order:
    """Work that waits, or is done piece by piece."""

    ticket: Ticket[Any]
    work: Generator[None, None, Any]
    spill_count: int
    """Blocks accepted before it: they are on SSD, or dropped, before it begins."""


class StorageLoop:
    """Everything the storage thread does, callable step by step."""

    def __init__(
        self,
        store: BlockStore,
        state: StorageState,
        *,
        inbox: queue.SimpleQueue[Call],
        post: Callable[[Outcome], object],
    ) -> None:
        self.is_closed = False
        self._store = store
        self._state = state
        self._inbox = inbox
        self._clock = store.clock
        self._post = post
        self._spiller = Spiller(store, state, finish=self._finish)
        self._orders: collections.deque[_Order] = collections.deque()
        self._checks: collections.deque[_Order] = collections.deque()
        self._adoptions: collections.deque[_Order] = collections.deque()
        self._turns = collections.deque(
            (
                self._step_inventory,
                self._step_spill,
                lambda: self._step_order(self._adoptions),
                lambda: self._step_order(self._orders),
                lambda: self._step_order(self._checks),
                self._step_upkeep,
            )
        )
        """What may do the next piece; the last one to have had its turn is at the end."""
        self._stats_tickets: list[Ticket[CacheStats]] = []
        """Requests for the counters: all get the same copy."""
        self._close_time: float | None = None
        """Until when spills are finished (`Clock.monotonic`); None until `close`."""
        self._deferred: Iterator[BlockHash] = iter(())
        self._inventory: Iterator[Inventory] = iter(())
        """Parts that are yet to be posted."""
        self._has_inventory = False
        """Whether the engine ever got a complete one, and so waits for none."""
        self._piece_time: float | None = None
        """When the piece of work under way began (`Clock.monotonic`); None between two. Others read it."""
        self._upkeep_time = self._clock.monotonic()

    @property
    def silence_s(self) -> float:
        """For how long this thread has been at one piece of work; 0 while it waits for some. Any thread."""
        began_time = self._piece_time
        return 0.0 if began_time is None else self._clock.monotonic() - began_time

    @contextlib.contextmanager
    def piece(self) -> Iterator[None]:
        """Do a piece of work in the block, so that others can see how long the disk blocks this thread."""
        outer_time, self._piece_time = self._piece_time, self._clock.monotonic()
        try:
            yield
        finally:
            self._piece_time = outer_time

    def open(self) -> None:
        """Open the directory and post the inventory; if the disk refuses, nothing is written."""
        with self.piece():
            try:
                self._store.open()
            except (OSError, sqlite3.Error, StartError) as error:
                self._fail(error)
                if not self._has_inventory:
                    # After later failures the engine's inventory stays: files may still be read.
                    self._post_inventory(Inventory(()))
            else:
                self._log_opened()
                is_clean = self._store.report.clean
                self._deferred = iter([record.hash for record in self._store.index] if is_clean else ())
                self._state.open()
                self._inventory = self._inventory_parts()
                self._step_inventory()
            self._announce_gone()

    def _log_opened(self) -> None:
        report = self._store.report
        _log.info(
            "cache_opened",
            extra={
                "blocks": len(self._store.index),
                "was_clean": report.clean,
                "repairs": report.repair_count,
                "duration_s": round(report.duration_s, 3),
            },
        )
        if report.unencrypted_block_count:
            _log.warning(
                "unencrypted_blocks_found",
                extra={
                    "blocks": report.unencrypted_block_count,
                    "detail": "written before there was a key; to remove them, stop the server and say "
                    "icehouse cache purge --unencrypted",
                },
            )
        if report.changed_code:
            _log.warning(
                "code_changed",
                extra={
                    "modules": list(report.changed_code),
                    "detail": "the model's blocks were computed by other code than it has now; they are not "
                    "used, and are there again with that code",
                },
            )

    def _inventory_parts(self) -> Iterator[Inventory]:
        """Yield what is stored; of a large tier in parts, each looked up when its turn comes."""
        records = self._store.index.by_recency(self._store.settings.fingerprint)
        if len(records) > _INVENTORY_PART_COUNT:
            # The engine finds the owner of a block in the block before it.
            records.sort(key=lambda record: record.start_token_index)
        names = [record.hash for record in records]
        for start in range(0, max(len(names), 1), _INVENTORY_PART_COUNT):
            stop = start + _INVENTORY_PART_COUNT
            # What left meanwhile was announced already.
            part = map(self._store.index.get, names[start:stop])
            stored = tuple(record for record in part if record is not None)
            yield Inventory(stored, is_first=start == 0, is_last=stop >= len(names))

    def _step_inventory(self) -> bool:
        part = next(self._inventory, None)
        if part is not None:
            self._post_inventory(part)
        return part is not None

    def _post_inventory(self, part: Inventory) -> None:
        self._has_inventory |= part.is_last
        self._post(part)

    def wait(self, timeout_s: float) -> None:
        """Handle the next message, or return when none comes in time."""
        with contextlib.suppress(queue.Empty):
            call = self._inbox.get(timeout=timeout_s)
            with self.piece():
                call()

    def step(self) -> bool:
        """Empty the inbox and do one piece of work; False when there is nothing left to do now."""
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
        if self._close_time is not None and (not self._spiller or now >= self._close_time):
            self._end()
            return False
        if self._state.is_retry_due(now=now):
            self._retry(now)
        if not self._state.is_usable:
            self._give_up_orders()
            return self._step_spill()
        for _ in range(len(self._turns)):
            # Rotated before it is called: one that raises has had its turn too.
            self._turns.rotate(-1)
            if self._turns[-1]():
                return True
        return False

    def _step_spill(self) -> bool:
        if not self._spiller:
            return False
        self._spiller.step()
        return True

    def _step_upkeep(self) -> bool:
        now = self._clock.monotonic()
        if now - self._upkeep_time >= _UPKEEP_S:
            self._upkeep_time = now
            self._store.maintain()
        # After a clean start, look at a few files until all have been looked at.
        hashes = list(islice(self._deferred, _DEFERRED_SLICE_COUNT))
        for block_hash in self._store.check_rows(hashes):
            _log.warning("row_mismatch_found", extra={"block": block_hash.hex()})
        return bool(hashes)

    # What comes through the inbox.

    def put(self, spill: Spill) -> None:
        self._spiller.add(spill)

    def touch(self, blocks: Names) -> None:
        """Note that these blocks were used now, in this order."""
        self._state.order_queue.release(1)
        self._store.touch(blocks)

    def demote(self, blocks: Names) -> None:
        """Make these blocks the next to go, the last one first."""
        self._state.order_queue.release(1)
        for block in blocks:
            self._store.index.demote(block)

    def begin(
        self, ticket: Ticket[_Result], work: Generator[None, None, _Result], *, is_check: bool = False
    ) -> None:
        """Do an order, after the spills accepted before it. A check removes nothing that is sound and may
        take very long; other orders do not wait for it."""
        orders = self._checks if is_check else self._orders
        orders.append(_Order(ticket, work, self._spiller.accepted_total))

    def adopt(self, ticket: Ticket[Persisted], work: Generator[None, None, Persisted | Failure]) -> None:
        """Take in a block's file. A request waits for it, so it waits for no spill."""
        self._adoptions.append(_Order(ticket, work, spill_count=0))

    def count(self, ticket: Ticket[CacheStats]) -> None:
        self._state.order_queue.release(1)
        self._stats_tickets.append(ticket)

    def close(self, deadline_time: float) -> None:
        """Finish the spills until the deadline (`Clock.monotonic`), close the directory and end."""
        self._close_time = deadline_time

    def pin(self, ticket: Ticket[Names], blocks: Names, end_time: float) -> None:
        """Pin or unpin, and return what is not there any more; fails where the disk refuses."""
        self._state.order_queue.release(1)
        outcome: Names | None = None
        if self._state.is_usable:
            with self._failures():
                self._store.pin(blocks, end_time)
                queued = self._spiller.pin(frozenset(blocks), end_time)
                outcome = tuple(n for n in blocks if n not in self._store.index and n not in queued)
        self._finish(ticket, self._unusable() if outcome is None else outcome)

    def count_read(self, report: ReadReport) -> None:
        """Count a read, and retire the blocks that could not be used."""
        self._state.read_queue.release(1)
        self._store.integrity.verified_block_total += report.block_count
        self._state.promote.read_byte_total += report.read_bytes
        self._state.codec.note(report.rates)
        with self._failures():
            for failure in report.failures:
                note_damage(self._store.integrity, failure)
                name = failure.hash.hex() if failure.hash is not None else ""
                _log.warning(
                    "block_not_read" if failure.cause is Damage.MEMORY else "block_retired",
                    extra={"block": name, "cause": failure.cause.value, "detail": failure.detail},
                )
                if self._state.is_usable:
                    self._store.retire(failure)

    def _step_order(self, orders: collections.deque[_Order]) -> bool:
        """Do a piece of the first order; False when there is none, or spills before it are not finished."""
        if not orders or self._spiller.finished_total < orders[0].spill_count:
            return False
        outcome: Any = None
        try:
            next(orders[0].work)
        except StopIteration as ended:
            outcome = ended.value
        except (OSError, sqlite3.Error) as error:
            self._fail(error)
            outcome = self._unusable()
        if outcome is not None:
            self._finish_order(orders, outcome)
        return True

    def _give_up_orders(self) -> None:
        """Fail all orders: nobody should wait for a directory that may never come back."""
        for orders in (self._orders, self._checks, self._adoptions):
            while orders:
                self._finish_order(orders, self._unusable())

    def _finish_order(self, orders: collections.deque[_Order], outcome: Any) -> None:
        if orders is not self._adoptions:
            self._state.order_queue.release(1)
        self._finish(orders.popleft().ticket, outcome)

    def _unusable(self) -> Failure:
        return Failure(Trouble.UNUSABLE, self._state.detail)

    def _send_stats(self) -> None:
        if not self._stats_tickets:
            return
        tickets, self._stats_tickets = self._stats_tickets, []
        stats = self._state.stats(self._store, spill_count=len(self._spiller))
        for ticket in tickets:
            self._finish(ticket, stats)

    def _retry(self, now: float) -> None:
        """Check whether the disk takes writes again; open the directory anew when it was given up."""
        if self._state.status is not StoreStatus.FULL:
            self._store.abandon()
            self._store.unlock()
            self.open()
            return
        needed_bytes = self._state.needed_bytes
        free_bytes = self._store.files.free_bytes(self._store.paths.root)
        if free_bytes >= needed_bytes + self._store.settings.free_floor_bytes:
            self._state.open()
        else:
            self._state.fill(self._state.detail, now=now, needed_bytes=needed_bytes)

    def _end(self) -> None:
        self._spiller.drop_all(SpillDropCause.SHUTDOWN)
        was_clean = self._store.close()
        self._store.unlock()
        self._state.close()
        self.is_closed = True
        self._announce_gone()
        self._post(StorageClosed(was_clean))

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """Stop writing when the disk refuses what is done in the block."""
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            self._fail(error)

    def _fail(self, error: OSError | sqlite3.Error | StartError) -> None:
        """Stop writing. If only the manifest has no space, nothing it had is lost. After any other failure
        rows and memory may differ, so the directory is given up until it is opened anew."""
        now = self._clock.monotonic()
        is_full = classify(error) is DiskErrorKind.FULL
        reason = "Disk is full" if is_full else "Disk refused"
        # Callers see the detail, so it names no path; the log does.
        detail = f"{reason}: {outline(error)}; nothing is written until"
        is_manifest_full = is_full and isinstance(error, sqlite3.Error) and self._state.is_usable
        _log.error(
            "cache_directory_full" if is_manifest_full else "cache_directory_given_up",
            extra={"directory": self._store.paths.root, "detail": str(error)},
        )
        if is_manifest_full:
            needed_bytes = GROWTH_ALLOWANCE_BYTES
            self._state.fill(
                f"{detail} {needed_bytes} bytes are free above the floor", now=now, needed_bytes=needed_bytes
            )
            return
        self._state.break_down(f"{detail} the cache directory works again", now=now)
        self._spiller.undo_writings()
        self._store.abandon()
        if next(self._inventory, None) is not None and not self._has_inventory:
            # Requests wait for the last part, and the directory may never be opened again.
            self._post_inventory(Inventory((), is_first=False, is_last=True))
        self._inventory = iter(())

    def _announce_gone(self) -> None:
        """Report to the engine which blocks left the disk."""
        if gone := self._store.take_gone():
            self._post(Evicted(gone))

    def _finish(self, ticket: Ticket[_Result], outcome: _Result | Failure) -> None:
        """Post a ticket with its outcome, after what left the disk before: a block of the same name may be
        stored again, and the engine must forget blocks before it reports that they are gone."""
        self._announce_gone()
        ticket.finish(outcome)
        self._post(ticket)
