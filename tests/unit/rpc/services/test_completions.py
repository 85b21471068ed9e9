"""Several outputs of one prompt: what the engine is asked, what is sent, and how they end together."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import grpc
import pytest
from icehouse.v1 import inference_service_pb2 as messages
from icehouse.v1 import logprobs_pb2, sampling_pb2, server_service_pb2, usage_pb2
from icehouse_server.config import TenantConfig
from icehouse_server.domain.events import Delta, Event, Failed, PrefillProgress
from icehouse_server.domain.request import GenerationRequest, TokenLogprobs
from icehouse_server.errors import Overloaded, Reason

from tests.fixtures.rpc.details import refusal_of, refused
from tests.fixtures.rpc.fake_engine import finished, hanging, overloaded, started
from tests.unit.rpc.conftest import SEED, RunningServer, running


def asked(count: int, **fields: Any) -> messages.GenerateRequest:
    sampling = sampling_pb2.SamplingParams(temperature=1.0)
    whole = {
        "request_id": "r",
        "prompt": {"text": "Hi"},
        "max_output_tokens": 2,
        "sampling": sampling,
        **fields,
    }
    return messages.GenerateRequest(completions=count, **whole)


def numbered(request: GenerationRequest) -> Iterable[Event]:
    """Script: progress, and two words that name the seed."""
    yield started(request)
    measured = (TokenLogprobs(9, -0.5, 1),) if request.logprobs and request.logprobs.of_prompt else ()
    yield PrefillProgress(1, 2, measured)
    seed = request.sampling.seed
    yield Delta(f"{seed}", (seed % 1000,))
    yield Delta("!", (7,))
    yield finished(request, output_token_count=2)


async def test_each_is_a_request_of_its_own_with_the_next_seed(served: RunningServer) -> None:
    logprobs = logprobs_pb2.LogprobsOptions(top_count=2, prompt=True)
    await served.inference.Generate(asked(3, logprobs=logprobs))
    first, second, third = served.engine.submitted
    assert [r.request_id for r in (first, second, third)] == ["r", "r#1", "r#2"]
    assert [r.sampling.seed for r in (first, second, third)] == [SEED, SEED + 1, SEED + 2]
    assert first.prompt_token_ids == second.prompt_token_ids == third.prompt_token_ids == tuple(b"Hi")
    wanted = [r.logprobs for r in (first, second, third) if r.logprobs is not None]
    assert [w.top_count for w in wanted] == [2, 2, 2]
    assert [w.of_prompt for w in wanted] == [True, False, False], "the prompt is measured once"


@pytest.mark.parametrize("temperature", [0.0, -0.0])
async def test_greedy_outputs_are_computed_once_and_told_each(
    served: RunningServer, temperature: float
) -> None:
    served.engine.script = numbered
    logprobs = logprobs_pb2.LogprobsOptions(prompt=True)
    greedy = asked(3, sampling=sampling_pb2.SamplingParams(temperature=temperature), logprobs=logprobs)
    response = await served.inference.Generate(greedy)
    assert [r.request_id for r in served.engine.submitted] == ["r"]
    assert [(c.index, c.text) for c in response.completions] == [(i, f"{SEED}!") for i in range(3)]
    assert all(c.usage == response.usage and c.cache == response.cache for c in response.completions)
    assert [entry.token_id for entry in response.prompt_logprobs] == [9]
    told = [each async for each in served.inference.Stream(greedy)]
    kinds = [each.WhichOneof("event") for each in told]
    assert [kinds.count(kind) for kind in ("started", "prefill_progress", "finished")] == [1, 1, 3]
    texts = dict.fromkeys(range(3), "")
    for each in told:
        if each.HasField("delta"):
            texts[each.delta.completion_index] += each.delta.text
    assert texts == dict.fromkeys(range(3), f"{SEED}!")


async def test_seeds_go_round(served: RunningServer) -> None:
    sampling = sampling_pb2.SamplingParams(temperature=1.0, seed=2**64 - 1)
    response = await served.inference.Generate(asked(2, sampling=sampling))
    assert [r.sampling.seed for r in served.engine.submitted] == [2**64 - 1, 0]
    assert [c.seed for c in response.completions] == [2**64 - 1, 0]


async def test_generate_tells_all_and_the_first_one_at_the_top(served: RunningServer) -> None:
    served.engine.script = numbered
    logprobs = logprobs_pb2.LogprobsOptions(prompt=True)
    response = await served.inference.Generate(asked(3, logprobs=logprobs))
    assert [c.index for c in response.completions] == [0, 1, 2]
    assert [c.text for c in response.completions] == [f"{SEED + i}!" for i in range(3)]
    assert [list(c.token_ids) for c in response.completions] == [[(SEED + i) % 1000, 7] for i in range(3)]
    assert {c.finish_reason for c in response.completions} == {usage_pb2.FINISH_REASON_LENGTH}
    assert all(c.cache == response.cache and c.cache.cached_tokens for c in response.completions)
    first = response.completions[0]
    assert (response.text, response.token_ids, response.usage) == (first.text, first.token_ids, first.usage)
    assert (response.request_id, response.seed) == ("r", SEED)
    assert [entry.token_id for entry in response.prompt_logprobs] == [9]


async def test_one_is_listed_only_where_it_was_asked_for(served: RunningServer) -> None:
    alone = await served.inference.Generate(asked(1))
    assert [c.text for c in alone.completions] == [alone.text] and alone.text
    plain = await served.inference.Generate(asked(0))
    assert not plain.completions


async def test_a_stream_starts_once_and_ends_each(served: RunningServer) -> None:
    served.engine.script = numbered
    responses = [response async for response in served.inference.Stream(asked(3))]
    kinds = [response.WhichOneof("event") for response in responses]
    assert kinds[0] == "started" and kinds.count("started") == 1
    assert responses[0].started.request_id == "r" and responses[0].started.seed == SEED
    assert kinds.count("prefill_progress") == 1
    assert kinds[-1] == "finished" and kinds.count("finished") == 3
    texts = dict.fromkeys(range(3), "")
    ended: list[int] = []
    for response in responses:
        if response.HasField("delta"):
            assert response.delta.completion_index not in ended
            texts[response.delta.completion_index] += response.delta.text
        elif response.HasField("finished"):
            ended.append(response.finished.completion_index)
    assert texts == {i: f"{SEED + i}!" for i in range(3)}
    assert sorted(ended) == [0, 1, 2]


async def test_all_are_told_though_the_first_one_says_much(served: RunningServer) -> None:
    """A reader who is slow still hears of each: nobody's events wait for another's end."""
    served.engine.script = hanging
    stream = served.inference.Stream(asked(2))
    heard = [await stream.read() for _ in range(3)]
    assert {r.delta.completion_index for r in heard if r.HasField("delta")} == {0, 1}
    stream.cancel()
    assert {await served.cancelled(), await served.cancelled()} == {"r", "r#1"}


async def test_the_first_to_fail_ends_them_all(served: RunningServer) -> None:
    served.engine.script = hanging
    stream = served.inference.Stream(asked(3))
    await stream.read()
    failed = Failed(Overloaded(Reason.MEMORY_SHORT, "no memory for it"))
    served.engine.publish(served.engine.submitted[1], failed)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while True:
            await stream.read()
    assert refusal_of(caught.value).reason == "MEMORY_SHORT"
    assert {await served.cancelled() for _ in range(2)} == {"r", "r#2"}


async def test_none_is_open_when_the_engine_refuses(served: RunningServer) -> None:
    served.engine.refusal = overloaded()
    refusal = await refused(served.inference.Generate(asked(2)))
    assert refusal.reason == "QUEUE_FULL"
    served.engine.refusal = None
    response = await served.inference.Generate(asked(2))
    assert len(response.completions) == 2, "both names are free again"


async def test_a_name_in_use_refuses_them_all(served: RunningServer) -> None:
    served.engine.script = hanging
    stream = served.inference.Stream(asked(2))
    await stream.read()
    refusal = await refused(served.inference.Generate(asked(3)))
    assert refusal.reason == "REQUEST_ID_IN_USE"
    assert len(served.engine.submitted) == 2
    stream.cancel()


async def test_each_counts_against_its_tenants_share() -> None:
    async with running(tenants=TenantConfig(waiting_limit=4)) as served:
        served.engine.script = lambda request: ()
        waiting = asyncio.ensure_future(served.inference.Generate(asked(3)))
        while len(served.engine.submitted) < 3:
            await served.settle()
        refusal = await refused(served.inference.Generate(asked(2, request_id="s")))
        assert refusal.reason == "TENANT_QUEUE_FULL"
        assert refusal.info.metadata["waiting_count"] == "3"
        refusal = await refused(served.inference.Generate(asked(5, request_id="s")))
        assert (refusal.reason, refusal.field) == ("PARAMETER_OUT_OF_RANGE", "completions"), "it never fits"
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def test_each_is_counted_in_its_tenants_tokens() -> None:
    async with running(tenants=TenantConfig(tokens_per_minute=100)) as served:
        await served.inference.Generate(asked(3))
        stats = (await served.serving.GetStats(server_service_pb2.GetStatsRequest())).stats
        [told] = stats.tenants
        assert (told.accepted_total, told.prompt_token_total, told.output_token_total) == (3, 6, 6)
        refusal = await refused(served.inference.Generate(asked(8, request_id="s", max_output_tokens=20)))
        assert refusal.reason == "TOKEN_RATE_EXCEEDED"
        assert refusal.info.metadata["tokens_wanted"] == str(8 * 22)


async def test_together_they_may_leave_no_more_unread_than_one() -> None:
    async with running(outbox_byte_limit=4000, stall_timeout_s=60.0) as served:
        served.engine.script = hanging
        stream = served.inference.Stream(asked(4))
        await stream.read()
        # Told in one turn of the loop, so nothing of it can be read in between.
        served.engine.publish(served.engine.submitted[2], Delta("x" * 1200, (1,)))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while True:
                await stream.read()
        assert refusal_of(caught.value).reason == "READER_STALLED"
