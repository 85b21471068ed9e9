"""Freed buffers: how many stay allocated for the next arrays, kept by the heap if `heap` says so, else by
MLX.

They hold temporary arrays of passes, in sizes that depend on the length of a chunk, and KV that is not in
pages. Reusing them avoids page faults: a prompt of 1,100 tokens in chunks of many lengths caused 19,000 with
MLX's store and 1,200 with the heap (KV in pages; 6 layers of width 512, 2-core x86, mlx 0.32.4). Without a
bound, a long prompt's buffers would stay for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import mlx.core as mx

from icehouse_server import heap

_TOKENS: Final = 24 << 10
_MIN_BYTES: Final = 128 << 20
_SHARE: Final = 1 / 8
"""Keep the KV of this many tokens, and at least this many bytes, but at most this share of the memory limit.
With the KV of 8,192 tokens, sixteen prompts after others of other sizes had their last first token after 1.1
times the engine's time, and 0.8 with this (128 KiB of KV a token; 2-core x86, 24 GiB)."""
_MOST_BYTES_UNKNOWN: Final = 1 << 30
"""If the device does not report its memory."""
_MOST_BYTES_BESIDE_HEAP: Final = 64 << 20
"""What MLX keeps if the heap keeps the rest: small arrays that come again in every pass."""
_GROWN: Final = 1 / 4
"""Share of the limit that the heap must have grown by before it is asked again for what it could not give."""
_FULL: Final = 7 / 8
_ROOM: Final = 3 / 4
"""A store that is full to the first share is emptied to the second, oldest buffers first: MLX's CPU build
would keep those that came first for good, and release everything that is freed later."""


class FreedBuffers:
    """Bounds the freed buffers (inference thread)."""

    def __init__(self, unused_bytes: Callable[[], int] = lambda: 0) -> None:
        """`unused_bytes` returns how much memory arrays have that was never written."""
        self._unused_bytes = unused_bytes
        self._limit_bytes = 0
        """0 until the KV size of a token is known."""
        self._memory_limit_bytes = 0
        self._other_bytes = 0
        """What the process uses besides arrays."""
        self._left_bytes = 0
        """What the heap still held when it was last asked to give back all free memory."""

    def bound(self, kv_bytes_per_token: int, *, memory_limit_bytes: int) -> None:
        """Keep as many as a model with such KV can use, and as the memory limit has room for.

        A `memory_limit_bytes` of 0 is unknown.
        """
        self._memory_limit_bytes = memory_limit_bytes
        most = int(_SHARE * memory_limit_bytes) or _MOST_BYTES_UNKNOWN
        self._limit_bytes = min(most, max(_MIN_BYTES, _TOKENS * kv_bytes_per_token))
        if not heap.is_kept():
            mx.set_cache_limit(self._limit_bytes)
            return
        mx.set_cache_limit(min(self._limit_bytes, _MOST_BYTES_BESIDE_HEAP))
        mx.clear_cache()
        heap.give_back()
        self._other_bytes = self._free_bytes()

    def trim(self) -> None:
        """Release the oldest buffers if the store is nearly full, or if arrays in use leave too little
        memory; release all if the heap holds them.

        Only while nothing is computed.
        """
        limit_bytes = self._limit_bytes
        if self._memory_limit_bytes:
            limit_bytes = min(limit_bytes, max(0, self._memory_limit_bytes - self._used_bytes()))
        if self._limit_bytes and heap.is_kept():
            self._empty_heap(limit_bytes)
        elif self._limit_bytes and mx.get_cache_memory() > _FULL * limit_bytes:
            mx.set_cache_limit(int(_ROOM * limit_bytes))
            mx.set_cache_limit(self._limit_bytes)

    def _empty_heap(self, limit_bytes: int) -> None:
        """Give back all free memory if it is more than may be kept: a heap cannot be emptied in part."""
        if self._free_bytes() > max(limit_bytes, self._left_bytes + int(_GROWN * self._limit_bytes)):
            mx.clear_cache()
            heap.give_back()
            self._left_bytes = self._free_bytes()

    def _free_bytes(self) -> int:
        """Return how much of the heap no array uses."""
        return heap.resident_bytes() - self._used_bytes() - self._other_bytes

    def _used_bytes(self) -> int:
        return mx.get_active_memory() - self._unused_bytes()
