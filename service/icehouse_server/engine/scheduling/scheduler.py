"""Scheduler: who waits, who runs, and which prompt tokens run in the next pass (inference thread).

The policy, without mlx, threads or clocks of its own. Every row that decodes is in every pass; beside them
the tokens of several prompts share what time the pass may take, so that running sequences keep their latency
between tokens, waiting prompts keep moving, and the weights are read once for all.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as ReadSequence

from icehouse_server.domain.ids import SequenceId, Tenant
from icehouse_server.domain.request import GenerationRequest
from icehouse_server.engine.core.ports import LayerSpan
from icehouse_server.engine.core.sequence import Phase, Sequence
from icehouse_server.engine.scheduling.layered_prefill import LayeredPrefill
from icehouse_server.engine.scheduling.limits import SchedulerLimits
from icehouse_server.engine.scheduling.pass_cost import PassSize
from icehouse_server.engine.scheduling.pass_plan import PassPlan, PrefillChunk
from icehouse_server.engine.scheduling.planner import PassPlanner, PassRoom
from icehouse_server.engine.scheduling.waiting_queue import WaitingQueue


class Scheduler:
    """Holds the waiting, preparing and decoding sequences and plans what runs."""

    def __init__(self, limits: SchedulerLimits, queue: WaitingQueue) -> None:
        self.limits = limits
        self._queue = queue
        self._following: dict[SequenceId, Sequence] = {}
        self._loading: dict[SequenceId, Sequence] = {}
        self._restoring: dict[SequenceId, Sequence] = {}
        self._prefilling: dict[SequenceId, Sequence] = {}
        self._decoding: dict[SequenceId, Sequence] = {}
        self._planner = PassPlanner(limits)
        self._layered = LayeredPrefill(limits.layer_count, chunk_end=self._chunk_end)

    @property
    def waiting_count(self) -> int:
        return len(self._queue)

    @property
    def prefilling_count(self) -> int:
        return len(self._prefilling)

    @property
    def decoding_count(self) -> int:
        return len(self._decoding)

    @property
    def is_decoding(self) -> bool:
        return bool(self._decoding)

    @property
    def keeps_pace(self) -> bool:
        """Whether rows decode at an even pace, which reads from SSD are to leave the cores to; where a crowd
        waits, its first tokens come before that."""
        return self.is_decoding and not self._planner.is_crowd(self._crowd)

    @property
    def decoding(self) -> list[Sequence]:
        """Those who draw a token a step."""
        return list(self._decoding.values())

    @property
    def is_empty(self) -> bool:
        return not (len(self._queue) or self._taken_slot_count)

    @property
    def running(self) -> list[Sequence]:
        """Everything that has a slot, oldest first."""
        places = (self._following, self._loading, self._restoring, self._prefilling, self._decoding)
        found = [sequence for place in places for sequence in place.values()]
        return sorted(found, key=lambda sequence: sequence.sequence_id)

    @property
    def free_slot_count(self) -> int:
        """Sequences that could be let in now, as far as slots go."""
        return max(0, self.limits.running_limit - self._taken_slot_count)

    def prefill_backlog_tokens(self, request: GenerationRequest) -> int:
        """Input tokens of running sequences that are still to be computed before a newcomer's: its tenant's
        own, and of each other tenant's as many as those and it have."""
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
        """Those whose caches are being rebuilt, the oldest first."""
        return sorted(self._restoring.values(), key=lambda sequence: sequence.sequence_id)

    @property
    def awaiting_image(self) -> Sequence | None:
        """The first comer of those whose next chunk would reach an image that has no vectors yet."""
        reach = self.limits.prefill_chunk_token_count
        waiting = (
            sequence
            for sequence in self._prefilling.values()
            if (image := sequence.next_image) is not None
            and image.start_token_index < sequence.processed_token_count + reach
        )
        return min(waiting, key=lambda sequence: sequence.sequence_id, default=None)

    @property
    def _taken_slot_count(self) -> int:
        places = (self._following, self._loading, self._restoring, self._prefilling, self._decoding)
        return sum(len(place) for place in places)

    @property
    def _preparing_count(self) -> int:
        """Those that there is work for before they draw; a load is not the device's."""
        return len(self._restoring) + len(self._prefilling)

    @property
    def _is_preparing_enough(self) -> bool:
        if self._preparing_count < self.limits.prefilling_limit:
            return False
        preparing = (*self._restoring.values(), *self._prefilling.values())
        return sum(s.remaining_token_count for s in preparing) >= self.limits.most_pass_token_count

    def candidates(self, now: float) -> Iterator[Sequence]:
        """Yield who may be let in next, the best first, while slots are free; each time the queue as it is.

        `prefilling_limit` prompts are in preparation at once, or as many more as one pass could hold. A
        tenant that runs nothing comes up whatever the others have taken: a slot is to be made for it.
        """
        if not len(self._queue):
            return
        for sequence in self._queue.ranked(now):
            is_full = self._is_preparing_enough or not self.free_slot_count
            if is_full and self._queue.running_count(sequence.request.tenant):
                return
            yield sequence

    def lets_nobody_pass(self, blocked: ReadSequence[Sequence]) -> bool:
        """Whether nobody is let in any more before those who come first and have no memory yet."""
        policy = self.limits.policy
        return len(blocked) >= policy.blocked_limit or any(
            sequence.passed_count >= policy.passed_limit for sequence in blocked
        )

    def admit(self, sequence: Sequence) -> None:
        """Give a waiting sequence a slot."""
        self._queue.discard(sequence)
        self._queue.note_running(sequence)
        self._place(sequence, Phase.PREFILLING)

    def start_following(self, sequence: Sequence) -> None:
        """Note that a sequence waits for blocks that another one is computing."""
        self._place(sequence, Phase.FOLLOWING)

    def park(self, sequence: Sequence) -> None:
        """Take a running sequence's slot away and let it wait again."""
        self._layered.forget(sequence)
        self._place(sequence, Phase.WAITING)
        self._queue.note_ended(sequence)
        sequence.park()
        self._queue.add(sequence)

    def start_loading(self, sequence: Sequence) -> None:
        """Note that a sequence waits for its blocks from SSD."""
        self._place(sequence, Phase.LOADING)

    def start_restoring(self, sequence: Sequence) -> None:
        """Note that a sequence's caches are to be rebuilt."""
        self._place(sequence, Phase.RESTORING)

    def start_prefilling(self, sequence: Sequence) -> None:
        """Note that a sequence's caches are open and the rest of its prompt is to be computed."""
        self._place(sequence, Phase.PREFILLING)

    def start_decoding(self, sequence: Sequence) -> None:
        """Note that a sequence's last chunk ran with its row: it is in every pass from now on."""
        self._place(sequence, Phase.DECODING)
        sequence.fed_ahead_count = 1

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is."""
        self._layered.forget(sequence)
        if sequence.phase is Phase.WAITING:
            self._queue.discard(sequence)
        else:
            self._queue.note_ended(sequence)
        self._place(sequence, Phase.ENDED)

    def _place(self, sequence: Sequence, phase: Phase) -> None:
        places = {
            Phase.FOLLOWING: self._following,
            Phase.LOADING: self._loading,
            Phase.RESTORING: self._restoring,
            Phase.PREFILLING: self._prefilling,
            Phase.DECODING: self._decoding,
        }
        for place in places.values():
            place.pop(sequence.sequence_id, None)
        sequence.phase = phase
        if phase in places:
            places[phase][sequence.sequence_id] = sequence

    def plan(self, *, spent_s: float = 0.0) -> PassPlan:
        """Plan the next pass, in a step that spent some time on restores.

        By priority, then shortest remaining first; the oldest has a share whatever its length, and one that
        was overtaken by as much as it is long is overtaken no more. Tenants take turns, and while nothing
        decodes, the others' prompts no more than double the pass that brings a tenant its first token.
        """
        prompts = _in_turns(sorted(self._prefilling.values(), key=_turn))
        if not prompts:
            return PassPlan(self._rows)
        room = self._planner.room(self._rows, crowd=self._crowd, spent_s=spent_s)
        self._layered.check()
        stops: dict[SequenceId, int] = {}
        layers: dict[SequenceId, LayerSpan] = {}
        first = prompts[0]
        oldest = min(prompts, key=lambda s: s.sequence_id)
        if oldest is not first and oldest.request.tenant == first.request.tenant:
            self._extend(oldest, stops, layers, room, share=self.limits.policy.oldest_share)
        for before, sequence in itertools.pairwise((first, *prompts)):
            has_ended = stops.get(before.sequence_id) == before.input_end
            if has_ended and before.request.tenant != sequence.request.tenant:
                room.double()
            self._extend(sequence, stops, layers, room)
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
            return plan  # what passes cost is a fit of a millisecond, which no pass of rows needs
        seconds = self._planner.seconds
        return dataclasses.replace(
            plan, rows_s=seconds(plan.rows), expected_s=seconds(plan.size + plan.layered)
        )

    def note_run(self, plan: PassPlan) -> None:
        """Account for the chunks of a pass, and for prompts that wait while tokens of younger ones run."""
        for chunk in plan.chunks:
            if chunk.layers is not None:
                self._layered.note(chunk.layers)
        for sequence in self._prefilling.values():
            sequence.overtaken_token_count += sum(
                chunk.token_count
                for chunk in plan.chunks
                if chunk.sequence.sequence_id > sequence.sequence_id and chunk.is_through
            )

    def note_time(
        self, plan: PassPlan, elapsed_s: float, *, guess_count: int = 0, layers_began_s: float = 0.0
    ) -> None:
        """Learn from a pass that ran: how many guesses its rows fed besides, and after what time a chunk in
        it began to go through some layers."""
        size = plan.size.with_guesses(guess_count)
        if not size.token_count:
            return
        if not plan.layered.token_count:
            self._planner.note_pass(size, elapsed_s)
        elif layers_began_s > 0.0:
            self._planner.note_beside_layers(size, layers_began_s)

    def restore_s(self, *, least_s: float) -> float:
        """Return how long this step may take loaded blocks into use and encode images; 0 while earlier ones
        took too long."""
        return self._planner.restore_s(
            self._rows, crowd=self._crowd, prompts_wait=bool(self._prefilling), least_s=least_s
        )

    def note_restore(self, elapsed_s: float, *, allowed_s: float) -> None:
        """Account for the restores and images of a step."""
        self._planner.note_restore(elapsed_s, allowed_s=allowed_s)

    @property
    def _rows(self) -> PassSize:
        return PassSize.of_rows(s.kv_token_count for s in self._decoding.values())

    @property
    def _crowd(self) -> float:
        """Sequences that wait for their first token, for each one that decodes; one by itself is none."""
        waiting = len(self._queue) + len(self._following) + len(self._loading) + self._preparing_count
        return waiting / max(1, len(self._decoding)) if waiting > 1 else 0.0

    def _extend(
        self,
        sequence: Sequence,
        stops: dict[SequenceId, int],
        layers: dict[SequenceId, LayerSpan],
        room: PassRoom,
        *,
        share: float = 1.0,
    ) -> None:
        """Let a sequence's chunk go as far as the room lasts and its limits allow."""
        begin, is_planned = sequence.processed_token_count, sequence.sequence_id in stops
        if share == 1.0 and not is_planned:
            self._layered.begin(sequence, room)
        if self._layered.is_of(sequence):
            comes_on = share < 1.0 or not stops
            if comes_on:
                room.reserve(share)
                layers[sequence.sequence_id] = self._layered.layers(room)
            if not is_planned:
                stops[sequence.sequence_id] = self._layered.stop if comes_on else begin
            return
        start = stops.get(sequence.sequence_id, begin)
        end = self._chunk_end(sequence, begin)
        if start >= end:
            stops[sequence.sequence_id] = start
            return
        stop = room.take(start, end, share=share)
        if stop == sequence.prefill_target < end and start < stop:
            # One token more, instead of a chunk of its own for it.
            stop = end
        stops[sequence.sequence_id] = _outside_images(sequence, begin, stop)

    def _chunk(self, sequence: Sequence, stop: int, layers: LayerSpan | None) -> PrefillChunk:
        start = sequence.processed_token_count
        draws = stop == sequence.input_end > sequence.prefill_target
        draw_count = stop - start if sequence.measures_prompt else int(draws)
        size = self.limits.size_of_chunk(start, stop - start, draw_count=draw_count)
        return PrefillChunk(sequence, start, stop, size, layers)

    def _chunk_end(self, sequence: Sequence, start: int) -> int:
        """Return how far a chunk from `start` may go at most."""
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
    """Return where a chunk ends instead of inside an image that is seen whole: before it, or behind it where
    the chunk begins with tokens of it, however little room there is."""
    for span in sequence.request.images:
        if span.image.is_seen_whole and span.start_token_index < stop < span.end_token_index:
            return span.start_token_index if start < span.start_token_index else span.end_token_index
    return stop


def _turn(sequence: Sequence) -> tuple[int, bool, int, int]:
    """Order prompts: by priority, those that were overtaken long enough, the shortest, the oldest."""
    remaining = sequence.remaining_token_count
    is_overdue = sequence.overtaken_token_count >= remaining
    length = 0 if is_overdue else remaining
    return (-sequence.request.priority, not is_overdue, length, sequence.sequence_id)


def _in_turns(prompts: list[Sequence]) -> list[Sequence]:
    """Return each tenant's first prompt, then each one's second, and so on: those of a turn the shortest
    first, since priorities are between a tenant's own."""
    turns: Counter[Tenant] = Counter()
    placed = []
    for sequence in prompts:
        tenant = sequence.request.tenant
        placed.append((turns[tenant], sequence.remaining_token_count, sequence.sequence_id, sequence))
        turns[tenant] += 1
    if len(turns) < 2:
        return prompts
    return [sequence for *_, sequence in sorted(placed, key=lambda place: place[:3])]
