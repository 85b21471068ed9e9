"""Reason table: every reason with its status code and what a client does about it; makes docs/errors.md."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import grpc

from icehouse_server.errors import Reason

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


_MEND = "Mend the field that BadRequest names; the same request never succeeds."
_WAIT = "Wait as long as RetryInfo says, then send it again, or send it to another replica."

TABLE: Mapping[Reason, Row] = {
    Reason.PROMPT_EMPTY: Row(_INVALID, "The prompt has no token.", _MEND),
    Reason.PROMPT_MISSING: Row(_INVALID, "No prompt, or nothing to evict, is named.", _MEND),
    Reason.PROMPT_AMBIGUOUS: Row(_INVALID, "Two prompts are set; one is wanted.", _MEND),
    Reason.PROMPT_TOO_LONG: Row(
        _INVALID,
        "The prompt leaves no room in the model's context.",
        "Shorten it; `context_tokens` is the limit.",
    ),
    Reason.TOKEN_OUT_OF_RANGE: Row(_INVALID, "A token id is not in the vocabulary.", _MEND),
    Reason.CHAT_INVALID: Row(_INVALID, "The conversation has a turn that cannot be, or not there.", _MEND),
    Reason.CHAT_TEMPLATE_MISSING: Row(
        _INVALID, "The model has no chat template.", "Send `text` or `tokens`, or use a chat model."
    ),
    Reason.IMAGE_INVALID: Row(
        _INVALID,
        "An image cannot be read, is larger than images may be here, or is one on which the model's vision "
        "tower fails.",
        _MEND,
    ),
    Reason.IMAGE_UNREACHABLE: Row(
        _PRECONDITION,
        "The host that an image is to be fetched from does not give it now, or not in time.",
        "Send the image's bytes, or try again once its host answers.",
    ),
    Reason.IMAGES_UNSUPPORTED: Row(
        _INVALID, "The model reads text alone.", "Leave the images out, or use a model that reads them."
    ),
    Reason.TOOL_INVALID: Row(_INVALID, "A tool's name or schema cannot be used.", _MEND),
    Reason.TOOL_CHOICE_INVALID: Row(_INVALID, "The choice of tools fits no tool of the request.", _MEND),
    Reason.TOOLS_UNSUPPORTED: Row(
        _INVALID,
        "The model's chat template knows no tools.",
        "Send the request without tools, or use a model with.",
    ),
    Reason.PARAMETER_OUT_OF_RANGE: Row(_INVALID, "A field has a value that is not allowed.", _MEND),
    Reason.RESPONSE_FORMAT_INVALID: Row(_INVALID, "The response format cannot be read.", _MEND),
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
        "A method of the worker protocol that this server does not have.",
        "Do without it; nothing will change here.",
    ),
    Reason.MODEL_NOT_FOUND: Row(
        grpc.StatusCode.NOT_FOUND,
        "Another model is served.",
        "Name `served_model`, or leave `model` empty.",
        is_also_local=True,
    ),
    Reason.ADAPTER_NOT_FOUND: Row(
        grpc.StatusCode.NOT_FOUND,
        "No adapter of this name is served.",
        "Name one that ListModels shows, or leave `adapter` empty.",
    ),
    Reason.REQUEST_ID_IN_USE: Row(
        grpc.StatusCode.ALREADY_EXISTS,
        "A request of this id and tenant waits or runs.",
        "Wait until it has ended, or choose another id, or none.",
    ),
    Reason.QUEUE_FULL: Row(_EXHAUSTED, "As many calls, requests or orders wait as may.", _WAIT),
    Reason.DEADLINE_UNREACHABLE: Row(
        _EXHAUSTED,
        "The first token is expected after the deadline.",
        "Allow more time, or try another replica.",
    ),
    Reason.TENANT_QUEUE_FULL: Row(
        _EXHAUSTED,
        "As many of the tenant's requests wait as may.",
        "Send fewer at once; RetryInfo says when.",
    ),
    Reason.TOKEN_RATE_EXCEEDED: Row(
        _EXHAUSTED,
        "The tenant has used its tokens of this minute.",
        "Wait as RetryInfo says, or ask for less output.",
    ),
    Reason.READER_STALLED: Row(
        _EXHAUSTED, "The caller did not read the stream.", "Read faster, or ask for less; the output is lost."
    ),
    Reason.MEMORY_SHORT: Row(_EXHAUSTED, "Others hold the memory that it needs.", _WAIT),
    Reason.MEMORY_NEVER_FITS: Row(
        _PRECONDITION, "This machine can never hold it.", "Shorten prompt or output, or use a bigger machine."
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
        "The caller's deadline passed.",
        "Allow more time, or ask for less.",
    ),
    Reason.CANCELLED: Row(
        grpc.StatusCode.CANCELLED, "The caller took the call back, or CancelRequest ended it.", "Nothing."
    ),
    Reason.ENGINE_FAILED: Row(
        grpc.StatusCode.INTERNAL,
        "A fault of the server.",
        "Report it with the request id; another replica may answer.",
        is_also_local=True,
    ),
    Reason.LOGITS_NOT_FINITE: Row(
        grpc.StatusCode.INTERNAL,
        "The model's numbers overflowed for this request alone; nothing of it is kept.",
        "Report it with the request id; another number type (`dtype`) or model may have room for it.",
    ),
    Reason.MESSAGE_MISSING: Row(
        _INVALID, "The call ended without a request message.", "Send one; mend the client."
    ),
    Reason.MESSAGE_MALFORMED: Row(
        _INVALID,
        "The bytes are no message of this method, or have more fields than one may have.",
        "Use the protos of this API version; send shorter lists.",
    ),
    Reason.MESSAGE_LATE: Row(
        grpc.StatusCode.DEADLINE_EXCEEDED,
        "The request message did not arrive in time.",
        "Send it faster; retry.",
    ),
    Reason.CREDENTIALS_MISSING: Row(
        grpc.StatusCode.UNAUTHENTICATED, "The server wants a token.", "Send `authorization: Bearer <token>`."
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
        grpc.StatusCode.PERMISSION_DENIED, "It concerns all tenants.", "Call with an operator's credentials."
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
        "No request of this name that the caller may end waits or runs.",
        "Look at ListRequests; one that has ended needs no ending.",
    ),
    Reason.EMBEDDING_UNSUPPORTED: Row(
        _PRECONDITION, "The served model shows no hidden states.", "Use a server with another model."
    ),
    Reason.CACHE_UNSUPPORTED: Row(
        _PRECONDITION,
        "The server, or the model, has no cache of this kind.",
        "Do without; GetModel and CacheStats say why.",
    ),
    Reason.EVENTS_EXPIRED: Row(
        grpc.StatusCode.OUT_OF_RANGE,
        "The KV events to go on from are kept no longer, or another server gave the number.",
        "Forget what was told and subscribe from 0.",
    ),
    Reason.EVENTS_LOST: Row(
        grpc.StatusCode.DATA_LOSS,
        "The subscriber fell behind the KV events that are kept.",
        "Forget what was told and subscribe from 0; read faster, or raise `kv_events.replay_bytes`.",
    ),
    Reason.STORE_UNUSABLE: Row(
        _PRECONDITION,
        "The SSD tier has stopped, or its folder cannot be used.",
        "Go on without the order; requests are served from RAM.",
        is_also_local=True,
    ),
    Reason.CONFIG_INVALID: Row(
        None, "A setting is unknown or out of range.", "Mend the setting that is named."
    ),
    Reason.MODEL_INVALID: Row(
        None, "The model's folder cannot be served.", "Mend the folder or name another."
    ),
    Reason.ADDRESS_IN_USE: Row(None, "The address cannot be listened on.", "Choose another address or port."),
    Reason.ADDRESS_INSECURE: Row(
        None, "The address is public and nothing secures it.", "Set up TLS and credentials, or use loopback."
    ),
    Reason.CERTIFICATE_INVALID: Row(
        None, "Certificate, key or authorities cannot be used.", "Mend the file named."
    ),
    Reason.TOKENS_INVALID: Row(None, "The token file cannot be used.", "Mend the line that is named."),
    Reason.STORE_LOCKED: Row(
        None, "Another process has the cache directory.", "Stop that one, or name another directory."
    ),
    Reason.CACHE_KEY_INVALID: Row(
        None, "The cache's key cannot be had, or opens nothing.", "Mend the file or command that is named."
    ),
    Reason.ENCRYPTION_MISSING: Row(
        None, "A key is set, and the package for it is not installed.", "Install the extra that is named."
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
        "whose `reason` is one of these names. Names never change, and new ones may come: treat one that",
        "you do not know by its code. `metadata` holds every number of the message. Statuses without an",
        "ErrorInfo come from gRPC itself, from a proxy, or from the connection.",
        "",
        "This page is written by `make gen` from `service/icehouse_server/rpc/calls/reason_table.py`.",
        "",
        "| reason | code | meaning | what the client does |",
        "|---|---|---|---|",
        *(
            f"| `{reason.value}` | {row.code.name} | {row.meaning} | {row.advice} |"
            for reason, row in of_calls
            if row.code is not None
        ),
        "",
        "## Of commands and of a server's start",
        "",
        "These never reach a caller. The process prints one line and ends with exit code 1, or 2 for",
        "settings.",
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
    ]
    return "\n".join(lines)
