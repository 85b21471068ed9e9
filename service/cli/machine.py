"""What this machine lets the process use.

Of a GPU only MLX knows, and MLX is asked on the inference thread alone: the answers are functions
that the engine calls there. What the system is asked is asked at once, since that may read files.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from service.cli.preload import runs_on_cpu
from service.engine.model_loader import device_memory_bytes

_SHARE = 0.9
"""The rest is for Python, gRPC, buffers on their way to SSD, and the user."""
_CACHE_SHARE_CPU = 0.25
_CACHE_SHARE_GPU = 0.2
"""Of what the device may use; model and live KV need the rest."""
_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def memory_limit(configured_bytes: int) -> Callable[[], int]:
    """Return how to learn what model, KV and cache may take together in bytes; 0 leaves it to the machine.

    That is most of the device's memory; on a CPU of RAM, or of the container's limit where it is lower.
    """
    if configured_bytes:
        return lambda: configured_bytes
    if not runs_on_cpu():
        return lambda: int(_SHARE * device_memory_bytes())
    total_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit_bytes = int(_SHARE * min(total_bytes, container_limit_bytes(_CGROUP_LIMITS) or total_bytes))
    return lambda: limit_bytes


def cache_limit(configured_bytes: int) -> Callable[[], int]:
    """Return how to learn the RAM tier's budget in bytes; 0 leaves it to the machine.

    On a CPU a share of what is free now, before the model is there.
    """
    if configured_bytes:
        return lambda: configured_bytes
    if not runs_on_cpu():
        return lambda: int(_CACHE_SHARE_GPU * device_memory_bytes())
    free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit_bytes = int(_CACHE_SHARE_CPU * free_bytes)
    return lambda: limit_bytes


def container_limit_bytes(files: tuple[Path, ...]) -> int | None:
    """Return the memory limit of this control group, None where there is none (versions 2 and 1)."""
    for file in files:
        try:
            text = file.read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text.isdecimal():
            return int(text)
    return None
