"""Reading a status the way a caller does."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A status with its google.rpc details by kind, None for those that it lacks."""

    code: grpc.StatusCode
    message: str
    info: Any
    bad_request: Any
    retry: Any
    quota: Any

    @property
    def reason(self) -> str:
        return str(self.info.reason)

    @property
    def field(self) -> str | None:
        return None if self.bad_request is None else str(self.bad_request.field_violations[0].field)


def refusal_of(error: grpc.aio.AioRpcError) -> Refusal:
    """Unpack the details; the status inside must agree with the one outside."""
    [packed] = [value for key, value in error.trailing_metadata() if key == "grpc-status-details-bin"]
    status = status_pb2.Status.FromString(packed)
    assert (status.code, status.message) == (error.code().value[0], error.details())
    kinds = {
        "info": error_details_pb2.ErrorInfo(),
        "bad_request": error_details_pb2.BadRequest(),
        "retry": error_details_pb2.RetryInfo(),
        "quota": error_details_pb2.QuotaFailure(),
    }
    found: dict[str, Any] = dict.fromkeys(kinds)
    for detail in status.details:
        for name, message in kinds.items():
            if detail.Unpack(message):
                found[name] = message
    assert found["info"].domain == "icehouse.dev"
    return Refusal(code=error.code(), message=status.message, **found)


async def refused(call: Awaitable[object]) -> Refusal:
    """Await a call that must be refused with details."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return refusal_of(caught.value)
