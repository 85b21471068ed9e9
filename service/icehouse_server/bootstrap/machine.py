"""Machine limits: the memory, heap and open files that this process may use, and the type of weights that
suits the machine."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import resource
from pathlib import Path

from icehouse_server.bootstrap.imports.openblas import openblas_loaded
from icehouse_server.config import ModelConfig
from icehouse_server.config.load import environment
from icehouse_server.device import USABLE_SHARE, Device

_CACHE_SHARE_CPU = 0.25
_CACHE_SHARE_GPU = 0.2
"""Share of a device without other users. Model and live KV need the rest."""
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def memory_limit(configured_bytes: int, device: Device) -> int:
    """Return the limit in bytes for model, KV and cache together. `configured_bytes` 0 derives it.

    It is most of what is free on the device. If the device reports no size (a CPU), it is most of RAM, or of
    the container's limit if that is lower. Never 0.
    """
    if configured_bytes or device.free_bytes:
        return configured_bytes or device.free_bytes or 0
    total_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(USABLE_SHARE * min(total_bytes, container_limit_bytes(_CGROUP_LIMITS) or total_bytes))


def cache_limit(configured_bytes: int, device: Device) -> int:
    """Return the RAM tier's limit in bytes. `configured_bytes` 0 derives it from the device.

    On a CPU it is a share of what is free now, before the model is loaded.
    """
    if configured_bytes:
        return configured_bytes
    if device.free_bytes:
        return int(_CACHE_SHARE_GPU / USABLE_SHARE * device.free_bytes)
    free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(_CACHE_SHARE_CPU * free_bytes)


def container_limit_bytes(files: tuple[Path, ...]) -> int | None:
    """Return the memory limit of this control group; None if it has none (versions 2 and 1)."""
    for file in files:
        try:
            text = file.read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text.isdecimal():
            return int(text)
    return None


_M_MMAP_THRESHOLD = -3
_LARGE_BYTES = 1 << 20


def give_back_large_arrays() -> None:
    """Have glibc map each allocation of 1 MiB or more separately, and unmap it when it is freed.

    By default glibc raises this threshold to 32 MiB and keeps such blocks in its heap, which fragments. With
    256 streams for ten minutes the resident set grew by 12 %, and by less than 5 % with this (`make soak`,
    tiny model, 2 x86 cores). Does nothing on other systems, or if the user set the threshold.
    """
    if platform.libc_ver()[0] != "glibc" or "MALLOC_MMAP_THRESHOLD_" in environment():
        return
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def freeze_objects() -> int:
    """Exclude all present objects from garbage collection; return their number.

    A full collection visits some 120,000 objects of modules and model while every thread waits: 0.08 to 0.12
    s between two tokens, once every minute or two under load (2-core x86).
    """
    gc.collect()
    gc.freeze()
    return gc.get_freeze_count()


_OWN_FILE_COUNT = 256
"""For files other than connections: blocks, manifest, weights, metrics, gateways, fetched images."""
_MACOS_FILE_LIMIT = 10_240
"""OPEN_MAX: macOS may refuse more, even if its hard limit is unlimited."""


def wanted_file_count(*, connection_limit: int) -> int:
    """Return how many files and sockets a server with this many connections may need."""
    return connection_limit + _OWN_FILE_COUNT


def allow_open_files(wanted_count: int) -> int:
    """Raise this process's limit of open files and sockets; return the resulting limit.

    The default is low (often 1,024 on Linux, 256 on macOS), and a process may raise it up to the hard limit.
    Never raises an error: with a lower limit the server serves fewer connections.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed, most = (_at_most(wanted_count, limit) for limit in (soft, hard))
    for count in (most, min(most, _MACOS_FILE_LIMIT)):
        if count > allowed and _set_file_limit(count, hard):
            return count
    return allowed


def _at_most(count: int, limit: int) -> int:
    return count if limit == resource.RLIM_INFINITY else min(count, limit)


def _set_file_limit(soft: int, hard: int) -> bool:
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    except (OSError, ValueError):
        return False
    return True


def weights_dtype(config: ModelConfig, device: Device) -> str:
    """Return the type to load weights in; "" for the model's own.

    On a CPU with OpenBLAS float32 is by far the fastest type; the reference BLAS is slower with it.
    """
    if config.dtype != "auto":
        return config.dtype
    return "float32" if not device.is_gpu and openblas_loaded() else ""
