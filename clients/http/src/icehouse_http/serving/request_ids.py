"""Request ids: what each answer is known by, in both logs and in the headers that OpenAI's and Anthropic's
packages read. A caller may send its own."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from icehouse_client import IcehouseClientError

from icehouse_http.errors import Dialect
from icehouse_http.upstream import NAME

Result = TypeVar("Result")

OWN_ID = "icehouse.own_request_id"
"""Key of a request's scope: the id that its caller sent, if it can be one."""
REQUEST_ID = "icehouse.request_id"
"""Key of a request's scope: its id, which is its name at the server where it has one there."""
HEADER = "x-request-id"
"""Of the caller's own id, and of every answer."""
ANTHROPIC_HEADER = "request-id"
IN_USE = "REQUEST_ID_IN_USE"
_MARK_CHARACTERS = 8


def new_id(kind: str) -> str:
    """Return an id that nothing else has."""
    return f"{kind}{uuid.uuid4().hex}"


def own_id(headers: Mapping[str, str]) -> str:
    """Return the id that a caller sent; empty for one that could not stand in a log."""
    sent = headers.get(HEADER, "")
    return sent if NAME.fullmatch(sent) else ""


def headers_of(request_id: str, dialect: Dialect) -> list[tuple[bytes, bytes]]:
    """Return the headers that tell an answer's id."""
    names = [HEADER, *([ANTHROPIC_HEADER] if dialect is Dialect.ANTHROPIC else ())]
    return [(name.encode(), request_id.encode()) for name in names]


def distinct(request_id: str) -> str:
    """Return a longer id for a request beside another one of this id."""
    mark = uuid.uuid4().hex[:_MARK_CHARACTERS]
    return f"{request_id[: 128 - len(mark) - 1]}-{mark}"


async def named(request_id: str, ask: Callable[[str], Awaitable[Result]]) -> Result:
    """Ask under an id, or under a longer one where another request has it: a caller may give all that it asks
    for one of its own requests the same."""
    try:
        return await ask(request_id)
    except IcehouseClientError as error:
        if error.reason != IN_USE:
            raise
    return await ask(distinct(request_id))
