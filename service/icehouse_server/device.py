"""Device facts: what MLX computes on here. MLX is asked once, before the inference thread begins.

The installed packages do not tell: MLX may have been built from source with CUDA, and a virtual machine with
macOS has no Metal. Asking creates no array and no stream, so any thread may do it.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping

USABLE_SHARE = 0.9
"""Share of memory for MLX. The rest is for Python, gRPC, buffers on their way to SSD, and the user."""
_OWN_BYTES = 1 << 30
"""Part of the memory that is free at the start which device libraries and compiled kernels take."""


class Backend(enum.Enum):
    """The backend that MLX computes with."""

    CPU = "cpu"
    METAL = "metal"
    CUDA = "cuda"

    @property
    def has_unified_memory(self) -> bool:
        """Whether the device's memory is also the host's."""
        return self is not Backend.CUDA


@dataclasses.dataclass(frozen=True, slots=True)
class Device:
    """MLX's default device. Code that depends on the device asks for a trait of it, not for its backend."""

    name: str
    backend: Backend
    memory_bytes: int | None = None
    """The size that it recommends not to exceed, or else its memory; None if it does not say."""
    free_bytes: int | None = None
    """How much a process that starts now may take; None if it tells no size, like MLX's CPU build."""
    array_limit_bytes: int | None = None
    """The size of the largest possible array, on Metal less than its memory; None for no limit."""

    @classmethod
    def of(cls, backend: Backend, info: Mapping[str, str | int]) -> Device:
        """Return the device that MLX describes with `info`.

        Metal uses system memory, and the system frees pages for it; only CUDA tells what others have taken.
        """
        total = _bytes(info, "max_recommended_working_set_size", "memory_size", "total_memory")
        free = _bytes(info, "free_memory")
        may_take = None if total is None else int(USABLE_SHARE * total)
        if may_take is not None and free is not None:
            # Even if little is free, there must be a limit: no limit would admit everything.
            may_take = min(may_take, max(free - _OWN_BYTES, free // 2))
        name = info.get("device_name") or info.get("architecture") or "unknown"
        return cls(str(name), backend, total, may_take, _bytes(info, "max_buffer_length"))

    @property
    def is_gpu(self) -> bool:
        return self.backend is not Backend.CPU

    @property
    def runs_ahead(self) -> bool:
        """Whether the device computes a pass while Python builds the next one."""
        return self.is_gpu

    @property
    def attention_shapes_are_costly(self) -> bool:
        """Whether attention of several queries takes far longer the first time for each shape: cuDNN plans it
        (40 ms on an H200)."""
        return self.backend is Backend.CUDA

    @property
    def products_are_costly(self) -> bool:
        """Whether each matrix product of several rows costs host time, so that fewer and larger ones pay off:
        MLX's CUDA backend looks up an algorithm and captures a graph for each."""
        return self.backend is Backend.CUDA

    @property
    def compiles_at_first_use(self) -> bool:
        """Whether a kernel is compiled when it is first needed, while its caller waits."""
        return self.is_gpu


def find_backend() -> Backend:
    """Return the backend of MLX's default device."""
    import mlx.core as mx

    if mx.default_device() == mx.Device(mx.cpu):
        return Backend.CPU
    return Backend.METAL if mx.metal.is_available() else Backend.CUDA


def find_device() -> Device:
    """Return MLX's default device. Raises ImportError, with the loader's message, if MLX cannot be loaded."""
    import mlx.core as mx

    return Device.of(find_backend(), mx.device_info())


def _bytes(info: Mapping[str, str | int], *keys: str) -> int | None:
    """Return the first of these sizes that MLX tells."""
    return next((int(info[key]) for key in keys if info.get(key)), None)
