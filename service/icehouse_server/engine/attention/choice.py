"""Choice of what attends to pages on this device."""

from __future__ import annotations

from icehouse_server.device import Backend, find_backend
from icehouse_server.engine.attention.gather import GatherAttention
from icehouse_server.engine.attention.gpu.launch import find_gpu_attention
from icehouse_server.engine.attention.port import PagedAttention, PoolShape

_CUDNN_HEAD_SIZE_LIMIT = 128
"""What cuDNN attends to as of MLX 0.32, in 16 bits; the head size is a multiple of 8."""


def shapes_are_costly(shape: PoolShape) -> bool:
    """Return whether the first attention of each shape waits for a plan to be built, as cuDNN's does."""
    is_cudnn = shape.dtype.size == 2 and shape.head_size <= _CUDNN_HEAD_SIZE_LIMIT
    return is_cudnn and shape.head_size % 8 == 0 and find_backend() is Backend.CUDA


def backend_for(shape: PoolShape) -> PagedAttention:
    """Return the device's kernels, or plain MLX where it has none."""
    return find_gpu_attention() or GatherAttention()
