"""Fields of a message in its bytes: what can be known of a request that is not parsed yet. Pure functions.

The parser makes an object of each field and holds Python's global lock until the last one: ten megabytes of
short messages take it a quarter of a second. Counting stops at its limit.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from google.protobuf.descriptor import Descriptor

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_VARINT_BYTES = 10
_WIDTHS = {_FIXED64: 8, _FIXED32: 4, 3: 0, 4: 0}
"""Bytes of what has always as many; the ends of a group have none."""


class Field(NamedTuple):
    """One field: its number, and where what it holds begins and ends."""

    number: int
    start: int
    stop: int
    is_delimited: bool
    """Whether it is a text, bytes, a message or packed numbers."""


def fields(data: bytes, start: int, stop: int) -> Iterator[Field]:
    """Yield the fields of the message in data[start:stop], as far as it is well formed.

    Of a group, which proto3 does not write, the fields inside are told as if they stood beside it.
    """
    position = start
    try:
        while position < stop:
            tag, position = _varint(data, position)
            kind = tag & 7
            if kind == _LENGTH:
                size_bytes, position = _varint(data, position)
            elif kind == _VARINT:
                begin = position
                _, position = _varint(data, position)
                size_bytes, position = position - begin, begin
            elif kind in _WIDTHS:
                size_bytes = _WIDTHS[kind]
            else:
                return
            if position + size_bytes > stop:
                return
            yield Field(tag >> 3, position, position + size_bytes, kind == _LENGTH)
            position += size_bytes
    except IndexError:
        # In the middle of a number: the parser will say so.
        return


def has_more_fields(data: bytes, descriptor: Descriptor, *, limit: int) -> bool:
    """Return whether a message has more fields than `limit`, those of the messages in it included.

    A list of many short messages is seen before any of them is looked into.
    """
    count = 0
    waiting = deque([(descriptor, 0, len(data))])
    while waiting:
        message, start, stop = waiting.popleft()
        parts = _messages_in(message)
        for field in fields(data, start, stop):
            count += 1
            if count > limit:
                return True
            if field.is_delimited and field.number in parts:
                waiting.append((parts[field.number], field.start, field.stop))
    return False


@functools.cache
def _messages_in(descriptor: Descriptor) -> Mapping[int, Descriptor]:
    """Return the type of each field that is a message, by the field's number."""
    return {field.number: field.message_type for field in descriptor.fields if field.message_type is not None}


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Return a number and where the next thing begins; raises IndexError where it has no end in time."""
    value = 0
    # Longer ones are no numbers of 64 bits; adding up one as long as a message would take hours.
    for shift in range(0, 7 * _VARINT_BYTES, 7):
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise IndexError(position)
