"""Reader pool: a few threads that turn load requests into verified bytes in the caller's memory.

A load goes from the engine straight to this pool, never behind a write, and its answer goes straight back.
The storage thread only gets a report, to count the read and to quarantine damaged files. The readers share
the blocks of one load; the reader that finishes the last block posts the answer.

A forward pass on the CPU waits for its slowest thread, so anything else that runs for 10 ms makes that step
10 ms longer. So reads are rate-limited during decode: a short piece in each of several steps is hardly
noticed, and the load takes longer.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from icehouse_server.averages import MovingAverage
from icehouse_server.clock import Clock
from icehouse_server.domain.blocks import BlockDamage
from icehouse_server.storage.api import (
    AnyTicket,
    BlocksLoaded,
    KvTarget,
    LayoutMismatch,
    LoadedBlock,
    Names,
    PlannedBlock,
    StorageFailure,
    Ticket,
)
from icehouse_server.storage.files import Files
from icehouse_server.storage.local.block_format.block_file import open_block, read_block, read_header
from icehouse_server.storage.local.block_format.header import BlockFileError
from icehouse_server.storage.local.block_format.region_input import ReadMeter
from icehouse_server.storage.local.codec_choice import NO_RATES, ReadRates
from icehouse_server.storage.local.encryption.constants import Cipher
from icehouse_server.storage.local.open_model import OpenModel
from icehouse_server.storage.storage_settings import StorageSettings
from icehouse_server.storage.store_paths import StorePaths

_RATE_WEIGHT = 0.3
"""Weight of each load in the moving average, however long it took: the next three outweigh a slow one."""
_PIECE_S = 0.003
"""About how long a reader works without a pause. Shorter pieces would wake it too often for decode."""


class ReadSchedule:
    """When readers may work: together a share of the time, and only one at once. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next_time = 0.0

    def reserve(self, now: float, *, share: float) -> float:
        """Reserve the next slot for a piece of work; return how many seconds away it is."""
        with self._lock:
            begin_time = max(now, self._next_time)
            self._next_time = begin_time + _PIECE_S / share
        return begin_time - now

    def correct(self, worked_s: float, *, share: float) -> None:
        """Shift later slots by how much longer or shorter a piece took than planned."""
        with self._lock:
            self._next_time += (worked_s - _PIECE_S) / share

    def clear(self) -> None:
        """Let the next reader work at once: readers no longer leave cores to others."""
        with self._lock:
            self._next_time = 0.0


class ReadLimiter:
    """Makes one reader wait for its slots while readers leave cores to others. A share of 1 is no limit."""

    def __init__(
        self,
        clock: Clock,
        schedule: ReadSchedule,
        *,
        share: Callable[[], float],
        pause: Callable[[float], object],
        on_piece: Callable[[float], None] = lambda pause_s: None,
    ) -> None:
        """`share` is called each time; `on_piece` is called before each piece with the pause before it."""
        self._clock = clock
        self._schedule = schedule
        self._share = share
        self._pause = pause
        self._on_piece = on_piece
        self._piece: tuple[float, float] | None = None
        """When the current piece began, and with which share."""
        self.paused_s = 0.0
        """In total."""

    def wait(self) -> None:
        """Wait for a slot, unless a piece of work is in progress and still short."""
        share = self._share()
        assert 0.0 < share <= 1.0, share
        now = self._clock.monotonic()
        if share == 1.0:
            self._piece = None
            self._schedule.clear()
        if share == 1.0 or (self._piece is not None and now - self._piece[0] < _PIECE_S):
            self._on_piece(0.0)
            return
        self.end()
        wait_s = self._schedule.reserve(now, share=share)
        self._on_piece(wait_s)
        if wait_s > 0.0:
            self._pause(wait_s)
        began_time = self._clock.monotonic()
        self._piece = (began_time, share)
        self.paused_s += began_time - now

    def end(self) -> None:
        piece, self._piece = self._piece, None
        if piece is not None:
            self._schedule.correct(self._clock.monotonic() - piece[0], share=piece[1])


