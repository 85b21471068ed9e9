"""Image encoding: images go through the vision tower one at a time, in the time that a step has beside its
rows, so that others decode meanwhile (inference thread).

A prompt's prefill stops before an image until its vectors are there. The oldest sequence's image goes first,
to its end; that of a sequence that ends meanwhile is dropped when another one begins.
"""

from __future__ import annotations

from collections.abc import Callable

from icehouse_server.engine.core.ports import Runner
from icehouse_server.engine.core.sequence import Sequence
from icehouse_server.engine.scheduling.preemption import Preemption
from icehouse_server.engine.scheduling.scheduler import Scheduler
from icehouse_server.errors import IcehouseError


class ImageEncoding:
    """Chooses the image, sees to its memory, and has the runner go on with it."""

    def __init__(
        self,
        *,
        runner: Runner,
        scheduler: Scheduler,
        preemption: Preemption,
        fail: Callable[[Sequence, IcehouseError], None],
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._preemption = preemption
        self._fail = fail

    def make_room(self) -> Sequence | None:
        """Return whose image is to be encoded in this step, once its memory is free."""
        sequence = self._scheduler.awaiting_image
        if sequence is None or sequence.next_image is None:
            return None
        size_bytes = self._runner.encode_bytes(sequence.request.whole_image(sequence.next_image))
        return sequence if self._preemption.make_image_fit(sequence, size_bytes) else None

    def go_on(self, sequence: Sequence, *, budget_s: float) -> None:
        """Encode the image that `make_room` chose for about so long; if the tower fails on it, its sequence
        is ended."""
        span = sequence.next_image
        assert span is not None, f"sequence {sequence.sequence_id} waits for no image"
        part = sequence.request.whole_image(span)
        try:
            is_there = self._runner.encode(sequence.sequence_id, part, budget_s=budget_s)
        except IcehouseError as error:
            self._fail(sequence, error)
            return
        if is_there:
            sequence.encoded_token_count = span.end_token_index
