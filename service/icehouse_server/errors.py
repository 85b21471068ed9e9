"""Operating errors: one tree, raised where the intent is known, mapped to gRPC once, in `rpc/`.

Every error has a `Reason` (stable, machine-readable), a message that says what failed, with which value,
against which limit and what to do next, and the numbers of that message in `metadata`. Broken invariants are
asserts, never one of these.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator, Mapping


class Reason(enum.StrEnum):
    """Why a call failed or the process did not start. The names are API: never renamed."""

    PROMPT_EMPTY = "PROMPT_EMPTY"
    PROMPT_MISSING = "PROMPT_MISSING"
    PROMPT_AMBIGUOUS = "PROMPT_AMBIGUOUS"
    PROMPT_TOO_LONG = "PROMPT_TOO_LONG"
    TOKEN_OUT_OF_RANGE = "TOKEN_OUT_OF_RANGE"
    CHAT_INVALID = "CHAT_INVALID"
    CHAT_TEMPLATE_MISSING = "CHAT_TEMPLATE_MISSING"
    IMAGE_INVALID = "IMAGE_INVALID"
    IMAGE_UNREACHABLE = "IMAGE_UNREACHABLE"
    IMAGES_UNSUPPORTED = "IMAGES_UNSUPPORTED"
    TOOL_INVALID = "TOOL_INVALID"
    TOOL_CHOICE_INVALID = "TOOL_CHOICE_INVALID"
    TOOLS_UNSUPPORTED = "TOOLS_UNSUPPORTED"
    PARAMETER_OUT_OF_RANGE = "PARAMETER_OUT_OF_RANGE"
    RESPONSE_FORMAT_INVALID = "RESPONSE_FORMAT_INVALID"
    GRAMMAR_TOO_COMPLEX = "GRAMMAR_TOO_COMPLEX"
    UNSUPPORTED = "UNSUPPORTED"
    METHOD_UNSUPPORTED = "METHOD_UNSUPPORTED"
    MODEL_NOT_FOUND = "MODEL_NOT_FOUND"
    MODEL_NOT_LOADED = "MODEL_NOT_LOADED"
    ADAPTER_NOT_FOUND = "ADAPTER_NOT_FOUND"
    REQUEST_ID_IN_USE = "REQUEST_ID_IN_USE"
    QUEUE_FULL = "QUEUE_FULL"
    DEADLINE_UNREACHABLE = "DEADLINE_UNREACHABLE"
    TENANT_QUEUE_FULL = "TENANT_QUEUE_FULL"
    TOKEN_RATE_EXCEEDED = "TOKEN_RATE_EXCEEDED"
    READER_STALLED = "READER_STALLED"
    MEMORY_SHORT = "MEMORY_SHORT"
    MEMORY_NEVER_FITS = "MEMORY_NEVER_FITS"
    LOADING = "LOADING"
    DRAINING = "DRAINING"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    CANCELLED = "CANCELLED"
    ENGINE_FAILED = "ENGINE_FAILED"
    RANK_LOST = "RANK_LOST"
    LOGITS_NOT_FINITE = "LOGITS_NOT_FINITE"
    MESSAGE_MISSING = "MESSAGE_MISSING"
    MESSAGE_MALFORMED = "MESSAGE_MALFORMED"
    MESSAGE_LATE = "MESSAGE_LATE"
    CREDENTIALS_MISSING = "CREDENTIALS_MISSING"
    CREDENTIALS_INVALID = "CREDENTIALS_INVALID"
    TENANT_FORBIDDEN = "TENANT_FORBIDDEN"
    OPERATOR_ONLY = "OPERATOR_ONLY"
    SHARED_PREFIX_FORBIDDEN = "SHARED_PREFIX_FORBIDDEN"
    CONFIG_INVALID = "CONFIG_INVALID"
    MODEL_INVALID = "MODEL_INVALID"
    ADDRESS_IN_USE = "ADDRESS_IN_USE"
    ADDRESS_INSECURE = "ADDRESS_INSECURE"
    CERTIFICATE_INVALID = "CERTIFICATE_INVALID"
    TOKENS_INVALID = "TOKENS_INVALID"
    STORE_LOCKED = "STORE_LOCKED"
    STORE_UNUSABLE = "STORE_UNUSABLE"
    CACHE_KEY_INVALID = "CACHE_KEY_INVALID"
    ENCRYPTION_MISSING = "ENCRYPTION_MISSING"
    BLOCK_NOT_FOUND = "BLOCK_NOT_FOUND"
    REQUEST_NOT_FOUND = "REQUEST_NOT_FOUND"
    EMBEDDING_UNSUPPORTED = "EMBEDDING_UNSUPPORTED"
    CACHE_UNSUPPORTED = "CACHE_UNSUPPORTED"
    EVENTS_EXPIRED = "EVENTS_EXPIRED"
    EVENTS_LOST = "EVENTS_LOST"


class IcehouseError(Exception):
    """Base of every operating error.

    `metadata` has each number and each name in the message as text for programs; None values are left out.
    `field` names the faulty request field in proto spelling; `retry_after_s` is a measured delay in seconds.
    """

    def __init__(
        self,
        reason: Reason,
        message: str,
        *,
        field: str | None = None,
        retry_after_s: float | None = None,
        metadata: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s
        self.metadata = {name: _raw(value) for name, value in (metadata or {}).items() if value is not None}


def _raw(value: object) -> str:
    """Return a value as text for programs: strings unquoted, `true` and `false` as in JSON."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def clipped(text: str, length_limit: int) -> str:
    """Return a text for a message, cut to at most `length_limit` characters."""
    return text if len(text) <= length_limit else text[: length_limit - 1] + "…"


