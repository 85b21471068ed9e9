"""What a call raises: the status of the server with its details unpacked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

_DETAILS_KEY = "grpc-status-details-bin"


class IcehouseClientError(Exception):
    """A call failed.

    `reason` is stable and machine readable (`QUEUE_FULL`, `PROMPT_TOO_LONG`, ...); where the status came
    from the network and not from the server it is the code's name. `metadata` holds the numbers of
    the message, `field` the request field at fault, `retry_after_s` when trying again makes sense.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        reason: str,
        metadata: dict[str, str],
        field: str | None,
        retry_after_s: float | None,
    ) -> None:
        super().__init__(
            f"{code.name} ({reason}): {message}" if reason != code.name else f"{reason}: {message}"
        )
        self.code = code
        self.message = message
        self.reason = reason
        self.metadata = metadata
        self.field = field
        self.retry_after_s = retry_after_s


def error_from(
    code: grpc.StatusCode, message: str | None, trailing: Iterable[tuple[str, str | bytes]] | None
) -> IcehouseClientError:
    """Return the error for a call's status and trailing metadata."""
    info = error_details_pb2.ErrorInfo(reason=code.name)
    bad_request = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    for detail in _details(trailing):
        # Unpack is a test and a read in one: only the message of the detail's own type takes it.
        for known in (info, bad_request, retry):
            detail.Unpack(known)
    violations = bad_request.field_violations
    delay = retry.retry_delay
    return IcehouseClientError(
        code,
        message or "no message",
        reason=info.reason,
        metadata=dict(info.metadata),
        field=violations[0].field if violations else None,
        retry_after_s=delay.ToNanoseconds() / 1e9 if retry.HasField("retry_delay") else None,
    )


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Raise what gRPC raises in the block as IcehouseClientError."""
    try:
        yield
    except grpc.RpcError as error:
        # What gRPC raises is the call too, which its types do not say.
        call: Any = error
        raise error_from(call.code(), call.details(), call.trailing_metadata()) from None


def _details(trailing: Iterable[tuple[str, str | bytes]] | None) -> list[error_details_pb2.ErrorInfo]:
    for key, value in trailing or ():
        if key == _DETAILS_KEY:
            return list(status_pb2.Status.FromString(value).details)
    return []
