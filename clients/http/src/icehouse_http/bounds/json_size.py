"""Size of a body as JSON: what it takes to read it, counted as its pieces come and before any of it is read.

A parser holds the event loop until it is done, and what is made of the values holds it again. Texts and
pictures are cheap however long they are; values are not, and each takes at least a byte outside of strings.
"""

from __future__ import annotations

from icehouse_http.errors import ApiError

_STRING_WORK = 16
"""A string takes as long as so many other bytes."""
_TEXT_BYTES = 64
"""So many bytes in strings take as long as one outside of them."""


class JsonSize:
    """Counts one body. Invalid JSON is counted too, somehow."""

    def __init__(self, *, limit: int) -> None:
        self._limit = limit
        self._structure = 0
        self._size_bytes = 0
        self._is_in_string = False
        self._rest = b""

    @property
    def work(self) -> int:
        """What the body takes, in bytes outside of strings."""
        return self._structure + self._size_bytes // _TEXT_BYTES

    def add(self, piece: bytes) -> None:
        """Count a piece; raises ApiError as soon as there is too much outside of strings."""
        self._size_bytes += len(piece)
        piece = self._rest + piece
        # The last backslash may belong to a quote that comes with the next piece.
        is_cut = (len(piece) - len(piece.rstrip(b"\\"))) % 2 == 1
        self._rest = b"\\" if is_cut else b""
        plain = piece[: len(piece) - is_cut].replace(b"\\\\", b"").replace(b'\\"', b"")
        quote_count = plain.count(b'"')
        self._structure += _STRING_WORK * quote_count // 2
        self._check()
        parts = plain.split(b'"')
        self._structure += sum(map(len, parts[int(self._is_in_string) :: 2]))
        self._is_in_string ^= quote_count % 2 == 1
        self._check()

    def _check(self) -> None:
        if self._structure > self._limit:
            message = (
                f"the body has too many values: outside its strings it may have "
                f"{self._limit} bytes, counting {_STRING_WORK} for each string"
            )
            raise ApiError(413, message, code="body_too_large")
