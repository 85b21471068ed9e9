"""Generator of agents' sessions with the statistics of recorded ones, for those without a trace.

A session has 50 to 250 turns; 95 % or a little more of its prompts' tokens were sent before. Most turns are
results of tools, seconds after the answer; every seventh is a person's, minutes later; a few come hours
later. Some turns edit the end of what was said. A full context is replaced by a summary. Some sessions start
sub-agents and wait for their end. All sessions of an agent share its instructions.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator

from bench.agents.trace import Request, Span, Trace

_HOUR_S = 3600.0


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """What sessions look like. Token counts that are drawn are log-normal around their medians."""

    block_token_count: int = 64
    agent_count: int = 4
    head_token_count: int = 15_000
    """Tools and instructions of an agent, which its sessions share."""
    least_turn_count: int = 50
    most_turn_count: int = 250
    first_token_count: int = 6_000
    """Median of a session's first message."""
    turn_token_count: int = 1_000
    """Median of what a turn adds, the answer before it included."""
    turn_spread: float = 1.35
    """Standard deviation of its logarithm."""
    output_token_count: int = 250
    context_token_limit: int = 160_000
    summary_token_count: int = 6_000
    tool_pause_s: float = 12.0
    person_pause_s: float = 240.0
    person_share: float = 1 / 7
    away_share: float = 0.01
    """Turns that come one to eight hours later."""
    edit_share: float = 0.04
    """Turns that replace the last blocks of what was said."""
    agents_share: float = 0.02
    """Turns that start a sub-agent."""
    agent_turn_count: int = 12
    open_count: int = 8
    """Sessions that are open at once, on average."""


def generate(request_count: int, shape: Shape, *, seed: int) -> Trace:
    """Return the first `request_count` requests, in order of time, of sessions drawn from the seed."""
    maker = _Maker(shape, seed)
    made: list[list[Request]] = []
    count = 0
    while count < request_count:
        made.append(maker.session())
        count += len(made[-1])
    # Each session begins a share of its length after the one before it.
    source = random.Random(seed + 1)
    spans_s = [session[-1].time_s - session[0].time_s for session in made]
    mean_s = sum(spans_s) / len(spans_s) / shape.open_count
    requests, begin_s = [], 0.0
    for session in made:
        requests += [dataclasses.replace(request, time_s=request.time_s + begin_s) for request in session]
        begin_s += source.expovariate(1.0 / mean_s)
    requests.sort(key=lambda request: request.time_s)
    return Trace("generated", shape.block_token_count, tuple(requests[:request_count]))


class _Maker:
    """Draws one session after the other; each from a seed of its own."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self._shape = shape
        self._seed = seed
        self._sessions = itertools.count()
        # An agent's instructions and those of its sub-agents are the first streams.
        self._streams = itertools.count(2 * shape.agent_count)

    def session(self) -> list[Request]:
        """Return a session's requests and its sub-agents', in order of time, from 0 on."""
        number = next(self._sessions)
        source = random.Random(f"{self._seed}/{number}")
        agent = source.randrange(self._shape.agent_count)
        turn_count = source.randint(self._shape.least_turn_count, self._shape.most_turn_count)
        requests = list(self._turns(source, number, None, agent, turn_count, 0.0))
        requests.sort(key=lambda request: request.time_s)
        return requests

    def _turns(
        self,
        source: random.Random,
        number: int,
        parent: int | None,
        agent: int,
        turn_count: int,
        time_s: float,
    ) -> Iterator[Request]:
        shape = self._shape
        head = Span(2 * agent + (parent is not None), shape.head_token_count // shape.block_token_count)
        said = _Said(shape, self._streams, source)
        for turn in range(turn_count):
            said.grow(source, is_first=turn == 0)
            output = max(1, round(_drawn(source, shape.output_token_count, 1.0)))
            yield Request(
                session=number,
                parent=parent,
                time_s=time_s,
                prompt=(head, *said.spans()),
                token_count=shape.head_token_count + said.token_count,
                output_token_count=output,
                head_token_count=shape.head_token_count,
                is_last=turn == turn_count - 1,
            )
            if parent is None and source.random() < shape.agents_share:
                count = 1 + round(source.expovariate(1 / shape.agent_turn_count))
                below = list(self._turns(source, next(self._sessions), number, agent, count, time_s + 1.0))
                yield from below
                time_s = below[-1].time_s
            time_s += self._pause_s(source, is_person=parent is None)

    def _pause_s(self, source: random.Random, *, is_person: bool) -> float:
        shape, lot = self._shape, source.random()
        if is_person and lot < shape.away_share:
            return source.uniform(_HOUR_S, 8 * _HOUR_S)
        if is_person and lot < shape.away_share + shape.person_share:
            return _drawn(source, shape.person_pause_s, 1.0)
        return _drawn(source, shape.tool_pause_s, 0.8)


class _Said:
    """What a session has said behind its instructions, as spans of streams."""

    def __init__(self, shape: Shape, streams: Iterator[int], source: random.Random) -> None:
        self._shape = shape
        self._streams = streams
        self._fixed: list[Span] = []
        """Spans of streams that will not grow any more."""
        self._stream = next(streams)
        self._block_count = 0
        """Blocks of the last stream."""
        self.token_count = 0

    def spans(self) -> tuple[Span, ...]:
        """Return them; a stream without a whole block is left out."""
        return (*self._fixed, Span(self._stream, self._block_count)) if self._block_count else (*self._fixed,)

    def grow(self, source: random.Random, *, is_first: bool) -> None:
        """Add a turn; now and then replace the end of what was said, or all of it by a summary."""
        shape = self._shape
        median = shape.first_token_count if is_first else shape.turn_token_count
        # Of what is longer only a part is sent.
        added = min(round(_drawn(source, median, shape.turn_spread)), shape.context_token_limit // 4)
        if self.token_count + added > shape.context_token_limit - shape.head_token_count:
            self._fixed, self._block_count, self.token_count = [], 0, 0
            self._stream = next(self._streams)
            added += shape.summary_token_count
        elif self._block_count > 1 and source.random() < shape.edit_share:
            self._cut(min(self._block_count - 1, 1 + int(source.expovariate(1 / 8))))
        self.token_count += added
        before = sum(span.block_count for span in self._fixed)
        self._block_count = self.token_count // shape.block_token_count - before

    def _cut(self, block_count: int) -> None:
        """Go on in a new stream, so many blocks before the end."""
        self._fixed.append(Span(self._stream, self._block_count - block_count))
        self._stream, self._block_count = next(self._streams), 0
        kept = sum(span.block_count for span in self._fixed)
        self.token_count = kept * self._shape.block_token_count


def _drawn(source: random.Random, median: float, spread: float) -> float:
    return source.lognormvariate(math.log(median), spread)
