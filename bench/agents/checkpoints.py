"""Checkpoints: copies of states that cannot be cut, taken at some positions of a prompt, kept under a budget.

A model with such states goes on from a checkpoint only, so that a hit ends at the last one within the known
blocks. Each takes as many bytes as some blocks. Positions are counted in the trace's blocks.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Callable, Iterator, Sequence

from bench.agents.paths import NONE, Paths
from bench.agents.trace import Request


class Victim(enum.Enum):
    """Which checkpoint goes when a session has more than its budget; never the newest one."""

    LRU = "LRU"
    GAP = "smallest gap"
    GAP_PER_AGE = "gap / age"


@dataclasses.dataclass(frozen=True, slots=True)
class Budget:
    """Where checkpoints are taken, and how many stay."""

    name: str
    interval_token_count: int = 2048
    """0: none in between."""
    at_heads: bool = True
    """Behind tools and instructions, where the trace tells."""
    at_branches: bool = False
    """Where a prompt leaves what was known, if that had no checkpoint."""
    per_session: int | None = None
    """How many a session keeps; None is all."""
    victim: Victim = Victim.LRU
    spares_shared: bool = False
    """Whether those on blocks that several sessions have used count for nobody."""
    supersedes: bool = False
    """Whether a session's newer checkpoint replaces the ones that it extends."""


@dataclasses.dataclass(slots=True, eq=False)
class _Checkpoint:
    segment: int
    offset: int
    """Blocks of its segment before it."""
    position: int
    """Blocks of its prompt before it."""
    session: int
    used: int
    """Number of the request that used it last."""
    before: _Checkpoint | None
    """The nearest one before it on its prompt's way, of any session; None for the beginning."""
    after: list[_Checkpoint] = dataclasses.field(default_factory=list)
    """Those that it is the nearest one for."""
    is_written: bool = False

    @property
    def gap(self) -> int:
        """Blocks that are computed again without it."""
        assert self.before is not None, "nobody computes the beginning again"
        return self.position - self.before.position


