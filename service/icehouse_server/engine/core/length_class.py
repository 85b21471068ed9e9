"""Length classes: how long the buffers are that rows of like length share, and what memory is counted by."""

from __future__ import annotations

from typing import Final

_LEAST_LENGTH: Final = 128


def length_class(token_count: int) -> int:
    """Return the length of the class for so many tokens: 128, 256, 384, 512, 768, 1024, 1536, ...

    At most half as much again is empty, from 256 on.
    """
    length = max(_LEAST_LENGTH, 1 << (token_count - 1).bit_length())
    middle = length // 4 * 3
    return middle if token_count <= middle and middle % _LEAST_LENGTH == 0 else length
