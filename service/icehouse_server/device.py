"""Device facts: what MLX computes on here, asked of MLX once, before the inference thread begins.

The packages that are installed do not tell it: MLX may have been built with CUDA from source, and a virtual
machine with macOS has no Metal. Asking makes no array and no stream, so any thread may do it.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping

USABLE_SHARE = 0.9
"""Of memory, by this process. The rest is for Python, gRPC, buffers on their way to SSD, and the user."""
_OWN_BYTES = 1 << 30
"""Of what is free at the start: libraries of the device and compiled kernels."""


class Backend(enum.Enum):
    """Which of its backends MLX computes with."""

    CPU = "cpu"
    METAL = "metal"
    CUDA = "cuda"

    @property
    def has_unified_memory(self) -> bool:
        """Whether what it computes on is the host's memory too."""
        return self is not Backend.CUDA


@dataclasses.dataclass(frozen=True, slots=True)
class Device:
    """MLX's default device. What depends on the device asks for one of its traits, not for its backend."""

    name: str
    backend: Backend
    memory_bytes: int | None = None
    """What it recommends to stay under, or else has; None where it tells nothing."""
    free_bytes: int | None = None
    """What a process may take that starts now; None where it tells no size, as MLX's CPU build."""
    array_limit_bytes: int | None = None
    """The largest array that can be made, on Metal less than its memory; None where there is no limit."""

    @classmethod
    def of(cls, backend: Backend, info: Mapping[str, str | int]) -> Device:
        """Return the device that MLX describes so.

        Metal's memory is the system's, which frees pages for it; only CUDA tells what others have taken.
        """
        total = _bytes(info, "max_recommended_working_set_size", "memory_size", "total_memory")
        free = _bytes(info, "free_memory")
        may_take = None if total is None else int(USABLE_SHARE * total)
        if may_take is not None and free is not None:
            # Little that is free is still a limit: none at all would let everything in.
            may_take = min(may_take, max(free - _OWN_BYTES, free // 2))
        name = info.get("device_name") or info.get("architecture") or "unknown"
        return cls(str(name), backend, total, may_take, _bytes(info, "max_buffer_length"))

    @property
    def is_gpu(self) -> bool:
        return self.backend is not Backend.CPU

    @property
    def runs_ahead(self) -> bool:
        """Whether it computes a pass while Python builds the next one."""
        return self.is_gpu

    @property
    def attention_shapes_are_costly(self) -> bool:
        """Whether the first attention of several queries of a shape takes far longer than later ones:
        cuDNN plans it (40 ms on an H200)."""
        return self.backend is Backend.CUDA

    @property
    def products_are_costly(self) -> bool:
        """Whether a matrix product of several rows costs the host time of its own, so that fewer and larger
        ones pay: MLX's CUDA backend looks up an algorithm and captures a graph for each."""
        return self.backend is Backend.CUDA

    @property
    def compiles_at_first_use(self) -> bool:
        """Whether a kernel that has not run yet is compiled in front of whoever needs it."""
        return self.is_gpu


def find_backend() -> Backend:
    """Return what MLX's default device belongs to."""
    import mlx.core as mx

    if mx.default_device() == mx.Device(mx.cpu):
        return Backend.CPU
    return Backend.METAL if mx.metal.is_available() else Backend.CUDA


def find_device() -> Device:
    """Return MLX's default device. Raises ImportError, with the loader's words, when MLX cannot be loaded."""
    import mlx.core as mx

    return Device.of(find_backend(), mx.device_info())


def _bytes(info: Mapping[str, str | int], *keys: str) -> int | None:
    """Return the first of these sizes that is told."""
    return next((int(info[key]) for key in keys if info.get(key)), None)
