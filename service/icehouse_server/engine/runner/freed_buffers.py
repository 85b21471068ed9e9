"""Freed buffers: how many stay allocated for the next arrays, by the heap where it is set so (`heap`), else
by MLX.

They hold what passes compute on the way, of a size for each length of a chunk, and KV that is not in pages.
Reusing them spares fresh pages: a prompt of 1,100 tokens in chunks of many lengths took 19,000 of them with
MLX's store and 1,200 with the heap (KV in pages; 6 layers of width 512, 2-core x86, mlx 0.32.4). Without a
bound a long prompt's buffers would stay for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import mlx.core as mx

from icehouse_server import heap

_TOKENS: Final = 24 << 10
_MIN_BYTES: Final = 128 << 20
_SHARE: Final = 1 / 8
"""The KV of so many tokens is kept, and at least so much, but never more than this share of what may be used.
With the KV of 8,192 tokens sixteen prompts that followed other sizes had their last first token after 1.1
times the engine's time, and 0.8 so (128 KiB of KV a token; 2-core x86 with 24 GiB)."""
_MOST_BYTES_UNKNOWN: Final = 1 << 30
"""Where the device does not say what it has."""
_MOST_BYTES_BESIDE_HEAP: Final = 64 << 20
"""That MLX keeps where the heap does: small arrays that come again in every pass."""
_GROWN: Final = 1 / 4
"""Of the limit: what the heap must have got besides before it is asked again for what it could not give."""
_FULL: Final = 7 / 8
_ROOM: Final = 3 / 4
"""A store that is full to the first share is emptied to the second one, the oldest buffers first: MLX's CPU
build would keep those that came first for good, and let go of all that is freed later."""


class FreedBuffers:
    """Bounds them, for the inference thread."""

    def __init__(self, unused_bytes: Callable[[], int] = lambda: 0) -> None:
        """`unused_bytes` returns what arrays have and nobody has written to."""
        self._unused_bytes = unused_bytes
        self._limit_bytes = 0
        """0 before it is known how much KV a token has."""
        self._memory_limit_bytes = 0
        self._other_bytes = 0
        """What the process has besides arrays."""
        self._left_bytes = 0
        """What the heap kept when it was last asked for all that is free."""

    def bound(self, kv_bytes_per_token: int, *, memory_limit_bytes: int) -> None:
        """Keep as many as a model with such KV has use for, and as what may be used has room for.

        `memory_limit_bytes` 0 is not known.
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
        """Release the oldest ones where few more would be held, or what is in use leaves them no memory; all,
        where the heap holds them.

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
        """Give back all that is free where it is more than may be kept: a heap is not emptied in part."""
        if self._free_bytes() > max(limit_bytes, self._left_bytes + int(_GROWN * self._limit_bytes)):
            mx.clear_cache()
            heap.give_back()
            self._left_bytes = self._free_bytes()

    def _free_bytes(self) -> int:
        """Return what the heap has that no array is in."""
        return heap.resident_bytes() - self._used_bytes() - self._other_bytes

    def _used_bytes(self) -> int:
        return mx.get_active_memory() - self._unused_bytes()
