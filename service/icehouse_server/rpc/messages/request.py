"""Request builder: the engine's request, as far as Generate, Warm, Embed and Rerank are alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from icehouse.v1 import cache_policy_pb2

from icehouse_server.domain.ids import AdapterName
from icehouse_server.domain.model import ModelInfo
from icehouse_server.domain.request import GenerationRequest, request_id_of
from icehouse_server.domain.sampling import SamplingParams
from icehouse_server.rpc.calls.calls import Call
from icehouse_server.rpc.messages.validation import (
    cache_use_of,
    check_adapter,
    check_model,
    priority_of,
    request_name_of,
    shared_tenant_of,
    tenant_of,
)


class RunMessage(Protocol):
    """A request message that makes the engine run."""

    @property
    def request_id(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def adapter(self) -> str: ...
    @property
    def priority(self) -> int: ...


def request_of(
    message: RunMessage,
    *,
    policy: cache_policy_pb2.CachePolicy,
    info: ModelInfo,
    call: Call,
    shared_prefix_grants: Mapping[str, frozenset[str] | None],
) -> GenerationRequest:
    """Return a request without a prompt, which asks for no output; the call learns its names.

    Raises what refuses it; nothing here needs the tokenizer.
    """
    check_model(message.model, info)
    check_adapter(message.adapter, info)
    call.model_id = info.model_id
    call.request_id = request_name_of(message.request_id, generated=call.request_id)
    cache_use = cache_use_of(policy)
    tenant = call.tenant = tenant_of(policy, call.caller)
    return GenerationRequest(
        request_id=request_id_of(call.request_id, tenant),
        prompt_token_ids=(),
        max_output_tokens=0,
        sampling=SamplingParams(),
        stop=(),
        arrival_time=call.arrival_time,
        deadline_time=call.deadline_time,
        cache_use=cache_use,
        tenant=tenant,
        adapter=AdapterName(message.adapter),
        shared_tenant=shared_tenant_of(policy, call.caller, shared_prefix_grants),
        priority=priority_of(message.priority),
        session_id=call.session_id,
    )
