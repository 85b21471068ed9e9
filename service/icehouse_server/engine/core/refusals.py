"""Refusals: the errors that callers get if their request does not end by its own output."""

from __future__ import annotations

from icehouse_server.engine.core.sequence import Sequence
from icehouse_server.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    ModelOutputInvalid,
    Overloaded,
    Reason,
    Unavailable,
)

_COMMANDS_RETRY_S = 1.0


def commands_waiting(count: int) -> Overloaded:
    """Too many commands of the prefix cache wait for the inference thread."""
    return Overloaded(
        Reason.QUEUE_FULL,
        f"{count} prefix cache commands are already waiting; try again later",
        retry_after_s=_COMMANDS_RETRY_S,
        metadata={"waiting": count},
    )


def past_deadline(sequence: Sequence, now: float) -> DeadlineExceeded:
    """The client's deadline passed while the request waited or ran."""
    waited_s = now - sequence.request.arrival_time
    return DeadlineExceeded(
        Reason.DEADLINE_EXCEEDED,
        f"the deadline passed after {waited_s:.3f} s in phase {sequence.phase.name}",
        metadata={"waited_s": f"{waited_s:.3f}", "phase": sequence.phase.name},
    )


def cancelled_by_client() -> Cancelled:
    """The client went away, so nobody sees this."""
    return Cancelled(Reason.CANCELLED, "the client cancelled the call or went away")


def shutting_down() -> Unavailable:
    """The request arrived while the server drains."""
    return Unavailable(Reason.DRAINING, "the server is shutting down; try another replica")


def stopped_before_done() -> Unavailable:
    """The drain's own deadline passed."""
    return Unavailable(Reason.DRAINING, "the server stopped before this request was finished")


def engine_failed() -> EngineFailed:
    """The inference loop died. The reason may name folders and internals, so it is only logged."""
    return EngineFailed(
        Reason.ENGINE_FAILED, "the inference loop failed and the server is stopping; its log says why"
    )


def rank_lost(detail: str) -> Unavailable:
    """A rank of the group does not answer, so nothing can be computed until all are back."""
    return Unavailable(
        Reason.RANK_LOST,
        f"a machine of this group was lost ({' '.join(detail.split())}); the group restarts by itself",
        retry_after_s=5.0,
    )


def logits_not_finite(drawn_count: int) -> ModelOutputInvalid:
    """The model's logits for a token are NaN or infinite, so nothing can be drawn from them."""
    return ModelOutputInvalid(
        Reason.LOGITS_NOT_FINITE,
        f"the model's logits for output token {drawn_count} are NaN or infinite, so the output cannot go on; "
        "the model's or adapter's weights may be damaged, or its numbers overflow their type",
        metadata={"output_token_count": drawn_count},
    )


def vector_not_finite() -> ModelOutputInvalid:
    """An encoder's numbers for a text are NaN or infinite."""
    return ModelOutputInvalid(
        Reason.LOGITS_NOT_FINITE,
        "the model's output for this text is NaN or infinite; its weights may be damaged, or its numbers "
        "overflow their type",
    )


def too_many_completions(count: int, limit: int) -> InvalidRequest:
    """A request's completions wait together, and not even an empty queue holds so many."""
    return InvalidRequest(
        Reason.PARAMETER_OUT_OF_RANGE,
        f"completions is {count}; at most {limit} requests may wait here, so ask for fewer",
        field="completions",
        metadata={"field": "completions", "value": count, "wanted": f"1 to {limit}"},
    )