@dataclasses.dataclass(frozen=True, slots=True)
class ReadReport:
    """Report of a finished read to the storage thread, which counts it and frees its place in the queue."""

    block_count: int = 0
    failures: tuple[StorageFailure, ...] = ()
    read_bytes: int = 0
    rates: ReadRates = NO_RATES


class ReadJob:
    """A load, or a request for headers, as the readers see it. The engine may abandon it at any time.

    Each item of the lists is written only by the reader that has that block.
    """

    def __init__(
        self,
        model: OpenModel,
        blocks: Sequence[PlannedBlock],
        target: KvTarget | None,
        names: Names,
        *,
        clock: Clock,
    ) -> None:
        self.model = model
        self.blocks = blocks
        """The blocks of a load."""
        self.target = target
        """Referenced only here, so that it is released before the answer."""
        self.names = names
        """The blocks whose headers are requested."""
        self.ticket: Ticket[Any] = Ticket()
        self.progress_time = clock.monotonic()
        """When it was queued, or a reader last made progress with it (`Clock.monotonic`)."""
        self.has_begun = False
        self.is_abandoned = False
        """Nobody waits for it any more: the rest of it need not be read."""
        self._first = threading.Lock()
        """Acquired by the first of two: a reader that begins or the engine that abandons; never released."""
        self.is_shared = False
        """Set by the first block's reader before other readers get a part."""
        self.busy_s = [0.0] * len(blocks)
        """How long each block's read took, without pauses."""
        self.meters = [ReadMeter(clock.monotonic) for _ in blocks]
        """What each block's reader did."""
        self.read_bytes = [0] * len(blocks)
        self.results: list[LoadedBlock | StorageFailure | None] = [None] * len(blocks)
        self.countdown = collections.deque(range(len(blocks)))
        """One number for each block to finish; the reader that pops 0 is the last."""

    def begin(self) -> bool:
        """Begin reading; False if it was abandoned before any reader had begun."""
        self.has_begun = self._first.acquire(blocking=False)
        return self.has_begun

    def abandon(self) -> bool:
        """Stop waiting for it; True if no reader has begun, so that none will."""
        self.is_abandoned = True
        return self._first.acquire(blocking=False)


_Work = tuple[ReadJob, int]
"""A job and the index of the block to read."""


