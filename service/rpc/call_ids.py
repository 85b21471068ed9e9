"""Names for the tool calls of an output that its model's format does not name."""

from __future__ import annotations

import array
import hashlib
import string
from collections.abc import Callable, Sequence

CALL_ID_LENGTH = 9
"""Mistral's templates take ids of nine letters and digits and no others."""

_ALPHABET = string.ascii_letters + string.digits


def call_id_maker(request_id: str, token_ids: Sequence[int]) -> Callable[[int], str]:
    """Return a function from a call's index to its id.

    The same request gives the same ids, by Generate and by Stream; a later turn of the same conversation,
    whose prompt is longer, gives others even under the same request id.
    """
    digest = hashlib.sha256(
        request_id.encode("utf-8") + b"\0" + array.array("q", token_ids).tobytes()
    ).digest()

    def make(index: int) -> str:
        number = int.from_bytes(hashlib.sha256(digest + index.to_bytes(8, "big")).digest(), "big")
        letters = []
        for _ in range(CALL_ID_LENGTH):
            number, place = divmod(number, len(_ALPHABET))
            letters.append(_ALPHABET[place])
        return "".join(letters)

    return make
