"""Codec choice: whether blocks are stored in byte planes, by what reads have shown. Storage thread.

Planes save a third of the bytes and make a restore wait for the decoder where the disk is faster than that.
Both rates come from real reads, with all readers at work. What is averaged is the time that a byte takes, so
that some files that the system had in memory do not make a slow disk a fast one.
"""

from __future__ import annotations

import dataclasses

from icehouse_server.averages import MovingAverage
from icehouse_server.storage.storage_settings import Codec

_RATE_WEIGHT = 0.3
"""Of each read in the moving averages, however long it took."""
_MARGIN = 1.25
"""By how much the decoder must be faster than the disk before planes are written again."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReadRates:
    """What one read showed, in bytes per second; 0 where it showed nothing."""

    disk_bytes_per_s: float = 0.0
    """Of bytes of files, by all readers together."""
    decode_bytes_per_s: float = 0.0
    """Of tensors' bytes made of planes, by all readers together."""


NO_RATES = ReadRates()


class CodecChoice:
    """Begins with planes unless the setting is `raw`; `auto` changes its mind with the rates."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self.has_planes = codec is not Codec.RAW
        """Whether the next block is stored in planes."""
        self._disk_s = MovingAverage(weight=_RATE_WEIGHT)
        """That a byte of a file takes."""
        self._decode_s = MovingAverage(weight=_RATE_WEIGHT)
        """That a byte of a tensor takes."""

    @property
    def decode_bytes_per_s(self) -> float:
        """By all readers together, a moving average; 0 before anything was decoded."""
        return 1.0 / self._decode_s.value if self._decode_s.value else 0.0

    def note(self, rates: ReadRates) -> None:
        """Take in what a read showed."""
        if rates.disk_bytes_per_s:
            self._disk_s.add(1.0 / rates.disk_bytes_per_s)
        if rates.decode_bytes_per_s:
            self._decode_s.add(1.0 / rates.decode_bytes_per_s)
        if self._codec is not Codec.AUTO or not (self._disk_s.value and self._decode_s.value):
            return
        margin = 1.0 if self.has_planes else _MARGIN
        self.has_planes = margin * self._decode_s.value <= self._disk_s.value
