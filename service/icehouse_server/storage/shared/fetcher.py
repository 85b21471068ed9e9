"""Fetcher: finds how far the object store has a chain, and fetches its blocks into the SSD tier.

Runs on the traffic's event loop. A lookup has a deadline, each read a silence limit, and a store that failed
is not asked for a while; whatever goes wrong, a request only misses and is computed. An object is written to
its own file and checked like a restored block; only then the storage thread gets it. An object that is not
the block it is named for is not read again until this server has stored it anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any

from icehouse_server.averages import MovingAverage
from icehouse_server.clock import Clock
from icehouse_server.domain.blocks import BlockDamage
from icehouse_server.domain.cache_stats import SharedStats
from icehouse_server.domain.ids import BlockHash, Fingerprint
from icehouse_server.storage.api import ChainFound, Fetched, Names
from icehouse_server.storage.files import Files, opened, remove
from icehouse_server.storage.local.block_format.block_file import verify_block
from icehouse_server.storage.local.block_format.header import BlockFile, BlockFileError
from icehouse_server.storage.local.encryption.constants import Cipher
from icehouse_server.storage.shared.object_store import ObjectStore, SharedSettings, StoreError
from icehouse_server.storage.store_paths import StorePaths

_log = logging.getLogger(__name__)

_HEAD_COUNT = 32
_GET_COUNT = 8
"""Most concurrent requests. A read holds a few MiB in memory."""
_ABSENT_S = 10.0
"""How long an absent name is not asked for again."""
_RATE_WEIGHT = 0.3
_LEAST_FETCHES = 3
"""Fewer fetches give no reliable rate."""


@dataclasses.dataclass(eq=False, slots=True)
class FetchJob:
    """A lookup or fetch that the engine waits for."""

    progress_time: float
    """When something last arrived for it (`Clock.monotonic`)."""
    is_abandoned: bool = False


class BlockFetcher:
    """Lookups and fetches. `may_ask` on any thread, everything else on the event loop."""

    def __init__(
        self,
        store: ObjectStore,
        folder: BlockFolder,
        settings: SharedSettings,
        *,
        clock: Clock,
        stats: SharedStats,
        adopt: Callable[[BlockFile, str], Awaitable[bool]],
        offload: Callable[..., Awaitable[Any]],
    ) -> None:
        """`adopt` gives a checked file to the storage thread and returns whether it became a block; `offload`
        calls a function that may take long."""
        self.store = store
        self.folder = folder
        self.settings = settings
        self.clock = clock
        self.stats = stats
        self._adopt = adopt
        self.offload = offload
        self.breaker = Breaker(clock)
        self._absent = RecentNames()
        self.stored = RecentNames()
        """Blocks that the store has, or will never get."""
        self.refused = RecentNames()
        """Objects not to be read until this server has replaced them."""
        self._downloads: dict[BlockHash, tuple[asyncio.Task[int], list[FetchJob]]] = {}
        """Each download with all jobs that wait for it."""
        self._searches: set[asyncio.Task[bool]] = set()
        self._heads = asyncio.Semaphore(_HEAD_COUNT)
        self._gets = asyncio.Semaphore(_GET_COUNT)
        self._rate = MovingAverage(weight=_RATE_WEIGHT)
        self._fetch_count = 0
        self._is_ending = False

    def may_ask(self, name: BlockHash) -> bool:
        """Whether it may be worth asking for a chain that begins with this block."""
        return self.breaker.pause_left_s == 0.0 and not self._is_absent(name)

    def note_stored(self, name: BlockHash) -> None:
        """Note that this server has put an object."""
        self.stored.add(name)
        self._absent.discard(name)
        self.refused.discard(name)

    async def find(self, names: Names, *, limit_s: float) -> ChainFound:
        """Return how much of a chain is in the store, as far as that is known after `limit_s`."""
        self.stats.lookup_total += 1
        reach = ChainReach(len(names), lambda index: self._size_of(names[index]))
        if self.breaker.begin():
            search = asyncio.create_task(self._search(reach))
            self._searches.add(search)
            search.add_done_callback(self._searches.discard)
            # Nobody waits for the rest of the search, but its end shows whether the store answers.
            await asyncio.wait({search}, timeout=limit_s)
            self.stats.late_lookup_total += not (search.done() and search.result())
        self.stats.hit_total += reach.found_count > 0
        rate = self._rate.value if self._fetch_count >= _LEAST_FETCHES else 0.0
        return ChainFound(reach.found_count, reach.size_bytes, rate)

    async def _search(self, reach: ChainReach) -> bool:
        """Search, and record how the store does; return whether it answered everything in time."""
        try:
            async with asyncio.timeout(self.settings.lookup_timeout_s):
                await reach.run()
            self.breaker.succeed()
            return True
        except TimeoutError:
            if not reach.has_answers:
                self._fail("the object store did not answer in time")
        except StoreError as error:
            self._fail(str(error))
        return False

    async def fetch(self, names: Names, job: FetchJob) -> Fetched:
        """Bring blocks into the SSD tier, several at once; the first that is unavailable ends it."""
        began_time = self.clock.monotonic()
        tasks = [self._download(name, job) for name in names]
        block_count = size_bytes = 0
        for task in tasks:
            got_bytes = await asyncio.shield(task)
            if not got_bytes:
                break
            block_count += 1
            size_bytes += got_bytes
        # Downloads that have not begun by now are of no use.
        job.is_abandoned = True
        elapsed_s = self.clock.monotonic() - began_time
        if block_count and elapsed_s > 0.0:
            self._fetch_count += 1
            self.stats.fetch_bytes_per_s = self._rate.add(size_bytes / elapsed_s)
        return Fetched(block_count, size_bytes)

    def end(self) -> None:
        """Cancel all downloads while the directory is still open, so that their files are removed."""
        self._is_ending = True
        for download, _ in self._downloads.values():
            download.cancel()

    def _is_absent(self, name: BlockHash) -> bool:
        now = self.clock.monotonic()
        return self._absent.has(name, now) or self.refused.has(name, now)

    def _note_absent(self, name: BlockHash) -> None:
        self._absent.add(name, end_time=self.clock.monotonic() + _ABSENT_S)

    async def _size_of(self, name: BlockHash) -> int | None:
        if self._is_absent(name):
            return None
        async with self._heads:
            size_bytes = await self.store.size_bytes(self.folder.object_name(name))
        if size_bytes is None:
            self._note_absent(name)
        return size_bytes

    def _download(self, name: BlockHash, job: FetchJob) -> asyncio.Task[int]:
        """Return the download of a block, perhaps one that another request has started."""
        if name not in self._downloads:
            jobs: list[FetchJob] = []
            task = asyncio.create_task(self._bring(name, jobs))
            self._downloads[name] = task, jobs
            task.add_done_callback(lambda _: self._downloads.pop(name))
        task, jobs = self._downloads[name]
        jobs.append(job)
        return task

    def _note_progress(self, jobs: Iterable[FetchJob]) -> None:
        now = self.clock.monotonic()
        for job in jobs:
            job.progress_time = now

    async def _bring(self, name: BlockHash, jobs: Sequence[FetchJob]) -> int:
        """Bring one block; return its file's bytes, or 0 if it is unavailable."""
        async with self._gets:
            is_wanted = any(not job.is_abandoned for job in jobs)
            if not is_wanted or self._is_absent(name) or not self.breaker.begin():
                return 0
            partial = self.folder.fetched(name)
            file = None
            try:
                file = await self._receive(name, jobs, partial)
                # Its deletion may have been ordered meanwhile.
                if self._is_ending or self.refused.has(name, self.clock.monotonic()):
                    file = None
            except OSError as error:
                _log.warning("fetched_block_not_written", extra={"detail": str(error)})
            finally:
                if file is None:
                    with contextlib.suppress(OSError):
                        await self.offload(partial.drop)
        # From here on the storage thread owns the file.
        if file is None or not await self._adopt(file, partial.path):
            return 0
        self._note_progress(jobs)
        self.stored.add(name)
        self.stats.fetched_block_total += 1
        self.stats.fetched_byte_total += file.file_bytes
        return file.file_bytes

    async def _receive(
        self, name: BlockHash, jobs: Sequence[FetchJob], partial: FetchedFile
    ) -> BlockFile | None:
        """Write an object to a file and check it; None if it is absent or not the block. Raises `OSError`
        from the disk."""
        await self.offload(partial.create)
        try:
            size_bytes = await self._copy(name, jobs, partial)
            self.breaker.succeed()
            if size_bytes:
                await self.offload(partial.finish)
                file: BlockFile = await self.offload(self.folder.sound, partial.path, name)
                return file
            self._note_absent(name)
        except TimeoutError:
            self._fail("the object store stopped in the middle of an object")
        except StoreError as error:
            self._fail(str(error))
        except BlockFileError as error:
            if error.damage is not BlockDamage.MEMORY:
                self._refuse(name, error)
        return None

    async def _copy(self, name: BlockHash, jobs: Sequence[FetchJob], partial: FetchedFile) -> int:
        """Copy an object to a file; return the bytes written. Raises `TimeoutError`, `StoreError`,
        `BlockFileError` for more bytes than a block has, and `OSError` from the disk."""
        offset = 0
        async with contextlib.aclosing(self.store.read(self.folder.object_name(name))) as chunks:
            while True:
                try:
                    chunk = await asyncio.wait_for(anext(chunks), self.settings.silence_s)
                except StopAsyncIteration:
                    return offset
                if offset + chunk.nbytes > self.settings.object_limit_bytes:
                    raise BlockFileError(BlockDamage.MISMATCH, "The object is larger than any block")
                await self.offload(partial.write, chunk, offset=offset)
                offset += chunk.nbytes
                self._note_progress(jobs)

    def _refuse(self, name: BlockHash, error: BlockFileError) -> None:
        self.stats.refused_block_total += 1
        self.refused.add(name)
        _log.warning("shared_block_refused", extra={"block": name.hex(), "cause": error.damage.value})

    def _fail(self, detail: str) -> None:
        self.stats.failure_total += 1
        if self.breaker.fail(detail):
            _log.warning("shared_reads_paused", extra={"detail": detail})