class InvalidRequest(IcehouseError):
    """The request can never succeed as written (INVALID_ARGUMENT)."""


class Unimplemented(IcehouseError):
    """This server does not support the method (UNIMPLEMENTED)."""


class NotFound(IcehouseError):
    """The named thing does not exist here (NOT_FOUND)."""


class AlreadyExists(IcehouseError):
    """A running request already has this id (ALREADY_EXISTS)."""


class Unauthenticated(IcehouseError):
    """The caller did not prove who it is (UNAUTHENTICATED)."""


class Forbidden(IcehouseError):
    """The caller is known and may not do this (PERMISSION_DENIED)."""


class Overloaded(IcehouseError):
    """A queue or budget is full; trying again later may work (RESOURCE_EXHAUSTED)."""


class CannotFit(IcehouseError):
    """The request can never fit this machine (FAILED_PRECONDITION)."""


class SourceUnreachable(IcehouseError):
    """Another host does not provide what the request names (FAILED_PRECONDITION)."""


class Unavailable(IcehouseError):
    """Loading or draining; another replica may answer (UNAVAILABLE)."""


class DeadlineExceeded(IcehouseError):
    """The client's deadline passed (DEADLINE_EXCEEDED)."""


class Cancelled(IcehouseError):
    """The client went away or cancelled (CANCELLED)."""


class EngineFailed(IcehouseError):
    """The inference loop died: a broken invariant, never the client's fault (INTERNAL)."""


class ModelOutputInvalid(IcehouseError):
    """The model computed values that are not numbers for this request; the others continue (INTERNAL)."""


class EventsExpired(IcehouseError):
    """The events from which a subscriber wants to continue are no longer kept (OUT_OF_RANGE)."""


class EventsLost(IcehouseError):
    """A subscriber fell behind the events that are kept (DATA_LOSS)."""


class ConfigError(IcehouseError):
    """A setting is unknown or out of range; the process does not start."""


class ModelError(IcehouseError):
    """The model folder is missing, incomplete or of an unknown kind; the process does not start."""


def model_invalid(message: str, *, metadata: Mapping[str, object] | None = None) -> ModelError:
    """Return the error of a model folder that cannot be served."""
    return ModelError(Reason.MODEL_INVALID, message, metadata=metadata)


class StartError(IcehouseError):
    """An address or directory that the process needs is not available; the process does not start."""


class StorageError(IcehouseError):
    """The SSD tier cannot do what was asked; requests continue without it."""


def extra_command(extra: str) -> str:
    """Return the command that installs an extra, for messages that say what to do next.

    From the checkout: no index has the package yet, so a package of that name would be somebody else's.
    """
    return (
        f"`pip install -e '.[{extra}]'` in Icehouse's folder, or the wheel again as `icehouse-….whl[{extra}]`"
    )


def size_text(size_bytes: int) -> str:
    """Return a size in words for people."""
    gib = size_bytes / (1 << 30)
    return f"{gib:.1f} GiB" if gib >= 1 else f"{size_bytes / (1 << 20):.1f} MiB"


@contextlib.contextmanager
def imports_of_extra(extra: str, *, setting: str) -> Iterator[None]:
    """Raise ConfigError, naming the extra, if the block cannot import what `setting` needs."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(
            Reason.CONFIG_INVALID,
            f"{setting} is set, and the package {error.name} is not installed; "
            f"install the extra, {extra_command(extra)}, or leave the setting away",
            field=setting,
            metadata={"package": error.name or ""},
        ) from error
