"""Codec choice: whether blocks are stored in byte planes, decided by what reads have shown. Storage thread.

Planes save a third of the bytes, but where the disk is faster than the decoder a restore waits for the
decoder. Blocks are raw until the disk has proved slower: compressing takes a stop from 4 s to 21, and a fast
restore from 1,100 MB/s to 310 (H100, files in memory). Both rates come from real reads, with all readers at
work; before the first read in planes, the decoder's rate comes from a trial. The averages are of the time per
byte, so that a few files cached in memory do not make a slow disk look fast.
"""

from __future__ import annotations

import dataclasses
import time

import numpy as np

from icehouse_server.averages import MovingAverage
from icehouse_server.storage.local.block_format.planes import (
    CHUNK_BYTES,
    PlaneDecoder,
    PlaneEncoder,
    table_sizes,
)
from icehouse_server.storage.storage_settings import Codec

_RATE_WEIGHT = 0.3
"""Weight of each read in the moving averages, however long it took."""
_MARGIN = 1.25
"""How many times faster than the disk the decoder must be before planes are written."""
_TRIALS = 5
"""Of the decoder; the fastest counts, since other programs can only slow it down."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReadRates:
    """What one read showed, in bytes per second; 0 if it showed nothing."""

    disk_bytes_per_s: float = 0.0
    """File bytes, by all readers together."""
    decode_bytes_per_s: float = 0.0
    """Tensors' bytes decoded from planes, by all readers together."""


NO_RATES = ReadRates()


class CodecChoice:
    """Starts raw unless the setting is `planes`; with `auto` it follows the rates."""

    def __init__(self, codec: Codec, *, tried_bytes_per_s: float) -> None:
        """`tried_bytes_per_s`: the decoder's rate in a trial, all readers together."""
        self._codec = codec
        self._tried_s = 1.0 / tried_bytes_per_s
        self.has_planes = codec is Codec.PLANES
        """Whether the next block is stored in planes."""
        self._disk_s = MovingAverage(weight=_RATE_WEIGHT)
        """Time per byte of a file."""
        self._decode_s = MovingAverage(weight=_RATE_WEIGHT)
        """Time per byte of a tensor."""

    @property
    def decode_bytes_per_s(self) -> float:
        """Moving average over all readers together; 0 before anything was decoded."""
        return 1.0 / self._decode_s.value if self._decode_s.value else 0.0

    def note(self, rates: ReadRates) -> None:
        """Add what a read showed, and choose anew."""
        if rates.disk_bytes_per_s:
            self._disk_s.add(1.0 / rates.disk_bytes_per_s)
        if rates.decode_bytes_per_s:
            self._decode_s.add(1.0 / rates.decode_bytes_per_s)
        if self._codec is not Codec.AUTO or not self._disk_s.value:
            return
        margin = 1.0 if self.has_planes else _MARGIN
        self.has_planes = margin * (self._decode_s.value or self._tried_s) <= self._disk_s.value


def try_decoder(*, reader_count: int) -> float:
    """Return how many bytes of bf16 numbers a second this many readers decode, each on its own core.

    Decodes one chunk of normally distributed numbers a few times, which takes some milliseconds.
    """
    numbers = np.random.default_rng(0).standard_normal(CHUNK_BYTES // 2, np.float32)
    chunk = (numbers.view(np.uint32) >> 16).astype("<u2").view(np.uint8)
    table, *planes = PlaneEncoder().encode(chunk, width=2)
    stored = memoryview(b"".join(planes))
    sizes = table_sizes(bytes(table), plane_bytes=CHUNK_BYTES // 2)
    decoder, target, durations_s = PlaneDecoder(), np.empty_like(chunk), []
    for _ in range(_TRIALS):
        began = time.perf_counter()
        decoder.decode(sizes, stored, target, width=2)
        durations_s.append(time.perf_counter() - began)
    return reader_count * CHUNK_BYTES / min(durations_s)
