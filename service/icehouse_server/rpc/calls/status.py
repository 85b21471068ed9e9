"""Status: IcehouseError to gRPC status with google.rpc details, by the table of reasons."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from icehouse_server import errors
from icehouse_server.errors import IcehouseError, Reason

ERROR_DOMAIN = "icehouse.dev"
"""`domain` of every ErrorInfo."""

_FOR_THE_CALLER = frozenset({Reason.TOKEN_RATE_EXCEEDED, Reason.DEADLINE_UNREACHABLE})
"""Refusals that a library should not try again on its own: a budget comes back in a minute, and the same
deadline is missed again. Told of a delay, Java's library waits and tries again whatever the code is."""

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
    """Return the canonical code; INTERNAL for what is never the caller's doing."""
    for error_type, code in _CODES:
        if isinstance(error, error_type):
            return code
    if error.reason is Reason.CACHE_UNSUPPORTED:
        return grpc.StatusCode.FAILED_PRECONDITION
    return grpc.StatusCode.INTERNAL


def status_of(error: IcehouseError) -> grpc.Status:
    """Return the status with ErrorInfo and whichever other details the error has facts for."""
    code = code_of(error)
    message = _clipped(error.message, MESSAGE_LENGTH_LIMIT)
    proto = status_pb2.Status(code=code.value[0], message=message)
    for detail in _details(error, code=code, message=message):
        packed = AnyMessage()
        packed.Pack(detail)
        proto.details.append(packed)
    status = rpc_status.to_status(proto)
    if error.retry_after_s is None or error.reason in _FOR_THE_CALLER:
        return status
    pushback = ("grpc-retry-pushback-ms", str(int(error.retry_after_s * 1000)))
    metadata = (*status.trailing_metadata, pushback)
    return _Status(code=status.code, details=status.details, trailing_metadata=metadata)


@dataclasses.dataclass(frozen=True, slots=True)
class _Status(grpc.Status):
    """A status whose trailers say how long to wait before a retry (gRPC proposal A6)."""

    code: grpc.StatusCode
    details: str
    trailing_metadata: Any


def with_trailers(status: grpc.Status, trailers: tuple[tuple[str, str | bytes], ...]) -> grpc.Status:
    """Return the status with more trailing metadata."""
    if not trailers:
        return status
    metadata = (*(status.trailing_metadata or ()), *trailers)
    return _Status(code=status.code, details=status.details, trailing_metadata=metadata)


def internal_error() -> IcehouseError:
    """Return what a caller may know of an exception that nobody foresaw: nothing."""
    return errors.EngineFailed(
        Reason.ENGINE_FAILED, "an internal error; the server's log has the details under this request_id"
    )


def _details(error: IcehouseError, *, code: grpc.StatusCode, message: str) -> list[Message]:
    metadata = {name: _clipped(value, VALUE_LENGTH_LIMIT) for name, value in error.metadata.items()}
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


def _clipped(text: str, length_limit: int) -> str:
    return text if len(text) <= length_limit else text[: length_limit - 1] + "…"


_INVALID = grpc.StatusCode.INVALID_ARGUMENT
_EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
_PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One reason. `code` is None where it only ever ends a command or a server's start."""

    code: grpc.StatusCode | None
    meaning: str
    advice: str
    is_also_local: bool = False
    """Whether commands end with it too, beside calls."""


_FIX = "Fix the field named in BadRequest; retrying unchanged will fail."
_WAIT = "Wait as long as RetryInfo says and retry, or send it to another replica."

