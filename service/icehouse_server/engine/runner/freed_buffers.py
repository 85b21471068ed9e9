"""Freed buffers that MLX keeps for the next arrays, so that they need no fresh pages.

Fresh pages made a restore of 134 MB take 62 ms instead of 14, and a pass in which eight rows outgrew their
buffers 1.1 s (2-core x86, mlx 0.32.4). Without a bound a long prompt's buffers would stay for ever.
"""

from __future__ import annotations

from typing import Final

import mlx.core as mx

_TOKENS: Final = 24 << 10
_MIN_BYTES: Final = 128 << 20
_SHARE: Final = 1 / 8
"""The KV of so many tokens is kept, and at least so much, but never more than this share of what may be used.
With the KV of 8,192 tokens sixteen prompts that followed other sizes had their last first token after 1.1
times the engine's time, and 0.8 so (128 KiB of KV a token; 2-core x86 with 24 GiB)."""
_FULL: Final = 7 / 8
_ROOM: Final = 3 / 4
"""A store that is full to the first share is emptied to the second one, the oldest buffers first: MLX's CPU
build would keep those that came first for good, and let go of all that is freed later."""


class FreedBuffers:
    """Bounds them, for the inference thread."""

    def __init__(self) -> None:
        self._limit_bytes = 0
        """0 before it is known how much KV a token has."""

    def bound(self, kv_bytes_per_token: int, *, memory_limit_bytes: int) -> None:
        """Keep as many as a model with such KV has use for, and this much memory room."""
        wanted = max(_MIN_BYTES, _TOKENS * kv_bytes_per_token)
        self._limit_bytes = min(wanted, int(_SHARE * memory_limit_bytes))
        mx.set_cache_limit(self._limit_bytes)

    def keep_room(self) -> None:
        """Let go of the oldest ones where few more would be kept. Only while nothing is computed."""
        if self._limit_bytes and mx.get_cache_memory() > _FULL * self._limit_bytes:
            mx.set_cache_limit(int(_ROOM * self._limit_bytes))
            mx.set_cache_limit(self._limit_bytes)
