"""Field checks: fields of request messages to domain data. Each error names its field. Pure functions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

from google.protobuf.duration_pb2 import Duration
from icehouse.v1 import (
    cache_policy_pb2,
    cache_service_pb2,
    embedding_service_pb2,
    inference_service_pb2,
    logprobs_pb2,
    rerank_service_pb2,
)

from icehouse_server.config import ServerConfig
from icehouse_server.domain.ids import CALLER_NAME_PATTERN, DEFAULT_TENANT, Tenant
from icehouse_server.domain.model import ModelInfo, ModelKind
from icehouse_server.domain.request import CacheUse, LogprobsWanted
from icehouse_server.errors import Forbidden, InvalidRequest, NotFound, Reason, clipped
from icehouse_server.rpc.access.caller import Caller, CallerRole
from icehouse_server.rpc.messages.proto_map import enum_of

RunMessage = (
    inference_service_pb2.GenerateRequest
    | cache_service_pb2.WarmRequest
    | embedding_service_pb2.EmbedRequest
    | rerank_service_pb2.RerankRequest
)
"""A request that the engine computes something for."""
PromptMessage = (
    cache_service_pb2.ExplainRequest
    | cache_service_pb2.PinRequest
    | cache_service_pb2.UnpinRequest
    | cache_service_pb2.EvictRequest
    | cache_service_pb2.ExportRequest
)
"""A request that asks the cache about a prompt."""

TENANT_BYTE_LIMIT = 128
PRIORITY_LIMIT = 100
TOP_LOGPROB_COUNT_LIMIT = 20
STOP_TOKEN_COUNT_LIMIT = 128
WATCH_INTERVAL_RANGE_S = (0.1, 3600.0)
DEFAULT_WATCH_INTERVAL_S = 1.0
DEFAULT_PAGE_SIZE = 100
PAGE_SIZE_LIMIT = 1000

_SHOWN_LENGTH_LIMIT = 80
_LISTED_LIMIT = 16


def shown(value: object) -> str:
    """Return a caller's value for a message: quoted if text, and at most one line long."""
    return clipped(repr(value), _SHOWN_LENGTH_LIMIT)


def refuse_value(field: str, value: object, wanted: str, *, unit: str = "") -> NoReturn:
    """Raise PARAMETER_OUT_OF_RANGE for `field`; `wanted` is the range in words, `unit` the value's unit."""
    raise InvalidRequest(
        Reason.PARAMETER_OUT_OF_RANGE,
        f"{field} is {shown(value)}{' ' if unit else ''}{unit}; it must be {wanted}",
        field=field,
        metadata={"field": field, "value": value, "wanted": wanted, **({"unit": unit} if unit else {})},
    )


@contextlib.contextmanager
def names_item(item: str, *, names_field: bool = True) -> Iterator[None]:
    """Make errors name the faulty item of a list, such as `inputs[3]`, and the field in it."""
    try:
        yield
    except InvalidRequest as error:
        raise InvalidRequest(
            error.reason,
            f"{item}: {error.message}",
            field=f"{item}.{error.field}" if names_field else item,
            metadata=error.metadata,
        ) from error


def check_count(field: str, count: int, limit: int, unit: str) -> None:
    """Refuse more than `limit` of what `unit` names."""
    if count > limit:
        refuse_value(field, count, f"at most {limit} {unit}", unit=unit)


def check_text_bytes(field: str, texts: Sequence[str], limit: int) -> None:
    """Refuse empty texts, and texts of more than `limit` bytes in UTF-8."""
    for index, text in enumerate(texts):
        if not 1 <= (size_bytes := len(text.encode("utf-8"))) <= limit:
            refuse_value(f"{field}[{index}]", size_bytes, f"1 to {limit} bytes long in UTF-8", unit="bytes")


def check_kind(info: ModelInfo, wanted: ModelKind) -> None:
    """Refuse a use that a model is not made for; a model that generates text serves all uses."""
    if info.kind in (ModelKind.CHAT, wanted):
        return
    raise InvalidRequest(
        Reason.UNSUPPORTED,
        f"model {info.model_id!r} is not made for this: {_USES[info.kind]}",
        field="model",
        metadata={"model": info.model_id, "kind": info.kind.name},
    )


_USES = {
    ModelKind.EMBEDDING: "it embeds texts; use EmbeddingService.Embed, or /v1/embeddings over HTTP",
    ModelKind.RERANK: "it scores documents for a query; use RerankService.Rerank, or /v1/rerank over HTTP",
}


