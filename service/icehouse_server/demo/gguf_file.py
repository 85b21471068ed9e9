"""GGUF file: its metadata and its encoded tensors.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The package that reads it is imported
only when a file is read: few servers need it.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float32]]
Metadata = Mapping[str, Any]
"""Keys as in the file, such as `llama.block_count` and `tokenizer.ggml.tokens`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor:
    """One encoded tensor: `quantized` holds its rows, `shape` is the decoded shape."""

    name: str
    shape: tuple[int, ...]
    encoding: int
    quantized: np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class GgufFile:
    """A file's content; the tensors are mapped from it, so it must exist as long as they are used."""

    metadata: Metadata
    tensors: tuple[Tensor, ...]


class PieceKind(enum.IntEnum):
    """GGUF's `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def read(file: Path) -> GgufFile:
    """Return the content of `file`; the tensors' bytes are not read yet."""
    gguf: Any = importlib.import_module("gguf")
    reader = gguf.GGUFReader(file)
    return GgufFile(
        metadata={name: field.contents() for name, field in reader.fields.items()},
        tensors=tuple(
            # GGUF counts dimensions from the innermost one.
            Tensor(t.name, tuple(int(n) for n in reversed(t.shape)), int(t.tensor_type), t.data)
            for t in reader.tensors
        ),
    )


def decode(tensor: Tensor) -> Array:
    """Return a tensor's values as float32 in its shape."""
    gguf: Any = importlib.import_module("gguf")
    values: Array = gguf.dequantize(tensor.quantized, gguf.GGMLQuantizationType(tensor.encoding))
    return values.reshape(tensor.shape)
