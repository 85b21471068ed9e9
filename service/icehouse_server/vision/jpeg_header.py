"""JPEG header: whether a decoder can drop pixels as it goes, or must hold the whole picture first. Pure.

A progressive file, or one whose colours come one after the other, is decoded from coefficients that are held
for all of the picture (ITU-T T.81, B.2), at whatever scale it is wanted: a small file may claim gigabytes so.
"""

from __future__ import annotations

from typing import Final

JPEG_START: Final = b"\xff\xd8\xff"

_SEQUENTIAL: Final = frozenset({0xC0, 0xC1})
"""Frames of baseline and extended sequential pictures in Huffman codes."""
_SEGMENTS: Final = _SEQUENTIAL | {0xC4, 0xDB, 0xDD, 0xFE, *range(0xE0, 0xF0)}
"""What a header has before its scan, each with its length. Decoders pass over other things too, in ways of
their own."""
_SCAN: Final = 0xDA
_COUNT_OFFSET: Final = 9
"""From a frame's marker to the number of its components; a scan has it at 4."""
_LEAST_LENGTH: Final = 2
"""Of a segment, which counts its own two bytes."""


def is_read_in_one_scan(data: bytes) -> bool:
    """Return whether the first scan has all of a sequential picture; False too for a header that is odd."""
    at, component_count = 2, None
    while at + _COUNT_OFFSET < len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:  # one of several before a marker
            at += 1
            continue
        if marker == _SCAN:
            return component_count == data[at + 4]
        length = int.from_bytes(data[at + 2 : at + 4], "big")
        if marker not in _SEGMENTS or length < _LEAST_LENGTH:
            return False
        if marker in _SEQUENTIAL:
            component_count = data[at + _COUNT_OFFSET]
        at += 2 + length
    return False