_FAILURE_LIMIT = 3
_FIRST_PAUSE_S = 1.0
_LAST_PAUSE_S = 60.0


class Breaker:
    """Circuit breaker for a store that fails: closed until three failures in a row, then open, with one trial
    after each pause. Any thread may look; one thread records."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._failure_count = 0
        self._pause_s = _FIRST_PAUSE_S
        self._trial_time = 0.0
        self._detail = ""

    @property
    def pause_detail(self) -> str:
        """Why no requests are sent at present; empty while all is well."""
        return self._detail if self._failure_count >= _FAILURE_LIMIT else ""

    @property
    def pause_left_s(self) -> float:
        """How long no request may be sent; 0 if one may be."""
        if self._failure_count < _FAILURE_LIMIT:
            return 0.0
        return max(0.0, self._trial_time - self._clock.monotonic())

    def begin(self) -> bool:
        """Return whether a request may be sent now; after failures, one per pause."""
        if self.pause_left_s > 0.0:
            return False
        if self._failure_count >= _FAILURE_LIMIT:
            self._trial_time = self._clock.monotonic() + self._pause_s
        return True

    def succeed(self) -> None:
        """Note an answer."""
        self._failure_count, self._pause_s, self._detail = 0, _FIRST_PAUSE_S, ""

    def fail(self, detail: str) -> bool:
        """Note a failure; True if it starts the first pause."""
        self._failure_count += 1
        self._detail = detail
        if self._failure_count < _FAILURE_LIMIT:
            return False
        self._trial_time = self._clock.monotonic() + self._pause_s
        self._pause_s = min(2.0 * self._pause_s, _LAST_PAUSE_S)
        return self._failure_count == _FAILURE_LIMIT


_PROBE_COUNT = 8
"""Names that are asked for at once."""


class ChainReach:
    """A search for how many blocks of a chain, from its first, an object store has. If it is stopped early,
    its results so far are valid.

    It asks for names, without a listing: a few at once, first at doubling distances, then within the
    remaining gap. A chain of 1,000 blocks takes three rounds of some ten requests.
    """

    def __init__(self, count: int, size_of: Callable[[int], Awaitable[int | None]]) -> None:
        """`size_of` returns the bytes of the block at an index; None if it is absent."""
        self._size_of = size_of
        self._limit = count
        self.found_count = 0
        """Blocks known to be there so far; holes between two that are there are not searched for."""
        self._sizes: list[int] = []
        self._answer_count = 0

    @property
    def has_answers(self) -> bool:
        """Whether the store has answered at all."""
        return self._answer_count > 0

    @property
    def size_bytes(self) -> int:
        """Estimate for all found blocks together."""
        return self.found_count * sum(self._sizes) // len(self._sizes) if self._sizes else 0

    async def run(self) -> None:
        """Search until the end is known. Raises what `size_of` raises."""
        probes = [count for power in range(self._limit.bit_length()) if (count := 1 << power) < self._limit]
        probes.append(self._limit)
        while self.found_count < self._limit:
            asked = [asyncio.ensure_future(self._ask(count)) for count in probes]
            try:
                answers = await asyncio.gather(*asked)
            finally:
                for each in asked:
                    each.cancel()
            absent = next((count for count, is_there in zip(probes, answers, strict=True) if not is_there), 0)
            if absent:
                self._limit = absent - 1
                self.found_count = min(self.found_count, self._limit)
            gap = self._limit - self.found_count
            steps = min(_PROBE_COUNT, gap)
            probes = [self.found_count + gap * step // steps for step in range(1, steps + 1)]

    async def _ask(self, count: int) -> bool:
        size_bytes = await self._size_of(count - 1)
        self._answer_count += 1
        if size_bytes is None:
            return False
        self._sizes.append(size_bytes)
        self.found_count = max(self.found_count, count)
        return True


_LIMIT_COUNT = 1 << 16
"""About 10 MB."""


class RecentNames:
    """The most recent names, up to a limit, each with the time until which it is remembered. One thread adds;
    any thread may look."""

    def __init__(self) -> None:
        self._end_times: OrderedDict[BlockHash, float] = OrderedDict()

    def add(self, name: BlockHash, *, end_time: float = float("inf")) -> None:
        self._end_times[name] = end_time
        self._end_times.move_to_end(name)
        if len(self._end_times) > _LIMIT_COUNT:
            self._end_times.popitem(last=False)

    def discard(self, name: BlockHash) -> None:
        self._end_times.pop(name, None)

    def has(self, name: BlockHash, now: float) -> bool:
        """Whether a name is still remembered at this time."""
        return self._end_times.get(name, 0.0) > now


class BlockFolder:
    """The served model's block files on this server, by name. Any thread; every method may take long."""

    def __init__(
        self, files: Files, paths: StorePaths, *, fingerprint: Fingerprint, cipher: Cipher | None
    ) -> None:
        self.files = files
        self._paths = paths
        self.fingerprint = fingerprint
        self.cipher = cipher

    def object_name(self, name: BlockHash) -> str:
        """Return a block's name in the store. The fingerprint and the block's name cover everything that its
        KV depends on; with encryption both also depend on the key."""
        return f"{self.fingerprint.hex()}/{name.hex()}"

    def read(self, name: BlockHash) -> tuple[BlockFile, bytes]:
        """Return the facts and the bytes of a sound block's file. Raises `BlockFileError` or `OSError`."""
        path = self._paths.block(self.fingerprint, name)
        file = self.sound(path, name)
        data = bytearray(file.file_bytes)
        with opened(self.files, path) as descriptor:
            got = self.files.read_into(descriptor, [memoryview(data)], offset=0)
        if got != len(data):
            raise BlockFileError(BlockDamage.TRUNCATED, f"{path} shrank while it was read")
        return file, bytes(data)

    def fetched(self, name: BlockHash) -> FetchedFile:
        """Return the file, not created yet, for a block to be fetched."""
        return FetchedFile(self.files, self._paths.fetched(self.fingerprint, name))

    def sound(self, path: str, name: BlockHash) -> BlockFile:
        """Return a file's facts after checking every byte. Raises `BlockFileError` if it is not the block of
        this name, whole and sound, and `OSError`."""
        file = verify_block(self.files, path, cipher=self.cipher)
        if file.header is None or (file.cipher is None) != (self.cipher is None):
            raise BlockFileError(BlockDamage.AUTH_TAG, f"{path} is not encrypted under the key in use")
        if (file.outline.fingerprint, file.outline.hash) != (self.fingerprint, name):
            raise BlockFileError(BlockDamage.MISMATCH, f"{path} holds another block than its name says")
        return file


