"""Room for models: whether disk and memory can hold them, checked before they are fetched and loaded."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from icehouse_server.errors import ModelError, Reason, StartError, size_text

WEIGHT_FILES = "model*.safetensors"
_FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1}
"""Bytes per value, by the type names of safetensors."""
_HELD_FLOAT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_TOWER_WEIGHT = re.compile("vision|visual|projector|connector")
"""Matches names of a vision tower's weights."""


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSize:
    """What a model takes, as far as it is known before it is there."""

    weight_bytes: int
    """In memory if its files are here; otherwise the size of its files, or 0 if that is not known."""
    missing_bytes: int
    """Size of the files that are not here yet."""
    place: Path
    """The folder for the missing files, whether or not it exists."""


class MachineResources:
    """The space of this machine for the models of one server; sizes of several models are added up."""

    def __init__(self, *, memory_limit_bytes: int) -> None:
        self._memory_limit_bytes = memory_limit_bytes
        self._weight_bytes: dict[str, int] = {}

    @property
    def weight_bytes(self) -> int:
        """Of all models so far."""
        return sum(self._weight_bytes.values())

    def check(self, model: str, size: ModelSize) -> None:
        """Raise StartError if memory cannot hold the weights, and what `check_disk` raises. A new size of a
        model replaces its previous one."""
        self._weight_bytes[model] = size.weight_bytes
        if self.weight_bytes > self._memory_limit_bytes:
            raise StartError(
                Reason.MEMORY_NEVER_FITS,
                f"the weights of {model} take {size_text(size.weight_bytes)} in memory, but this server may "
                f"use {size_text(self._memory_limit_bytes)} for model, KV and cache; serve a smaller model "
                "or one with fewer bits, or raise --memory-limit-bytes if there is more",
                metadata={"weight_bytes": size.weight_bytes, "limit_bytes": self._memory_limit_bytes},
            )
        check_disk(model, size)


def check_disk(model: str, size: ModelSize) -> None:
    """Raise ModelError if the disk cannot hold what is missing."""
    folder = existing_folder(size.place)
    free_bytes = shutil.disk_usage(folder).free
    if size.missing_bytes > free_bytes:
        raise ModelError(
            Reason.MODEL_NOT_FOUND,
            f"{model} needs {size_text(size.missing_bytes)} more on disk, and {size_text(free_bytes)} are "
            f"free in {folder}; make room (`icehouse ls` shows the models that are there, `icehouse rm` "
            "removes one), or move the models' folder with HF_HOME or XDG_CACHE_HOME",
            metadata={"missing_bytes": size.missing_bytes, "free_bytes": free_bytes},
        )


def existing_folder(path: Path) -> Path:
    """Return the path, or the nearest folder above it that exists."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.exists())


def folder_size(folder: Path, *, dtype: str = "") -> ModelSize:
    """Return the size of a complete model folder when it is loaded as `dtype`; "" is the model's own type."""
    return ModelSize(held_bytes(folder, dtype=dtype), 0, folder)


def held_bytes(folder: Path, *, dtype: str) -> int:
    """Return what the weights of a folder take in memory: never too little, as far as their files tell.

    Loading converts floating-point numbers to `dtype`, except in a quantized language model; its vision
    tower, if any, may not be quantized.
    """
    try:
        tensors = [each for file in folder.glob(WEIGHT_FILES) for each in _tensors(file)]
    except (OSError, ValueError, AttributeError, LookupError, TypeError):
        # Loading will report what is wrong.
        return sum(file.stat().st_size for file in folder.glob(WEIGHT_FILES))
    is_quantized = any(name.endswith(".scales") for name, _, _ in tensors)
    total_bytes = 0
    for name, stored_dtype, size_bytes in tensors:
        value_bytes = _FLOAT_BYTES.get(stored_dtype)
        is_kept = is_quantized and not _TOWER_WEIGHT.search(name)
        if value_bytes is None or is_kept:
            total_bytes += size_bytes
        else:
            # MLX has no 8-bit floats: they become the model's own 16-bit type.
            own_bytes = max(2, value_bytes)
            total_bytes += size_bytes // value_bytes * _HELD_FLOAT_BYTES.get(dtype, own_bytes)
    return total_bytes


def _tensors(file: Path) -> Iterator[tuple[str, str, int]]:
    """Yield name, type and bytes of each tensor in a weight file. Raises ValueError if it is not one, and
    other errors for a malformed header."""
    with file.open("rb") as opened:
        header_bytes = int.from_bytes(opened.read(8), "little")
        if header_bytes > os.fstat(opened.fileno()).st_size:
            raise ValueError(f"{file} is not a safetensors file")
        header: dict[str, Any] = json.loads(opened.read(header_bytes))
    for name, tensor in header.items():
        if name != "__metadata__":
            begin, end = tensor["data_offsets"]
            yield name, tensor["dtype"], end - begin
