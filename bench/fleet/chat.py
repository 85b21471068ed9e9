"""Chat completions over OpenAI's HTTP, streamed and timed, without a client library's own time in them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import time
import urllib.parse
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any

Message = Mapping[str, str]
"""`role` and `content`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What came of one call. Times in seconds from the call on."""

    text: str
    prompt_token_count: int
    cached_token_count: int
    output_token_count: int
    ttft_s: float


class ChatFailed(Exception):
    """A call was refused, or its stream broke off."""


async def chat(
    url: str,
    *,
    model: str,
    messages: Sequence[Message],
    max_output_tokens: int,
    options: Mapping[str, Any] | None = None,
) -> Answer:
    """Return a greedy answer. Raises ChatFailed, or OSError where nobody listens."""
    body = {
        "model": model,
        "messages": list(messages),
        "max_tokens": max_output_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **(options or {}),
    }
    pieces: list[str] = []
    usage: dict[str, Any] = {}
    ttft_s: float | None = None
    start_time_s = time.perf_counter()
    async with contextlib.aclosing(_events(url, json.dumps(body).encode())) as events:
        async for event in events:
            if "error" in event:
                raise ChatFailed(str(event["error"]))
            for choice in event.get("choices", ()):
                if text := choice["delta"].get("content"):
                    ttft_s = ttft_s or time.perf_counter() - start_time_s
                    pieces.append(text)
            usage = event.get("usage") or usage
    if not usage:
        raise ChatFailed("the stream ended without its usage")
    return Answer(
        text="".join(pieces),
        prompt_token_count=usage["prompt_tokens"],
        cached_token_count=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        output_token_count=usage["completion_tokens"],
        ttft_s=time.perf_counter() - start_time_s if ttft_s is None else ttft_s,
    )


async def _events(url: str, body: bytes) -> AsyncGenerator[dict[str, Any], None]:
    """Post a request and yield the events of its answer."""
    place = urllib.parse.urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    with contextlib.closing(writer):
        writer.write(_head(place.netloc, len(body)) + body)
        status, is_chunked = await _answer_head(reader)
        if status != 200:
            raise ChatFailed(f"HTTP {status}: {(await reader.read()).decode(errors='replace')[-500:]}")
        rest = b""
        async for piece in _chunks(reader) if is_chunked else _whole(reader):
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if line.startswith(b"data: {"):
                    yield json.loads(line.removeprefix(b"data: "))


def _head(host: str, body_size_bytes: int) -> bytes:
    lines = (
        "POST /v1/chat/completions HTTP/1.1",
        f"Host: {host}",
        "Connection: close",
        "Content-Type: application/json",
        f"Content-Length: {body_size_bytes}",
    )
    return "\r\n".join((*lines, "", "")).encode()


async def _answer_head(reader: asyncio.StreamReader) -> tuple[int, bool]:
    """Return the status, and whether the body comes in chunks."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    except asyncio.IncompleteReadError as error:
        raise ChatFailed("the connection ended before an answer") from error
    return int(head.split(" ", 2)[1]), "transfer-encoding: chunked" in head


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    try:
        while size_bytes := int(await reader.readline() or b"0", 16):
            yield await reader.readexactly(size_bytes)
            await reader.readline()
    except asyncio.IncompleteReadError as error:
        raise ChatFailed("the stream broke off") from error


async def _whole(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while piece := await reader.read(1 << 16):
        yield piece
