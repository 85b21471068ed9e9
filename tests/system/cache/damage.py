"""Ways to spoil block files under a running server."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path


def block_files(directory: Path) -> list[Path]:
    """Return the committed block files of a cache directory."""
    return sorted((directory / "blocks").rglob("*.safetensors"))


def flip(path: Path, offset: int) -> None:
    """Turn one bit round."""
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def header_offset(path: Path) -> int:
    """Return an offset inside the header's JSON."""
    return 8 + struct.unpack("<Q", path.read_bytes()[:8])[0] // 2


def tensor_offset(path: Path, index: int) -> int:
    """Return an offset inside a tensor, by its place in the file; -1 is the last one."""
    data = path.read_bytes()
    (header_bytes,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + header_bytes])
    spans = sorted(facts["data_offsets"] for name, facts in header.items() if name != "__metadata__")
    begin, end = [span for span in spans if span[1] > span[0]][index]
    return int(8 + header_bytes + (begin + end) // 2)


def swap(path: Path, other: Path) -> None:
    """Let two files change names."""
    spare = path.with_suffix(".swapped")
    path.rename(spare)
    other.rename(path)
    spare.rename(other)


def _each(action: Callable[[Path], object]) -> Callable[[list[Path]], None]:
    def spoil(paths: list[Path]) -> None:
        for path in paths:
            # The server may find older damage meanwhile and put the file aside first, or not yet.
            if _has_header(path):
                with contextlib.suppress(FileNotFoundError):
                    action(path)

    return spoil


def _has_header(path: Path) -> bool:
    """Whether a file is not so spoiled already that there is no place in it to spoil."""
    try:
        header_offset(path)
        tensor_offset(path, 0)
    except (OSError, struct.error, ValueError):
        return False
    return True


def _swap_pairs(paths: list[Path]) -> None:
    for path, other in zip(paths[::2], paths[1::2], strict=False):
        with contextlib.suppress(FileNotFoundError):
            swap(path, other)


DAMAGES: dict[str, Callable[[list[Path]], None]] = {
    "length of the header": _each(lambda path: flip(path, 1)),
    "header": _each(lambda path: flip(path, header_offset(path))),
    "first tensor": _each(lambda path: flip(path, tensor_offset(path, 0))),
    "last tensor": _each(lambda path: flip(path, tensor_offset(path, -1))),
    "last byte": _each(lambda path: flip(path, path.stat().st_size - 1)),
    "truncated by a byte": _each(lambda path: os.truncate(path, path.stat().st_size - 1)),
    "truncated to nothing": _each(lambda path: os.truncate(path, 0)),
    "deleted": _each(lambda path: path.unlink()),
    "swapped": _swap_pairs,
    "replaced by a folder": _each(lambda path: (path.unlink(), path.mkdir())),
    "replaced by a link": _each(lambda path: (shutil.move(path, f"{path}.x"), path.symlink_to(f"{path}.x"))),
}