class ReaderPool:
    """Reads what is submitted, on the threads of `run` or, with `step`, on the caller's."""

    def __init__(
        self,
        settings: StorageSettings,
        *,
        files: Files,
        clock: Clock,
        report: Callable[[OpenModel, ReadReport], None],
        cipher: Cipher | None,
        pause: Callable[[float], object] | None = None,
    ) -> None:
        """`pause` waits for some seconds. The default ends early when the cores are free, or at `stop`."""
        self._settings = settings
        self._schedule = ReadSchedule()
        self._is_stopping = threading.Event()
        self._has_cores = threading.Event()
        self._has_cores.set()
        self._cores = threading.Lock()
        self._decoding: set[OpenModel] = set()
        """Models to which the readers leave cores."""
        self._pause = pause or self._has_cores.wait
        self._files = files
        self._paths = StorePaths(os.path.abspath(settings.directory))
        self._clock = clock
        self._report = report
        self._cipher = cipher
        self._rate = MovingAverage(weight=_RATE_WEIGHT)
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._jobs: dict[AnyTicket, ReadJob] = {}
        """Jobs that readers have yet to finish. The engine's thread adds them."""
        self._progress_time = clock.monotonic()
        """When any reader last made progress with any job."""

    def submit(
        self,
        model: OpenModel,
        blocks: Sequence[PlannedBlock] = (),
        into: KvTarget | None = None,
        *,
        names: Names = (),
    ) -> Ticket[Any]:
        """Queue a load, or a request for the headers of `names`; the caller bounds the queue."""
        job = ReadJob(model, blocks, into, names, clock=self._clock)
        self._jobs[job.ticket] = job
        self._work.put((job, 0))
        return job.ticket

    def silence_s(self, ticket: AnyTicket) -> float:
        """Return how long no reader has made progress with a job, or with any job while it is queued; 0 once
        it is answered. Called by the engine's thread, like `abandon` and `hung_count`."""
        job = self._jobs.get(ticket)
        if job is None:
            return 0.0
        queue_progress_time = 0.0 if job.has_begun else self._progress_time
        return max(0.0, self._clock.monotonic() - max(job.progress_time, queue_progress_time))

    def abandon(self, ticket: AnyTicket) -> None:
        """Stop waiting for a job. A read in progress cannot be stopped: its memory is released when the
        system returns from the read."""
        job = self._jobs.get(ticket)
        if job is not None and job.abandon():
            del self._jobs[ticket]
            job.target = None

    @property
    def hung_count(self) -> int:
        """Jobs that were abandoned during a read from which the reader has not returned."""
        return sum(job.is_abandoned for job in list(self._jobs.values()))

    def leave_cores(self, model: OpenModel, *, to_decode: bool) -> None:
        """Read at a small share of the time while any model decodes, or at full speed; reads in progress
        too."""
        with self._cores:
            (self._decoding.add if to_decode else self._decoding.discard)(model)
            if self._decoding and not self._is_stopping.is_set():
                self._has_cores.clear()
            else:
                self._has_cores.set()

    def run(self) -> None:
        """Read until `stop`; the body of each reader's thread."""
        while (work := self._work.get()) is not None:
            self._do(work)
            # While this thread waits for the next job, it must not hold the last one's memory.
            del work
        # The other readers must see it too.
        self._work.put(None)

    def stop(self) -> None:
        """Let the threads end after the reads queued before, without pauses."""
        self._is_stopping.set()
        self._has_cores.set()
        self._work.put(None)

    def step(self) -> bool:
        """Read one block on the calling thread; False if nothing is queued."""
        work = None if self._work.empty() else self._work.get_nowait()
        if work is not None:
            self._do(work)
        return work is not None

    def _do(self, work: _Work) -> None:
        if self._begin(work):
            self._read(work)

    def _begin(self, work: _Work) -> bool:
        """Begin with a block; False if the job was abandoned while it waited."""
        job, index = work
        if index == 0 and not job.begin():
            self._report(job.model, ReadReport())
            return False
        self._note_progress(job)
        return True

    def _read(self, work: _Work) -> None:
        job, index = work
        if job.blocks:
            self._read_block(job, index)
        else:
            self._read_headers(job)

    def _note_progress(self, job: ReadJob, *, pause_s: float = 0.0) -> None:
        """Note that a reader made progress; its pause for others does not count as silence of the disk."""
        job.progress_time = self._progress_time = self._clock.monotonic() + pause_s

    def _finish(self, job: ReadJob, outcome: Any | None, report: ReadReport) -> None:
        """Answer a job, unless nobody waits for it, and note that the readers have finished it."""
        if outcome is not None:
            job.ticket.finish(outcome)
            job.model.send(job.ticket)
        self._progress_time = self._clock.monotonic()
        self._jobs.pop(job.ticket, None)
        self._report(job.model, report)

    def _read_headers(self, job: ReadJob) -> None:
        """Answer with the sound headers; damaged blocks are found when they are loaded."""
        headers = []
        for name in job.names:
            if job.is_abandoned:
                break
            self._note_progress(job)
            with contextlib.suppress(BlockFileError, OSError, MemoryError):
                path = self._paths.block(job.model.fingerprint, name)
                headers.append(read_header(self._files, path, name, cipher=self._cipher))
        self._finish(job, tuple(headers), ReadReport())

    def _read_block(self, job: ReadJob, index: int) -> None:
        planned = job.blocks[index]
        began_s = self._clock.monotonic()
        limiter = ReadLimiter(
            self._clock,
            self._schedule,
            share=self._share,
            pause=self._pause,
            on_piece=lambda pause_s: self._note_progress(job, pause_s=pause_s),
        )
        path = self._paths.block(planned.header.fingerprint, planned.header.hash)
        checksum = None
        failed: tuple[BlockDamage, str] | None = None
        try:
            if not (job.is_abandoned or isinstance(job.results[0], StorageFailure)):
                with open_block(self._files, path, planned, cipher=self._cipher) as (descriptor, file):
                    checksum = file.header_checksum
                    if index == 0:
                        self._share_out(job)
                    job.results[index] = read_block(
                        self._files,
                        descriptor,
                        file,
                        planned,
                        job.target,
                        before_read=limiter.wait,
                        meter=job.meters[index],
                    )
                    job.read_bytes[index] = sum(map(file.region_bytes, planned.regions))
        except BlockFileError as error:
            failed = error.damage, str(error)
        except LayoutMismatch as error:
            failed = BlockDamage.LAYOUT, str(error)
        except MemoryError:
            failed = BlockDamage.MEMORY, "No memory to read it into"
        except OSError as error:
            # Only closing can raise it here, after the bytes were read: the medium is not to be trusted.
            failed = BlockDamage.IO, f"{path}: {error}"
        if failed is not None:
            job.results[index] = StorageFailure(*failed, planned.header.hash, checksum)
        limiter.end()
        job.busy_s[index] = self._clock.monotonic() - began_s - limiter.paused_s
        if not job.is_shared or job.countdown.pop() == 0:
            self._answer(job)

    def _share(self) -> float:
        return 1.0 if self._has_cores.is_set() else self._settings.share_beside_decode

    def _share_out(self, job: ReadJob) -> None:
        """Let all readers read the other blocks, now that the first one is open."""
        job.is_shared = True
        for index in range(1, len(job.blocks)):
            self._work.put((job, index))

    def _answer(self, job: ReadJob) -> None:
        job.target = None
        failures = tuple(result for result in job.results if isinstance(result, StorageFailure))
        if job.is_abandoned:
            # Damage is reported nevertheless.
            self._finish(job, None, ReadReport(failures=failures))
            return
        loaded = tuple(_leading_blocks(job.results))
        read_bytes = sum(job.read_bytes[: len(loaded)])
        # The time it would have taken alone and at full speed: other loads are read in between.
        reader_count = min(self._settings.reader_thread_count, len(job.busy_s))
        busy_s = sum(job.busy_s) / reader_count
        rate = self._rate.add(read_bytes / busy_s) if busy_s and read_bytes else self._rate.value
        failure = failures[0] if failures else None
        outcome = BlocksLoaded(loaded, read_bytes, rate, failure) if loaded else failure
        self._finish(
            job, outcome, ReadReport(len(loaded), failures, read_bytes, _rates_of(job.meters, reader_count))
        )


def _rates_of(meters: Sequence[ReadMeter], reader_count: int) -> ReadRates:
    """Return the rates of what these readers did together."""
    disk_s = sum(meter.disk_s for meter in meters) / reader_count
    decode_s = sum(meter.decode_s for meter in meters) / reader_count
    return ReadRates(
        sum(meter.disk_bytes for meter in meters) / disk_s if disk_s else 0.0,
        sum(meter.decoded_bytes for meter in meters) / decode_s if decode_s else 0.0,
    )


def _leading_blocks(results: Sequence[LoadedBlock | StorageFailure | None]) -> Iterator[LoadedBlock]:
    """Yield the blocks before the first one that was not read."""
    for result in results:
        if not isinstance(result, LoadedBlock):
            return
        yield result