def check_adapter(name: str, info: ModelInfo, *, field: str) -> None:
    """Accept the empty name and adapters that are served; raises NotFound for any other."""
    served = [adapter.name for adapter in info.adapters]
    if name and name not in served:
        known = ", ".join(served[:_LISTED_LIMIT])
        raise NotFound(
            Reason.ADAPTER_NOT_FOUND,
            f"adapter {shown(name)} is not served here; leave `{field}` empty or name one of the "
            f"{len(served)} that ListModels shows: {known or 'none'}",
            field=field,
            metadata={"adapter": name, "served_adapters": known, "served_count": len(served)},
        )


def check_name(field: str, name: str) -> str:
    """Return a caller's name for a request or a conversation; raises InvalidRequest if it must not be logged
    as it is."""
    if CALLER_NAME_PATTERN.fullmatch(name) is None:
        refuse_value(field, name, "1 to 128 of A-Z a-z 0-9 . _ : -")
    return name


def max_output_tokens_of(value: int, config: ServerConfig) -> int:
    """Return the most tokens to generate, within the server's limit; 0 asks for the default.

    A larger number is not refused: clients send the same one to every server, and the context may end an
    output earlier anyway.
    """
    if value < 0:
        refuse_value("max_output_tokens", value, "1 or more, or absent")
    return min(value or config.default_max_output_tokens, config.max_output_tokens_limit)


def max_reasoning_tokens_of(value: int, config: ServerConfig) -> int:
    """Return the most tokens of reasoning."""
    if value < 0:
        refuse_value("max_reasoning_tokens", value, "0 or more, or absent")
    return min(value, config.max_output_tokens_limit)


def completions_of(value: int, config: ServerConfig) -> int:
    """Return how many outputs to generate; 0 asks for one."""
    if not 0 <= value <= config.max_completions:
        refuse_value("completions", value, f"1 to {config.max_completions}, or absent")
    return value or 1


def stop_of(stop: Sequence[str], config: ServerConfig) -> tuple[str, ...]:
    """Return the stop strings without duplicates."""
    check_count("stop", len(stop), config.max_stop_count, "strings")
    check_text_bytes("stop", stop, config.max_stop_bytes)
    return tuple(dict.fromkeys(stop))


def stop_token_ids_of(token_ids: Sequence[int], info: ModelInfo) -> tuple[int, ...]:
    """Return the tokens that end an output, without duplicates."""
    check_count("stop_token_ids", len(token_ids), STOP_TOKEN_COUNT_LIMIT, "tokens")
    check_token_ids(token_ids, info, field="stop_token_ids")
    return tuple(dict.fromkeys(token_ids))


def logprobs_of(proto: logprobs_pb2.LogprobsOptions, info: ModelInfo) -> LogprobsWanted:
    """Return which log probabilities to send."""
    if not 0 <= proto.top_count <= TOP_LOGPROB_COUNT_LIMIT:
        refuse_value("logprobs.top_count", proto.top_count, f"0 to {TOP_LOGPROB_COUNT_LIMIT}")
    check_count("logprobs.token_ids", len(proto.token_ids), TOP_LOGPROB_COUNT_LIMIT, "tokens")
    check_token_ids(proto.token_ids, info, field="logprobs.token_ids")
    return LogprobsWanted(proto.top_count, of_prompt=proto.prompt, token_ids=tuple(proto.token_ids))


def cache_use_of(proto: cache_policy_pb2.CachePolicy) -> CacheUse:
    """Return how the cache may be used; enum values from a newer API are refused."""
    use = enum_of(proto.use, cache_policy_pb2.CacheUse, CacheUse, unset=CacheUse.READ_WRITE)
    if use is None:
        refuse_value("cache.use", int(proto.use), "a CacheUse of this API version")
    return use


def tenant_of(proto: cache_policy_pb2.CachePolicy, caller: Caller) -> Tenant:
    """Return the tenant whose blocks may be used; raises Forbidden if it is not the caller's.

    Operators, and everybody if no credentials are required, may name any tenant.
    """
    _check_tenant(proto.tenant, field="cache.tenant")
    if caller.tenant is None:
        return Tenant(proto.tenant) if proto.tenant else DEFAULT_TENANT
    if not proto.tenant or proto.tenant == caller.tenant:
        return caller.tenant
    if caller.role is CallerRole.OPERATOR:
        return Tenant(proto.tenant)
    raise Forbidden(
        Reason.TENANT_FORBIDDEN,
        f"cache.tenant is {shown(proto.tenant)}, but the credentials are {caller.tenant!r}'s; leave it empty",
        field="cache.tenant",
        metadata={"tenant": caller.tenant, "named_tenant": proto.tenant},
    )


