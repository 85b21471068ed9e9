"""Devices that are arithmetic, and the loop's part around a scheduler: what planning comes to, in seconds."""

from __future__ import annotations

import dataclasses
import itertools
import random

from icehouse_server.domain.ids import SequenceId, Tenant
from icehouse_server.engine.attention.padding import padding_of
from icehouse_server.engine.core.ports import PassResult
from icehouse_server.engine.core.sequence import Phase, Sequence
from icehouse_server.engine.scheduling.limits import SchedulerLimits
from icehouse_server.engine.scheduling.pass_cost import PassSize
from icehouse_server.engine.scheduling.pass_plan import PassPlan, PrefillChunk
from icehouse_server.engine.scheduling.scheduler import Scheduler
from icehouse_server.engine.scheduling.waiting_queue import WaitingLimits, WaitingQueue
from icehouse_server.text.detokenizer import TextStream

from tests.fixtures.engine import decode_ascii, request


def sequence(number: int, prompt_token_count: int, *, priority: int = 0, tenant: str = "") -> Sequence:
    text = TextStream(decode=decode_ascii, prompt_token_ids=[], stops=())
    asked = request(f"r{number}", [1] * prompt_token_count, priority=priority)
    asked = dataclasses.replace(asked, tenant=Tenant(tenant))
    return Sequence(SequenceId(number), asked, text, output_token_limit=1_000_000)


@dataclasses.dataclass(frozen=True, slots=True)
class Costs:
    """What a device's passes take: `fixed_s`, `token_s` for each token, `row_s` for each draw, `score_s` for
    each token and position it is scored against, `read_s` for each position whose KV is read."""

    fixed_s: float
    token_s: float
    row_s: float = 0.0
    score_s: float = 0.0
    read_s: float = 0.0

    def seconds(self, size: PassSize) -> float:
        return (
            self.fixed_s
            + self.token_s * size.token_count
            + self.row_s * size.draw_count
            + self.score_s * size.score_count
            + self.read_s * size.read_count
        )


GPU = Costs(fixed_s=0.008, token_s=1e-5, row_s=2e-5, score_s=2e-10, read_s=2e-8)
"""A pass is dear and a token cheap: 2,048 tokens take 20 ms more than one."""
H200 = Costs(fixed_s=0.0066, token_s=1.6e-5, row_s=5e-5, score_s=1.2e-9, read_s=3.7e-8)
"""About what a 4B model in 16 bits takes on one."""
CPU = Costs(fixed_s=0.010, token_s=0.002)


@dataclasses.dataclass(frozen=True, slots=True)
class Quirks:
    """What a pass takes besides, and how its end is seen."""

    noise: float = 0.0
    """Of each pass, either way, by chance."""
    slow_count: int = 0
    """So many passes at the start compile: they take a hundred times as long."""
    shape_s: float = 0.0
    """Each shape of attention that no pass had before takes so much longer."""
    runs_ahead: bool = False
    """A pass is told of when the next one is dispatched, from its predecessor's end to its own."""
    host_s: float = 0.0
    """Building a pass; run ahead, the device computes meanwhile."""
    replay_s: float | None = None
    """The same of a pass of rows alone that is replayed; None where it is built like any other."""
    late_s: float = 0.0
    """Run ahead, the host sees every tenth pass's end so much later; the next pass looks as much shorter."""


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """A pass that was planned: what it held, and when it ended."""

    chunks: tuple[PrefillChunk, ...]
    row_count: int
    end_s: float
    shape_count: int
    """New shapes of attention."""


