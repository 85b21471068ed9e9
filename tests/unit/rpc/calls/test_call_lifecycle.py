"""What a call holds is given back before its caller has read how it ended."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from icehouse_server.errors import InvalidRequest, Reason
from icehouse_server.rpc.calls.call_lifecycle import RpcCalls

from tests.fixtures.rpc.unread_context import UnreadContext
from tests.unit.rpc.conftest import FakeClock


@pytest.mark.parametrize(
    "error", [InvalidRequest(Reason.PROMPT_EMPTY, "no"), RuntimeError("a fault")], ids=["refused", "broken"]
)
async def test_what_a_call_holds_is_free_before_its_status_is_read(error: Exception) -> None:
    calls = RpcCalls(clock=FakeClock(), on_end=lambda record: ())
    freed: list[str] = []
    context: Any = UnreadContext()

    async def refused() -> None:
        async with calls.call(context) as call:
            call.holds.callback(freed.append, "slot")
            raise error

    task = asyncio.ensure_future(refused())
    await context.told
    assert freed == ["slot"] and calls.idle.is_set()
    assert not task.done()
    task.cancel()
