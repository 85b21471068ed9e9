"""Errors as HTTP tells them: a status, and a body in the protocol's own shape."""

from __future__ import annotations

import contextlib
import enum
import math
from collections.abc import Iterator, Mapping
from typing import Any

import grpc
from icehouse_client import IcehouseClientError

from icehouse_http.field_names import NO_NAMES, FieldNames

_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.OUT_OF_RANGE: 400,
    grpc.StatusCode.FAILED_PRECONDITION: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.CANCELLED: 499,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
"""All others are 500."""

_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

_UNAVAILABLE_RETRY_S = 1.0
"""When to try again a server that does not say when."""


class Dialect(enum.Enum):
    """Whose errors a path has."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"


_NO_HEADERS: Mapping[str, str] = {}


def dialect_of(path: str, headers: Mapping[str, str] = _NO_HEADERS) -> Dialect:
    """Return whose API a path belongs to, and of a path of both whose package asks."""
    is_anthropics = path.startswith("/v1/messages") or "anthropic-version" in headers
    return Dialect.ANTHROPIC if is_anthropics else Dialect.OPENAI


class ApiError(Exception):
    """A request that is refused, or failed.

    `code` is Icehouse's reason, `param` the field at fault where there is one.
    """

    def __init__(
        self, status: int, message: str, *, code: str, param: str | None = None, retry_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_s = retry_s

    @property
    def headers(self) -> dict[str, str]:
        """The headers that go with it: when to come again."""
        if self.retry_s is None:
            return {}
        return {
            "retry-after": str(max(1, math.ceil(self.retry_s))),
            "retry-after-ms": str(math.ceil(self.retry_s * 1000)),
        }

    def body(self, dialect: Dialect) -> dict[str, Any]:
        """Return the error as the protocol writes it."""
        is_ours = self.status >= 500
        if dialect is Dialect.ANTHROPIC:
            kind = _ANTHROPIC_TYPES.get(self.status, "api_error" if is_ours else "invalid_request_error")
        else:
            kind = _OPENAI_TYPES.get(self.status, "server_error" if is_ours else "invalid_request_error")
        error = {"type": kind, "message": self.message, "code": self.code, "param": self.param}
        return {"type": "error", "error": error} if dialect is Dialect.ANTHROPIC else {"error": error}


class CallerGone(ApiError):
    """A request whose caller did not wait for the answer, which nobody sees."""

    def __init__(self) -> None:
        super().__init__(499, "the caller has gone", code="CANCELLED")


def bad_request(message: str, *, param: str | None = None) -> ApiError:
    """Return the refusal of a request that cannot be read."""
    return ApiError(400, message, code="invalid_value", param=param)


def api_error(error: IcehouseClientError, names: FieldNames = NO_NAMES) -> ApiError:
    """Return what a failed call is in HTTP, its fields by the caller's names."""
    status = _STATUS.get(error.code, 500)
    retry_s = error.retry_after_s
    if retry_s is None and error.code is grpc.StatusCode.UNAVAILABLE:
        retry_s = _UNAVAILABLE_RETRY_S
    if not error.field:
        return ApiError(status, error.message, code=error.reason, retry_s=retry_s)
    param, message = names.name_of(error.field), names.in_words(error.message, error.field)
    return ApiError(status, message, code=error.reason, param=param, retry_s=retry_s)


@contextlib.contextmanager
def refusing_by(names: FieldNames) -> Iterator[None]:
    """Raise a failed call of the block as ApiError with the caller's names."""
    try:
        yield
    except IcehouseClientError as error:
        raise api_error(error, names) from error
