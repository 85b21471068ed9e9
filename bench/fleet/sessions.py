"""Agents' sessions by size: who says how much when, decided from a seed before anything runs.

Each session belongs to an agent, whose instructions and tools all its sessions begin with. Every turn sends
all that was said before it and something new, mostly what a tool has answered, and gets little back.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """What sessions look like. Counts are tokens unless they say otherwise; medians of log-normal draws.

    As it stands, 96 % of all prompt tokens were seen before (94 to 97 % is what published traces of agents
    have), inputs are 140 times as long as outputs, and half of the sessions end beyond 21,000 tokens.
    """

    agent_count: int = 4
    agent_token_count: int = 6000
    """Instructions and tools, the same in all sessions of an agent."""
    task_token_count: int = 1500
    """What the first turn adds to them."""
    input_token_count: int = 700
    """What each later turn adds."""
    output_token_count: int = 150
    turn_count: int = 20
    """Mean; at least two."""
    pause_s: float = 10.0
    """Mean time from an answer to the next turn: a tool at work, a human who reads."""
    spread: float = 0.6
    """Standard deviation of the logarithm of each count."""

    def scaled(self, factor: float) -> Shape:
        """Return the same shape with all token counts times `factor`: equal shares, other sizes."""
        names = ("agent_token_count", "task_token_count", "input_token_count", "output_token_count")
        sizes = {name: max(1, round(getattr(self, name) * factor)) for name in names}
        return dataclasses.replace(self, **sizes)


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """What one turn adds to its session, and how long after the answer before it it is sent."""

    input_token_count: int
    output_token_count: int
    pause_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Session:
    """One session: its agent by number, and its turns."""

    agent: int
    turns: tuple[Turn, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Tokens:
    """All prompt tokens of some sessions, and those of them that nobody had sent or been answered before."""

    prompt_count: int
    new_count: int
    output_count: int

    @property
    def hit_rate(self) -> float:
        """What one worker that forgets nothing would reuse, as a share."""
        return 1 - self.new_count / self.prompt_count


def make_sessions(count: int, shape: Shape, *, seed: int) -> list[Session]:
    """Return sessions; the first of a longer list are those of a shorter one."""
    source = random.Random(seed)
    return [_session(source, shape) for _ in range(count)]


def _session(source: random.Random, shape: Shape) -> Session:
    turn_count = 2 + math.floor(source.expovariate(1 / max(1e-9, shape.turn_count - 1.5)))
    turns = []
    for index in range(min(turn_count, 4 * shape.turn_count)):
        median = shape.input_token_count if index else shape.task_token_count
        turns.append(
            Turn(
                input_token_count=_draw(source, median, shape.spread),
                output_token_count=_draw(source, shape.output_token_count, shape.spread),
                pause_s=source.expovariate(1 / shape.pause_s) if index and shape.pause_s else 0.0,
            )
        )
    return Session(source.randrange(shape.agent_count), tuple(turns))


def _draw(source: random.Random, median: float, spread: float) -> int:
    # Not more than e^2 times the median: one draw in a thousand would fill a model's context otherwise.
    return max(1, round(median * math.exp(min(2.0, source.gauss(0.0, spread)))))


def tokens_of(sessions: Sequence[Session], shape: Shape) -> Tokens:
    """Count what the sessions send and are answered."""
    prompt_count = new_count = output_count = 0
    for session in sessions:
        length = shape.agent_token_count
        for turn in session.turns:
            length += turn.input_token_count
            new_count += turn.input_token_count
            prompt_count += length
            length += turn.output_token_count
            output_count += turn.output_token_count
    new_count += shape.agent_token_count * len({session.agent for session in sessions})
    return Tokens(prompt_count, new_count, output_count)


def last_token_counts(sessions: Sequence[Session], shape: Shape) -> list[int]:
    """Return how long each session is at its end, its agent's instructions included."""
    own = (sum(turn.input_token_count + turn.output_token_count for turn in s.turns) for s in sessions)
    return [shape.agent_token_count + count for count in own]
