"""What this machine lets the process use, read once at start."""

from __future__ import annotations

import os
from pathlib import Path

from service.cli.preload import runs_on_cpu
from service.engine.model_loader import device_memory_bytes

_SHARE = 0.9
"""The rest is for Python, gRPC, buffers on their way to SSD, and the user."""
_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def default_memory_limit_bytes() -> int:
    """Return what model, KV and cache may take together: most of the device's memory.

    On a CPU that is RAM, or the container's limit where it is lower.
    """
    if not runs_on_cpu():
        return int(_SHARE * device_memory_bytes())
    total_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(_SHARE * min(total_bytes, container_limit_bytes(_CGROUP_LIMITS) or total_bytes))


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
