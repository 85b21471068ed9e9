"""Weights file of an MLX model, written from the tensors of a GGUF file.

Dequantized values are rounded to bfloat16, the type the models were published in: the folder is half as
large as float32 would make it, and loading it as float32 adds no further rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from icehouse_server.demo.gguf_file import Array, Tensor


def to_bfloat16(values: Array) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """Round finite float32 to bfloat16, nearest with ties to even; the bits come back as uint16."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounding = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return ((bits + rounding) >> np.uint32(16)).astype(np.uint16)


def write_weights(
    tensors: Sequence[Tensor],
    file: Path,
    *,
    convert: Callable[[Tensor], tuple[str, Array]],
    on_progress: Callable[[float], None],
) -> None:
    """Write every tensor under the name and with the values that `convert` gives it, as one safetensors file.

    `on_progress` gets 0 to 1.
    """
    total = sum(t.quantized.nbytes for t in tensors)
    done = 0
    arrays: dict[str, np.ndarray[Any, np.dtype[np.uint16]]] = {}
    specs: dict[str, safetensors.TensorSpec] = {}
    for tensor in tensors:
        name, values = convert(tensor)
        arrays[name] = to_bfloat16(values)
        # `arrays` keeps every buffer alive until serialize_file has read it.
        specs[name] = safetensors.TensorSpec(
            dtype="bfloat16",
            shape=list(values.shape),
            data_ptr=arrays[name].ctypes.data,
            data_len=arrays[name].nbytes,
        )
        done += tensor.quantized.nbytes
        on_progress(done / total)
    safetensors.serialize_file(specs, str(file), metadata={"format": "mlx"})
