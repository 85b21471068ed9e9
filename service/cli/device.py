"""What MLX would run on here, asked of MLX itself, for `icehouse doctor`."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Device:
    """MLX's default device. `memory_bytes` is what it recommends to stay under, None when it says nothing."""

    name: str
    is_gpu: bool
    memory_bytes: int | None


def find_device() -> Device:
    """Return MLX's default device. Raises ImportError, with the loader's words, when MLX cannot be loaded."""
    import mlx.core as mx

    is_gpu = mx.default_device() == mx.Device(mx.gpu)
    info = mx.device_info()
    name = info.get("device_name") or info.get("architecture") or "unknown"
    memory = info.get("max_recommended_working_set_size") or info.get("memory_size")
    return Device(name=str(name), is_gpu=is_gpu, memory_bytes=int(memory) if memory else None)
