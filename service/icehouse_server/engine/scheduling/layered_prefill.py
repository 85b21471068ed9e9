"""Layered prefill: the one prompt whose chunk goes through some of the layers in each pass.

For devices that cannot cut a chunk small enough beside rows, such as a CPU: each chunk of a long prompt reads
all that the prompt holds, so a chunk of many tokens goes through the layers that a pass has time for, after
the rows, and the next pass goes on. Inference thread only. The runner has what was computed of the chunk;
this says which chunk it is and how far it is. A chunk begins anew when it may no longer go as far as planned,
since a sequence waits for a tail before that.
"""

from __future__ import annotations

from collections.abc import Callable

from icehouse_server.domain.request import Drafting
from icehouse_server.engine.core.ports import LayerSpan
from icehouse_server.engine.core.sequence import Phase, Sequence
from icehouse_server.engine.scheduling.planner import PassBudget


class LayeredPrefill:
    """At most one chunk at a time. `layer_count` 0: chunks go through all layers at once."""

    def __init__(self, layer_count: int, *, chunk_end: Callable[[Sequence, int], int]) -> None:
        """`chunk_end` says how far a sequence's chunk from a place may go."""
        self._layer_count = layer_count
        self._chunk_end = chunk_end
        self._sequence: Sequence | None = None
        self._start = self._stop = self._layer = 0

    def check(self) -> None:
        """Before a pass is planned: forget the chunk if it may not go as far as it was to go."""
        sequence = self._sequence
        if sequence is not None:
            at = sequence.processed_token_count
            assert sequence.phase is Phase.PREFILLING and at == self._start, (sequence.phase, at)
            if self._end(sequence) < self._stop:
                self._sequence = None

    def forget(self, sequence: Sequence) -> None:
        """A sequence gives up its caches, and its chunk with them."""
        if self._sequence is sequence:
            self._sequence = None

    def is_of(self, sequence: Sequence) -> bool:
        return self._sequence is sequence

    @property
    def stop(self) -> int:
        """Where the chunk ends."""
        return self._stop

    def begin(self, sequence: Sequence, budget: PassBudget) -> None:
        """Begin with a sequence's next tokens, if no chunk is in progress and that is better."""
        if not self._layer_count or self._sequence is not None or not _may_go_layered(sequence):
            return
        start = sequence.processed_token_count
        stop = budget.take_layered(start, self._end(sequence), layer_count=self._layer_count)
        if stop >= start + 2:
            self._sequence, self._start, self._stop, self._layer = sequence, start, stop, 0

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
