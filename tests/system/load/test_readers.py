"""Readers that stop reading and callers that leave all at once: the others go on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc
import pytest
from icehouse_server.domain.ids import RequestId

from tests.fixtures.patience import BOUND_S
from tests.fixtures.rpc.details import refusal_of
from tests.system.load.live_server import live_server, request, rest_of

_TOKEN_TEXT = "x" * 2000
"""So much text a token that a reader who stops fills his connection's window within a hundred tokens."""


def wordy(token_ids: Sequence[int]) -> str:
    return _TOKEN_TEXT * len(token_ids)


async def test_a_reader_who_stops_is_ended_with_bounded_memory_and_the_others_go_on() -> None:
    byte_limit = 200_000
    async with live_server(decode=wordy, outbox_byte_limit=byte_limit, outbox_event_limit=8) as server:
        stalled = await server.begin("stalled", max_output_tokens=30_000)
        outbox = server.router._outboxes[RequestId("stalled")]
        most_bytes = 0
        while "stalled" not in server.seam.cancelled:
            # The others are served to the end meanwhile.
            answer = await server.inference.Generate(request("beside", max_output_tokens=20), timeout=BOUND_S)
            assert len(answer.text) == 20 * len(_TOKEN_TEXT)
            most_bytes = max(most_bytes, outbox.waiting_bytes)
        assert most_bytes <= byte_limit
        await server.stats_when(lambda stats: stats.decoding_count == 0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rest_of(stalled)
        refusal = refusal_of(caught.value)
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "READER_STALLED")
        assert outbox.waiting_bytes == 0, "what it left unread is let go"


async def test_fifty_streams_cancelled_at_once_leave_every_slot_free() -> None:
    async with live_server(running_limit=30) as server:
        server.runner.is_paused = True
        streams = [server.inference.Stream(request(f"storm-{i}")) for i in range(50)]
        await server.stats_when(lambda s: s.decoding_count == 30 and s.waiting_count == 20)
        for stream in streams:
            stream.cancel()
        after = await server.stats_when(
            lambda s: s.decoding_count + s.waiting_count + s.prefilling_count == 0
        )
        assert after.cancelled_total == 50
        assert server.runner.history == {} and server.runner.decoding == []
        server.runner.is_paused = False
        answers = await asyncio.gather(*(server.inference.Generate(request(f"next-{i}")) for i in range(30)))
        assert [len(answer.text) for answer in answers] == [4] * 30
