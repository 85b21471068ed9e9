"""Shrinking of a request that fails: what is not needed for that is left out, piece by piece."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from google.protobuf.message import Message

from tests.system.fuzz.frames import LONG_S
from tests.system.fuzz.mutations import parsed
from tests.system.fuzz.requests import METHODS, FuzzRequest

TRY_LIMIT = 300
"""Requests that one shrinking may send."""


async def shrunk(request: FuzzRequest, fails: Callable[[FuzzRequest], Awaitable[bool]]) -> FuzzRequest:
    """Return the smallest request found that still fails; `request` itself where nothing can be left out."""
    left = TRY_LIMIT
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for candidate in _smaller(request):
            if not left:
                return request
            left -= 1
            if await fails(candidate):
                request, is_smaller = candidate, True
                break
    return request


def _smaller(request: FuzzRequest) -> Iterator[FuzzRequest]:
    plain: dict[str, Any] = {"metadata": (), "timeout_s": LONG_S, "leave_after": None, "is_compressed": False}
    for name, value in plain.items():
        if getattr(request, name) != value:
            yield dataclasses.replace(request, **{name: value})
    for place, data in enumerate(request.messages):
        before, after = request.messages[:place], request.messages[place + 1 :]
        if len(request.messages) > 1:
            yield dataclasses.replace(request, messages=before + after)
        for smaller in _smaller_messages(request.path, data):
            if len(smaller) < len(data):
                yield dataclasses.replace(request, messages=(*before, smaller, *after))


def _smaller_messages(path: str, data: bytes) -> Iterator[bytes]:
    method = METHODS.get(path)
    message = None if method is None else parsed(method.input_type, data)
    if message is not None:
        yield from (smaller.SerializeToString() for smaller in _without_a_field(message))
    size = len(data) // 2
    while size:
        for start in range(0, len(data), size):
            yield data[:start] + data[start + size :]
        size //= 2


def _without_a_field(message: Message) -> Iterator[Message]:
    for path in _paths(message, ()):
        smaller = copy.deepcopy(message)
        *way, last = path
        node: Any = smaller
        for step in way:
            node = node[step] if isinstance(step, int) else getattr(node, step)
        if isinstance(last, int):
            del node[last]
        else:
            node.ClearField(last)
        yield smaller


def _paths(message: Message, way: tuple[str | int, ...]) -> Iterator[tuple[str | int, ...]]:
    """Yield the ways to all fields and items that are there, the outer ones first."""
    for field, value in message.ListFields():
        here = (*way, field.name)
        yield here
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        if is_map or (field.message_type is None and not field.is_repeated):
            continue
        if not field.is_repeated:
            yield from _paths(value, here)
            continue
        for place, item in enumerate(value):
            yield (*here, place)
            if isinstance(item, Message):
                yield from _paths(item, (*here, place))
