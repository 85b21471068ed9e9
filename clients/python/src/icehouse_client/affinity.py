"""The key by which a load balancer sends prompts with one beginning to one server.

Sent as the header `icehouse-prefix-key` with every call whose cache it concerns: Generate, Stream, Warm,
Explain, Pin, Unpin, Evict, Export of a prompt, and Rerank. Every client library makes it the same way, so
that callers in different languages meet in the same cache:

    key = first 16 hex digits of SHA-256(model ‖ 0x00 ‖ kind ‖ 0x00 ‖ variant ‖ beginning)

`kind` is "text", "tokens", "chat", "infill" or, for Rerank, "query". The beginning is the first 1024 bytes of
the text, the query or the infill's prefix in UTF-8; the first 256 token ids, each as four bytes,
little-endian; or of a conversation each message up to and with the user's first one, as
role ‖ 0x00 ‖ content ‖ 0x00 with the texts of `parts` joined to the content, cut after 4096 bytes. A role is
a word such as "user", or the message's `role_name`. So all turns of a conversation have one key. The variant
is what else makes KV another: empty without an adapter and tools, otherwise adapter ‖ 0x00 and of each tool
name ‖ 0x00 ‖ description ‖ 0x00 ‖ parameters_json ‖ 0x00.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from icehouse.v1 import cache_service_pb2 as cache
from icehouse.v1 import inference_service_pb2 as inference
from icehouse.v1 import prompt_pb2, tool_pb2
from icehouse.v1 import rerank_service_pb2 as reranking

from icehouse_client.chat import role_of

PREFIX_KEY_HEADER = "icehouse-prefix-key"

_TEXT_BYTES = 1024
_TOKEN_COUNT = 256
_CHAT_BYTES = 4096

PromptRequest = (
    inference.GenerateRequest
    | cache.WarmRequest
    | cache.ExplainRequest
    | cache.PinRequest
    | cache.UnpinRequest
    | cache.EvictRequest
    | cache.ExportRequest
)
"""A message with a prompt that the cache is asked for."""


def prefix_key(request: PromptRequest | reranking.RerankRequest) -> str:
    """Return the request's key: 16 hex digits, equal for prompts that begin alike; empty without a prompt."""
    if isinstance(request, reranking.RerankRequest):
        return _key(
            request.model, "query", _variant(request.adapter, ()), request.query.encode()[:_TEXT_BYTES]
        )
    prompt = request.prompt
    variant = _variant(prompt.adapter, prompt.tools)
    if prompt.HasField("tokens"):
        ids = b"".join(i.to_bytes(4, "little", signed=True) for i in prompt.tokens.ids[:_TOKEN_COUNT])
        return _key(request.model, "tokens", variant, ids)
    if prompt.HasField("chat"):
        return _key(request.model, "chat", variant, _turns(prompt.chat))
    if prompt.HasField("infill"):
        return _key(request.model, "infill", variant, prompt.infill.prefix.encode()[:_TEXT_BYTES])
    if prompt.HasField("text"):
        return _key(request.model, "text", variant, prompt.text.encode()[:_TEXT_BYTES])
    return ""


def prefix_metadata(request: PromptRequest | reranking.RerankRequest) -> tuple[tuple[str, str], ...]:
    """Return the header with the request's key; none where it has no prompt."""
    key = prefix_key(request)
    return ((PREFIX_KEY_HEADER, key),) if key else ()


def _key(model: str, kind: str, variant: bytes, beginning: bytes) -> str:
    return hashlib.sha256(f"{model}\0{kind}\0".encode() + variant + beginning).hexdigest()[:16]


def _variant(adapter: str, tools: Sequence[tool_pb2.Tool]) -> bytes:
    if not adapter and not tools:
        return b""
    texts = (f"{tool.name}\0{tool.description}\0{tool.parameters_json}\0" for tool in tools)
    return "".join((f"{adapter}\0", *texts)).encode()


def _turns(chat: prompt_pb2.ChatPrompt) -> bytes:
    turns = b""
    for message in chat.messages:
        content = message.content + "".join(part.text for part in message.parts)
        turns += f"{role_of(message)}\0{content}\0".encode()
        if message.role == prompt_pb2.ROLE_USER or len(turns) >= _CHAT_BYTES:
            break
    return turns[:_CHAT_BYTES]
