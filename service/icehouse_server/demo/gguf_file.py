"""GGUF file: its metadata, its vocabulary, and its tensors as they lie in it.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The package that reads it comes with
the `demo` extra, so it is imported here and only when a file is read.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float32]]
Metadata = Mapping[str, Any]
"""Keys as in the file, such as `llama.block_count` and `tokenizer.ggml.tokens`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor as it lies in the file; `quantized` holds encoded rows, `shape` is the decoded shape."""

    name: str
    shape: tuple[int, ...]
    encoding: int
    quantized: np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class GgufFile:
    """A file that is read; the tensors are mapped from it, so it must stay as long as they are used."""

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


@dataclasses.dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """What a GGUF file says about its tokenizer. `pieces` and `kinds` are indexed by token id."""

    pieces: Sequence[str]
    kinds: Sequence[int]
    bos_id: int
    eos_id: int
    unknown_id: int
    padding_id: int
    merges: Sequence[str] = ()
    """Pairs with a space between them, in rank order; empty where the file has none."""


def can_read() -> bool:
    """Whether the package that reads GGUF is installed."""
    return importlib.util.find_spec("gguf") is not None


def read(file: Path) -> GgufFile:
    """Return what is in `file`; the tensors' bytes are not read yet."""
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


def read_vocabulary(metadata: Metadata) -> GgufVocabulary:
    """Return the vocabulary of a file."""
    return GgufVocabulary(
        pieces=metadata["tokenizer.ggml.tokens"],
        kinds=metadata["tokenizer.ggml.token_type"],
        bos_id=int(metadata["tokenizer.ggml.bos_token_id"]),
        eos_id=int(metadata["tokenizer.ggml.eos_token_id"]),
        unknown_id=int(metadata["tokenizer.ggml.unknown_token_id"]),
        padding_id=int(metadata["tokenizer.ggml.padding_token_id"]),
        merges=metadata.get("tokenizer.ggml.merges", ()),
    )
