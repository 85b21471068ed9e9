"""Paths: the tree of all prompts of a trace, cut where prompts end or part, so that caches count in segments.

All blocks of a segment are always asked for together. So a cache needs one entry for a segment and a count of
how many of its blocks it holds, from the first one on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from bench.agents.trace import Request, Trace

NONE = -1
"""Above a first segment, and at the end of an empty prompt."""


@dataclasses.dataclass(frozen=True, slots=True)
class Paths:
    """Segments by number; a parent has a smaller one than its children."""

    block_token_count: int
    parents: Sequence[int]
    starts: Sequence[int]
    """Blocks of a prompt before the segment."""
    counts: Sequence[int]
    """Blocks of the segment."""
    ends: Sequence[int]
    """By request: the segment that its prompt ends with."""

    @property
    def block_count(self) -> int:
        """Different blocks of all prompts."""
        return sum(self.counts)

    def upwards(self, segment: int) -> list[int]:
        """Return a segment and all before it, the first one last."""
        found, parents = [], self.parents
        while segment != NONE:
            found.append(segment)
            segment = parents[segment]
        return found

    def end_of(self, segment: int) -> int:
        """Return the blocks of a prompt up to the segment's end."""
        return self.starts[segment] + self.counts[segment]


def paths_of(trace: Trace) -> Paths:
    """Return the segments of a trace's prompts."""
    cuts: dict[int, set[int]] = {}
    """By stream, in order of appearance: where prompts leave it."""
    above: dict[int, tuple[int, int] | None] = {}
    """By stream: the stream and the block count that it begins behind."""
    for request in trace.requests:
        before: tuple[int, int] | None = None
        for span in request.prompt:
            if span.stream not in cuts:
                cuts[span.stream], above[span.stream] = set(), before
            cuts[span.stream].add(span.block_count)
            before = span.stream, span.block_count
    parents: list[int] = []
    starts: list[int] = []
    counts: list[int] = []
    found: dict[tuple[int, int], int] = {}
    for stream, places in cuts.items():
        origin = above[stream]
        parent = NONE if origin is None else found[origin]
        start, last = (0 if parent == NONE else starts[parent] + counts[parent]), 0
        for place in sorted(places):
            found[stream, place] = len(parents)
            parents.append(parent)
            starts.append(start + last)
            counts.append(place - last)
            parent, last = found[stream, place], place
    return Paths(
        block_token_count=trace.block_token_count,
        parents=parents,
        starts=starts,
        counts=counts,
        ends=[_end(request, found) for request in trace.requests],
    )


def _end(request: Request, found: dict[tuple[int, int], int]) -> int:
    if not request.prompt:
        return NONE
    last = request.prompt[-1]
    return found[last.stream, last.block_count]
