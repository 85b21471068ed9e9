"""Newcomers: requests become sequences that wait, or their callers are told why not (inference thread)."""

from __future__ import annotations

from collections.abc import Sequence as ReadSequence

from service.clock import Clock
from service.domain.model import ModelInfo
from service.domain.request import GenerationRequest
from service.engine.admission import Admission
from service.engine.live_requests import LiveRequests
from service.engine.sequence import Sequence
from service.engine.text import Decode
from service.engine.waiting import WaitingRoom
from service.errors import IcehouseError


class Reception:
    """Takes requests in; those that were handed in together, all or none."""

    def __init__(
        self,
        *,
        admission: Admission,
        live: LiveRequests,
        room: WaitingRoom,
        model: ModelInfo,
        clock: Clock,
        decode: Decode,
        decode_with_markers: Decode,
    ) -> None:
        self._admission = admission
        self._live = live
        self._room = room
        self._model = model
        self._clock = clock
        self._decode, self._decode_with_markers = decode, decode_with_markers

    def receive(self, requests: ReadSequence[GenerationRequest]) -> None:
        """Take in requests for the same prompt, or refuse them all."""
        sequences = [self._sequence_of(request) for request in requests]
        refusal = self._admission.refusal(
            requests[0],
            output_token_limit=sequences[0].output_token_limit,
            now=self._clock.monotonic(),
            request_count=len(requests),
        )
        if refusal is not None:
            self.refuse(requests, refusal)
            return
        for sequence in sequences:
            self._room.add(sequence)
            self._live.accept(sequence)

    def refuse(self, requests: ReadSequence[GenerationRequest], error: IcehouseError) -> None:
        """Tell the callers that nothing was taken in."""
        for request in requests:
            self._live.refuse(request, error)

    def _sequence_of(self, request: GenerationRequest) -> Sequence:
        return Sequence.of(
            request,
            sequence_id=self._live.next_id(),
            decode=self._decode_with_markers if request.shows_markers else self._decode,
            context_token_limit=self._model.context_token_limit,
        )
