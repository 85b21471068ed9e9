"""Read-ahead: a thread that reads a model's files, so that the system has them in memory when MLX needs them.

The inference thread asks how far it has read, instead of waiting for a disk while other engines have work.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

_PIECE_BYTES: Final = 4 << 20
_AHEAD_BYTES: Final = 64 << 20
"""How far to read beyond what was asked for, so that the disk is never idle. Reading everything at once would
take a processor away from other work."""


class WeightReadAhead:
    """Reads from the first question until its block ends."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self._changed = threading.Condition()
        self._asked_bytes: float = 0
        self._read_bytes: float = 0
        self._thread = threading.Thread(target=self._run, name="read_ahead", daemon=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ask(math.inf)

    def has(self, size_bytes: int) -> bool:
        """Whether the first `size_bytes` of the files have been read, or cannot be."""
        self._ask(size_bytes)
        if self._thread.ident is None:
            self._thread.start()
        return self._read_bytes >= size_bytes

    def _ask(self, size_bytes: float) -> None:
        with self._changed:
            self._asked_bytes = max(self._asked_bytes, size_bytes)
            self._changed.notify()

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # MLX reads the same file and reports its error
            for file in self._files:
                self._read(file)
        self._read_bytes = math.inf

    def _read(self, file: Path) -> None:
        piece = bytearray(_PIECE_BYTES)
        with file.open("rb", buffering=0) as opened:
            while self._may_go_on() and (count := opened.readinto(piece)):
                self._read_bytes += count

    def _may_go_on(self) -> bool:
        """Wait until more is wanted; return False at the end of the block."""
        with self._changed:
            self._changed.wait_for(lambda: self._read_bytes < self._asked_bytes + _AHEAD_BYTES)
            return self._asked_bytes < math.inf
