"""Memory guard: requests against what the device has left, before they start (inference thread)."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from icehouse_server.domain.request import Drafting
from icehouse_server.engine.core.memory_model import _OUTPUT_ALLOWANCE, MemoryModel
from icehouse_server.engine.core.sequence import Sequence
from icehouse_server.errors import CannotFit, Overloaded, Reason


class MemoryGuard:
    """Compares predictions with what the device is using. `limit_bytes` 0 switches it off."""

    def __init__(
        self,
        model: MemoryModel,
        *,
        limit_bytes: int,
        weight_bytes: int,
        chunk_token_count: int,
        measured_chunk_token_count: int = 0,
    ) -> None:
        self.limit_bytes = limit_bytes
        self._measured_chunk_token_count = measured_chunk_token_count
        self._model = model
        self._weight_bytes = weight_bytes
        self._chunk_token_count = chunk_token_count

    def never_fits(self, token_count: int) -> CannotFit | None:
        """Return the refusal of a request that could not run even alone."""
        needed = self._model.request_bytes(token_count=token_count, chunk_token_count=self._chunk_token_count)
        needed += self._weight_bytes + self._model.draft.weight_bytes
        if not self.limit_bytes or needed <= self.limit_bytes:
            return None
        return CannotFit(
            Reason.MEMORY_NEVER_FITS,
            f"{token_count} tokens with the model need about {needed} bytes, and this server may use "
            f"{self.limit_bytes}; send a shorter prompt, ask for fewer tokens, or raise memory_limit_bytes",
            metadata={
                "estimated_bytes": needed,
                "limit_bytes": self.limit_bytes,
                "token_count": token_count,
            },
        )

    def start_bytes(self, sequence: Sequence) -> int:
        """Return what must be free before a sequence may start: its input, a little output, one chunk."""
        token_count = _let_in_token_count(sequence)
        needed = self._model.request_bytes(token_count=token_count, chunk_token_count=self._chunk_token_count)
        speculation = sequence.request.speculation
        if speculation is not None and speculation.drafting is Drafting.DRAFT_MODEL:
            needed += token_count * self._model.draft.kv_bytes_per_token
        if sequence.measures_prompt:
            needed += self._model.logits_bytes(self._measured_chunk_token_count)
        return needed

    def growth_bytes(self, sequences: Iterable[Sequence]) -> int:
        """Return what running sequences were let in for and do not hold yet, each for itself."""
        return sum(max(0, self.start_bytes(s) - self._model.kv_bytes(s.kv_token_count)) for s in sequences)

    def lane_growth_bytes(self, sequences: Collection[Sequence], *, decoding: Collection[Sequence]) -> int:
        """Return what these sequences will take beyond their own when they decode together: padding that
        those who decode do not hold yet, and the copy of the lane when the last of them joins."""
        ends = [_let_in_token_count(s) for s in sequences]
        held = self._model.padding_bytes([s.kv_token_count for s in decoding])
        return max(0, self._model.padding_bytes(ends) - held) + self._model.seating_bytes(ends)

    def join_bytes(self, joining: Sequence, *, decoding: Collection[Sequence]) -> int:
        """Return what a row takes that joins those who decode, beside what they and it hold already."""
        return self._model.seating_bytes([s.kv_token_count for s in (*decoding, joining)])

    def chunk_bytes(
        self, chunk_token_count: int, context_token_count: int, *, is_measured: bool = False
    ) -> int:
        """Return the transient of one prefill chunk, its KV included, and its logits if they are wanted."""
        transient = self._model.chunk_bytes(
            chunk_token_count=chunk_token_count, context_token_count=context_token_count
        )
        if is_measured:
            transient += self._model.logits_bytes(chunk_token_count)
        return transient + self._model.growth_bytes(
            chunk_token_count=chunk_token_count, context_token_count=context_token_count
        )

    def excess_bytes(self, *, active_bytes: int, needed_bytes: int) -> int:
        """Return by how much the limit would be passed; 0 when it fits or there is no limit."""
        if not self.limit_bytes:
            return 0
        return max(0, active_bytes + needed_bytes - self.limit_bytes)

    def short(self, *, needed_bytes: int, active_bytes: int) -> Overloaded:
        """Return the refusal of a request for which there is no memory now."""
        return Overloaded(
            Reason.MEMORY_SHORT,
            f"about {needed_bytes} bytes are needed, {active_bytes} of {self.limit_bytes} are in use and "
            "nothing more can be freed; try again later",
            retry_after_s=1.0,
            metadata={
                "needed_bytes": needed_bytes,
                "active_bytes": active_bytes,
                "limit_bytes": self.limit_bytes,
            },
        )


def _let_in_token_count(sequence: Sequence) -> int:
    left = sequence.output_token_limit - len(sequence.output_token_ids)
    return len(sequence.input_token_ids) + min(left, _OUTPUT_ALLOWANCE)
