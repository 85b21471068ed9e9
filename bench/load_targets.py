"""Servers that a plan of arrivals can be played against, each with its way to send a request."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import Sequence
from typing import Protocol

import grpc

from bench.grpc_clients import READ_WRITE, Client, text_request
from bench.replies import Reply

READ_LIMIT_BYTES = 1 << 20


class Target(Protocol):
    """A server under load."""

    name: str

    async def ask(self, text: str, *, max_output_tokens: int) -> Reply | None:
        """Stream one greedy reply and time its tokens; None if the server refused or broke off."""
        ...


class IcehouseTarget:
    """Our server, over a few connections in turn."""

    name = "icehouse"

    def __init__(self, clients: Sequence[Client]) -> None:
        self._clients = itertools.cycle(clients)

    async def ask(self, text: str, *, max_output_tokens: int) -> Reply | None:
        request = text_request(text, max_output_tokens=max_output_tokens, cache=READ_WRITE)
        try:
            reply, _, _ = await next(self._clients).stream(request)
        except grpc.aio.AioRpcError:
            return None
        return reply if reply.token_times_s else None


class MlxLmTarget:
    """mlx-lm's server, with one HTTP connection per request, as its own clients have. Text comes by token."""

    name = "mlx-lm"

    def __init__(self, port: int) -> None:
        self._port = port

    async def ask(self, text: str, *, max_output_tokens: int) -> Reply | None:
        body = json.dumps(
            {"prompt": text, "max_tokens": max_output_tokens, "temperature": 0.0, "stream": True}
        ).encode()
        start_time_s = time.perf_counter()
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=READ_LIMIT_BYTES)
        except OSError:
            return None
        with contextlib.closing(writer):
            writer.write(_head(len(body)) + body)
            times = await _token_times(reader)
        return Reply(start_time_s, tuple(times), ()) if times else None


def _head(body_size_bytes: int) -> bytes:
    lines = (
        "POST /v1/completions HTTP/1.1",
        "Host: 127.0.0.1",
        "Connection: close",
        "Content-Type: application/json",
        f"Content-Length: {body_size_bytes}",
    )
    return "\r\n".join((*lines, "", "")).encode()


async def _token_times(reader: asyncio.StreamReader) -> list[float]:
    """Return the arrival time of each piece of text; empty if the answer broke off."""
    times: list[float] = []
    try:
        async for raw in reader:
            if raw.startswith(b"data: [DONE]"):
                return times
            if raw.startswith(b"data: {"):
                choices = json.loads(raw[len(b"data: ") :])["choices"]
                times += [time.perf_counter() for choice in choices if choice.get("text")]
    except (OSError, ValueError):
        return []
    return []
