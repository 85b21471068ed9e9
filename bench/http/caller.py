"""Caller of the HTTP front: one kept connection, three protocols, no client library's time in them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import json
import time
import urllib.parse
from collections.abc import AsyncIterator, Mapping
from typing import Any


class Protocol(enum.Enum):
    """Which API is spoken; the value is its path."""

    CHAT = "/v1/chat/completions"
    MESSAGES = "/v1/messages"
    RESPONSES = "/v1/responses"

    @property
    def label(self) -> str:
        """Its name in tables."""
        return self.name.lower()


@dataclasses.dataclass(frozen=True, slots=True)
class Heard:
    """One stream as its caller saw it, in seconds of `time.perf_counter`."""

    start_time_s: float
    first_text_time_s: float
    end_time_s: float
    output_token_count: int

    @property
    def ttft_s(self) -> float:
        """From the request to the first text."""
        return self.first_text_time_s - self.start_time_s


class CallFailed(Exception):
    """An answer was refused, or it broke off. `status` is 0 where there was none."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status}: {message}" if status else message)
        self.status = status


def body_of(protocol: Protocol, text: str, *, max_output_tokens: int) -> bytes:
    """Return the request for a greedy stream of so many tokens."""
    asked: dict[str, Any] = {"model": "any", "stream": True, "temperature": 0}
    if protocol is Protocol.RESPONSES:
        asked |= {"input": text, "max_output_tokens": max_output_tokens, "store": False}
    else:
        asked |= {"messages": [{"role": "user", "content": text}], "max_tokens": max_output_tokens}
    if protocol is Protocol.CHAT:
        asked["stream_options"] = {"include_usage": True}
    return json.dumps(asked).encode()


class Caller:
    """One connection, on which one request runs at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, token: str) -> None:
        self._reader = reader
        self._writer = writer
        self._token = token

    @classmethod
    @contextlib.asynccontextmanager
    async def connected(cls, url: str, *, token: str = "") -> AsyncIterator[Caller]:
        """Give a caller until the block ends."""
        place = urllib.parse.urlsplit(url)
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        try:
            yield cls(reader, writer, token=token)
        finally:
            writer.close()

    async def stream(self, protocol: Protocol, body: bytes) -> Heard:
        """Send a request and time its first text; raises CallFailed."""
        start_time_s = time.perf_counter()
        first_text_time_s: float | None = None
        token_count = 0
        self._writer.write(self._head("POST", protocol.value, len(body)) + body)
        await self._answer_head()
        async for line in self._lines():
            if first_text_time_s is None and _has_text(protocol, line):
                first_text_time_s = time.perf_counter()
            if b'"output_tokens"' in line or b'"completion_tokens"' in line:
                token_count = _output_token_count(protocol, line) or token_count
            if b'"error"' in line and b'"error": null' not in line and b'"error":null' not in line:
                raise CallFailed(200, line.decode(errors="replace")[:300])
        if first_text_time_s is None:
            raise CallFailed(200, "the stream had no text")
        return Heard(start_time_s, first_text_time_s, time.perf_counter(), token_count)

    async def ask(self, method: str, path: str, body: bytes = b"") -> bytes:
        """Send a request and return the answer's body; raises CallFailed."""
        self._writer.write(self._head(method, path, len(body)) + body)
        size_bytes = await self._answer_head()
        return await self._reader.readexactly(size_bytes or 0)

    def _head(self, method: str, path: str, size_bytes: int) -> bytes:
        lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
        lines += [f"Content-Length: {size_bytes}"]
        if self._token:
            lines.append(f"Authorization: Bearer {self._token}")
        return "\r\n".join((*lines, "", "")).encode()

    async def _answer_head(self) -> int | None:
        """Return the size of the body, None where it comes in chunks; raises CallFailed for a refusal."""
        try:
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise CallFailed(0, "the connection ended before an answer") from error
        first, _, rest = head.partition("\r\n")
        fields = dict(line.split(": ", 1) for line in rest.split("\r\n") if ": " in line)
        status = int(first.split(" ", 2)[1])
        size_bytes = int(fields["content-length"]) if "content-length" in fields else None
        if status != 200:
            told = await self._reader.readexactly(size_bytes or 0)
            raise CallFailed(status, told.decode(errors="replace")[:300])
        return size_bytes

    async def _lines(self) -> AsyncIterator[bytes]:
        """Iterate over the lines of a body that comes in chunks, as they come."""
        rest = b""
        try:
            while size_bytes := int(await self._reader.readline() or b"0", 16):
                *lines, rest = (rest + (await self._reader.readexactly(size_bytes + 2))[:-2]).split(b"\n")
                for line in lines:
                    yield line
            await self._reader.readline()
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise CallFailed(0, "the stream broke off") from error


def _has_text(protocol: Protocol, line: bytes) -> bool:
    """Whether a line is an event with some of the output's text."""
    if not line.startswith(b"data: {"):
        return False
    event = json.loads(line.removeprefix(b"data: "))
    match protocol:
        case Protocol.CHAT:
            return any(choice["delta"].get("content") for choice in event.get("choices", ()))
        case Protocol.MESSAGES:
            return bool(event["type"] == "content_block_delta")
        case Protocol.RESPONSES:
            return bool(event["type"] == "response.output_text.delta")


def _output_token_count(protocol: Protocol, line: bytes) -> int:
    """Return how many tokens an event with usage counts, 0 where it has none yet."""
    event: Mapping[str, Any] = json.loads(line.removeprefix(b"data: "))
    holder = event.get("response", event) if protocol is Protocol.RESPONSES else event
    usage = holder.get("usage") or {}
    return int(usage.get("completion_tokens" if protocol is Protocol.CHAT else "output_tokens") or 0)
