"""Reader pool: a few threads that turn load requests into verified bytes, where they are wanted.

A load goes from the engine straight to this pool, never behind a write, and its answer goes
straight back; the storage thread is only told what was found, to count it and to put damaged
files aside. The blocks of one load are shared among the readers: the reader that takes the
last ticket delivers.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from icehouse_server.averages import MovingAverage
from icehouse_server.clock import Clock
from icehouse_server.domain.blocks import BlockHeader, Damage
from icehouse_server.storage.api import (
    AnyTicket,
    Failure,
    KvPlace,
    Loaded,
    LoadedBlock,
    Names,
    PlannedBlock,
    Ticket,
    UnfitLayout,
)
from icehouse_server.storage.files import Files
from icehouse_server.storage.local.block_format.damage import BlockFileError
from icehouse_server.storage.local.block_format.read_pace import ReadPace, ReadTurns
from icehouse_server.storage.local.block_format.reader import open_block, read_block, read_header
from icehouse_server.storage.local.encryption.facts import Cipher
from icehouse_server.storage.paths import StorePaths
from icehouse_server.storage.settings import StorageSettings

_RATE_WEIGHT = 0.3
"""Of a load, however long it took: one that others' work made slow is outweighed by the next three."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReadReport:
    """What the storage thread is told of a finished order to read, so that its place is free again."""

    block_count: int = 0
    failures: tuple[Failure, ...] = ()
    read_bytes: int = 0


class Reading:
    """An order on its way through the readers. The engine's thread may abandon it at any time."""

    def __init__(self, ticket: Ticket[Any], *, now: float) -> None:
        self.ticket = ticket
        self.progress_time = now
        """When it was asked for, or a reader last came on with it (`Clock.monotonic`)."""
        self.has_begun = False
        self.is_abandoned = False
        """Nobody waits for it any more: what is left of it need not be read."""
        self._start = collections.deque((None,))
        """One item: whoever takes it, a reader that begins or the engine that abandons, is the first."""

    def begin(self) -> bool:
        """Take it up; False when it was abandoned before any reader had begun it."""
        self.has_begun = self._is_first()
        return self.has_begun

    def abandon(self) -> bool:
        """Stop waiting for it; True when no reader has begun it, so that none will."""
        self.is_abandoned = True
        return self._is_first()

    def _is_first(self) -> bool:
        try:
            self._start.pop()
        except IndexError:
            return False
        return True


class HeadJob(Reading):
    """A request for headers on its way."""

    def __init__(self, names: Names, *, now: float) -> None:
        super().__init__(Ticket(), now=now)
        self.names = names


class LoadJob(Reading):
    """One load on its way. Each result slot is written by the one reader that has that block."""

    def __init__(self, blocks: Sequence[PlannedBlock], into: KvPlace | None, *, now: float) -> None:
        assert blocks, "A load asks for no block"
        super().__init__(Ticket(), now=now)
        self.blocks = blocks
        self.place = into
        """Held here alone, so that it is let go of before the answer."""
        self.is_shared = False
        """Set by the first block's reader before others get a part."""
        self.busy_s = [0.0] * len(blocks)
        """What reading each block took, without pauses."""
        self.read_bytes = [0] * len(blocks)
        self.results: list[LoadedBlock | Failure | None] = [None] * len(blocks)
        self.tickets = collections.deque(range(len(blocks)))

    @property
    def failures(self) -> tuple[Failure, ...]:
        return tuple(result for result in self.results if isinstance(result, Failure))


