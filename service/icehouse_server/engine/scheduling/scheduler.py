"""Scheduler: who waits, who runs, and which prompt tokens run in the next pass (inference thread).

It is pure policy, without mlx, threads or clocks. Every decoding row is in every pass. The tokens of several
prompts share the rest of the pass's time, so that running sequences keep their latency between tokens,
waiting prompts keep moving, and the weights are read once for all.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as ReadSequence

from icehouse_server.domain.ids import SequenceId, Tenant
from icehouse_server.domain.request import Drafting, GenerationRequest
from icehouse_server.engine.core.ports import LayerSpan, PassResult
from icehouse_server.engine.core.sequence import Phase, Sequence
from icehouse_server.engine.scheduling.budget import PassBudget, PassPlanner
from icehouse_server.engine.scheduling.limits import SchedulerLimits
from icehouse_server.engine.scheduling.pass_cost import PassSize
from icehouse_server.engine.scheduling.pass_plan import PassPlan, PrefillChunk
from icehouse_server.engine.scheduling.waiting_queue import WaitingQueue

_RUNNING_PHASES = (Phase.FOLLOWING, Phase.LOADING, Phase.RESTORING, Phase.PREFILLING, Phase.DECODING)


class Scheduler:
    """Holds the waiting, preparing and decoding sequences and plans what runs."""

    def __init__(self, limits: SchedulerLimits, queue: WaitingQueue) -> None:
        self.limits = limits
        self.queue = queue
        self._by_phase: dict[Phase, dict[SequenceId, Sequence]] = {phase: {} for phase in _RUNNING_PHASES}
        self._following = self._by_phase[Phase.FOLLOWING]
        self._loading = self._by_phase[Phase.LOADING]
        self._restoring = self._by_phase[Phase.RESTORING]
        self._prefilling = self._by_phase[Phase.PREFILLING]
        self._decoding = self._by_phase[Phase.DECODING]
        self._planner = PassPlanner(limits)
        self._layered = LayeredPrefill(limits.layer_count, chunk_end=self._chunk_end)

    @property
    def waiting_count(self) -> int:
        return len(self.queue)

    @property
    def prefilling_count(self) -> int:
        return len(self._prefilling)

    @property
    def decoding_count(self) -> int:
        return len(self._decoding)

    @property
    def keeps_pace(self) -> bool:
        """Whether rows are to decode at an even pace, so that reads from SSD must leave the cores to them.
        While many wait, their first tokens matter more."""
        return bool(self._decoding) and not self._planner.is_long_queue(self._waiting_per_row)

    @property
    def decoding(self) -> list[Sequence]:
        """Sequences that draw a token in each step."""
        return list(self._decoding.values())

    @property
    def running(self) -> list[Sequence]:
        """Sequences that have a slot, oldest first."""
        running = [sequence for phase in self._by_phase.values() for sequence in phase.values()]
        return sorted(running, key=lambda sequence: sequence.sequence_id)

    @property
    def free_slot_count(self) -> int:
        """How many more sequences the slots allow."""
        return max(0, self.limits.running_limit - sum(map(len, self._by_phase.values())))

    def prefill_backlog_tokens(self, request: GenerationRequest) -> int:
        """Input tokens of running sequences to be computed before a newcomer's: all of its own tenant's, and
        of each other tenant's at most as many as those and its own."""
        preparing = (*self._loading.values(), *self._restoring.values(), *self._prefilling.values())
        backlogs: Counter[Tenant] = Counter()
        for sequence in preparing:
            backlogs[sequence.request.tenant] += max(0, sequence.remaining_token_count)
        own = backlogs.pop(request.tenant, 0)
        most = own + len(request.prompt_token_ids)
        return own + sum(min(backlog, most) for backlog in backlogs.values())

    @property
    def loading_count(self) -> int:
        return len(self._loading) + len(self._restoring)

    @property
    def restoring(self) -> list[Sequence]:
        """Sequences whose caches are being rebuilt, oldest first."""
        return sorted(self._restoring.values(), key=lambda sequence: sequence.sequence_id)

    @property
    def awaiting_image(self) -> Sequence | None:
        """The oldest sequence whose next chunk would reach an image that has no vectors yet."""
        reach = self.limits.prefill_chunk_token_count
        waiting = (
            sequence
            for sequence in self._prefilling.values()
            if (image := sequence.next_image) is not None
            and image.start_token_index < sequence.processed_token_count + reach
        )
        return min(waiting, key=lambda sequence: sequence.sequence_id, default=None)

    @property
    def _preparing_count(self) -> int:
        """Sequences that need the device before they draw; loads from SSD do not."""
        return len(self._restoring) + len(self._prefilling)

    @property
    def _is_preparing_enough(self) -> bool:
        if self._preparing_count < self.limits.prefilling_limit:
            return False
        preparing = (*self._restoring.values(), *self._prefilling.values())
        return sum(s.remaining_token_count for s in preparing) >= self.limits.most_pass_token_count

    def candidates(self, now: float) -> Iterator[Sequence]:
        """Yield the sequences that may be admitted next, best first, while slots are free. The queue may
        change meanwhile.

        `prefilling_limit` prompts are prepared at once, or more if one pass could hold them. A sequence of a
        tenant that runs nothing is yielded even without a free slot: one is to be made for it.
        """
        if not len(self.queue):
            return
        for sequence in self.queue.ranked(now):
            is_full = self._is_preparing_enough or not self.free_slot_count
            if is_full and self.queue.running_count(sequence.request.tenant):
                return
            yield sequence

    def lets_nobody_pass(self, blocked: ReadSequence[Sequence]) -> bool:
        """Whether nobody else may be admitted ahead of these, which come first but have no memory yet."""
        policy = self.limits.policy
        return len(blocked) >= policy.blocked_limit or any(
            sequence.passed_count >= policy.passed_limit for sequence in blocked
        )

    def admit(self, sequence: Sequence) -> None:
        """Give a waiting sequence a slot."""
        self.queue.discard(sequence)
        self.queue.note_running(sequence)
        self.move(sequence, Phase.PREFILLING)

    def park(self, sequence: Sequence) -> None:
        """Take a running sequence's slot away and queue it again."""
        self._layered.forget(sequence)
        self.move(sequence, Phase.WAITING)
        self.queue.note_ended(sequence)
        sequence.park()
        self.queue.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, whatever its phase."""
        self._layered.forget(sequence)
        if sequence.phase is Phase.WAITING:
            self.queue.discard(sequence)
        else:
            self.queue.note_ended(sequence)
        self.move(sequence, Phase.ENDED)

    def move(self, sequence: Sequence, phase: Phase) -> None:
        """Put a sequence into a phase. If it decodes, its last chunk has run and it is in every later
        pass."""
        for others in self._by_phase.values():
            others.pop(sequence.sequence_id, None)
        sequence.phase = phase
        if phase in self._by_phase:
            self._by_phase[phase][sequence.sequence_id] = sequence
        if phase is Phase.DECODING:
            sequence.fed_ahead_count = 1

    def plan(self, *, spent_s: float = 0.0) -> PassPlan:
        """Plan the next pass, in a step that spent some time on restores.

        Prompts run by priority, then shortest remaining first. The oldest always has a share, and a prompt
        that was overtaken by as many tokens as it has left is overtaken no more. Tenants take turns. While
        nothing decodes, other tenants' prompts at most double the pass that gives a tenant its first token.
        """
        prompts = _in_turns(sorted(self._prefilling.values(), key=_turn))
        if not prompts:
            return PassPlan(self._rows)
        budget = self._planner.budget(self._rows, waiting_per_row=self._waiting_per_row, spent_s=spent_s)
        self._layered.check()
        stops: dict[SequenceId, int] = {}
        layers: dict[SequenceId, LayerSpan] = {}
        first = prompts[0]
        oldest = min(prompts, key=lambda s: s.sequence_id)
        if oldest is not first and oldest.request.tenant == first.request.tenant:
            self._extend(oldest, stops, layers, budget, share=self.limits.policy.oldest_share)
        for before, sequence in itertools.pairwise((first, *prompts)):
            has_ended = stops.get(before.sequence_id) == before.input_end
            if has_ended and before.request.tenant != sequence.request.tenant:
                budget.double()
            self._extend(sequence, stops, layers, budget)
        return self.planned(
            [
                self._chunk(s, stops[s.sequence_id], layers.get(s.sequence_id))
                for s in prompts
                if stops[s.sequence_id] > s.processed_token_count
            ]
        )

    def planned(self, chunks: ReadSequence[PrefillChunk]) -> PassPlan:
        """Return the plan of a pass over these chunks and the rows that decode now."""
        plan = PassPlan(self._rows, tuple(chunks))
        if not chunks:
            return plan  # the fit of costs takes a millisecond, and a pass of rows needs none
        seconds = self._planner.seconds
        return dataclasses.replace(
            plan, rows_s=seconds(plan.rows), expected_s=seconds(plan.size + plan.layered)
        )

    def note_run(self, plan: PassPlan) -> None:
        """Account for the chunks of a pass, and for prompts that were overtaken by younger ones."""
        for chunk in plan.chunks:
            if chunk.layers is not None:
                self._layered.note(chunk.layers)
        for sequence in self._prefilling.values():
            sequence.overtaken_token_count += sum(
                chunk.token_count
                for chunk in plan.chunks
                if chunk.sequence.sequence_id > sequence.sequence_id and chunk.is_through
            )

    def note_time(self, plan: PassPlan, result: PassResult) -> None:
        """Learn from what a pass that ran took."""
        size = plan.size.with_guesses(result.drafted_count)
        has_layers = plan.layered.token_count > 0
        elapsed_s = result.layers_began_s if has_layers else result.elapsed_s
        if size.token_count and elapsed_s > 0.0:
            is_host_bound = result.is_host_bound
            self._planner.note_pass(size, elapsed_s, beside_layers=has_layers, is_host_bound=is_host_bound)

    def restore_s(self, *, least_s: float) -> float:
        """Return how long this step may spend on taking loaded blocks into use and on encoding images; 0
        while earlier steps took too long."""
        return self._planner.restore_s(
            self._rows,
            waiting_per_row=self._waiting_per_row,
            prompts_wait=bool(self._prefilling),
            least_s=least_s,
        )

    def note_restore(self, elapsed_s: float, *, allowed_s: float) -> None:
        """Account for the restores and images of a step."""
        self._planner.note_restore(elapsed_s, allowed_s=allowed_s)

    @property
    def _rows(self) -> PassSize:
        return PassSize.of_rows(s.kv_token_count for s in self._decoding.values())

    @property
    def _waiting_per_row(self) -> float:
        """How many sequences wait for their first token, per decoding one. A single one counts as 0."""
        waiting = len(self.queue) + len(self._following) + len(self._loading) + self._preparing_count
        return waiting / max(1, len(self._decoding)) if waiting > 1 else 0.0

    def _extend(
        self,
        sequence: Sequence,
        stops: dict[SequenceId, int],
        layers: dict[SequenceId, LayerSpan],
        budget: PassBudget,
        *,
        share: float = 1.0,
    ) -> None:
        """Extend a sequence's chunk as far as the budget and its limits allow."""
        begin, is_planned = sequence.processed_token_count, sequence.sequence_id in stops
        if share == 1.0 and not is_planned:
            self._layered.begin(sequence, budget)
        if self._layered.is_of(sequence):
            comes_on = share < 1.0 or not stops
            if comes_on:
                budget.reserve(share)
                layers[sequence.sequence_id] = self._layered.layers(budget)
            if not is_planned:
                stops[sequence.sequence_id] = self._layered.stop if comes_on else begin
            return
        start = stops.get(sequence.sequence_id, begin)
        end = self._chunk_end(sequence, begin)
        if start >= end:
            stops[sequence.sequence_id] = start
            return
        if self.limits.runs_whole:
            stop = budget.take_whole(start, end)
        else:
            stop = budget.take(start, end, share=share)
        if stop == sequence.prefill_target < end and start < stop:
            # The last token joins this chunk instead of getting one of its own.
            stop = end
        stops[sequence.sequence_id] = _outside_images(sequence, begin, stop)

    def _chunk(self, sequence: Sequence, stop: int, layers: LayerSpan | None) -> PrefillChunk:
        start = sequence.processed_token_count
        draws = stop == sequence.input_end > sequence.prefill_target
        draw_count = stop - start if sequence.measures_prompt else int(draws)
        size = self.limits.size_of_chunk(start, stop - start, draw_count=draw_count)
        return PrefillChunk(sequence, start, stop, size, layers)

    def _chunk_end(self, sequence: Sequence, start: int) -> int:
        """Return where a chunk from `start` must end at the latest."""
        limits = self.limits
        end = sequence.input_end
        image = sequence.next_image
        if image is not None:
            end = min(end, max(start, image.start_token_index))
        if limits.cuts_before_last_token and start < sequence.prefill_target:
            end = min(end, sequence.prefill_target)
        chunk = limits.prefill_chunk_token_count
        boundary = (start // chunk + 1) * chunk
        if boundary < sequence.prefill_target:
            end = min(end, boundary)
        if limits.chunk_ends_at_last_block:
            block = limits.chunk_ends_at_last_block
            last_block_end = sequence.prefill_target // block * block
            if start < last_block_end < end:
                end = last_block_end
        end = min([end, *(point for point in sequence.capture_points if start < point)])
        measured = limits.measured_chunk_token_count
        if measured and sequence.measures_prompt:
            end = min(end, (start // measured + 1) * measured)
        return end


def _outside_images(sequence: Sequence, start: int, stop: int) -> int:
    """Return where a chunk ends so that it splits no image that is seen whole: before the image, or after it
    if the chunk begins inside it, whatever the budget."""
    for span in sequence.request.images:
        if span.image.is_seen_whole and span.start_token_index < stop < span.end_token_index:
            return span.start_token_index if start < span.start_token_index else span.end_token_index
    return stop


def _turn(sequence: Sequence) -> tuple[int, bool, int, int]:
    """Return a prompt's sort key: priority first, then overtaken long enough, then shortest, then oldest."""
    remaining = sequence.remaining_token_count
    is_overdue = sequence.overtaken_token_count >= remaining
    length = 0 if is_overdue else remaining
    return (-sequence.request.priority, not is_overdue, length, sequence.sequence_id)


def _in_turns(prompts: list[Sequence]) -> list[Sequence]:
    """Return each tenant's first prompt, then each one's second, and so on. Within a turn the shortest goes
    first, since priorities rank only a tenant's own prompts."""
    turns: Counter[Tenant] = Counter()
    ranked = []
    for sequence in prompts:
        tenant = sequence.request.tenant
        ranked.append((turns[tenant], sequence.remaining_token_count, sequence.sequence_id, sequence))
        turns[tenant] += 1
    if len(turns) < 2:
        return prompts
    return [sequence for *_, sequence in sorted(ranked, key=lambda entry: entry[:3])]


class LayeredPrefill:
    """The one prompt whose chunk goes through some of the layers in each pass.

    For devices that cannot cut a chunk small enough beside rows, such as a CPU: each chunk of a long prompt
    reads all that the prompt holds, so a chunk of many tokens goes through the layers that a pass has time
    for, after the rows, and the next pass goes on. The runner has what was computed of the chunk; this says
    which chunk it is and how far it is. A chunk begins anew when it may no longer go as far as planned, since
    a sequence waits for a tail before that. `layer_count` 0: chunks go through all layers at once.
    """

    def __init__(self, layer_count: int, *, chunk_end: Callable[[Sequence, int], int]) -> None:
        """`chunk_end` says how far a sequence's chunk from a position may go."""
        self._layer_count = layer_count
        self._chunk_end = chunk_end
        self._sequence: Sequence | None = None
        self._start = self._layer = 0
        self.stop = 0
        """Where the chunk ends."""

    def check(self) -> None:
        """Before a pass is planned: forget the chunk if it may not go as far as it was to go."""
        sequence = self._sequence
        if sequence is not None:
            at = sequence.processed_token_count
            assert sequence.phase is Phase.PREFILLING and at == self._start, (sequence.phase, at)
            if self._end(sequence) < self.stop:
                self._sequence = None

    def forget(self, sequence: Sequence) -> None:
        """A sequence gives up its caches, and its chunk with them."""
        if self._sequence is sequence:
            self._sequence = None

    def is_of(self, sequence: Sequence) -> bool:
        return self._sequence is sequence

    def begin(self, sequence: Sequence, budget: PassBudget) -> None:
        """Begin with a sequence's next tokens, if no chunk is in progress and that is better."""
        if not self._layer_count or self._sequence is not None or not _may_go_layered(sequence):
            return
        start = sequence.processed_token_count
        stop = budget.take_layered(start, self._end(sequence), layer_count=self._layer_count)
        if stop >= start + 2:
            self._sequence, self._start, self.stop, self._layer = sequence, start, stop, 0

    def layers(self, budget: PassBudget) -> LayerSpan:
        """Return the layers that are left; the pass's time ends them, after the first one."""
        return LayerSpan(self._layer, self._layer_count, self._layer_count, budget.within_s)

    def note(self, layers: LayerSpan) -> None:
        """Note that a pass took the chunk through these."""
        self._layer = layers.last
        if layers.is_last:
            self._sequence = None

    def _end(self, sequence: Sequence) -> int:
        # The input's last token is drawn from, which takes all layers.
        return min(self._chunk_end(sequence, sequence.processed_token_count), sequence.prefill_target)


def _may_go_layered(sequence: Sequence) -> bool:
    """Whether nothing is asked of a sequence's chunks but their KV, and they are nothing but tokens."""
    request = sequence.request
    drafts = request.speculation is not None and request.speculation.drafting is Drafting.DRAFT_MODEL
    return not (drafts or request.images or sequence.measures_prompt or request.pooling is not None)