class FetchedFile:
    """The file of a block that is being fetched. Any thread; every method may take long, and raises
    `OSError`.

    Its task may be cancelled at any time while a thread is in one of these methods: `drop` waits for that
    thread, and later calls do nothing.
    """

    def __init__(self, files: Files, path: str) -> None:
        self.path = path
        self._files = files
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        self._is_dropped = False

    def create(self) -> None:
        with self._lock:
            if not self._is_dropped:
                remove(self._files, self.path)
                self._descriptor = self._files.create(self.path)

    def write(self, chunk: memoryview, *, offset: int) -> None:
        with self._lock:
            if self._descriptor is not None:
                self._files.write(self._descriptor, [chunk], offset=offset)

    def finish(self) -> None:
        """Make the file durable and close it."""
        with self._lock, self._closing() as descriptor:
            if descriptor is not None:
                self._files.fsync(descriptor)

    def drop(self) -> None:
        """Close and remove the file."""
        with self._lock:
            self._is_dropped = True
            try:
                with self._closing():
                    pass
            finally:
                remove(self._files, self.path)

    @contextlib.contextmanager
    def _closing(self) -> Iterator[int | None]:
        """Yield the descriptor, if the file is open, and close it."""
        descriptor, self._descriptor = self._descriptor, None
        try:
            yield descriptor
        finally:
            if descriptor is not None:
                self._files.close(descriptor)
