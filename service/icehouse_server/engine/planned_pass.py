"""Planned pass: what the scheduler planned, as the runner takes it and as its time is learned from."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from icehouse_server.engine.core.ports import Chunk
from icehouse_server.engine.scheduling.pass_cost import NOTHING, PassSize
from icehouse_server.engine.scheduling.scheduler import PrefillChunk


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedPass:
    """What the time of a pass, which may come a pass later, is to be taken for."""

    rows: PassSize
    size: PassSize
    """Of all that goes through all layers, the rows included."""
    layered: PassSize
    """What goes through some of them, as so many tokens."""
    prefilled_token_count: int

    @classmethod
    def of(cls, chunks: Collection[PrefillChunk], *, rows: PassSize) -> PlannedPass:
        """Return a pass over these rows and chunks."""
        return cls(
            rows,
            sum((chunk.size for chunk in chunks if chunk.layers is None), rows),
            sum((chunk.size for chunk in chunks if chunk.layers is not None), NOTHING),
            sum(chunk.kept_count for chunk in chunks),
        )

    @property
    def advanced_token_count(self) -> int:
        """Prompt tokens that its time was spent on: those on their way through the layers by their share."""
        return self.layered.token_count or self.prefilled_token_count


def chunk_of(planned: PrefillChunk) -> Chunk:
    """Return a planned chunk as the runner takes it."""
    sequence = planned.sequence
    request, tokens = sequence.request, sequence.input_token_ids
    is_measured = sequence.measures_prompt
    return Chunk(
        sequence.sequence_id,
        tokens[planned.start : planned.stop],
        adapter=request.adapter,
        row=sequence.decode_row() if planned.is_last else None,
        next_token_ids=tokens[planned.start + 1 : planned.stop + 1] if is_measured else (),
        wanted=request.logprobs if is_measured else None,
        images=request.image_parts(planned.start, planned.stop) if request.images else (),
        rope_positions=sequence.rope_positions,
        pooling=request.pooling,
        layers=planned.layers,
        length=sequence.kv_length,
        speculation=request.speculation,
    )
