"""Leaving a call of the Python client at any moment, also before the server has heard of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import pytest
from icehouse_client import AsyncClient

from tests.fixtures.rpc.fake_engine import hanging
from tests.unit.rpc.conftest import RunningServer


async def generate(client: AsyncClient) -> None:
    await client.generate("Hi")


async def iterate(client: AsyncClient) -> None:
    async for _ in client.stream("Hi").events():
        pass


@pytest.mark.parametrize("ask", [generate, iterate])
@pytest.mark.parametrize("is_heard_of", [False, True], ids=["sent", "submitted"])
async def test_no_request_goes_on_without_its_caller(
    served: RunningServer, ask: Callable[[AsyncClient], Awaitable[None]], is_heard_of: bool
) -> None:
    """Each caller leaves one turn of the event loop later than the last, counted from one of two moments."""
    served.engine.script = hanging
    submitted = served.engine.submitted
    async with AsyncClient(served.server.address) as client:
        for turn_count in range(40):
            asking, before_count = asyncio.ensure_future(ask(client)), len(submitted)
            while is_heard_of and len(submitted) == before_count:
                await asyncio.sleep(0)
            for _ in range(turn_count):
                await asyncio.sleep(0)
            asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asking
        # It comes behind all of them.
        await client.tokenize("Hi")
        assert len(submitted) == 40 or not is_heard_of
        ended = [await served.cancelled() for _ in submitted]
        assert len(set(ended)) == len(ended), "each request is cancelled, and once"
