"""Uploader: stores blocks of the SSD tier in the object store, one after the other, at the lowest priority.

A block is offered when it was written here and whenever it is used, so a block that could not be stored gets
another chance. Nothing waits for an upload: the queue holds names, and when it is full the oldest is dropped.
Runs on the traffic's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable

from icehouse_server.domain.blocks import RegionKind
from icehouse_server.domain.ids import BlockHash
from icehouse_server.storage.api import Names
from icehouse_server.storage.local.block_format.header import (
    BlockFile,
    BlockFileError,
    head_length,
    parse_head,
)
from icehouse_server.storage.shared.fetcher import BlockFetcher, Breaker
from icehouse_server.storage.shared.object_store import StoreError

_log = logging.getLogger(__name__)

_QUEUE_LIMIT_COUNT = 8192
_DELETE_LIMIT_COUNT = 1 << 16
"""As many as `refused` remembers: an ordered deletion is dropped only after that many others."""
_TRY_LIMIT = 4
"""A block that the store refused this often is dropped."""
_PAUSE_STEP_S = 0.5


class Uploader:
    """The blocks to store and the objects to delete. On the event loop."""

    def __init__(self, fetcher: BlockFetcher) -> None:
        """It stores where `fetcher` looks."""
        self._fetcher = fetcher
        self._store, self._folder, self._settings = fetcher.store, fetcher.folder, fetcher.settings
        self._clock, self._stats, self._offload = fetcher.clock, fetcher.stats, fetcher.offload
        self.breaker = Breaker(fetcher.clock)
        self._offered: OrderedDict[BlockHash, int] = OrderedDict()
        """How often each was tried."""
        self._to_delete: OrderedDict[BlockHash, int] = OrderedDict()
        self._has_work = asyncio.Event()
        self._is_working = False
        self._is_upload_next = False
        """A deletion failed: a block is stored before the next one, as some stores let nobody delete."""
        self.pause_s: Callable[[float], float] = lambda worked_s: 0.0
        """How long to leave the cores to others after this much work."""

    @property
    def is_busy(self) -> bool:
        """Whether something can be stored or deleted now."""
        return self._is_working or (self._has_work.is_set() and self.breaker.pause_left_s == 0.0)

    @property
    def queue_count(self) -> int:
        return len(self._offered)

    def offer(self, names: Names) -> None:
        """Queue blocks to be stored, except those that are stored already."""
        now = self._clock.monotonic()
        for name in names:
            if not self._fetcher.stored.has(name, now):
                self._offered.setdefault(name, 0)
        while len(self._offered) > _QUEUE_LIMIT_COUNT:
            self._offered.popitem(last=False)
            self._stats.dropped_block_total += 1
        self._note_work()

    def delete(self, names: Names) -> None:
        """Queue objects to be deleted; until this server has stored them anew, it fetches none of them."""
        for name in names:
            self._offered.pop(name, None)
            self._fetcher.stored.discard(name)
            self._fetcher.refused.add(name)
            self._to_delete.setdefault(name, 0)
        while len(self._to_delete) > _DELETE_LIMIT_COUNT:
            self._to_delete.popitem(last=False)
        self._note_work()

    async def run(self) -> None:
        """Store and delete for ever."""
        while True:
            await self._has_work.wait()
            if (pause_left_s := self.breaker.pause_left_s) > 0.0:
                await asyncio.sleep(min(pause_left_s, _PAUSE_STEP_S))
                continue
            self.breaker.begin()
            is_deletion = bool(self._to_delete) and not (self._is_upload_next and self._offered)
            self._is_upload_next = False
            queue = self._to_delete if is_deletion else self._offered
            work = self._delete if is_deletion else self._upload
            name, try_count = queue.popitem(last=False)
            began_time = self._clock.monotonic()
            size_bytes = 0
            self._is_working = True
            try:
                async with asyncio.timeout(self._settings.put_timeout_s):
                    size_bytes = await work(name)
                self.breaker.succeed()
            except (StoreError, TimeoutError) as error:
                self._fail(str(error) or "the object store did not answer in time")
                self._put_back(name, try_count + 1, is_deletion=is_deletion)
            except Exception:  # an exception of ours or the library's costs this block, not all behind it
                _log.exception("shared_store_failed")
                self._stats.dropped_block_total += queue is self._offered
            self._is_working = False
            self._note_work()
            worked_s = self._clock.monotonic() - began_time
            rate = self._settings.write_bytes_per_s
            await asyncio.sleep(max(self.pause_s(worked_s), size_bytes / rate - worked_s if rate else 0.0))

    def _put_back(self, name: BlockHash, try_count: int, *, is_deletion: bool) -> None:
        """Queue a failed task again. Deletions have no try limit: they were ordered."""
        if is_deletion:
            self._to_delete.setdefault(name, try_count)
            self._is_upload_next = True
        elif name in self._to_delete:
            return  # its deletion was ordered meanwhile
        elif try_count < _TRY_LIMIT:
            self._offered[name] = try_count
        else:
            self._stats.dropped_block_total += 1

    def _note_work(self) -> None:
        if self._offered or self._to_delete:
            self._has_work.set()
        else:
            self._has_work.clear()

    async def _delete(self, name: BlockHash) -> int:
        await self._store.delete(self._folder.object_name(name))
        self._stats.deleted_block_total += 1
        return 0

    async def _upload(self, name: BlockHash) -> int:
        """Store one block unless the store has it; return the bytes sent."""
        try:
            file, data = await self._offload(self._folder.read, name)
        except (BlockFileError, OSError):
            # It has left this server, or is damaged: its next reader finds out.
            self._stats.dropped_block_total += 1
            return 0
        if file.outline.token_count < file.outline.block_token_limit:
            # A tail: only somebody with the very same prompt could name it.
            self._fetcher.stored.add(name)
            return 0
        target = self._folder.object_name(name)
        replaces = self._fetcher.refused.has(name, self._clock.monotonic())
        size_bytes = None if replaces else await self._store.size_bytes(target)
        if size_bytes is not None:
            replaces = await self._has_more(file, target, size_bytes)
        is_stored = size_bytes is None or replaces
        if is_stored:
            is_stored = await self._store.put(target, data, replaces=replaces)
        if name not in self._to_delete:  # otherwise its deletion was ordered meanwhile, and is next
            self._fetcher.note_stored(name)
        if not is_stored:
            self._stats.known_block_total += 1
            return 0
        self._stats.stored_block_total += 1
        self._stats.stored_byte_total += len(data)
        return len(data)

    async def _has_more(self, file: BlockFile, target: str, size_bytes: int) -> bool:
        """Return whether a block has regions that the object lacks, such as a checkpoint taken later."""
        own = {region.kind for region in file.regions}
        if own == {RegionKind.KV}:
            return False
        head = bytearray()
        try:
            async with contextlib.aclosing(self._store.read(target)) as chunks:
                async for chunk in chunks:
                    head += chunk
                    if len(head) >= 8 and len(head) >= head_length(head, file_bytes=size_bytes):
                        break
            head_bytes = head_length(head, file_bytes=size_bytes)
            theirs = parse_head(bytes(head[:head_bytes]), file_bytes=size_bytes, cipher=self._folder.cipher)
        except BlockFileError:
            return True
        return not own <= {region.kind for region in theirs.regions}

    def _fail(self, detail: str) -> None:
        self._stats.failure_total += 1
        if self.breaker.fail(detail):
            _log.warning("shared_writes_paused", extra={"detail": detail})
