"""Choice of the backend that attends to pages on this device."""

from __future__ import annotations

import logging

from icehouse_server.device import Backend, find_backend
from icehouse_server.engine.attention.cpu.attention import CpuAttention
from icehouse_server.engine.attention.gather import GatherAttention
from icehouse_server.engine.attention.gpu.launch import gpu_attentions
from icehouse_server.engine.attention.gpu.trial import prove
from icehouse_server.engine.attention.port import PagedAttention, PoolShape

_log = logging.getLogger("icehouse.engine")

_CUDNN_HEAD_SIZE_LIMIT = 128
"""What cuDNN attends to as of MLX 0.32, in 16 bits; the head size is a multiple of 8."""


def shapes_are_costly(shape: PoolShape) -> bool:
    """Return whether the first attention of each shape waits for a plan to be built, as cuDNN's does."""
    is_cudnn = shape.dtype.size == 2 and shape.head_size <= _CUDNN_HEAD_SIZE_LIMIT
    return is_cudnn and shape.head_size % 8 == 0 and find_backend() is Backend.CUDA


def kernels_for(shape: PoolShape, *, query_head_count: int, has_sinks: bool) -> PagedAttention | None:
    """Return the device's kernels, where it has some and they are proved for such layers."""
    if query_head_count % shape.kv_head_count:
        query_head_count = shape.kv_head_count  # config.json does not say
    gather = GatherAttention()
    for kernels in [CpuAttention()] if find_backend() is Backend.CPU else gpu_attentions():
        why = prove(shape, query_head_count, backend=kernels, reference=gather, has_sinks=has_sinks)
        if not why:
            return kernels
        _log.warning("pages_unproved", extra={"detail": why})
    return None