class Checkpoints:
    """All checkpoints that a cache holds."""

    def __init__(self, paths: Paths, budget: Budget, *, size_blocks: int) -> None:
        """`size_blocks` is what one takes, as blocks; 0 asks only how many there are."""
        self._paths = paths
        self._budget = budget
        self._size_blocks = size_blocks
        self._at: collections.defaultdict[int, dict[int, _Checkpoint]] = collections.defaultdict(dict)
        """By segment and offset."""
        self._of: collections.defaultdict[int, dict[_Checkpoint, None]] = collections.defaultdict(dict)
        """By session: those that count for it, in order of capture."""
        self._beginning = _Checkpoint(NONE, 0, 0, session=-1, used=0, before=None)
        """Stands before all, and is never let go."""
        self._count = 0
        self.held_at_ends: list[int] = []
        """How many each ended session had of its own."""

    @property
    def block_count(self) -> int:
        """What all of them take, as blocks."""
        return self._count * self._size_blocks

    @property
    def shared_count(self) -> int:
        """How many count for no session."""
        return self._count - sum(map(len, self._of.values()))

    def use(self, path: Sequence[int], *, known: int, number: int) -> int:
        """Return the position of the last checkpoint within the `known` blocks of a prompt, 0 without one."""
        found = self._last_within(path, known)
        found.used = number
        return found.position

    def capture(
        self,
        path: Sequence[int],
        *,
        reached: int,
        known: int,
        number: int,
        request: Request,
        is_shared: Callable[[int], bool],
    ) -> None:
        """Take the checkpoints of a prompt behind what was `reached` of the `known` blocks; let go of those
        beyond the budget. `is_shared` says which segments several families use."""
        own = self._of[request.session]
        segments = iter(reversed(path))
        segment = next(segments, None)
        before = self._last_within(path, reached)
        taken: list[_Checkpoint] = []
        for position in self._positions(path, request, reached=reached, known=known):
            while segment is not None and self._paths.end_of(segment) < position:
                segment = next(segments, None)
            assert segment is not None, "a position lies within the prompt"
            offset = position - self._paths.starts[segment]
            assert offset not in self._at[segment], "what was reached is the last one that is known"
            fresh = _Checkpoint(segment, offset, position, request.session, number, before)
            self._insert(fresh)
            before = fresh
            taken.append(fresh)
            if not (self._budget.spares_shared and is_shared(segment)):
                own[fresh] = None
        if self._budget.supersedes and taken:
            self._supersede(path, taken[-1])
        if self._budget.spares_shared:
            for each in [each for each in own if is_shared(each.segment)]:
                del own[each]
        self._thin(request.session, number)
        if request.is_last:
            self.held_at_ends.append(len(own))

    def write(self, segment: int, start: int, stop: int) -> int:
        """Note that these blocks of a segment leave RAM; return what is written with them, as blocks."""
        fresh = [
            c for c in self._at.get(segment, {}).values() if start < c.offset <= stop and not c.is_written
        ]
        for each in fresh:
            each.is_written = True
        return len(fresh) * self._size_blocks

    def last(self, segment: int) -> int:
        """Return the offset of a segment's last checkpoint, 0 without one."""
        return max(self._at.get(segment, ()), default=0)

    def drop_last(self, segment: int) -> int:
        """Let go of a segment's last checkpoint; return what it took, as blocks."""
        self._drop(self._at[segment][self.last(segment)])
        return self._size_blocks

    def cut(self, segment: int, block_count: int) -> None:
        """Let go of the checkpoints behind the first blocks of a segment."""
        for each in [c for c in self._at.get(segment, {}).values() if c.offset > block_count]:
            self._drop(each)

    def _positions(self, path: Sequence[int], request: Request, *, reached: int, known: int) -> Iterator[int]:
        """Yield where this prompt's checkpoints are taken, in order."""
        end = self._paths.end_of(path[0]) if path else 0
        block = self._paths.block_token_count
        step = self._budget.interval_token_count // block
        places = {end}
        if step:
            places.update(range((reached // step + 1) * step, end, step))
        if self._budget.at_heads:
            places.add(request.head_token_count // block)
        if self._budget.at_branches:
            places.add(known)
        return (place for place in sorted(places) if reached < place <= end)

    def _supersede(self, path: Sequence[int], newest: _Checkpoint) -> None:
        on_path = set(path)
        for each in list(self._of[newest.session]):
            if each is not newest and each.segment in on_path and each.position < newest.position:
                self._drop(each)

    def _thin(self, session: int, number: int) -> None:
        """Let go of a session's checkpoints until it has no more than its budget."""
        own, limit = self._of[session], self._budget.per_session
        while limit is not None and len(own) > limit:
            candidates = list(own)[:-1]
            if self._budget.victim is Victim.LRU:
                victim = min(candidates, key=lambda each: (each.used, each.position))
            else:
                by_age = self._budget.victim is Victim.GAP_PER_AGE
                victim = min(
                    candidates, key=lambda each: each.gap / ((number - each.used + 1) if by_age else 1)
                )
            self._drop(victim)

    def _last_within(self, path: Sequence[int], block_count: int) -> _Checkpoint:
        """Return the last checkpoint within the first blocks of a prompt; the beginning if there is none."""
        for segment in path:
            start = self._paths.starts[segment]
            if start < block_count and (there := self._at.get(segment)):
                offset = max((offset for offset in there if start + offset <= block_count), default=0)
                if offset:
                    return there[offset]
        return self._beginning

    def _insert(self, fresh: _Checkpoint) -> None:
        """Add one, between the one before it and those that follow it."""
        self._at[fresh.segment][fresh.offset] = fresh
        self._count += 1
        assert fresh.before is not None
        siblings = fresh.before.after
        fresh.after = [each for each in siblings if self._follows(each, fresh)]
        for each in fresh.after:
            each.before = fresh
        fresh.before.after = [each for each in siblings if each.before is not fresh] + [fresh]

    def _follows(self, later: _Checkpoint, earlier: _Checkpoint) -> bool:
        """Whether a prompt to `later` passes `earlier`."""
        is_behind = later.position > earlier.position
        return is_behind and earlier.segment in self._paths.upwards(later.segment)

    def _drop(self, checkpoint: _Checkpoint) -> None:
        there = self._at[checkpoint.segment]
        del there[checkpoint.offset]
        if not there:
            del self._at[checkpoint.segment]
        self._of[checkpoint.session].pop(checkpoint, None)
        self._count -= 1
        for each in checkpoint.after:
            each.before = checkpoint.before
        assert checkpoint.before is not None
        checkpoint.before.after.remove(checkpoint)
        checkpoint.before.after += checkpoint.after