def shared_tenant_of(
    proto: cache_policy_pb2.CachePolicy, caller: Caller, grants: Mapping[str, frozenset[str] | None]
) -> Tenant | None:
    """Return the tenant whose prompts the request may also start from; raises Forbidden if not granted."""
    name = proto.shared_prefix_name
    _check_tenant(name, field="cache.shared_prefix_name")
    if not name:
        return None
    if caller.role is not CallerRole.OPERATOR:
        granted = grants.get(name, frozenset())
        if granted is not None and caller.tenant not in granted:
            raise Forbidden(
                Reason.SHARED_PREFIX_FORBIDDEN,
                f"cache.shared_prefix_name is {shown(name)}, which is not shared with {caller.tenant!r}; "
                "leave it empty, or have an operator share it",
                field="cache.shared_prefix_name",
                metadata={"tenant": caller.tenant, "shared_prefix_name": name},
            )
    return Tenant(name)


def _check_tenant(name: str, *, field: str) -> None:
    size_bytes = len(name.encode("utf-8"))
    if size_bytes > TENANT_BYTE_LIMIT:
        refuse_value(field, size_bytes, f"at most {TENANT_BYTE_LIMIT} bytes in UTF-8", unit="bytes")


def policy_of(message: RunMessage) -> cache_policy_pb2.CachePolicy:
    """Return how a request uses the cache."""
    if isinstance(message, embedding_service_pb2.EmbedRequest):
        # A vector needs every token's hidden state, and nobody continues such a text.
        return cache_policy_pb2.CachePolicy(use=cache_policy_pb2.CACHE_USE_OFF)
    return message.cache


def check_adapter_of(message: RunMessage, info: ModelInfo) -> None:
    """Refuse a request with an adapter that is not served."""
    is_of_prompt = isinstance(message, inference_service_pb2.GenerateRequest | cache_service_pb2.WarmRequest)
    check_adapter(adapter_of(message), info, field="prompt.adapter" if is_of_prompt else "adapter")


def adapter_of(message: RunMessage) -> str:
    """Return the name of the adapter that a request runs with."""
    if isinstance(message, embedding_service_pb2.EmbedRequest | rerank_service_pb2.RerankRequest):
        return message.adapter
    return message.prompt.adapter


def priority_of(value: int) -> int:
    """Return the priority."""
    if not -PRIORITY_LIMIT <= value <= PRIORITY_LIMIT:
        refuse_value("priority", value, f"{-PRIORITY_LIMIT} to {PRIORITY_LIMIT}")
    return value


def watch_interval_of(proto: Duration, *, present: bool) -> float:
    """Return the seconds between two answers of WatchStats."""
    if not present:
        return DEFAULT_WATCH_INTERVAL_S
    interval_s = proto.seconds + proto.nanos / 1e9
    shortest_s, longest_s = WATCH_INTERVAL_RANGE_S
    if not shortest_s <= interval_s <= longest_s:
        refuse_value("interval", interval_s, f"{shortest_s:g} s to {longest_s:g} s", unit="s")
    return interval_s


def pin_ttl_of(proto: Duration, *, present: bool) -> float | None:
    """Return how long a pin stays, in seconds; None means until it is unpinned."""
    if not present:
        return None
    ttl_s = proto.seconds + proto.nanos / 1e9
    if ttl_s <= 0:
        refuse_value("ttl", ttl_s, "more than 0 s", unit="s")
    return ttl_s


def page_size_of(value: int) -> int:
    """Return how many entries a page may have: the default for 0, and never more than the limit."""
    if value < 0:
        refuse_value("page_size", value, "0 or more")
    return min(value or DEFAULT_PAGE_SIZE, PAGE_SIZE_LIMIT)


def check_length(token_count: int, info: ModelInfo, *, field: str) -> None:
    """Refuse a prompt that leaves no space for one output token, if the model generates any."""
    if token_count <= info.prompt_token_limit:
        return
    held = f"{info.context_token_limit}{', output included' if info.kind is ModelKind.CHAT else ''}"
    raise InvalidRequest(
        Reason.PROMPT_TOO_LONG,
        f"the prompt has {token_count} tokens; the model's context holds {held}; shorten the prompt",
        field=field,
        metadata={"prompt_tokens": token_count, "context_tokens": info.context_token_limit},
    )


def check_token_ids(token_ids: Sequence[int], info: ModelInfo, *, field: str) -> None:
    """Refuse an id outside the model's vocabulary."""
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < info.vocabulary_size):
        return
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < info.vocabulary_size:
            item = f"{field}[{index}]"
            raise InvalidRequest(
                Reason.TOKEN_OUT_OF_RANGE,
                f"{item} is {token_id}; token ids of this model are 0 to {info.vocabulary_size - 1}",
                field=item,
                metadata={"index": index, "token_id": token_id, "vocabulary_size": info.vocabulary_size},
            )
