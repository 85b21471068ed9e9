"""Message fields: refuses by a request's bytes what a parsed message hides, or what costs too much to parse.

- Two fields of one oneof: a parser keeps the last one without a word, so a prompt could get lost unseen.
- More fields than any request needs: the parser makes an object of each and holds Python's global lock until
  it is done. Ten megabytes of short messages take a quarter of a second.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import chain, islice
from typing import NamedTuple

from google.protobuf.descriptor import Descriptor, ServiceDescriptor
from icehouse.v1 import (
    cache_service_pb2,
    embedding_service_pb2,
    inference_service_pb2,
    prompt_pb2,
    rerank_service_pb2,
)

from icehouse_server.errors import InvalidRequest, Reason
from icehouse_server.rpc.calls.methods import LONG_MESSAGE_BYTES

FIELD_LIMIT = 1 << 16
"""Fields of one request, such as 4,096 messages of a chat with sixteen each. They are parsed in 2 ms."""
SCANNED_FIELD_LIMIT = 1000
"""A message with more top-level fields has too many stop strings, and a prompt with more has too many tools;
both are refused for that."""

_PROMPT = prompt_pb2.Prompt.DESCRIPTOR


def inputs_of(services: Sequence[ServiceDescriptor]) -> Mapping[str, Descriptor]:
    """Return the request's type of each method with a prompt; `services` are served beside the API."""
    return {
        f"{service.full_name}/{method.name}": method.input_type
        for service in (*_services(), *services)
        for method in service.methods
    }


def check_fields(data: bytes, descriptor: Descriptor) -> None:
    """Refuse a message that sets two fields of one oneof, or a long one with too many fields.

    Raises InvalidRequest. Bytes that are no message are left to the parser.
    """
    if len(data) > LONG_MESSAGE_BYTES and has_more_fields(data, descriptor, limit=FIELD_LIMIT):
        raise InvalidRequest(
            Reason.MESSAGE_MALFORMED,
            f"the {len(data)} bytes of the request have more than {FIELD_LIMIT} fields, those of the "
            "messages in it included; send fewer, or shorter lists",
            metadata={"size_bytes": len(data), "field_limit": FIELD_LIMIT},
        )
    if clash := clashing_fields(data, descriptor):
        listed = " and ".join(f"`{name}`" for name in clash)
        raise InvalidRequest(
            Reason.PROMPT_AMBIGUOUS,
            f"{listed} are set; set one of them",
            field=clash[-1],
            metadata={"fields": ",".join(clash)},
        )


def clashing_fields(data: bytes, descriptor: Descriptor) -> tuple[str, ...]:
    """Return the names of fields that share a oneof, in `data` or its `prompt`; empty for no clash.

    A parser merges a prompt that is sent in several pieces, so their fields count together.
    """
    top = list(islice(fields(data, 0, len(data)), SCANNED_FIELD_LIMIT))
    if clash := _clash({field.number for field in top}, descriptor):
        return clash
    prompt = descriptor.fields_by_name.get("prompt")
    if prompt is None or prompt.message_type is not _PROMPT:
        return ()
    inner = (fields(data, each.start, each.stop) for each in top if each.number == prompt.number)
    present = {field.number for field in islice(chain.from_iterable(inner), SCANNED_FIELD_LIMIT)}
    return tuple(f"prompt.{name}" for name in _clash(present, _PROMPT))


def _clash(present: Set[int], descriptor: Descriptor) -> tuple[str, ...]:
    for names_by_number in _oneofs(descriptor):
        names = tuple(name for number, name in names_by_number.items() if number in present)
        if len(names) > 1:
            return names
    return ()


def _services() -> list[ServiceDescriptor]:
    modules = (inference_service_pb2, cache_service_pb2, embedding_service_pb2, rerank_service_pb2)
    return [service for module in modules for service in module.DESCRIPTOR.services_by_name.values()]


def _oneofs(descriptor: Descriptor) -> list[dict[int, str]]:
    """Return name by number for each oneof; the one-field oneofs of `optional` are not among them."""
    return [
        {field.number: field.name for field in oneof.fields}
        for oneof in descriptor.oneofs
        if len(oneof.fields) > 1
    ]


_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_VARINT_BYTES = 10
_WIDTHS = {_FIXED64: 8, _FIXED32: 4, 3: 0, 4: 0}
"""Sizes of values of fixed length; the ends of a group have none."""


class Field(NamedTuple):
    """One field: its number, and where its value begins and ends."""

    number: int
    start: int
    stop: int
    is_delimited: bool
    """Whether it is a text, bytes, a message or packed numbers."""


def fields(data: bytes, start: int, stop: int) -> Iterator[Field]:
    """Yield the fields of the message in data[start:stop], as far as it is well formed.

    The fields of a group, which proto3 does not write, count as fields beside it.
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
        # In the middle of a number: the parser will complain.
        return


def has_more_fields(data: bytes, descriptor: Descriptor, *, limit: int) -> bool:
    """Return whether a message has more fields than `limit`, including those of nested messages.

    Level by level, so that a long list is noticed before its messages are read. Counting stops at the limit.
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
    """Return a number and the position after it; raises IndexError if it does not end in time."""
    value = 0
    # A 64-bit number is never longer, and adding up one as long as a message would take hours.
    for shift in range(0, 7 * _VARINT_BYTES, 7):
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise IndexError(position)
