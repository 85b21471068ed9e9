"""KV growth: for how many tokens a sequence's KV arrays have room, at each length. Pure arithmetic.

An array that grows is copied whole, and room that nobody uses is memory that nobody else has. So room is
made in classes: for 128 tokens, or an eighth of the length where that is more (rows that came together grow
together, and eight of 200 tokens held one pass up for 0.15 s every 64 tokens), and where the length is known
(an input that is being read, an output that may not be longer) just that.
"""

from __future__ import annotations

import dataclasses

from icehouse_server.engine.core.length_class import length_class

_FIRST_OUTPUT_TOKEN_COUNT = 128
"""Output tokens that an input's arrays have room for."""
_LEAST_INPUT_CLASS = 1024
"""Room that is made at once for an input, and twice as much each time it does not do."""
_LEAST_CLASS_STEP = 128
_CLASS_SHARE = 8
_SLOT_ROOM_TO_DECODE = 96
"""Tokens that a slot has room for besides, where the reply may be as long: rows that outgrow their slots
together hold a pass up. With 32 eight rows of 40 tokens did so 88 tokens later, for 60 to 100 ms."""


@dataclasses.dataclass(frozen=True, slots=True)
class KvLength:
    """What is known beforehand of a sequence's length, in tokens."""

    input_token_count: int = 0
    """What is prefilled; 0 where it is not known."""
    limit_token_count: int = 1 << 62
    """Input and output together at most."""


UNKNOWN_LENGTH = KvLength()


@dataclasses.dataclass(frozen=True, slots=True)
class KvGrowth:
    """How KV arrays grow on one device: always to a class, so that a length alone tells the room."""

    grid_token_count: int = 1
    """Lengths of arrays are multiples of it."""
    is_paged: bool = False
    """KV lies in pages of so many tokens, which come one by one and are not copied."""

    def room(self, token_count: int, length: KvLength = UNKNOWN_LENGTH) -> int:
        """Return for how many tokens the arrays of a sequence that holds so many have room."""
        if not token_count:
            return 0
        if self.is_paged:
            return _ceiling(token_count, self.grid_token_count)
        wanted = max(token_count, min(self._class_of(token_count, length), length.limit_token_count))
        return _ceiling(wanted, self.grid_token_count)

    def ending_room(self, token_count: int) -> int:
        """Return the room of a sequence that is known to end at this length."""
        return self.room(token_count, KvLength(token_count, token_count))

    def slot_length(self, token_count: int) -> int:
        """Return how long the slots are in which rows of about so many tokens lie together."""
        return _ceiling(length_class(token_count), self.grid_token_count)

    def _class_of(self, token_count: int, length: KvLength) -> int:
        first = _ceiling(length.input_token_count + _FIRST_OUTPUT_TOKEN_COUNT, self.grid_token_count)
        if length.input_token_count and token_count <= first:
            at_once = max(_LEAST_INPUT_CLASS, _power_of_two(token_count))
            return at_once if at_once < length.input_token_count else first
        step = max(_LEAST_CLASS_STEP, _power_of_two(token_count) // 2 // _CLASS_SHARE)
        return _ceiling(token_count, step)


def slot_room(token_count: int, length: KvLength, *, token_limit: int) -> int:
    """Return for how many tokens a row that has so many is to have room in its slot, up to the longest."""
    room = min(token_count + _SLOT_ROOM_TO_DECODE, length.limit_token_count, token_limit)
    return max(token_count, room)


UNALIGNED = KvGrowth()
"""Arrays of any length will do."""


def _power_of_two(token_count: int) -> int:
    """Return the least that is not smaller."""
    return 1 << (token_count - 1).bit_length()


def _ceiling(token_count: int, step: int) -> int:
    return -(-token_count // step) * step
