"""Which work comes next: the policy, without mlx, threads or clocks of its own.

One unit of work at a time, so that a cancel, a deadline or a newcomer is seen between any two
forward passes. Prefill is cut into chunks that end on one grid and is given turns between
decode steps by time: in each turn about as long as a decode step takes, so that running
sequences keep their inter-token latency and waiting prompts keep moving.
"""

from __future__ import annotations

import dataclasses

from service.engine.ids import SequenceId
from service.engine.sequence import Phase, Sequence
from service.engine.waiting import WaitingRoom


@dataclasses.dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds on what runs at once. `prefill_slice_s` 0 follows the measured decode step."""

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
_CROWD_LIMIT = 4.0
"""Most decode steps' worth of prefill between two decode steps."""
_OLDEST_EVERY = 4
"""Every so many prefill turns the oldest prompt runs instead of the shortest, so none starves."""


class Scheduler:
    """Holds the waiting, preparing and decoding sequences and picks the next unit of work."""

    def __init__(self, limits: SchedulerLimits, room: WaitingRoom) -> None:
        self.limits = limits
        self._room = room
        self._following: dict[SequenceId, Sequence] = {}
        self._loading: dict[SequenceId, Sequence] = {}
        self._restoring: dict[SequenceId, Sequence] = {}
        self._prefilling: dict[SequenceId, Sequence] = {}
        self._decoding: dict[SequenceId, Sequence] = {}
        self._decode_step_s = 0.0
        self._turn_spent_s = 0.0
        self._turn_count = 0

    @property
    def waiting_count(self) -> int:
        return len(self._room)

    @property
    def prefilling_count(self) -> int:
        return len(self._prefilling)

    @property
    def decoding_count(self) -> int:
        return len(self._decoding)

    @property
    def is_empty(self) -> bool:
        return not (len(self._room) or self._following or self._preparing_count or self._decoding)

    @property
    def is_blocked(self) -> bool:
        """Nothing can run until a message comes: only loads are under way, if anything."""
        return not (len(self._room) or self._restoring or self._prefilling or self._decoding)

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
        return self._room.best(now)

    def admit(self, sequence: Sequence) -> None:
        """Give a waiting sequence a slot."""
        self._room.discard(sequence)
        self._room.note_running(sequence)
        self._place(sequence, Phase.PREFILLING)

    def start_following(self, sequence: Sequence) -> None:
        """Note that a sequence waits for blocks that another one is computing."""
        self._place(sequence, Phase.FOLLOWING)

    def park(self, sequence: Sequence) -> None:
        """Take a running sequence's slot away and let it wait again."""
        self._place(sequence, Phase.WAITING)
        self._room.note_ended(sequence)
        sequence.park()
        self._room.add(sequence)

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
            self._room.discard(sequence)
        else:
            self._room.note_ended(sequence)
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
        if (self._prefilling or self._restoring) and not (self._decoding and self._turn_is_over()):
            if self._restoring:
                return RestoreSlice(next(iter(self._restoring.values())))
            return self._next_chunk()
        return DecodeStep() if self._decoding else Idle()

    def note_prefill(self, elapsed_s: float) -> None:
        """Account for a prefill chunk or a piece of a restore that just ran."""
        self._turn_spent_s += elapsed_s
        if not self._decoding:
            # No decode step ends the turn, and the oldest prompt must not keep it.
            self._turn_count += 1

    def note_decode(self, elapsed_s: float) -> None:
        """Account for a decode step that just ran; a new prefill turn begins."""
        old = self._decode_step_s
        self._decode_step_s = elapsed_s if old == 0.0 else old + _SMOOTHING * (elapsed_s - old)
        self._turn_spent_s = 0.0
        self._turn_count += 1

    def _turn_is_over(self) -> bool:
        slice_s = self.limits.prefill_slice_s or self._decode_step_s
        # When more wait for their first token than draw their next, the many come first, up to a point.
        crowd = self._preparing_count / max(1, len(self._decoding))
        slice_s *= min(_CROWD_LIMIT, max(1.0, crowd))
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
