"""Page pool: the KV of one group of layers, for all rows and all blocks, in one array of equal pages.

A page belongs to whoever refers to its `Page`: row tables and block regions. Without a reference it is free.
A pass in flight may still read a freed page, so it is handed out again only after all passes dispatched by
then have ended.

Inference thread only, except that the last reference to a page may be dropped on any thread.
"""

from __future__ import annotations

import collections
import io
import logging
import math
import mmap
import struct
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, cast

import mlx.core as mx
import numpy as np

from icehouse_server.device import Backend, find_backend
from icehouse_server.engine.attention.port import Ints, PoolShape

_log = logging.getLogger("icehouse.engine")

_LEAST_PAGES: Final = 16

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Page:
    """One page, as long as somebody refers to it."""

    __slots__ = ("__weakref__", "_freed", "number")

    def __init__(self, number: int, freed: collections.deque[int]) -> None:
        self.number = number
        self._freed = freed

    def __del__(self) -> None:
        self._freed.append(self.number)

    def move(self, number: int, freed: collections.deque[int]) -> None:
        """Give the page a new number, and a new list to report to when it is freed."""
        self.number, self._freed = number, freed


class PagePool:
    """Pages of one geometry.

    The pool is allocated at once, with all the memory that KV may take. Growing means copying, with the old
    and the new array in memory together, so a growing pool could never use more than half of the memory. The
    memory guard admits no request that would not fit. If the limit is unknown, or other models need memory
    too, the pool begins small and doubles while there is room.
    """

    def __init__(self, shape: PoolShape, *, passes: PassClock, size_bytes: int = 0) -> None:
        """`size_bytes` is its size at first, and for good; 0 if it may grow."""
        self.shape = shape
        self._passes = passes
        self._freed: collections.deque[int] = collections.deque()
        self._waiting: collections.deque[tuple[int, int]] = collections.deque()
        """(pass, page): the number of the last pass dispatched when the page was freed."""
        self._free: list[int] = []
        self._live: weakref.WeakValueDictionary[int, Page] = weakref.WeakValueDictionary()
        self.generation = 0
        """How often the array was replaced."""
        self.before_replaced: list[Callable[[], None]] = []
        """Called before the array is replaced. Its holders must drop it, or its memory would not be freed."""
        self.room_bytes: Callable[[], int] | None = None
        """How much more may be allocated now; None if that is unknown."""
        self.is_bounded = size_bytes > 0
        """Whether it already has all the memory that it may take."""
        self.array = self._new_array(0)
        self.order = mx.zeros((1,), mx.int32)
        self.view: mx.array | None = None
        self.grow(max(_LEAST_PAGES, size_bytes // shape.page_bytes))

    @property
    def page_count(self) -> int:
        return int(self.array.shape[0])

    @property
    def held_bytes(self) -> int:
        return self.page_count * self.shape.page_bytes

    @property
    def free_bytes(self) -> int:
        """Size of the pages that nobody refers to."""
        return (len(self._free) + len(self._waiting) + len(self._freed)) * self.shape.page_bytes

    def pages_for(self, token_count: int) -> int:
        """Return how many pages this many tokens take."""
        return -(-token_count // self.shape.page_token_count)

    def memory(self) -> Bytes | None:
        """Return the array's bytes, which other threads may write and drop; None without unified memory."""
        if not find_backend().has_unified_memory:
            return None
        # On the CPU stream, which has no pass in flight to wait for.
        with mx.stream(mx.cpu):
            readable = self.array.view(mx.uint16) if self.shape.dtype.size == 2 else self.array  # by NumPy
        mx.eval(readable)
        # Flattened only here: no dimension of an MLX array can reach 2 GiB.
        content: Bytes = np.asarray(memoryview(readable)).reshape(-1).view(np.uint8)  # type: ignore[arg-type]
        return content

    def take(self, count: int) -> list[Page]:
        """Return free pages with undefined content, growing the pool if necessary."""
        if not self._has_free(count):
            self.grow(count - len(self._free))
        # In ascending order, since attention reads adjacent pages at once.
        taken = sorted(self._free[len(self._free) - count :] if count else [])
        del self._free[len(self._free) - len(taken) :]
        pages = [Page(number, self._freed) for number in taken]
        self._live.update(zip(taken, pages, strict=True))
        return pages

    def close(self) -> None:
        """Free the memory, even if pages are still referred to; nobody may read or write them any more."""
        self.array, self.view = self._new_array(0), None
        self.before_replaced.clear()
        self._free.clear()
        self._waiting.clear()

    def take_spare(self, count: int) -> list[Page] | None:
        """Return free pages for something optional; None if there are too few and the pool may not grow."""
        if not self._has_free(count) and not self._may_grow(count - len(self._free)):
            return None
        return self.take(count)

    def _may_grow(self, count: int) -> bool:
        if self.is_bounded or self.room_bytes is None:
            return not self.is_bounded
        return self.held_bytes + count * self.shape.page_bytes <= self.room_bytes()

    def shrink(self) -> int:
        """Give back the memory of free pages, if there is room for a copy of the others; return how much.
        Pages move, so nobody else may know their numbers, and all writes must be settled."""
        count = max(_LEAST_PAGES, len(self._live))
        before_bytes, size_bytes = self.held_bytes, count * self.shape.page_bytes
        has_room = not self._live or self.room_bytes is None or size_bytes <= self.room_bytes()
        if size_bytes >= before_bytes or not has_room:
            return 0
        # A page freed on another thread just now reports to the old list, which is no longer read.
        pages = sorted(self._live.values(), key=lambda page: page.number)
        self._replace(count, [page.number for page in pages])
        self._freed = collections.deque()
        for number, page in enumerate(pages):
            page.move(number, self._freed)
        self._live = weakref.WeakValueDictionary({page.number: page for page in pages})
        self._waiting.clear()
        self._free = list(range(count - 1, len(pages) - 1, -1))
        return before_bytes - self.held_bytes

    def _has_free(self, count: int) -> bool:
        self._collect()
        if len(self._free) < count:
            self._wait_for_freed()
        return len(self._free) >= count

    def _collect(self) -> None:
        while self._freed:
            self._waiting.append((self._passes.dispatched, self._freed.popleft()))
        while self._waiting and self._waiting[0][0] <= self._passes.ended:
            self._free.append(self._waiting.popleft()[1])

    def _wait_for_freed(self) -> None:
        """Free the pages that earlier passes may still read, by waiting for those passes. That is rare,
        short, and cheaper than copying the pool. Not the last pass: it may still be unbuilt."""
        if self._waiting and self._waiting[0][0] < self._passes.dispatched:
            mx.synchronize()
            while self._waiting and self._waiting[0][0] < self._passes.dispatched:
                self._free.append(self._waiting.popleft()[1])

    def grow(self, least_count: int) -> None:
        """Add at least this many pages; double the pool if there is room for that beside the copy."""
        before = self.page_count
        spare = before if self.room_bytes is None else self.room_bytes() // self.shape.page_bytes - before
        added = max(least_count, min(before, spare))
        self._replace(before + added, range(before))
        self._free[:0] = range(before + added - 1, before - 1, -1)

    def _replace(self, page_count: int, numbers: Sequence[int]) -> None:
        """Replace the array by one of `page_count` pages, which begins with these pages of the old one."""
        # The pass in flight writes into the array that is copied.
        mx.eval(self.order, self.array)
        self.view = None
        for drop in self.before_replaced:
            drop()
        if numbers:
            self._copy(page_count, np.array(numbers, np.int32))
        else:
            self.array = self._new_array(0)  # free the old one first
            self.array = self._new_array(page_count)
        mx.eval(self.array)
        self.generation += 1
        facts = {"page_count": page_count, "size_bytes": self.held_bytes}
        _log.info("page_pool_replaced", extra=facts)

    def _copy(self, page_count: int, numbers: Ints) -> None:
        before, source = self.array, self.memory()
        if source is None:
            rest = mx.broadcast_to(mx.zeros((), self.shape.dtype), self._size(page_count - len(numbers)))
            self.array = mx.concatenate([before[mx.array(numbers)], rest])
            return
        self.array = self._new_array(page_count)
        target, size_bytes = self.memory(), self.shape.page_bytes
        assert target is not None, "it is memory of the host as the old one was"
        pages = target.reshape(-1, size_bytes)[: len(numbers)]
        np.take(source.reshape(-1, size_bytes), numbers, axis=0, out=pages, mode="clip")

    def _size(self, page_count: int) -> tuple[int, ...]:
        kind = self.shape
        return page_count, kind.layer_count, 2, kind.kv_head_count, kind.page_token_count, kind.head_size

    def _new_array(self, page_count: int) -> mx.array:
        """Return new pages. The system commits host memory, Metal's included, only when it is written to."""
        if find_backend() is Backend.CUDA:
            return mx.zeros(self._size(page_count), self.shape.dtype)
        return uninitialised(self._size(page_count), dtype=self.shape.dtype)


def numbers_of(pages: Iterable[Page]) -> Ints:
    """Return the numbers of pages, as backends take them."""
    return np.fromiter((page.number for page in pages), np.int32)


_DESCRIPTIONS: Final = {mx.float32: "<f4", mx.float16: "<f2"}
"""Dtypes that a .npy file can name. They need no view after the load, which would take as long again."""


def can_reserve(size_bytes: int) -> bool:
    """Return whether the system would commit this much host memory, although nobody writes to it yet.

    Without overcommitment it may refuse, and MLX's CPU build (0.32) does not check for a failed allocation.
    """
    try:
        mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except (OSError, OverflowError):
        return False
    return True


def uninitialised(shape: tuple[int, ...], *, dtype: mx.Dtype) -> mx.array:
    """Return an array over memory that was never written.

    MLX has no other way (its `empty` is `zeros`). Filling 134 MB took 11 ms, or 50 ms with fresh pages, on
    the thread that others wait for; this takes 3 ms.
    """
    if math.prod(shape) == 0:
        return mx.zeros(shape, dtype)
    description = _DESCRIPTIONS.get(dtype, f"<u{dtype.size}")
    # On the CPU stream: the load is waited for, and no pass is in flight there.
    loaded = mx.load(cast(Any, _Unwritten(shape, description)), format="npy", stream=mx.cpu)
    assert isinstance(loaded, mx.array)
    return loaded if loaded.dtype == dtype else loaded.view(dtype, stream=mx.cpu)


class _Unwritten(io.RawIOBase):
    """A .npy file of an array: it has a header, and reading its content leaves the buffer unchanged."""

    _MAGIC: Final = b"\x93NUMPY\x01\x00"

    def __init__(self, shape: tuple[int, ...], description: str) -> None:
        super().__init__()
        facts = f"{{'descr': '{description}', 'fortran_order': False, 'shape': {shape}, }}".encode()
        self._head = self._MAGIC + struct.pack("<H", len(facts)) + facts
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        assert whence == io.SEEK_SET, whence
        self._position = offset
        return offset

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        piece = self._head[self._position : self._position + len(buffer)]
        buffer[: len(piece)] = piece
        self._position += len(buffer)
        return len(buffer)


class PassClock:
    """Which passes the device was given, counted from 1, and which of them have ended. The pipeline advances
    it; others only read it.

    A device works in the order of dispatch. So once pass N has ended, everything dispatched before it has
    too, and memory that only passes up to N read may be written.
    """

    __slots__ = ("dispatched", "ended")

    def __init__(self) -> None:
        self.dispatched = 0
        """Number of the last pass that was dispatched or is being built; 0 before the first one."""
        self.ended = 0
        """All passes up to this number have ended."""

    def dispatch(self) -> int:
        """Count a pass that is about to be built and dispatched; return its number."""
        self.dispatched += 1
        return self.dispatched

    def end(self, number: int) -> None:
        """Note that a pass, and every pass before it, has ended."""
        assert self.ended < number <= self.dispatched, (self.ended, number, self.dispatched)
        self.ended = number
