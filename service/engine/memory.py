"""What the device says about its memory."""

from __future__ import annotations

import mlx.core as mx


def device_memory_bytes() -> int:
    """Return what a process should use at most: Metal's recommended working set, or all there is."""
    info = mx.device_info()
    found = info.get("max_recommended_working_set_size") or info.get("memory_size")
    found = found or info.get("total_memory") or 0
    return int(found)
