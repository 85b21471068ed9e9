"""Headers that are on their way when a call ends are waited for, and are nobody's unheard failure."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import grpc
import pytest
from icehouse_server.rpc.engine_client.answers import StallTimer


class Connection:
    """Takes headers when it is told to, or fails like one whose caller has gone."""

    def __init__(self) -> None:
        self.has_begun = asyncio.Event()
        self.may_end = asyncio.Event()
        self.is_gone = False
        self.taken_count = 0

    async def send_initial_metadata(self, initial_metadata: Any) -> None:
        self.has_begun.set()
        await self.may_end.wait()
        if self.is_gone:
            raise grpc.aio.InternalError("the caller is gone")
        self.taken_count += 1

    async def write(self, message: Any) -> None:
        raise AssertionError("no message is sent here")


@pytest.mark.parametrize("is_gone", [False, True], ids=["taken", "gone"])
async def test_an_end_waits_for_headers_and_hears_of_their_failure(is_gone: bool) -> None:
    unheard: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: unheard.append(what))
    connection = Connection()
    connection.is_gone = is_gone
    beginning = asyncio.ensure_future(StallTimer(timeout_s=1.0).begin(connection))
    await connection.has_begun.wait()
    beginning.cancel()
    await asyncio.sleep(0)
    assert not beginning.done(), "the status would go before the headers"
    connection.may_end.set()
    # Awaited itself its error would keep the headers alive, and what nobody heard of is told when they go.
    await asyncio.wait([beginning])
    assert beginning.cancelled() and connection.taken_count == int(not is_gone)
    del beginning
    gc.collect()
    assert not unheard, unheard


async def test_headers_of_a_caller_who_is_gone_end_the_call_as_cancelled() -> None:
    connection = Connection()
    connection.is_gone = True
    connection.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await StallTimer(timeout_s=1.0).begin(connection)
