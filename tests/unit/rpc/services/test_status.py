"""The status for the page: what the server knows, with or without the engine's answer."""

from __future__ import annotations

import dataclasses

from icehouse.v1 import inference_service_pb2 as messages
from icehouse_server.domain.cache_commands import ListRecent, RecentBlock, RecentBlocks
from icehouse_server.domain.ids import BlockHash
from icehouse_server.domain.model import EngineState
from icehouse_server.rpc.services.observation import BLOCK_LIMIT

from tests.unit.rpc.conftest import RunningServer, running

BLOCK = RecentBlock(BlockHash(b"a"), BlockHash(b"root"), 0, 256, 3, is_in_ram=True, is_on_ssd=False)


async def test_it_has_the_latest_sample_slow_requests_and_the_blocks_used_last(served: RunningServer) -> None:
    served.engine.order_answer = RecentBlocks((BLOCK,))
    await served.inference.Generate(
        messages.GenerateRequest(prompt={"text": "ab"}, request_id="r1", max_output_tokens=1)
    )
    await served.server.observation.sample()
    status = await served.server.observation.read_status()
    assert status.recent_blocks == (BLOCK,) and served.engine.orders == [ListRecent(BLOCK_LIMIT)]
    assert status.snapshot is served.server.observation.latest
    assert [request.request_id for request in status.slowest_requests] == ["r1"]
    assert status.collect_time == served.clock.wall()


async def test_tokens_are_asked_for_where_they_are_wanted_and_can_be_read(served: RunningServer) -> None:
    told = dataclasses.replace(BLOCK, token_keys=tuple(b"ab"))
    served.engine.order_answer = RecentBlocks((told,))
    [block] = (await served.server.observation.read_status(with_tokens=True)).recent_blocks or ()
    assert served.engine.orders == [ListRecent(BLOCK_LIMIT, with_tokens=True)]
    assert served.server.observation.decode(block.token_keys or ()) == "ab"


async def test_an_engine_that_refuses_leaves_the_blocks_out(served: RunningServer) -> None:
    assert (await served.server.observation.read_status()).recent_blocks is None


async def test_while_the_model_loads_the_engine_is_not_asked() -> None:
    async with running(ready=False) as served:
        status = await served.server.observation.read_status()
        assert (status.snapshot.state, status.recent_blocks) == (EngineState.LOADING, None)
        assert served.engine.orders == []
