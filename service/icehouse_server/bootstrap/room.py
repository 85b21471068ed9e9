"""Room for models: whether disk and memory hold them, checked before they are fetched and loaded."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

from icehouse_server.errors import ModelError, Reason, StartError

WEIGHT_FILES = "model*.safetensors"


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSize:
    """What a model takes, as far as that is known before it is there."""

    weight_bytes: int
    """Of its files; 0 where it is not known. In memory they take as much, or more in a wider type."""
    missing_bytes: int
    """Of files that are not here yet."""
    place: Path
    """The folder that the missing ones go to, whether or not it exists."""


class Room:
    """What this machine has for the models of one server; several are added up."""

    def __init__(self, *, memory_limit_bytes: int) -> None:
        self._memory_limit_bytes = memory_limit_bytes
        self.weight_bytes = 0
        """Of all models so far."""

    def check(self, model: str, size: ModelSize) -> None:
        """Raise StartError when memory cannot hold the weights, and what `check_disk` raises."""
        self.weight_bytes += size.weight_bytes
        if self.weight_bytes > self._memory_limit_bytes:
            raise StartError(
                Reason.MEMORY_NEVER_FITS,
                f"the weights of {model} take {_text(size.weight_bytes)}, and this server may use "
                f"{_text(self._memory_limit_bytes)} of memory for model, KV and cache; serve a smaller model "
                "or one with fewer bits, or raise --memory-limit-bytes if there is more",
                metadata={"weight_bytes": size.weight_bytes, "limit_bytes": self._memory_limit_bytes},
            )
        check_disk(model, size)


def check_disk(model: str, size: ModelSize) -> None:
    """Raise ModelError when the disk cannot hold what is missing."""
    folder = existing_folder(size.place)
    free_bytes = shutil.disk_usage(folder).free
    if size.missing_bytes > free_bytes:
        raise ModelError(
            Reason.MODEL_NOT_FOUND,
            f"{model} needs {_text(size.missing_bytes)} more on disk, and {_text(free_bytes)} are free in "
            f"{folder}; make room (`icehouse ls` shows the models that are there, `icehouse rm` removes "
            "one), or move the models' folder with HF_HOME or XDG_CACHE_HOME",
            metadata={"missing_bytes": size.missing_bytes, "free_bytes": free_bytes},
        )


def existing_folder(path: Path) -> Path:
    """Return the path, or the nearest folder above it that exists."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.exists())


def folder_size(folder: Path) -> ModelSize:
    """Return the size of a model's folder, of which nothing is missing."""
    return ModelSize(sum(shard.stat().st_size for shard in folder.glob(WEIGHT_FILES)), 0, folder)


def _text(size_bytes: int) -> str:
    gib = size_bytes / (1 << 30)
    return f"{gib:.1f} GiB" if gib >= 1 else f"{size_bytes / (1 << 20):.1f} MiB"
