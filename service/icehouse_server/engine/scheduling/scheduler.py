"""Scheduler: which work comes next; the policy, without mlx, threads or clocks of its own.

One unit of work at a time, so that a cancel, a deadline or a newcomer is seen between any two
forward passes. Prefill is cut by time: between two decode steps it gets about as long as a decode
step takes, in chunks of as many tokens as the measured pace says, so that running sequences keep their
inter-token latency and waiting prompts keep moving. What a turn took too long, later turns lack.

The units of work that a step may run; the scheduler picks one, the loop runs it (inference thread).
"""

from __future__ import annotations

import dataclasses

from icehouse_server.domain.ids import SequenceId
from icehouse_server.engine.core.sequence import Phase, Sequence
from icehouse_server.engine.scheduling.prefill_budget import OldestShare, Turns
from icehouse_server.engine.scheduling.waiting_queue import WaitingQueue


@dataclasses.dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds on what runs at once, and for how long.

    Chunks end at multiples of `prefill_chunk_token_count`, counted from the sequence's start, and where time
    cuts them shorter at multiples of `prefill_grid_token_count`, which divides it.
    `prefill_slice_s` 0 follows the measured decode step; `prefill_chunk_s` 0 leaves chunks whole while
    nothing decodes.
    """

    running_limit: int
    prefilling_limit: int
    prefill_chunk_token_count: int
    prefill_grid_token_count: int = 1
    prefill_slice_s: float = 0.0
    prefill_chunk_s: float = 0.0
    chunk_ends_at_last_block: int = 0
    """Block size when a chunk must end at the prompt's last full block (checkpoints), else 0."""
    measured_chunk_token_count: int = 0
    """Longest chunk whose logits are wanted, a divisor or multiple of the block size; 0 is any."""


