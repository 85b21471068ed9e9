"""The HTTP front on a free port of loopback, before a server of the test's own."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx2
import openai
from icehouse_http.serving.server import Listening, server_of
from icehouse_http.settings import Settings

from tests.fixtures.patience import BOUND_S


@dataclasses.dataclass(frozen=True)
class HttpFront:
    """A front that serves, and clients of it."""

    address: str
    """The server behind it."""
    url: str
    http: httpx2.AsyncClient
    openai: openai.AsyncOpenAI
    anthropic: anthropic.AsyncAnthropic


@contextlib.asynccontextmanager
async def front_of(address: str, **settings: Any) -> AsyncIterator[HttpFront]:
    """Serve until the block ends. The SDKs try nothing twice."""
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    told = Settings(address=address, **settings)
    server = server_of(told, Listening())
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    url = f"http://127.0.0.1:{port}"
    sdk: dict[str, Any] = {"api_key": "none", "timeout": BOUND_S, "max_retries": 0}
    # Without TLS there is nothing to verify, and each would read all authorities that this machine trusts.
    kinds = openai.DefaultAsyncHttpxClient, anthropic.DefaultAsyncHttpxClient
    plain = [kind(verify=False) for kind in kinds]
    try:
        async with (
            httpx2.AsyncClient(base_url=url, timeout=BOUND_S, verify=False) as http,
            openai.AsyncOpenAI(base_url=f"{url}/v1", http_client=plain[0], **sdk) as for_openai,
            anthropic.AsyncAnthropic(base_url=url, http_client=plain[1], **sdk) as for_anthropic,
        ):
            yield HttpFront(address, url, http, for_openai, for_anthropic)
    finally:
        server.should_exit = True
        await serving
