"""Picture that the pages on images show to a model: `python -m docs.picture` writes it."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Final

PATH: Final = Path(__file__).resolve().parent / "howto" / "cube.png"
_SIDE: Final = 96

_SKY, _SNOW, _TOP, _LEFT, _RIGHT = (
    b"\x74\xa9\xd8",
    b"\xf2\xf6\xfa",
    b"\xe4\xf6\xfd",
    b"\x9b\xd4\xee",
    b"\x5f\xae\xd6",
)


def rows() -> list[bytes]:
    """Return the lines of pixels, three bytes each: a cube of ice on snow under the sky."""
    return [b"".join(_color(x, y) for x in range(_SIDE)) for y in range(_SIDE)]


def _color(x: int, y: int) -> bytes:
    aside = abs(x - _SIDE // 2)
    if aside < 30 and abs(y - 36) * 2 < 30 - aside:
        return _TOP
    if aside < 30 and 36 <= y < 36 + 15 - aside / 2 + 32:
        return _LEFT if x < _SIDE // 2 else _RIGHT
    return _SKY if y < 54 else _SNOW


def png() -> bytes:
    """Return the picture as a file."""
    header = struct.pack(">IIBBBBB", _SIDE, _SIDE, 8, 2, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\x00" + row for row in rows()), 9)
    chunks = (b"IHDR", header), (b"IDAT", pixels), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def rows_of(file: bytes) -> list[bytes]:
    """Return the lines of pixels of a file that `png` made, by whichever zlib."""
    start = file.index(b"IDAT") + 4
    (size,) = struct.unpack(">I", file[start - 8 : start - 4])
    raw = zlib.decompress(file[start : start + size])
    step = 1 + 3 * _SIDE
    return [raw[at + 1 : at + step] for at in range(0, len(raw), step)]


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


if __name__ == "__main__":
    PATH.write_bytes(png())
