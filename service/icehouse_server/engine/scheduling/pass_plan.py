"""Pass plan: the rows and chunks of one forward pass, and what it is expected to take."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from icehouse_server.domain.ids import SequenceId
from icehouse_server.engine.core.ports import Chunk, LayerSpan
from icehouse_server.engine.core.sequence import Sequence
from icehouse_server.engine.scheduling.pass_cost import NOTHING, PassSize


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Input tokens [start, stop) of one sequence."""

    sequence: Sequence
    start: int
    stop: int
    size: PassSize
    """What it adds to a pass if it goes through all layers."""
    layers: LayerSpan | None = None
    """The layers that it goes through in this pass; None for all."""

    @property
    def token_count(self) -> int:
        return self.stop - self.start

    @property
    def is_last(self) -> bool:
        """Whether the first output token is drawn from it."""
        return self.stop == self.sequence.input_end > self.sequence.prefill_target

    @property
    def is_through(self) -> bool:
        """Whether it has gone through all layers at the end of the pass."""
        return self.layers is None or self.layers.is_last

    @property
    def stored_count(self) -> int:
        """Its tokens without the input's last one, which is run again after each cache hit; 0 until it has
        gone through all layers."""
        return max(0, min(self.stop, self.sequence.prefill_target) - self.start) if self.is_through else 0

    def for_runner(self) -> Chunk:
        sequence = self.sequence
        request, tokens = sequence.request, sequence.input_token_ids
        is_measured = sequence.measures_prompt
        return Chunk(
            sequence.sequence_id,
            tokens[self.start : self.stop],
            adapter=request.adapter,
            row=sequence.decode_row() if self.is_last else None,
            next_token_ids=tokens[self.start + 1 : self.stop + 1] if is_measured else (),
            wanted=request.logprobs if is_measured else None,
            images=request.image_parts(self.start, self.stop) if request.images else (),
            rope_positions=sequence.rope_positions,
            pooling=request.pooling,
            layers=self.layers,
            speculation=request.speculation,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class PassPlan:
    """One pass. Times are the device's; 0 before any pass was measured, or without a chunk."""

    rows: PassSize
    """Size of the decoding rows."""
    chunks: tuple[PrefillChunk, ...] = ()
    rows_s: float = 0.0
    """Expected time of the rows alone."""
    expected_s: float = 0.0
    """Expected time of the whole pass."""

    @property
    def size(self) -> PassSize:
        """Size of everything that goes through all layers, including the rows."""
        return sum((chunk.size for chunk in self.chunks if chunk.layers is None), self.rows)

    @property
    def layered(self) -> PassSize:
        """Size of what goes through some layers, converted to tokens through all layers."""
        parts = (chunk.size.part(chunk.layers.share) for chunk in self.chunks if chunk.layers is not None)
        return sum(parts, NOTHING)

    @property
    def stored_count(self) -> int:
        """Prompt tokens whose KV exists after the pass."""
        return sum(chunk.stored_count for chunk in self.chunks)

    @property
    def advanced_token_count(self) -> int:
        """Prompt tokens that its time is spent on. Those that go through some layers count by their share."""
        return self.layered.token_count or self.stored_count

    def prefill_s(self, elapsed_s: float) -> float:
        """Return the part of the pass's time that its chunks took, by what was expected of its rows."""
        return elapsed_s * (1.0 - self.rows_s / self.expected_s) if self.expected_s else elapsed_s

    def chunks_through(self, went_through: Mapping[SequenceId, LayerSpan]) -> list[PrefillChunk]:
        """Return the chunks as they ran: for some, time was up before their last layers."""
        return [
            dataclasses.replace(chunk, layers=went_through.get(chunk.sequence.sequence_id, chunk.layers))
            for chunk in self.chunks
        ]
