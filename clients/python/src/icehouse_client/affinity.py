"""The key by which a load balancer sends prompts with one beginning to one server.

Sent as the header `icehouse-prefix-key` with every Generate and Stream. Every client library makes
it the same way, so that callers in different languages meet in the same cache:

    key = first 16 hex digits of SHA-256(model ‖ 0x00 ‖ kind ‖ 0x00 ‖ beginning)

`kind` is "text", "tokens" or "chat". The beginning is the first 1024 bytes of the text in UTF-8; the
first 256 token ids, each as four bytes, little-endian; or of a conversation each message up to and
with the first of role "user", as role ‖ 0x00 ‖ content ‖ 0x00, cut after 4096 bytes. So all turns of
a conversation have one key.
"""

from __future__ import annotations

import hashlib

from icehouse.v1 import inference_service_pb2 as inference

PREFIX_KEY_HEADER = "icehouse-prefix-key"

_TEXT_BYTES = 1024
_TOKEN_COUNT = 256
_CHAT_BYTES = 4096


def prefix_key(request: inference.GenerateRequest) -> str:
    """Return the request's key: 16 hex digits, equal for prompts that begin alike."""
    kind = request.WhichOneof("prompt") or ""
    digest = hashlib.sha256(f"{request.model}\0{kind}\0".encode())
    digest.update(_beginning(request, kind))
    return digest.hexdigest()[:16]


def _beginning(request: inference.GenerateRequest, kind: str) -> bytes:
    if kind == "text":
        return request.text.encode()[:_TEXT_BYTES]
    if kind == "tokens":
        return b"".join(i.to_bytes(4, "little") for i in request.tokens.ids[:_TOKEN_COUNT])
    turns = b""
    for message in request.chat.messages:
        turns += f"{message.role}\0{message.content}\0".encode()
        if message.role == "user" or len(turns) >= _CHAT_BYTES:
            break
    return turns[:_CHAT_BYTES]