class Scheduler:
    """Holds the waiting, preparing and decoding sequences and picks the next unit of work."""

    def __init__(self, limits: SchedulerLimits, queue: WaitingQueue) -> None:
        self.limits = limits
        self._queue = queue
        self._following: dict[SequenceId, Sequence] = {}
        self._loading: dict[SequenceId, Sequence] = {}
        self._restoring: dict[SequenceId, Sequence] = {}
        self._prefilling: dict[SequenceId, Sequence] = {}
        self._decoding: dict[SequenceId, Sequence] = {}
        self._turns = Turns(
            slice_s=limits.prefill_slice_s,
            chunk_s=limits.prefill_chunk_s,
            chunk_token_count=limits.prefill_chunk_token_count,
            grid_token_count=limits.prefill_grid_token_count,
        )
        self._oldest_share = OldestShare()

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
    def decoding(self) -> list[Sequence]:
        """Those who draw a token a step."""
        return list(self._decoding.values())

    @property
    def is_empty(self) -> bool:
        return not (len(self._queue) or self._following or self._preparing_count or self._decoding)

    @property
    def is_blocked(self) -> bool:
        """Nothing can run until a message comes: only loads are under way, if anything."""
        return not (len(self._queue) or self._restoring or self._prefilling or self._decoding)

    @property
    def running(self) -> list[Sequence]:
        """Everything that has a slot, oldest first."""
        places = (self._following, self._loading, self._restoring, self._prefilling, self._decoding)
        found = [sequence for place in places for sequence in place.values()]
        return sorted(found, key=lambda sequence: sequence.sequence_id)

    @property
    def free_slot_count(self) -> int:
        """Sequences that could be let in now, as far as slots go."""
        taken = len(self._following) + self._preparing_count + len(self._decoding)
        return max(0, self.limits.running_limit - taken)

    @property
    def prefill_backlog_tokens(self) -> int:
        """Input tokens of running sequences that are still to be computed."""
        preparing = (*self._loading.values(), *self._restoring.values(), *self._prefilling.values())
        return sum(max(0, s.prefill_target - s.processed_token_count) for s in preparing)

    @property
    def loading_count(self) -> int:
        return len(self._loading) + len(self._restoring)

    @property
    def _preparing_count(self) -> int:
        return len(self._loading) + len(self._restoring) + len(self._prefilling)

    def candidate(self, now: float) -> Sequence | None:
        """Return who would be let in next, or None when nobody waits or no slot is free."""
        if self._preparing_count >= self.limits.prefilling_limit or not self.free_slot_count:
            return None
        return self._queue.best(now)

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
        """Note that a prefilled sequence joined the decode batch."""
        self._place(sequence, Phase.DECODING)
        self._turns.note_join()

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is."""
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

    def next_work(self) -> Work:
        """Pick the next unit of work."""
        is_decoding = self.is_decoding
        joining = next((s for s in self._prefilling.values() if s.is_prefilled), None)
        if joining is not None and (not is_decoding or self._turns.may_join(crowd=self._crowd)):
            return Join(joining)
        if not is_decoding or not self._turns.is_over(crowd=self._crowd):
            if self._restoring and (not is_decoding or self._turns.may_restore(crowd=self._crowd)):
                return RestoreSlice(next(iter(self._restoring.values())))
            if chunk := self._next_chunk():
                return chunk
        return DecodeStep() if self._decoding else Idle()

    def note_chunk(self, chunk: PrefillChunk, elapsed_s: float) -> None:
        """Account for a prefill chunk that just ran."""
        self._turns.note_chunk(start=chunk.start, token_count=chunk.stop - chunk.start, elapsed_s=elapsed_s)
        older = (s for s in self._unfinished if s.sequence_id < chunk.sequence.sequence_id)
        self._oldest_share.note(elapsed_s, was_oldest=next(older, None) is None)
        self.note_prefill(elapsed_s)

    def note_prefill(self, elapsed_s: float) -> None:
        """Account for prefill time that just went by."""
        self._turns.note_prefill(elapsed_s, is_decoding=self.is_decoding)

    def note_restore(self, elapsed_s: float) -> None:
        """Account for a slice of a restore that just ran."""
        self._turns.note_restore()
        self.note_prefill(elapsed_s)

    def note_decode(self, elapsed_s: float) -> None:
        """Account for a decode step that just ran."""
        self._turns.note_decode(elapsed_s, crowd=self._crowd)

    @property
    def _crowd(self) -> float:
        """Sequences that wait for their first token, for each one that decodes."""
        return (len(self._queue) + self._preparing_count) / max(1, len(self._decoding))

    @property
    def _unfinished(self) -> list[Sequence]:
        """Those with prompt left to compute."""
        return [s for s in self._prefilling.values() if not s.is_prefilled]

    def _next_chunk(self) -> PrefillChunk | None:
        unfinished = self._unfinished
        if not unfinished:
            return None
        oldest = min(unfinished, key=lambda s: s.sequence_id)
        shortest = min(unfinished, key=lambda s: (s.prefill_target - s.processed_token_count, s.sequence_id))
        if oldest is shortest:
            return self._chunk_of(oldest)
        chunk = self._chunk_of(oldest)
        cost_s = self._turns.expected_s(chunk.start, chunk.stop - chunk.start)
        return chunk if self._oldest_share.is_due(cost_s) else self._chunk_of(shortest)

    def _chunk_of(self, sequence: Sequence) -> PrefillChunk:
        start = sequence.processed_token_count
        chunk = self.limits.prefill_chunk_token_count
        end = min((start // chunk + 1) * chunk, sequence.prefill_target)
        stop = self._turns.chunk_stop(start, end, is_decoding=self.is_decoding, crowd=self._crowd)
        if self.limits.chunk_ends_at_last_block:
            block = self.limits.chunk_ends_at_last_block
            last_block_end = sequence.prefill_target // block * block
            if start < last_block_end < stop:
                stop = last_block_end
        measured = self.limits.measured_chunk_token_count
        if measured and sequence.measures_prompt:
            stop = min(stop, (start // measured + 1) * measured)
        return PrefillChunk(sequence, start, stop)


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Run prompt tokens [start, stop) of one sequence."""

    sequence: Sequence
    start: int
    stop: int


@dataclasses.dataclass(frozen=True, slots=True)
class RestoreSlice:
    """Go on rebuilding one sequence's caches from its blocks."""

    sequence: Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Join:
    """Let a prefilled sequence decode with the others from the next step on."""

    sequence: Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeStep:
    """Draw one token for every decoding sequence."""


@dataclasses.dataclass(frozen=True, slots=True)
class Idle:
    """Nothing to run until a message comes."""


Work = PrefillChunk | RestoreSlice | Join | DecodeStep | Idle
