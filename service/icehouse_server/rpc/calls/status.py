"""Status: IcehouseError to gRPC status with google.rpc details, by the class of the error."""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from icehouse_server import errors
from icehouse_server.errors import IcehouseError, Reason, clipped

ERROR_DOMAIN = "icehouse.dev"
"""`domain` of every ErrorInfo."""

_FOR_THE_CALLER = frozenset({Reason.TOKEN_RATE_EXCEEDED, Reason.DEADLINE_UNREACHABLE})
"""Refusals that a client library should not retry by itself: a budget refills within a minute, and the same
deadline would be missed again. With a delay, Java's library retries whatever the code is."""

MESSAGE_LENGTH_LIMIT = 500
VALUE_LENGTH_LIMIT = 200
"""Statuses travel as HTTP/2 trailers, of which clients accept 8 KiB by default."""


_CODES: tuple[tuple[type[IcehouseError], grpc.StatusCode], ...] = (
    (errors.InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.Unimplemented, grpc.StatusCode.UNIMPLEMENTED),
    (errors.NotFound, grpc.StatusCode.NOT_FOUND),
    (errors.AlreadyExists, grpc.StatusCode.ALREADY_EXISTS),
    (errors.Unauthenticated, grpc.StatusCode.UNAUTHENTICATED),
    (errors.Forbidden, grpc.StatusCode.PERMISSION_DENIED),
    (errors.Overloaded, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.CannotFit, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.SourceUnreachable, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.StorageError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.Unavailable, grpc.StatusCode.UNAVAILABLE),
    (errors.DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED),
    (errors.Cancelled, grpc.StatusCode.CANCELLED),
    (errors.EventsExpired, grpc.StatusCode.OUT_OF_RANGE),
    (errors.EventsLost, grpc.StatusCode.DATA_LOSS),
)


def code_of(error: IcehouseError) -> grpc.StatusCode:
    """Return the canonical code; INTERNAL for errors that are never the caller's fault."""
    for error_type, code in _CODES:
        if isinstance(error, error_type):
            return code
    if error.reason is Reason.CACHE_UNSUPPORTED:
        return grpc.StatusCode.FAILED_PRECONDITION
    return grpc.StatusCode.INTERNAL


def status_of(error: IcehouseError) -> grpc.Status:
    """Return the status with ErrorInfo and the other details that the error has values for."""
    code = code_of(error)
    message = clipped(error.message, MESSAGE_LENGTH_LIMIT)
    proto = status_pb2.Status(code=code.value[0], message=message)
    for detail in _details(error, code=code, message=message):
        proto.details.add().Pack(detail)
    status = rpc_status.to_status(proto)
    if error.retry_after_s is None or error.reason in _FOR_THE_CALLER:
        return status
    # How long to wait before a retry (gRPC proposal A6).
    return with_trailers(status, (("grpc-retry-pushback-ms", str(int(error.retry_after_s * 1000))),))


def with_trailers(status: grpc.Status, trailers: tuple[tuple[str, str | bytes], ...]) -> grpc.Status:
    """Return the status with more trailing metadata."""
    if not trailers:
        return status
    made: Any = status  # `rpc_status` returns a named tuple
    replaced: grpc.Status = made._replace(trailing_metadata=(*(status.trailing_metadata or ()), *trailers))
    return replaced


def _details(error: IcehouseError, *, code: grpc.StatusCode, message: str) -> list[Message]:
    metadata = {name: clipped(value, VALUE_LENGTH_LIMIT) for name, value in error.metadata.items()}
    info = error_details_pb2.ErrorInfo(reason=error.reason.value, domain=ERROR_DOMAIN, metadata=metadata)
    details: list[Message] = [info]
    if error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=message, reason=error.reason.value
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        delay = Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        subject = f"tenant:{metadata['tenant']}" if "tenant" in metadata else error.reason.value
        quota = error_details_pb2.QuotaFailure.Violation(subject=subject, description=message)
        details.append(error_details_pb2.QuotaFailure(violations=[quota]))
    return details
