"""OpenBLAS: loaded before MLX, so that MLX's calls find it first (MLX's CPU build on Linux).

The CPU wheel links a slow reference BLAS. With OpenBLAS in front of it and float32 weights, prefill of Gemma
3 270M ran 6.4 times faster (`make bench CASE=blas`, 2 x86 cores, mlx 0.32.4). This does nothing on macOS or
with CUDA.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import logging
import platform
import subprocess
import sys
from pathlib import Path

_log = logging.getLogger("icehouse.boot")

_KNOWN_PATHS = (
    "/usr/lib/{machine}-linux-gnu/openblas-pthread/libopenblas.so.0",
    "/usr/lib/{machine}-linux-gnu/libopenblas.so.0",
    "/usr/lib64/libopenblasp.so.0",
    "/usr/lib64/libopenblas.so.0",
    "/usr/lib/libopenblas.so.0",
)


def runs_on_cpu() -> bool:
    """Guess, before MLX is imported, whether it will run on the CPU of a Linux machine.

    Afterwards `icehouse_server.device` knows.
    """
    return sys.platform == "linux" and not any(_installed(f"mlx-cuda-{n}") for n in (12, 13))


def find_openblas() -> Path | None:
    """Return this system's OpenBLAS library, from the usual paths or else from the loader's list."""
    for pattern in _KNOWN_PATHS:
        path = Path(pattern.format(machine=platform.machine()))
        if path.exists():
            return path
    return _ask_ldconfig()


def openblas_loaded() -> bool:
    """Whether this process has OpenBLAS mapped, according to the kernel."""
    try:
        return "libopenblas" in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def load_openblas() -> None:
    """Load OpenBLAS into this process if MLX needs it. Call it before MLX is imported.

    Its symbols become global, and libraries loaded later find them before those of their own dependencies. So
    it works like LD_PRELOAD, without a second start.
    """
    if not runs_on_cpu() or openblas_loaded():
        return
    library = find_openblas()
    if library is None:
        return
    assert "mlx.core" not in sys.modules, "MLX is imported already, and has its BLAS"
    try:
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        _log.warning("openblas_not_loaded", extra={"path": library, "detail": str(error)})


def _ask_ldconfig() -> Path | None:
    for program in ("ldconfig", "/sbin/ldconfig"):
        try:
            listing = subprocess.run([program, "-p"], capture_output=True, text=True, timeout=10, check=True)
        except (OSError, subprocess.SubprocessError):
            continue
        for line in listing.stdout.splitlines():
            name, _, path = line.strip().partition(" => ")
            if name.startswith("libopenblas") and Path(path).exists():
                return Path(path)
    return None


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