class ReaderPool:
    """Reads what is submitted, on `run`'s threads or, step by step, on the caller's."""

    def __init__(
        self,
        settings: StorageSettings,
        *,
        files: Files,
        clock: Clock,
        post: Callable[[Ticket[Any]], object],
        report: Callable[[ReadReport], None],
        cipher: Cipher | None,
        pause: Callable[[float], object] | None = None,
    ) -> None:
        """Readers work `share_beside_decode` of the time together while they leave the cores to others.

        `pause` waits for so many seconds; by default it ends early when the cores are free or the pool stops.
        """
        self._share_beside_decode = settings.share_beside_decode
        self._turns = ReadTurns()
        self._is_stopping = threading.Event()
        self._has_cores = threading.Event()
        self._has_cores.set()
        self._pause = pause or self._has_cores.wait
        self._files = files
        self._paths = StorePaths(os.path.abspath(settings.directory))
        self._clock = clock
        self._post = post
        self._report = report
        self._fingerprint = settings.fingerprint
        self._cipher = cipher
        self._reader_count = settings.reader_thread_count
        self._rate = MovingAverage(weight=_RATE_WEIGHT)
        self._work: queue.SimpleQueue[tuple[LoadJob, int] | HeadJob | None] = queue.SimpleQueue()
        self._readings: dict[AnyTicket, Reading] = {}
        """Orders that readers have yet to end. The engine's thread puts them in."""
        self._progress_time = clock.monotonic()
        """When any reader last came on with anything."""

    def submit(self, blocks: Sequence[PlannedBlock], into: KvPlace | None) -> Ticket[Loaded]:
        """Queue a load; bounding it is the caller's part."""
        job = LoadJob(blocks, into, now=self._clock.monotonic())
        self._readings[job.ticket] = job
        self._work.put((job, 0))
        return job.ticket

    def submit_heads(self, names: Names) -> Ticket[tuple[BlockHeader, ...]]:
        """Queue a question for headers; bounding it is the caller's part."""
        job = HeadJob(names, now=self._clock.monotonic())
        self._readings[job.ticket] = job
        self._work.put(job)
        return job.ticket

    def silence_s(self, ticket: AnyTicket) -> float:
        """Return for how long no reader has come on with an order, or with any before it is its turn; 0 where
        it was answered. Called by the engine's thread, like `abandon` and `hung_count`."""
        reading = self._readings.get(ticket)
        if reading is None:
            return 0.0
        before_turn_time = 0.0 if reading.has_begun else self._progress_time
        return max(0.0, self._clock.monotonic() - max(reading.progress_time, before_turn_time))

    def abandon(self, ticket: AnyTicket) -> None:
        """Stop waiting for an order. What a reader is at cannot be stopped: its memory is let go of when the
        system returns from the read."""
        reading = self._readings.get(ticket)
        if reading is not None and reading.abandon():
            del self._readings[ticket]
            if isinstance(reading, LoadJob):
                reading.place = None

    @property
    def hung_count(self) -> int:
        """Orders that were abandoned while a reader was at them, and that it has not come back from."""
        return sum(reading.is_abandoned for reading in list(self._readings.values()))

    def leave_cores(self, *, to_decode: bool) -> None:
        """Read at a small share of the time from now on, or at full speed; those under way too."""
        if to_decode:
            self._has_cores.clear()
        if not to_decode or self._is_stopping.is_set():
            self._has_cores.set()

    def run(self) -> None:
        """Read until `stop`; the body of each reader's thread."""
        while (work := self._work.get()) is not None:
            self._do(work)
            # While this thread waits for the next one, nothing of the last one is kept.
            del work
        # The others are told too.
        self._work.put(None)

    def stop(self) -> None:
        """Let the threads end after the reads queued before, without a pause."""
        self._is_stopping.set()
        self._has_cores.set()
        self._work.put(None)

    def step(self) -> bool:
        """Read one block on the calling thread; False when nothing is queued."""
        try:
            work = self._work.get_nowait()
        except queue.Empty:
            return False
        if work is None:
            return False
        self._do(work)
        return True

    def _do(self, work: tuple[LoadJob, int] | HeadJob) -> None:
        if self._take_up(work):
            self._read_on(work)

    def _take_up(self, work: tuple[LoadJob, int] | HeadJob) -> bool:
        """Begin with an order; False when it was abandoned while it waited."""
        reading, index = (work, 0) if isinstance(work, HeadJob) else work
        if index == 0 and not reading.begin():
            self._report(ReadReport())
            return False
        self._note_progress(reading)
        return True

    def _read_on(self, work: tuple[LoadJob, int] | HeadJob) -> None:
        if isinstance(work, HeadJob):
            self._read_heads(work)
        else:
            self._read(*work)

    def _note_progress(self, reading: Reading, *, pause_s: float = 0.0) -> None:
        """Note that a reader has come on; a pause that it makes for others is no silence of the disk."""
        reading.progress_time = self._progress_time = self._clock.monotonic() + pause_s

    def _end(self, reading: Reading, outcome: Any | None, report: ReadReport) -> None:
        """Answer an order, unless there is nobody to answer, and note that the readers have done with it."""
        if outcome is not None:
            reading.ticket.settle(outcome)
            self._post(reading.ticket)
        self._progress_time = self._clock.monotonic()
        self._readings.pop(reading.ticket, None)
        self._report(report)

    def _read_heads(self, job: HeadJob) -> None:
        """Answer with the headers that are sound; the others are found out when they are loaded."""
        headers = []
        for name in job.names:
            if job.is_abandoned:
                break
            self._note_progress(job)
            with contextlib.suppress(BlockFileError, OSError, MemoryError):
                path = self._paths.block(self._fingerprint, name)
                headers.append(read_header(self._files, path, name, cipher=self._cipher))
        self._end(job, tuple(headers), ReadReport())

    def _read(self, job: LoadJob, index: int) -> None:
        planned = job.blocks[index]
        began_s = self._clock.monotonic()
        pace = ReadPace(
            self._clock,
            self._turns,
            share=self._share,
            pause=self._pause,
            note_piece=lambda pause_s: self._note_progress(job, pause_s=pause_s),
        )
        path = self._paths.block(planned.header.fingerprint, planned.header.hash)
        checksum = None
        try:
            if not (job.is_abandoned or isinstance(job.results[0], Failure)):
                descriptor, file = open_block(self._files, path, planned, cipher=self._cipher)
                checksum = file.header_checksum
                try:
                    if index == 0:
                        self._share_out(job)
                    job.results[index] = read_block(
                        self._files,
                        descriptor,
                        file,
                        planned,
                        job.place,
                        pace=pace,
                    )
                    job.read_bytes[index] = sum(file.region_bytes(kind) for kind in planned.regions)
                finally:
                    self._files.close(descriptor)
        except BlockFileError as error:
            job.results[index] = Failure(error.damage, str(error), planned.header.hash, checksum)
        except UnfitLayout as error:
            job.results[index] = Failure(Damage.LAYOUT, str(error), planned.header.hash, checksum)
        except MemoryError:
            job.results[index] = Failure(Damage.MEMORY, "No memory to read it into", planned.header.hash)
        except OSError as error:
            # Only a close can raise it here, after the bytes were read: the medium is not to be trusted.
            job.results[index] = Failure(Damage.IO, f"{path}: {error}", planned.header.hash)
        pace.end()
        job.busy_s[index] = self._clock.monotonic() - began_s - pace.paused_s
        if not job.is_shared or job.tickets.pop() == 0:
            self._deliver(job)

    def _share(self) -> float:
        """Return which share of the time readers work now."""
        return 1.0 if self._has_cores.is_set() else self._share_beside_decode

    def _share_out(self, job: LoadJob) -> None:
        """The first block is there: let all readers at the others."""
        job.is_shared = True
        for index in range(1, len(job.blocks)):
            self._work.put((job, index))

    def _deliver(self, job: LoadJob) -> None:
        failures, job.place = job.failures, None
        if job.is_abandoned:
            # What was found to be damaged is told all the same.
            self._end(job, None, ReadReport(failures=failures))
            return
        loaded: list[LoadedBlock] = []
        for result in job.results:
            if not isinstance(result, LoadedBlock):
                break
            loaded.append(result)
        read_bytes = sum(job.read_bytes[: len(loaded)])
        # What it would have taken by itself and at full speed: others' loads come in between.
        busy_s = sum(job.busy_s) / min(self._reader_count, len(job.busy_s))
        read_bytes_per_s = self._rate.add(read_bytes / busy_s) if busy_s and read_bytes else self._rate.value
        report = ReadReport(len(loaded), failures, read_bytes)
        if not loaded:
            self._end(job, failures[0], report)
            return
        outcome = Loaded(
            blocks=tuple(loaded),
            read_bytes=read_bytes,
            read_bytes_per_s=read_bytes_per_s,
            failure=failures[0] if failures else None,
        )
        self._end(job, outcome, report)
