"""Memory guard: what requests and passes will need on the device, and whether that fits. Sizes in bytes.

Each sequence is charged for the KV that it was admitted for, and nothing else. The temporary arrays of a pass
exist once, for all its sequences.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from icehouse_server.domain.request import Drafting, GenerationRequest
from icehouse_server.engine.core.memory_budget import BudgetShare
from icehouse_server.engine.core.memory_model import MemoryModel
from icehouse_server.engine.core.sequence import Phase, Sequence
from icehouse_server.engine.scheduling.pass_plan import PrefillChunk
from icehouse_server.errors import CannotFit, Overloaded, Reason, size_text

_OUTPUT_ALLOWANCE = 256
"""Output tokens that a sequence is admitted for. Memory for more is freed when they come, or the sequence is
parked."""


class MemoryGuard:
    """Compares predictions with what the device uses. Without a limit everything fits."""

    def __init__(
        self,
        model: MemoryModel,
        *,
        share: BudgetShare,
        weight_bytes: int,
        chunk_token_count: int,
        measured_chunk_token_count: int = 0,
    ) -> None:
        self.share = share
        self._own_bytes = weight_bytes + model.draft.weight_bytes
        self._pooled_bytes = self._own_bytes + model.pool_bytes if model.pool_bytes else 0
        self._measured_chunk_token_count = measured_chunk_token_count
        self._model = model
        self._weight_bytes = weight_bytes
        self._chunk_token_count = chunk_token_count

    @property
    def limit_bytes(self) -> int:
        """What this engine may use now; 0 is no limit."""
        return self._within_pool(self.share.limit_bytes)

    @property
    def has_company(self) -> bool:
        """Whether other models hold memory too."""
        return self.share.others_bytes > 0

    def never_fits(self, token_count: int, request: GenerationRequest | None = None) -> CannotFit | None:
        """Return the refusal of a request that could not run even alone."""
        needed = self._model.request_bytes(token_count=token_count, chunk_token_count=self._chunk_token_count)
        needed += self._own_bytes
        if request is not None:
            needed += self._draft_bytes(request, token_count)
            if request.logprobs is not None and request.logprobs.of_prompt:
                needed += self._model.logits_bytes(self._measured_chunk_token_count)
            needed = max(needed, self._image_start_bytes(request))
        limit_bytes = self._within_pool(self.share.most_bytes)
        if not limit_bytes or needed <= limit_bytes:
            return None
        return CannotFit(
            Reason.MEMORY_NEVER_FITS,
            f"{token_count} tokens with the model need about {size_text(needed)}, but this server may use "
            f"{size_text(limit_bytes)}; send a shorter prompt or smaller images, ask for fewer tokens, or "
            "raise memory_limit_bytes",
            metadata={"estimated_bytes": needed, "limit_bytes": limit_bytes, "token_count": token_count},
        )

    def start_bytes(self, sequence: Sequence, *, beside: Collection[Sequence] = ()) -> int:
        """Return what must be free before a sequence may start: the KV that it and all running ones, of other
        engines too, were admitted for and do not hold yet, and the largest pass that their inputs need."""
        together = (sequence, *beside)
        kv_bytes = self.growth_bytes(together) + self.share.others_promised_bytes
        return kv_bytes + max(self._input_pass_bytes(s) for s in together)

    @property
    def kv_limit_bytes(self) -> int:
        """What KV may use beside the weights; 0 without a limit."""
        limit_bytes = self.limit_bytes
        return max(0, limit_bytes - self._own_bytes) if limit_bytes else 0

    def held_bytes(self, sequences: Iterable[Sequence]) -> int:
        """Return what the KV of sequences takes now, including the room that it can grow into."""
        return sum(map(self._held_bytes, sequences))

    def growth_bytes(self, sequences: Iterable[Sequence]) -> int:
        """Return the KV that sequences were admitted for and do not hold yet."""
        return sum(max(0, self._admitted_bytes(s) - self._held_bytes(s)) for s in sequences)

    def pass_bytes(self, chunks: Collection[PrefillChunk], *, decoding: Iterable[Sequence]) -> int:
        """Return what a pass needs in addition: its chunks' temporary arrays and KV, and its rows' new KV."""
        needed = sum(
            self.chunk_bytes(chunk.stop - chunk.start, chunk.stop, is_measured=chunk.sequence.measures_prompt)
            for chunk in chunks
        )
        return needed + self._row_bytes(decoding)

    def pass_kv_bytes(self, chunks: Collection[PrefillChunk], *, decoding: Iterable[Sequence]) -> int:
        """Return the KV that the chunks and rows of a pass add."""
        added = sum(
            self._model.growth_bytes(chunk_token_count=each.stop - each.start, context_token_count=each.stop)
            for each in chunks
        )
        return added + self._row_bytes(decoding)

    def _row_bytes(self, decoding: Iterable[Sequence]) -> int:
        held = (sequence.kv_token_count for sequence in decoding)
        return sum(self._model.kv_bytes(count + 1) - self._model.kv_bytes(count) for count in held)

    def chunk_bytes(
        self, chunk_token_count: int, context_token_count: int, *, is_measured: bool = False
    ) -> int:
        """Return the peak of one prefill chunk, with its KV, and its logits if they are wanted."""
        transient = self._transient_bytes(chunk_token_count, context_token_count, is_measured=is_measured)
        return transient + self._model.growth_bytes(
            chunk_token_count=chunk_token_count, context_token_count=context_token_count
        )

    def excess_bytes(self, *, active_bytes: int, needed_bytes: int) -> int:
        """Return by how much the limit would be exceeded after idle engines have given way; 0 if it fits or
        there is no limit. `active_bytes` is what all engines use."""
        used_bytes = active_bytes + needed_bytes
        excess = self.share.excess_bytes(used_bytes)
        if self._pooled_bytes:
            excess = max(excess, used_bytes - self.share.others_bytes - self._pooled_bytes)
        return excess

    def yield_others(self, size_bytes: int) -> int:
        """Have other engines give up blocks in RAM; return the bytes that this frees for this one."""
        return 0 if self._pooled_bytes else self.share.yield_others(size_bytes)

    def note_waiting(self, now: float | None) -> None:
        """Note since when nothing runs here for want of memory: `now`, unless it was noted before. None:
        memory is not the reason."""
        since = self.share.waits_since
        self.share.waits_since = now if now is None or since is None else since

    def short(self, *, needed_bytes: int, active_bytes: int) -> Overloaded:
        """Return the refusal of a request that has no memory now."""
        active_bytes, limit_bytes = active_bytes - self.share.others_bytes, self.limit_bytes
        return Overloaded(
            Reason.MEMORY_SHORT,
            f"about {needed_bytes} bytes are needed, {active_bytes} of {limit_bytes} are in use and "
            "nothing more can be freed; try again later",
            retry_after_s=1.0,
            metadata={
                "needed_bytes": needed_bytes,
                "active_bytes": active_bytes,
                "limit_bytes": limit_bytes,
            },
        )

    def _within_pool(self, limit_bytes: int) -> int:
        return min(limit_bytes or self._pooled_bytes, self._pooled_bytes or limit_bytes)

    def _admitted_bytes(self, sequence: Sequence) -> int:
        left = sequence.output_token_limit - len(sequence.output_token_ids)
        token_count = len(sequence.input_token_ids) + min(left, _OUTPUT_ALLOWANCE)
        return self._model.kv_bytes(token_count) + self._draft_bytes(sequence.request, token_count)

    def _held_bytes(self, sequence: Sequence) -> int:
        held = sequence.kv_token_count
        if not held:
            return sequence.loading_token_count * self._model.kv_bytes_per_token
        return self._model.kv_bytes(held) + self._draft_bytes(sequence.request, held)

    def _draft_bytes(self, request: GenerationRequest, token_count: int) -> int:
        speculation = request.speculation
        if speculation is None or speculation.drafting is not Drafting.DRAFT_MODEL:
            return 0
        return token_count * self._model.draft.kv_bytes_per_token

    def _input_pass_bytes(self, sequence: Sequence) -> int:
        """Return the temporary arrays of the largest pass that a sequence's input may still need."""
        if sequence.phase is Phase.DECODING:
            return 0
        token_count = len(sequence.input_token_ids)
        chunk = min(self._chunk_token_count, token_count)
        if sequence.measures_prompt and self._measured_chunk_token_count:
            chunk = min(chunk, self._measured_chunk_token_count)
        transient = self._transient_bytes(chunk, token_count, is_measured=sequence.measures_prompt)
        begin = sequence.processed_token_count
        images = (span.image for span in sequence.request.images if span.end_token_index > begin)
        return max([transient, *map(self._model.image_bytes, images)])

    def _image_start_bytes(self, request: GenerationRequest) -> int:
        """Return the most that is needed at once while one of a request's images is encoded, with the KV of
        the tokens before it."""
        needed = (
            self._model.image_bytes(span.image) + self._model.kv_bytes(span.start_token_index)
            for span in request.images
        )
        return max(needed, default=0) + self._weight_bytes

    def _transient_bytes(self, chunk_token_count: int, context_token_count: int, *, is_measured: bool) -> int:
        transient = self._model.chunk_bytes(
            chunk_token_count=chunk_token_count, context_token_count=context_token_count
        )
        return transient + (self._model.logits_bytes(chunk_token_count) if is_measured else 0)
