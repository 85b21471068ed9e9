"""Output processor: turns drawn tokens into text and events, and ends sequences (inference thread)."""

from __future__ import annotations

import dataclasses

from icehouse_server.domain.events import Delta, Event, Finished, FinishReason
from icehouse_server.domain.ids import RequestId
from icehouse_server.engine.core.ports import Drawn, Listener
from icehouse_server.engine.core.sequence import Sequence


class Output:
    """Collects the events of one step and publishes them together."""

    def __init__(self, *, listener: Listener, eos_token_ids: frozenset[int]) -> None:
        self._listener = listener
        self._eos = eos_token_ids
        self._events: list[tuple[RequestId, Event]] = []

    def emit(self, request_id: RequestId, event: Event) -> None:
        """Add an event to this step's."""
        self._events.append((request_id, event))

    def take_token(self, sequence: Sequence, drawn: Drawn, now: float) -> Finished | None:
        """Account for one drawn token and emit its text; return the end if this was the last token."""
        token_id = drawn.token_id
        if sequence.first_token_time is None:
            sequence.first_token_time = now
        sequence.fed_ahead_count = drawn.fed_ahead_count
        if drawn.drafts is not None:
            sequence.drafts = sequence.drafts.plus(drawn.drafts)
        sequence.output_token_ids.append(token_id)
        sequence.undelivered_token_ids.append(token_id)
        if drawn.logprobs is not None:
            offset = sequence.text.next_offset
            sequence.undelivered_logprobs.append(dataclasses.replace(drawn.logprobs, text_offset=offset))
        sampling = sequence.request.sampling
        is_end = token_id in self._eos and not sampling.ignores_end_tokens
        if is_end or token_id in sampling.stop_token_ids:
            end = self.finish(sequence, FinishReason.STOP_TOKEN, now)
            # Held-back text can turn out to contain a stop string that came before the token.
            return end if end.stop_string is not None else dataclasses.replace(end, stop_token_id=token_id)
        step = sequence.text.push(token_id)
        self._deliver(sequence, step.text)
        if step.stop_string is not None:
            self._deliver(sequence, "", always=True)
            return Finished(FinishReason.STOP_STRING, step.stop_string, sequence.usage(now))
        if drawn.is_complete:
            # Only an end token could follow, so it need not be drawn.
            return self.finish(sequence, FinishReason.STOP_TOKEN, now)
        if len(sequence.output_token_ids) >= sequence.output_token_limit:
            return self.finish(sequence, sequence.limit_reason, now)
        return None

    def finish(self, sequence: Sequence, reason: FinishReason, now: float) -> Finished:
        """Emit held-back text and return the end."""
        last = sequence.text.finish()
        if last.stop_string is not None:
            reason = FinishReason.STOP_STRING
        self._deliver(sequence, last.text, always=True)
        return Finished(reason, last.stop_string, sequence.usage(now), sequence.embedding)

    def publish(self) -> None:
        """Hand this step's events to the listener."""
        if self._events:
            events, self._events = self._events, []
            self._listener.publish(events)

    def _deliver(self, sequence: Sequence, text: str, *, always: bool = False) -> None:
        if text or (always and sequence.undelivered_token_ids):
            token_ids, logprobs = sequence.undelivered_token_ids, sequence.undelivered_logprobs
            self.emit(sequence.request.request_id, Delta(text, tuple(token_ids), tuple(logprobs)))
            token_ids.clear()
            logprobs.clear()
