"""Choice of what attends to pages on this device."""

from __future__ import annotations

from icehouse_server.engine.attention.gather import GatherAttention
from icehouse_server.engine.attention.gpu.launch import find_gpu_attention
from icehouse_server.engine.attention.port import PagedAttention, PoolShape


def backend_for(shape: PoolShape) -> PagedAttention:
    """Return the device's kernels, or plain MLX where it has none."""
    return find_gpu_attention() or GatherAttention()
