"""Which work comes next: the policy, without mlx, threads or clocks of its own.

One unit of work at a time, so that a cancel, a deadline or a newcomer is seen between any two
forward passes. Prefill is cut into chunks that end on one grid and is given turns between
decode steps by time: in each turn about as long as a decode step takes, so that running
sequences keep their inter-token latency and waiting prompts keep moving.
"""

from __future__ import annotations

import dataclasses
import heapq

from service.engine.ids import SequenceId
from service.engine.sequence import Phase, Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds on what runs at once. `prefill_slice_s` 0 follows the measured decode step."""

    waiting_limit: int
    running_limit: int
    prefilling_limit: int
    prefill_chunk_token_count: int
    prefill_slice_s: float = 0.0
    chunk_ends_at_last_block: int = 0
    """Block size when a chunk must end at the prompt's last full block (checkpoints), else 0."""


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
class DecodeStep:
    """Draw one token for every decoding sequence."""


@dataclasses.dataclass(frozen=True, slots=True)
class Idle:
    """Nothing to run until a message comes."""


Work = PrefillChunk | RestoreSlice | DecodeStep | Idle

_SMOOTHING = 0.2
_OLDEST_EVERY = 4
"""Every so many prefill turns the oldest prompt runs instead of the shortest, so none starves."""


class Scheduler:
    """Holds the waiting, prefilling and decoding sequences and picks the next unit of work."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self._waiting: list[tuple[int, int, Sequence]] = []
        self._loading: dict[SequenceId, Sequence] = {}
        self._restoring: dict[SequenceId, Sequence] = {}
        self._prefilling: dict[SequenceId, Sequence] = {}
        self._decoding: dict[SequenceId, Sequence] = {}
        self._decode_step_s = 0.0
        self._turn_spent_s = 0.0
        self._turn_count = 0

    @property
    def waiting_count(self) -> int:
        return len(self._waiting)

    @property
    def prefilling_count(self) -> int:
        return len(self._prefilling)

    @property
    def decoding_count(self) -> int:
        return len(self._decoding)

    @property
    def is_empty(self) -> bool:
        return not (self._waiting or self._preparing_count or self._decoding)

    @property
    def is_blocked(self) -> bool:
        """Nothing can run until a message comes: only loads are under way, if anything."""
        return not (self._waiting or self._restoring or self._prefilling or self._decoding)

    @property
    def loading_count(self) -> int:
        return len(self._loading) + len(self._restoring)

    @property
    def _preparing_count(self) -> int:
        return len(self._loading) + len(self._restoring) + len(self._prefilling)

    def enqueue(self, sequence: Sequence) -> bool:
        """Let a sequence wait; False when `waiting_limit` of them do already."""
        if len(self._waiting) >= self.limits.waiting_limit:
            return False
        heapq.heappush(self._waiting, (-sequence.request.priority, sequence.sequence_id, sequence))
        return True

    def admit(self) -> list[Sequence]:
        """Move waiting sequences into prefill as far as the limits allow, best first."""
        admitted = []
        while (
            self._waiting
            and self._preparing_count < self.limits.prefilling_limit
            and self._preparing_count + len(self._decoding) < self.limits.running_limit
        ):
            _, _, sequence = heapq.heappop(self._waiting)
            self._place(sequence, Phase.PREFILLING)
            admitted.append(sequence)
        return admitted

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

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is."""
        if sequence.phase is Phase.WAITING:
            self._waiting = [entry for entry in self._waiting if entry[2] is not sequence]
            heapq.heapify(self._waiting)
        self._place(sequence, Phase.ENDED)

    def _place(self, sequence: Sequence, phase: Phase) -> None:
        places = {
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
        if (self._prefilling or self._restoring) and not (self._decoding and self._turn_is_over()):
            if self._restoring:
                return RestoreSlice(next(iter(self._restoring.values())))
            return self._next_chunk()
        return DecodeStep() if self._decoding else Idle()

    def note_prefill(self, elapsed_s: float) -> None:
        """Account for a prefill chunk or a piece of a restore that just ran."""
        self._turn_spent_s += elapsed_s

    def note_decode(self, elapsed_s: float) -> None:
        """Account for a decode step that just ran; a new prefill turn begins."""
        old = self._decode_step_s
        self._decode_step_s = elapsed_s if old == 0.0 else old + _SMOOTHING * (elapsed_s - old)
        self._turn_spent_s = 0.0
        self._turn_count += 1

    def _turn_is_over(self) -> bool:
        slice_s = self.limits.prefill_slice_s or self._decode_step_s
        return self._turn_spent_s > 0.0 and self._turn_spent_s >= slice_s

    def _next_chunk(self) -> PrefillChunk:
        oldest_turn = self._turn_count % _OLDEST_EVERY == 0
        sequence = min(
            self._prefilling.values(),
            key=lambda s: (
                0 if oldest_turn else s.prefill_target - s.processed_token_count,
                s.sequence_id,
            ),
        )
        start = sequence.processed_token_count
        chunk = self.limits.prefill_chunk_token_count
        stop = min((start // chunk + 1) * chunk, sequence.prefill_target)
        if self.limits.chunk_ends_at_last_block:
            block = self.limits.chunk_ends_at_last_block
            last_block_end = sequence.prefill_target // block * block
            if start < last_block_end < stop:
                stop = last_block_end
        return PrefillChunk(sequence, start, stop)
