"""Pins for `cache_control`: the prompt up to a marked block is pinned for the mark's time, behind the answer.

A mark in the tools or in the system's text stands for both, since chat templates put them in either order.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from icehouse_client import AsyncClient, IcehouseClientError

from icehouse_http.errors import ApiError
from icehouse_http.exchange import Asked
from icehouse_http.fields import Fields
from icehouse_http.messages.request import prompt_options
from icehouse_http.messages.turns import turns_of

_log = logging.getLogger("icehouse_http")

Place = tuple[int, int]
"""A turn and a block in it, counted from 0."""
_HEAD: Place = (-1, -1)
"""Tools and system."""
_TTLS_S = {"5m": 300.0, "1h": 3600.0}
_DEFAULT_TTL = "5m"
_IN_FLIGHT_LIMIT = 16
_TIMEOUT_S = 30.0


class Pins:
    """The pins that are being asked for, at most `_IN_FLIGHT_LIMIT`; what is more is left out."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def ask(self, client: AsyncClient, fields: Fields, asked: Asked) -> None:
        """Begin to pin what a request marks; returns at once."""
        for ttl_s, place in marks_of(fields):
            if len(self._tasks) >= _IN_FLIGHT_LIMIT:
                _log.debug("a pin was left out: %d are being asked for", len(self._tasks))
                return
            task = asyncio.create_task(_pin(client, fields, asked, ttl_s=ttl_s, place=place))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Give up those that are not answered."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _pin(client: AsyncClient, fields: Fields, asked: Asked, *, ttl_s: float, place: Place) -> None:
    try:
        messages = [turn.message for turn in turns_of(_until(fields, place))]
        options = prompt_options(asked, messages)
        await client.cache.pin(messages, ttl_s=ttl_s, timeout_s=_TIMEOUT_S, **options)
    except (ApiError, IcehouseClientError, ValueError) as error:
        _log.debug("a marked prompt was not pinned: %s", error)


def marks_of(fields: Fields) -> list[tuple[float, Place]]:
    """Return the deepest marked place for each time in seconds, unless a longer one reaches as far."""
    deepest: dict[float, Place] = {}
    for place, block in _blocks(fields):
        control = block.get("cache_control")
        if isinstance(control, Mapping):
            ttl = control.get("ttl")
            deepest[_TTLS_S.get(ttl if isinstance(ttl, str) else "", _TTLS_S[_DEFAULT_TTL])] = place
    marks: list[tuple[float, Place]] = []
    for ttl_s in sorted(deepest, reverse=True):
        if not marks or deepest[ttl_s] > marks[-1][1]:
            marks.append((ttl_s, deepest[ttl_s]))
    return marks


def _blocks(fields: Fields) -> Iterator[tuple[Place, Mapping[str, Any]]]:
    """Iterate over what may be marked, the deepest last: blocks in a tool's result count as this one."""
    for block in (*_listed(fields.raw("tools")), *_listed(fields.raw("system"))):
        yield _HEAD, block
    place = _HEAD
    for turn_index, turn in enumerate(_listed(fields.raw("messages"))):
        blocks = _listed(turn.get("content"))
        for block_index, block in enumerate(blocks):
            for marked in (block, *_listed(block.get("content"))):
                yield (turn_index, block_index), marked
        place = turn_index, len(blocks)
    # The request's own mark is one at its end.
    yield place, {"cache_control": fields.raw("cache_control")}


def _listed(value: object) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def _until(fields: Fields, place: Place) -> Fields:
    """Return a request whose prompt ends at this place; behind tools and system is a turn without text."""
    turn_index, block_index = place
    turns: list[Mapping[str, Any]] = fields.items("messages")[: turn_index + 1]
    if place == _HEAD:
        turns = [{"role": "user", "content": ""}]
    elif isinstance(content := turns[-1].get("content"), list):
        turns[-1] = {**turns[-1], "content": content[: block_index + 1]}
    return Fields({"system": fields.raw("system"), "messages": turns})
