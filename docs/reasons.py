"""Reasons of refusals: each with its status code and what a client does about it; makes docs/errors.md."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import grpc
from icehouse_server.errors import Reason

_INVALID = grpc.StatusCode.INVALID_ARGUMENT
_EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
_PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION


@dataclasses.dataclass(frozen=True, slots=True)
class ReasonRow:
    """One reason. `code` is None where it only ever ends a command or a server's start."""

    code: grpc.StatusCode | None
    meaning: str
    advice: str
    is_also_local: bool = False
    """Whether commands end with it too, beside calls."""


_FIX = "Fix the field named in BadRequest; retrying unchanged will fail."
_WAIT = "Wait as long as RetryInfo says and retry, or send it to another replica."

REASONS: Mapping[Reason, ReasonRow] = {
    Reason.PROMPT_EMPTY: ReasonRow(_INVALID, "The prompt has no token.", _FIX),
    Reason.PROMPT_MISSING: ReasonRow(_INVALID, "The request has no prompt.", _FIX),
    Reason.PROMPT_AMBIGUOUS: ReasonRow(
        _INVALID, "Two forms of the prompt are set; exactly one is allowed.", _FIX
    ),
    Reason.PROMPT_TOO_LONG: ReasonRow(
        _INVALID,
        "The prompt leaves no room in the model's context.",
        "Shorten it; `context_tokens` is the limit.",
    ),
    Reason.TOKEN_OUT_OF_RANGE: ReasonRow(_INVALID, "A token id is not in the vocabulary.", _FIX),
    Reason.CHAT_INVALID: ReasonRow(_INVALID, "A message is invalid, or invalid at its position.", _FIX),
    Reason.CHAT_TEMPLATE_MISSING: ReasonRow(
        _INVALID, "The model has no chat template.", "Send `text` or `tokens`, or use a chat model."
    ),
    Reason.IMAGE_INVALID: ReasonRow(
        _INVALID,
        "An image cannot be read, is too large, or makes the model's vision code fail.",
        _FIX,
    ),
    Reason.IMAGE_UNREACHABLE: ReasonRow(
        _PRECONDITION,
        "The host of an image URL did not deliver the image, or not in time.",
        "Send the image's bytes, or try again once its host answers.",
    ),
    Reason.IMAGES_UNSUPPORTED: ReasonRow(
        _INVALID, "The model reads only text.", "Leave the images out, or use a model that reads them."
    ),
    Reason.TOOL_INVALID: ReasonRow(_INVALID, "A tool's name or schema cannot be used.", _FIX),
    Reason.TOOL_CHOICE_INVALID: ReasonRow(_INVALID, "`tool_choice` matches no tool of the request.", _FIX),
    Reason.TOOLS_UNSUPPORTED: ReasonRow(
        _INVALID,
        "The model's chat template does not support tools.",
        "Send the request without tools, or use a model that supports them.",
    ),
    Reason.PARAMETER_OUT_OF_RANGE: ReasonRow(_INVALID, "A field has a value that is not allowed.", _FIX),
    Reason.RESPONSE_FORMAT_INVALID: ReasonRow(_INVALID, "The response format cannot be read.", _FIX),
    Reason.GRAMMAR_TOO_COMPLEX: ReasonRow(
        _INVALID,
        "The response format costs more to compile than is allowed.",
        "Use a simpler or smaller format; `metadata` has the limit.",
    ),
    Reason.UNSUPPORTED: ReasonRow(
        _INVALID, "This server, or its model, does not offer it.", "Leave the field out."
    ),
    Reason.METHOD_UNSUPPORTED: ReasonRow(
        grpc.StatusCode.UNIMPLEMENTED,
        "This server does not implement this method of the worker protocol.",
        "Do without it; retrying will not help.",
    ),
    Reason.MODEL_NOT_FOUND: ReasonRow(
        grpc.StatusCode.NOT_FOUND,
        "The server serves another model.",
        "Name `served_model`, or leave `model` empty.",
        is_also_local=True,
    ),
    Reason.ADAPTER_NOT_FOUND: ReasonRow(
        grpc.StatusCode.NOT_FOUND,
        "The server has no adapter of this name.",
        "Name one that ListModels shows, or leave `adapter` empty.",
    ),
    Reason.REQUEST_ID_IN_USE: ReasonRow(
        grpc.StatusCode.ALREADY_EXISTS,
        "The tenant already has a request with this id waiting or running.",
        "Wait until it has ended, choose another id, or leave the id out.",
    ),
    Reason.QUEUE_FULL: ReasonRow(_EXHAUSTED, "The queue of calls, requests or commands is full.", _WAIT),
    Reason.DEADLINE_UNREACHABLE: ReasonRow(
        _EXHAUSTED,
        "The first token would come after the deadline.",
        "Allow more time, or try another replica.",
    ),
    Reason.TENANT_QUEUE_FULL: ReasonRow(
        _EXHAUSTED,
        "The tenant's queue is full.",
        "Send fewer at once; RetryInfo says when.",
    ),
    Reason.TOKEN_RATE_EXCEEDED: ReasonRow(
        _EXHAUSTED,
        "The tenant has used up its tokens for this minute.",
        "Wait as RetryInfo says, or ask for less output.",
    ),
    Reason.READER_STALLED: ReasonRow(
        _EXHAUSTED, "The client did not read the stream.", "Read faster, or ask for less; the output is lost."
    ),
    Reason.MEMORY_SHORT: ReasonRow(_EXHAUSTED, "Other requests hold the memory that this one needs.", _WAIT),
    Reason.MEMORY_NEVER_FITS: ReasonRow(
        _PRECONDITION,
        "The request needs more memory than this machine can give it.",
        "Shorten the prompt or the output, or use a smaller model or a bigger machine.",
        is_also_local=True,
    ),
    Reason.LOADING: ReasonRow(
        grpc.StatusCode.UNAVAILABLE,
        "The model is loading.",
        "Retry with backoff, or wait until health is SERVING.",
    ),
    Reason.MODEL_NOT_LOADED: ReasonRow(
        grpc.StatusCode.UNAVAILABLE,
        "The model, one of several, could not be loaded.",
        "Mend what the server's log names; it is tried again when the next request names it.",
    ),
    Reason.DRAINING: ReasonRow(
        grpc.StatusCode.UNAVAILABLE,
        "The server is stopping.",
        "Send it to another replica; retry with backoff.",
    ),
    Reason.DEADLINE_EXCEEDED: ReasonRow(
        grpc.StatusCode.DEADLINE_EXCEEDED,
        "The client's deadline passed.",
        "Allow more time, or ask for less.",
    ),
    Reason.CANCELLED: ReasonRow(
        grpc.StatusCode.CANCELLED, "The client cancelled the call, or CancelRequest ended it.", "Nothing."
    ),
    Reason.RANK_LOST: ReasonRow(
        grpc.StatusCode.UNAVAILABLE,
        "A machine of the group that serves the model was lost.",
        "Try again after the delay that the error says; the group starts again by itself.",
    ),
    Reason.ENGINE_FAILED: ReasonRow(
        grpc.StatusCode.INTERNAL,
        "The server has a fault.",
        "Report it with the request id; another replica may answer.",
        is_also_local=True,
    ),
    Reason.LOGITS_NOT_FINITE: ReasonRow(
        grpc.StatusCode.INTERNAL,
        "The model's numbers overflowed for this request alone; nothing of it is kept.",
        "Report it with the request id; another number type (`dtype`) or model may avoid it.",
    ),
    Reason.MESSAGE_MISSING: ReasonRow(
        _INVALID, "The call ended without a request message.", "Send one; this is a bug in the client."
    ),
    Reason.MESSAGE_MALFORMED: ReasonRow(
        _INVALID,
        "The bytes are not a message of this method, or it has too many fields.",
        "Use the protos of this API version; send shorter lists.",
    ),
    Reason.MESSAGE_LATE: ReasonRow(
        grpc.StatusCode.DEADLINE_EXCEEDED,
        "The request message did not arrive in time.",
        "Send it faster; retry.",
    ),
    Reason.CREDENTIALS_MISSING: ReasonRow(
        grpc.StatusCode.UNAUTHENTICATED,
        "The server requires a token.",
        "Send `authorization: Bearer <token>`.",
    ),
    Reason.CREDENTIALS_INVALID: ReasonRow(
        grpc.StatusCode.UNAUTHENTICATED,
        "The token is unknown or expired, or the certificate names nobody.",
        "Get new credentials; do not retry with these.",
    ),
    Reason.TENANT_FORBIDDEN: ReasonRow(
        grpc.StatusCode.PERMISSION_DENIED, "The request names another tenant.", "Leave `cache.tenant` empty."
    ),
    Reason.OPERATOR_ONLY: ReasonRow(
        grpc.StatusCode.PERMISSION_DENIED,
        "The call concerns all tenants.",
        "Call with an operator's credentials.",
    ),
    Reason.SHARED_PREFIX_FORBIDDEN: ReasonRow(
        grpc.StatusCode.PERMISSION_DENIED,
        "The prefix is not shared with the tenant.",
        "Leave `cache.shared_prefix_name` empty, or have the server's operator share it.",
    ),
    Reason.BLOCK_NOT_FOUND: ReasonRow(
        grpc.StatusCode.NOT_FOUND,
        "No block of the prompt is cached.",
        "Send the prompt through Warm first.",
        is_also_local=True,
    ),
    Reason.REQUEST_NOT_FOUND: ReasonRow(
        grpc.StatusCode.NOT_FOUND,
        "There is no waiting or running request of this id that the caller may end.",
        "Look at ListRequests; the request may have ended already.",
    ),
    Reason.EMBEDDING_UNSUPPORTED: ReasonRow(
        _PRECONDITION, "The served model does not expose hidden states.", "Use a server with another model."
    ),
    Reason.CACHE_UNSUPPORTED: ReasonRow(
        _PRECONDITION,
        "The server, or the model, has no cache of this kind.",
        "Do without it; GetModel and CacheStats say why.",
    ),
    Reason.EVENTS_EXPIRED: ReasonRow(
        grpc.StatusCode.OUT_OF_RANGE,
        "The KV events after this number are no longer kept, or the number is another server's.",
        "Discard what was received and subscribe from 0.",
    ),
    Reason.EVENTS_LOST: ReasonRow(
        grpc.StatusCode.DATA_LOSS,
        "The subscriber fell too far behind; KV events were lost.",
        "Discard what was received and subscribe from 0; read faster, or raise `kv_events.replay_bytes`.",
    ),
    Reason.STORE_UNUSABLE: ReasonRow(
        _PRECONDITION,
        "The SSD tier has stopped, or its folder cannot be used.",
        "Do without this command; requests are still served, from RAM.",
        is_also_local=True,
    ),
    Reason.CONFIG_INVALID: ReasonRow(
        None, "A setting is unknown or out of range.", "Fix the setting that is named."
    ),
    Reason.MODEL_INVALID: ReasonRow(
        None, "The model's folder cannot be served.", "Fix the folder, or name another one."
    ),
    Reason.ADDRESS_IN_USE: ReasonRow(
        None, "The server cannot listen on the address.", "Choose another address or port."
    ),
    Reason.ADDRESS_INSECURE: ReasonRow(
        None,
        "The address is public, and neither TLS nor credentials protect it.",
        "Set up TLS and credentials, or use loopback.",
    ),
    Reason.CERTIFICATE_INVALID: ReasonRow(
        None, "The certificate, its key or the authorities cannot be used.", "Fix the file that is named."
    ),
    Reason.TOKENS_INVALID: ReasonRow(None, "The token file cannot be used.", "Fix the line that is named."),
    Reason.STORE_LOCKED: ReasonRow(
        None, "Another process uses the cache directory.", "Stop that process, or use another directory."
    ),
    Reason.CACHE_KEY_INVALID: ReasonRow(
        None, "The cache's key cannot be read, or does not fit.", "Fix the file or command that is named."
    ),
    Reason.ENCRYPTION_MISSING: ReasonRow(
        None, "A key is set, but the encryption package is not installed.", "Install the extra that is named."
    ),
}


def markdown() -> str:
    """Return docs/errors.md."""
    of_calls = [(reason, row) for reason, row in REASONS.items() if row.code is not None]
    of_starts = [(reason, row) for reason, row in REASONS.items() if row.code is None or row.is_also_local]
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
        "`make gen` writes this page from `docs/reasons.py`.",
        "",
    ]
    return "\n".join(lines)