TABLE: Mapping[Reason, Row] = {
    Reason.PROMPT_EMPTY: Row(_INVALID, "The prompt has no token.", _FIX),
    Reason.PROMPT_MISSING: Row(_INVALID, "The request has no prompt, or names nothing to evict.", _FIX),
    Reason.PROMPT_AMBIGUOUS: Row(_INVALID, "Two prompts are set; exactly one is allowed.", _FIX),
    Reason.PROMPT_TOO_LONG: Row(
        _INVALID,
        "The prompt leaves no room in the model's context.",
        "Shorten it; `context_tokens` is the limit.",
    ),
    Reason.TOKEN_OUT_OF_RANGE: Row(_INVALID, "A token id is not in the vocabulary.", _FIX),
    Reason.CHAT_INVALID: Row(_INVALID, "A message is invalid, or invalid at its position.", _FIX),
    Reason.CHAT_TEMPLATE_MISSING: Row(
        _INVALID, "The model has no chat template.", "Send `text` or `tokens`, or use a chat model."
    ),
    Reason.IMAGE_INVALID: Row(
        _INVALID,
        "An image cannot be read, is too large, or makes the model's vision code fail.",
        _FIX,
    ),
    Reason.IMAGE_UNREACHABLE: Row(
        _PRECONDITION,
        "The host of an image URL did not deliver the image, or not in time.",
        "Send the image's bytes, or try again once its host answers.",
    ),
    Reason.IMAGES_UNSUPPORTED: Row(
        _INVALID, "The model reads only text.", "Leave the images out, or use a model that reads them."
    ),
    Reason.TOOL_INVALID: Row(_INVALID, "A tool's name or schema cannot be used.", _FIX),
    Reason.TOOL_CHOICE_INVALID: Row(_INVALID, "`tool_choice` matches no tool of the request.", _FIX),
    Reason.TOOLS_UNSUPPORTED: Row(
        _INVALID,
        "The model's chat template does not support tools.",
        "Send the request without tools, or use a model that supports them.",
    ),
    Reason.PARAMETER_OUT_OF_RANGE: Row(_INVALID, "A field has a value that is not allowed.", _FIX),
    Reason.RESPONSE_FORMAT_INVALID: Row(_INVALID, "The response format cannot be read.", _FIX),
    Reason.GRAMMAR_TOO_COMPLEX: Row(
        _INVALID,
        "The response format costs more to compile than is allowed.",
        "Use a simpler or smaller format; `metadata` has the limit.",
    ),
    Reason.UNSUPPORTED: Row(
        _INVALID, "This server, or its model, does not offer it.", "Leave the field out."
    ),
    Reason.METHOD_UNSUPPORTED: Row(
        grpc.StatusCode.UNIMPLEMENTED,
        "This server does not implement this method of the worker protocol.",
        "Do without it; retrying will not help.",
    ),
    Reason.MODEL_NOT_FOUND: Row(
        grpc.StatusCode.NOT_FOUND,
        "The server serves another model.",
        "Name `served_model`, or leave `model` empty.",
        is_also_local=True,
    ),
    Reason.ADAPTER_NOT_FOUND: Row(
        grpc.StatusCode.NOT_FOUND,
        "The server has no adapter of this name.",
        "Name one that ListModels shows, or leave `adapter` empty.",
    ),
    Reason.REQUEST_ID_IN_USE: Row(
        grpc.StatusCode.ALREADY_EXISTS,
        "The tenant already has a request with this id waiting or running.",
        "Wait until it has ended, choose another id, or leave the id out.",
    ),
    Reason.QUEUE_FULL: Row(_EXHAUSTED, "The queue of calls, requests or commands is full.", _WAIT),
    Reason.DEADLINE_UNREACHABLE: Row(
        _EXHAUSTED,
        "The first token would come after the deadline.",
        "Allow more time, or try another replica.",
    ),
    Reason.TENANT_QUEUE_FULL: Row(
        _EXHAUSTED,
        "The tenant's queue is full.",
        "Send fewer at once; RetryInfo says when.",
    ),
    Reason.TOKEN_RATE_EXCEEDED: Row(
        _EXHAUSTED,
        "The tenant has used up its tokens for this minute.",
        "Wait as RetryInfo says, or ask for less output.",
    ),
    Reason.READER_STALLED: Row(
        _EXHAUSTED, "The client did not read the stream.", "Read faster, or ask for less; the output is lost."
    ),
    Reason.MEMORY_SHORT: Row(_EXHAUSTED, "Other requests hold the memory that this one needs.", _WAIT),
    Reason.MEMORY_NEVER_FITS: Row(
        _PRECONDITION,
        "The request needs more memory than this machine can give it.",
        "Shorten the prompt or the output, or use a bigger machine.",
    ),
    Reason.LOADING: Row(
        grpc.StatusCode.UNAVAILABLE,
        "The model is loading.",
        "Retry with backoff, or wait until health is SERVING.",
    ),
    Reason.DRAINING: Row(
        grpc.StatusCode.UNAVAILABLE,
        "The server is stopping.",
        "Send it to another replica; retry with backoff.",
    ),
    Reason.DEADLINE_EXCEEDED: Row(
        grpc.StatusCode.DEADLINE_EXCEEDED,
        "The client's deadline passed.",
        "Allow more time, or ask for less.",
    ),
    Reason.CANCELLED: Row(
        grpc.StatusCode.CANCELLED, "The client cancelled the call, or CancelRequest ended it.", "Nothing."
    ),
    Reason.ENGINE_FAILED: Row(
        grpc.StatusCode.INTERNAL,
        "The server has a fault.",
        "Report it with the request id; another replica may answer.",
        is_also_local=True,
    ),
    Reason.LOGITS_NOT_FINITE: Row(
        grpc.StatusCode.INTERNAL,
        "The model's numbers overflowed for this request alone; nothing of it is kept.",
        "Report it with the request id; another number type (`dtype`) or model may avoid it.",
    ),
    Reason.MESSAGE_MISSING: Row(
        _INVALID, "The call ended without a request message.", "Send one; this is a bug in the client."
    ),
    Reason.MESSAGE_MALFORMED: Row(
        _INVALID,
        "The bytes are not a message of this method, or it has too many fields.",
        "Use the protos of this API version; send shorter lists.",
    ),
    Reason.MESSAGE_LATE: Row(
        grpc.StatusCode.DEADLINE_EXCEEDED,
        "The request message did not arrive in time.",
        "Send it faster; retry.",
    ),
    Reason.CREDENTIALS_MISSING: Row(
        grpc.StatusCode.UNAUTHENTICATED,
        "The server requires a token.",
        "Send `authorization: Bearer <token>`.",
    ),
    Reason.CREDENTIALS_INVALID: Row(
        grpc.StatusCode.UNAUTHENTICATED,
        "The token is unknown or expired, or the certificate names nobody.",
        "Get new credentials; do not retry with these.",
    ),
    Reason.TENANT_FORBIDDEN: Row(
        grpc.StatusCode.PERMISSION_DENIED, "The request names another tenant.", "Leave `cache.tenant` empty."
    ),
    Reason.OPERATOR_ONLY: Row(
        grpc.StatusCode.PERMISSION_DENIED,
        "The call concerns all tenants.",
        "Call with an operator's credentials.",
    ),
    Reason.SHARED_PREFIX_FORBIDDEN: Row(
        grpc.StatusCode.PERMISSION_DENIED,
        "The prefix is not shared with the tenant.",
        "Leave `cache.shared_prefix_name` empty, or have the server's operator share it.",
    ),
    Reason.BLOCK_NOT_FOUND: Row(
        grpc.StatusCode.NOT_FOUND,
        "No block of the prompt is cached.",
        "Send the prompt through Warm first.",
        is_also_local=True,
    ),
    Reason.REQUEST_NOT_FOUND: Row(
        grpc.StatusCode.NOT_FOUND,
        "There is no waiting or running request of this id that the caller may end.",
        "Look at ListRequests; the request may have ended already.",
    ),
    Reason.EMBEDDING_UNSUPPORTED: Row(
        _PRECONDITION, "The served model does not expose hidden states.", "Use a server with another model."
    ),
    Reason.CACHE_UNSUPPORTED: Row(
        _PRECONDITION,
        "The server, or the model, has no cache of this kind.",
        "Do without it; GetModel and CacheStats say why.",
    ),
    Reason.EVENTS_EXPIRED: Row(
        grpc.StatusCode.OUT_OF_RANGE,
        "The KV events after this number are no longer kept, or the number is another server's.",
        "Discard what was received and subscribe from 0.",
    ),
    Reason.EVENTS_LOST: Row(
        grpc.StatusCode.DATA_LOSS,
        "The subscriber fell too far behind; KV events were lost.",
        "Discard what was received and subscribe from 0; read faster, or raise `kv_events.replay_bytes`.",
    ),
    Reason.STORE_UNUSABLE: Row(
        _PRECONDITION,
        "The SSD tier has stopped, or its folder cannot be used.",
        "Do without this command; requests are still served, from RAM.",
        is_also_local=True,
    ),
    Reason.CONFIG_INVALID: Row(
        None, "A setting is unknown or out of range.", "Fix the setting that is named."
    ),
    Reason.MODEL_INVALID: Row(
        None, "The model's folder cannot be served.", "Fix the folder, or name another one."
    ),
    Reason.ADDRESS_IN_USE: Row(
        None, "The server cannot listen on the address.", "Choose another address or port."
    ),
    Reason.ADDRESS_INSECURE: Row(
        None,
        "The address is public, and neither TLS nor credentials protect it.",
        "Set up TLS and credentials, or use loopback.",
    ),
    Reason.CERTIFICATE_INVALID: Row(
        None, "The certificate, its key or the authorities cannot be used.", "Fix the file that is named."
    ),
    Reason.TOKENS_INVALID: Row(None, "The token file cannot be used.", "Fix the line that is named."),
    Reason.STORE_LOCKED: Row(
        None, "Another process uses the cache directory.", "Stop that process, or use another directory."
    ),
    Reason.CACHE_KEY_INVALID: Row(
        None, "The cache's key cannot be read, or does not fit.", "Fix the file or command that is named."
    ),
    Reason.ENCRYPTION_MISSING: Row(
        None, "A key is set, but the encryption package is not installed.", "Install the extra that is named."
    ),
}


