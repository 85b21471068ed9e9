"""Trace: requests in order of time, whose prompts are chains of blocks without their text.

A prompt is a few spans of streams. A stream is a run of blocks that always begins at the same place: behind
the same blocks, or at the beginning of a prompt. A session that only appends has one stream, so that a prompt
of thousands of blocks is two or three spans, and a million of them fit into memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """The first blocks of a stream."""

    stream: int
    block_count: int


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One request of a session."""

    session: int
    parent: int | None
    """The session that started this one as a sub-agent."""
    time_s: float
    """Its arrival, from the trace's beginning."""
    prompt: tuple[Span, ...]
    token_count: int
    """Of the prompt, with what is left over after its last block."""
    output_token_count: int
    head_token_count: int
    """Tokens of tools and instructions at the prompt's beginning; 0 where the trace does not say."""
    is_last: bool
    """Whether the session ends with it."""
    tenant: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of time. Blocks have the trace's size, not the server's."""

    name: str
    block_token_count: int
    requests: tuple[Request, ...]

    @property
    def session_count(self) -> int:
        """How many sessions there are, sub-agents too."""
        return len({request.session for request in self.requests})

    @property
    def prompt_token_count(self) -> int:
        """Tokens of all prompts together."""
        return sum(request.token_count for request in self.requests)


def beside(one: Trace, other: Trace) -> Trace:
    """Return the requests of two tenants over the same time: the second one's is stretched. Blocks have the
    smaller size of the two, which the larger one is a multiple of."""
    size = min(one.block_token_count, other.block_token_count)
    sessions = 1 + max(request.session for request in one.requests)
    streams = 1 + max((span.stream for request in one.requests for span in request.prompt), default=0)
    stretch = one.requests[-1].time_s / max(other.requests[-1].time_s, 1e-9)
    requests = [
        *(_moved(each, one.block_token_count // size) for each in one.requests),
        *(
            _moved(each, other.block_token_count // size, sessions=sessions, streams=streams, stretch=stretch)
            for each in other.requests
        ),
    ]
    name = f"{one.name} beside {other.name}"
    return Trace(name, size, tuple(sorted(requests, key=lambda request: request.time_s)))


def _moved(
    request: Request, block_factor: int, *, sessions: int = 0, streams: int = 0, stretch: float = 1.0
) -> Request:
    """Return a request with numbers behind those of another trace, if any, as a tenant of its own then."""
    return dataclasses.replace(
        request,
        session=request.session + sessions,
        parent=None if request.parent is None else request.parent + sessions,
        time_s=request.time_s * stretch,
        prompt=tuple(Span(s.stream + streams, s.block_count * block_factor) for s in request.prompt),
        tenant=int(sessions > 0),
    )


@dataclasses.dataclass(slots=True)
class _Place:
    """Where a known block lies."""

    stream: int
    block_count: int
    """Blocks of the stream up to and with this one."""


class StreamIndex:
    """Turns prompts given as lists of block ids into spans. An id counts together with all ids before it."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, Hashable], int] = {}
        """Number of each known block by the block before it, -1 for none, and its id."""
        self._known: list[_Place] = []
        self._lengths: list[int] = []
        """Blocks of each stream."""

    def spans(self, block_ids: Iterable[Hashable]) -> tuple[Span, ...]:
        """Return the prompt's spans; blocks that are new here are known from now on."""
        found: list[Span] = []
        before, last = -1, None
        for block_id in block_ids:
            number = self._places.get((before, block_id))
            if number is None:
                number = self._places[before, block_id] = self._add_behind(last)
            place = self._known[number]
            if last is not None and place.stream != last.stream:
                found.append(Span(last.stream, last.block_count))
            before, last = number, place
        if last is not None:
            found.append(Span(last.stream, last.block_count))
        return tuple(found)

    def deepest_known(self, block_ids: Iterable[Hashable]) -> int:
        """Return the number of the last known block that these begin with; -1 if none is known."""
        deepest = -1
        for block_id in block_ids:
            number = self._places.get((deepest, block_id))
            if number is None:
                break
            deepest = number
        return deepest

    def _add_behind(self, last: _Place | None) -> int:
        """Add a block at the end of its predecessor's stream, or of a new stream where that one goes on."""
        if last is not None and last.block_count == self._lengths[last.stream]:
            self._lengths[last.stream] += 1
            self._known.append(_Place(last.stream, last.block_count + 1))
        else:
            self._lengths.append(1)
            self._known.append(_Place(len(self._lengths) - 1, 1))
        return len(self._known) - 1