class Served:
    """A scheduler, and the device that runs what it plans."""

    def __init__(self, costs: Costs, limits: SchedulerLimits, quirks: Quirks = Quirks()) -> None:
        self.queue = WaitingQueue(WaitingLimits(request_limit=1000))
        self.scheduler = Scheduler(limits, self.queue)
        self.costs, self.quirks = costs, quirks
        self.steps: list[Step] = []
        self._dice = random.Random(11)
        self.shapes: set[tuple[int, int]] = set()
        """Lengths of queries and keys that attention was given."""
        self._number = 0
        self._now = self._device_end = self._seen_end = 0.0
        self._dispatched: tuple[PassPlan, float, float] | None = None
        """A pass in flight, when its building began and when it ends."""

    def ask(self, *prompt_token_counts: int) -> list[Sequence]:
        """Let prompts of these lengths arrive together."""
        prompts = [sequence(self._number + i, count) for i, count in enumerate(prompt_token_counts)]
        self._number += len(prompts)
        for prompt in prompts:
            self.queue.add(prompt)
        return prompts

    def end(self, *sequences: Sequence) -> None:
        """Let sequences end."""
        for each in sequences:
            self.scheduler.remove(each)

    def run(self, pass_count: int = 1) -> list[Step]:
        """Run so many passes; return them."""
        return [self._run_one() for _ in range(pass_count)]

    def run_until_decoding(self, *prompts: Sequence) -> list[Step]:
        """Run until all of these have drawn a token; return the passes, of which there are at most 10,000."""
        before = len(self.steps)
        while any(prompt not in self.scheduler.decoding for prompt in prompts):
            assert len(self.steps) < before + 10_000, "they never come on"
            self._run_one()
        return self.steps[before:]

    def serve(self, *prompt_token_counts: int) -> list[Step]:
        """Let prompts arrive, draw a token each and end; return the passes that it took."""
        prompts = self.ask(*prompt_token_counts)
        steps = self.run_until_decoding(*prompts)
        self.run()
        self.end(*prompts)
        return steps

    def seconds_of(self, steps: list[Step]) -> float:
        """Return how long passes took that ran one behind the other."""
        return sum(self.gaps(steps))

    def gaps(self, steps: list[Step]) -> list[float]:
        """Return each pass's time from the end of the one before it."""
        ends = [step.end_s for step in self.steps[: self.steps.index(steps[0])]]
        times = [ends[-1] if ends else 0.0, *(step.end_s for step in steps)]
        return [after - before for before, after in itertools.pairwise(times)]

    def _run_one(self) -> Step:
        scheduler, quirks = self.scheduler, self.quirks
        for waiting in scheduler.candidates(1e6):
            scheduler.admit(waiting)
        plan = scheduler.plan()
        assert plan.size.token_count, "nothing to run"
        row_count = scheduler.decoding_count
        began = self._now
        self._now += quirks.host_s if quirks.replay_s is None or plan.size.has_chunk else quirks.replay_s
        shape_count = self._new_shape_count(plan)
        end = max(self._now, self._device_end) + self._taken_s(plan) + quirks.shape_s * shape_count
        self._device_end = end
        scheduler.note_run(plan)
        if quirks.runs_ahead:
            before, self._dispatched = self._dispatched, (plan, began, end)
            if before is not None:
                self._see_end(*before)
        else:
            self._see_end(plan, began, end)
        for row in scheduler.decoding:
            row.output_token_ids.append(1)
        for chunk in plan.chunks:
            chunk.sequence.processed_token_count = chunk.stop
            if chunk.is_last:
                scheduler.move(chunk.sequence, Phase.DECODING)
        self.steps.append(Step(plan.chunks, row_count, end, shape_count))
        return self.steps[-1]

    def _see_end(self, plan: PassPlan, began: float, end: float) -> None:
        """Wait for a pass as the pipeline does, and tell the scheduler what it took."""
        is_late = self.quirks.late_s and len(self.steps) % 10 == 0
        is_host_bound = end <= self._now
        self._now = max(self._now, end + self.quirks.late_s * bool(is_late))
        elapsed_s, self._seen_end = self._now - max(began, self._seen_end), self._now
        self.scheduler.note_time(plan, PassResult(elapsed_s=elapsed_s, is_host_bound=is_host_bound))

    def _taken_s(self, plan: PassPlan) -> float:
        quirks = self.quirks
        seconds = self.costs.seconds(plan.size) * (1.0 + quirks.noise * self._dice.uniform(-1.0, 1.0))
        if len(self.steps) < quirks.slow_count:
            seconds *= 100.0
        return seconds

    def _new_shape_count(self, plan: PassPlan) -> int:
        before = len(self.shapes)
        for chunk in plan.chunks:
            if chunk.token_count > 64:  # the others are attended to by a kernel that takes any length
                padded = padding_of(chunk.start, chunk.token_count)
                self.shapes.add((padded.query_count, padded.key_count))
        return len(self.shapes) - before