def markdown() -> str:
    """Return docs/errors.md."""
    of_calls = [(reason, row) for reason, row in TABLE.items() if row.code is not None]
    of_starts = [(reason, row) for reason, row in TABLE.items() if row.code is None or row.is_also_local]
    lines = [
        "# Reasons",
        "",
        "A refused call has a canonical status code and a `google.rpc.ErrorInfo` (domain `icehouse.dev`)",
        "whose `reason` is one of these names. Names never change, but new ones may be added: handle an",
        "unknown one by its code. `metadata` holds every number of the message. Statuses without an",
        "ErrorInfo come from gRPC itself, from a proxy, or from the connection.",
        "",
        "| reason | code | meaning | what the client does |",
        "|---|---|---|---|",
        *(
            f"| `{reason.value}` | {row.code.name} | {row.meaning} | {row.advice} |"
            for reason, row in of_calls
            if row.code is not None
        ),
        "",
        "## Commands and server start",
        "",
        "These never reach a client. The process prints one line and exits with 1, or with 2 if a setting",
        "is at fault.",
        "",
        "| reason | meaning | what to do |",
        "|---|---|---|",
        *(
            f"| `{reason.value}` | {row.meaning} | {row.advice} |"
            for reason, row in of_starts
            if row.code is None
        ),
        "",
        "Commands may also end with "
        + ", ".join(f"`{reason.value}`" for reason, row in of_starts if row.code is not None)
        + ".",
        "",
        "`make gen` writes this page from `service/icehouse_server/rpc/calls/status.py`.",
        "",
    ]
    return "\n".join(lines)
