"""Cache: a model of the two tiers that counts blocks instead of holding them; a million requests in minutes.

It has room for so many blocks in all, some of them in RAM. A prompt's blocks come to RAM when it is computed.
What was used least recently leaves RAM, a chain's end first, and is written to SSD unless it is there. What
the rule gives up leaves both tiers. A test compares it with the service's `PrefixTree`, block by block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from bench.agents.checkpoints import Checkpoints
from bench.agents.gaps import IdleSessions
from bench.agents.owners import Owners
from bench.agents.paths import Paths
from bench.agents.rules import IDLE_SHARES, IdleOrder, LruOrder, Rule, order_of
from bench.agents.trace import Request

_USES_FOR_SSD = 2
"""Requests that must have used a block before `SECOND_HIT` writes it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Sizes of the tiers, in the trace's blocks."""

    block_count: int
    """In RAM and on SSD together."""
    ram_block_count: int


@dataclasses.dataclass(frozen=True, slots=True)
class Hit:
    """What a cache had of one prompt, in blocks."""

    ram_count: int
    ssd_count: int


class Cache:
    """The tiers of one run. Checkpoints take space too, where the model needs them."""

    def __init__(
        self, paths: Paths, limits: Limits, rule: Rule, *, checkpoints: Checkpoints | None = None
    ) -> None:
        size = len(paths.parents)
        self._paths = paths
        self._limits = limits
        self._rule = rule
        self._checkpoints = checkpoints
        self._order = order_of(rule, paths)
        self._ram_order = IdleOrder() if rule in IDLE_SHARES else LruOrder()
        self._held, self._in_ram, self._use_counts = [0] * size, [0] * size, [0] * size
        self._on_ssd = [0] * size
        """A bit for each block of the segment."""
        self._owners = Owners(size)
        self._idle = IdleSessions(IDLE_SHARES[rule]) if rule in IDLE_SHARES else None
        self._used_count = self._ram_used_count = 0
        self.written_count = 0
        """Blocks written to SSD, and what checkpoints took there, as blocks."""

    def held(self, segment: int) -> int:
        """Return how many blocks of a segment are in a tier."""
        return self._held[segment]

    def play(self, number: int, request: Request) -> Hit:
        """Play one request of the trace: look up its prompt, keep it, and let others go for it."""
        path = self._paths.upwards(self._paths.ends[number])
        hit = self._match(path)
        if self._checkpoints is not None:
            hit = self._reach_checkpoint(path, hit, number, request)
        self._keep(path, number, request)
        if request.is_last and self._rule in (Rule.ENDS_FIRST, Rule.ENDS_DROPPED):
            self._end(request.session)
        for session in () if self._idle is None else self._idle.note(request):
            for order in (self._order, self._ram_order):
                assert isinstance(order, IdleOrder)
                order.put_next(self._owners.of(session))
        self._shrink_ram()
        self._shrink(self._weight - self._limits.block_count)
        return hit

    def _match(self, path: Sequence[int]) -> Hit:
        ram_count = ssd_count = 0
        for segment in reversed(path):
            held = self._held[segment]
            in_ram = self._in_ram[segment]
            ram_count += in_ram
            ssd_count += held - in_ram
            if held < self._paths.counts[segment]:
                break
        return Hit(ram_count, ssd_count)

    def _reach_checkpoint(self, path: Sequence[int], hit: Hit, number: int, request: Request) -> Hit:
        """Return what is left of a hit: the blocks up to the last checkpoint within it. Take new ones."""
        assert self._checkpoints is not None
        known = hit.ram_count + hit.ssd_count
        reached = self._checkpoints.use(path, known=known, number=number)
        self._owners.use(path, request)
        self._checkpoints.capture(
            path,
            reached=reached,
            known=known,
            number=number,
            request=request,
            is_shared=self._owners.is_shared,
        )
        return Hit(min(hit.ram_count, reached), max(0, reached - hit.ram_count))

    def _keep(self, path: Sequence[int], number: int, request: Request) -> None:
        counts, held, in_ram = self._paths.counts, self._held, self._in_ram
        for segment in path:
            count = counts[segment]
            self._used_count += count - held[segment]
            self._ram_used_count += count - in_ram[segment]
            held[segment] = in_ram[segment] = count
            self._use_counts[segment] += 1
        self._owners.use(path, request)
        own = self._owners.of(request.session) if self._rule is Rule.IDLE_SESSION else ()
        self._order.use(path, own, number)
        self._ram_order.use(path, own, number)

    def _end(self, session: int) -> None:
        own = self._owners.end(session)
        self._ram_order.put_first(own)
        if self._rule is Rule.ENDS_FIRST:
            self._order.put_first(own)
            return
        for segment in reversed(own):
            if self._held[segment]:
                self._trim(segment, self._held[segment])

    def _shrink_ram(self) -> None:
        while self._ram_used_count > self._limits.ram_block_count:
            segment = self._ram_order.first()
            stop = self._in_ram[segment]
            start = stop - min(stop, self._ram_used_count - self._limits.ram_block_count)
            self._set_in_ram(segment, start)
            if self._rule is Rule.SECOND_HIT and self._use_counts[segment] < _USES_FOR_SSD:
                self._trim(segment, stop - start)
            else:
                self._write(segment, start, stop)

    def _write(self, segment: int, start: int, stop: int) -> None:
        """Write blocks that leave RAM, unless SSD has them."""
        fresh = ((1 << stop) - (1 << start)) & ~self._on_ssd[segment]
        self._on_ssd[segment] |= fresh
        self.written_count += fresh.bit_count()
        if self._checkpoints is not None:
            self.written_count += self._checkpoints.write(segment, start, stop)

    def _shrink(self, excess: int) -> None:
        """Let go of blocks, and of the checkpoints among them, that take at least so many blocks."""
        while excess > 0:
            segment = self._order.first()
            held = self._held[segment]
            last = self._checkpoints.last(segment) if self._checkpoints is not None else 0
            if last < held:
                count = min(excess, held - last)
                self._trim(segment, count)
                excess -= count
            else:
                assert self._checkpoints is not None
                excess -= self._checkpoints.drop_last(segment)

    def _trim(self, segment: int, count: int) -> None:
        """Give up the last blocks of a segment."""
        left = self._held[segment] - count
        if self._checkpoints is not None:
            self._checkpoints.cut(segment, left)
        self._held[segment] = left
        self._used_count -= count
        self._on_ssd[segment] &= (1 << left) - 1
        if self._in_ram[segment] > left:
            self._set_in_ram(segment, left)
        if not left:
            self._order.remove(segment)

    def _set_in_ram(self, segment: int, count: int) -> None:
        self._ram_used_count -= self._in_ram[segment] - count
        self._in_ram[segment] = count
        if not count:
            self._ram_order.remove(segment)

    @property
    def _weight(self) -> int:
        extra = 0 if self._checkpoints is None else self._checkpoints.block_count
        return self._used_count + extra
