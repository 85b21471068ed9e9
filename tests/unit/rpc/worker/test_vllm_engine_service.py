"""The worker protocol over the wire: what reaches the engine, what comes back, every refusal by its field."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from icehouse.v1 import inference_service_pb2 as native
from icehouse_server.domain.cache_commands import EvictBlocks, EvictReport, ListKnown, Tier
from icehouse_server.domain.events import Delta, Event, Failed, Finished, FinishReason, PrefillProgress
from icehouse_server.domain.ids import Tenant
from icehouse_server.domain.model import EngineState
from icehouse_server.domain.request import CacheUse, GenerationRequest, Logprob, Pooling, TokenLogprobs
from icehouse_server.domain.response_format import Choice
from icehouse_server.domain.stats import EngineStats
from icehouse_server.engine.core.block_log import BlockLog
from icehouse_server.errors import CannotFit, Reason
from icehouse_server.text.tokenizer_archive import TokenizerArchive

from tests.fixtures.kv_event_source import source_of
from tests.fixtures.rpc.details import refused
from tests.fixtures.rpc.fake_engine import (
    MODEL_INFO,
    REPORT,
    counting,
    finished,
    hanging,
    overloaded,
    started,
    usage_of,
)
from tests.fixtures.rpc.fake_grammars import HELD
from tests.fixtures.rpc.worker import ARCHIVE, HAS_PROTOCOL, worker_parts

if not HAS_PROTOCOL:
    pytest.skip("smg-grpc-proto, of the extra `fleet`, is missing", allow_module_level=True)

from icehouse_server.rpc.kv_events.block_mirror import BlockRemoved
from icehouse_server.rpc.worker.kv_event_streams import KvEventStreams
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as messages

from tests.fixtures.patience import BOUND_S
from tests.unit.rpc.access.test_tokens import ADS, BOSS, SEARCH, bearer, guarded_server
from tests.unit.rpc.conftest import RunningServer, running

PROMPT = {"input_ids": [1, 2, 3]}
CACHED = REPORT.cached_token_count


@pytest.fixture
async def served() -> AsyncIterator[RunningServer]:
    async with running(worker=worker_parts()) as started_server:
        yield started_server


def asking(*, stream: bool = True, **params: Any) -> messages.GenerateRequest:
    """Return a request for two greedy tokens, unless `params` of its sampling say otherwise."""
    sampling = {"temperature": 0.0, "max_tokens": 2, **params}
    return messages.GenerateRequest(
        request_id="r1", tokenized=PROMPT, sampling_params=messages.SamplingParams(**sampling), stream=stream
    )


async def answers(call: Any) -> list[Any]:
    return [getattr(response, response.WhichOneof("response")) async for response in call]


async def rest_of(call: Any) -> list[Any]:
    """Return the answers that were not read one by one."""
    told = []
    while (response := await call.read()) is not grpc.aio.EOF:
        told.append(getattr(response, response.WhichOneof("response")))
    return told


async def ended(call: Any) -> None:
    async for _ in call:
        pass


async def test_streamed_tokens_come_in_chunks_and_whole_at_the_end(served: RunningServer) -> None:
    chunks = await answers(served.worker.Generate(asking()))
    told = [(list(c.token_ids), c.prompt_tokens, c.completion_tokens, c.cached_tokens) for c in chunks[:-1]]
    assert told == [([0], 3, 1, CACHED), ([1], 3, 1, CACHED)]
    last = chunks[-1]
    assert (list(last.output_ids), last.finish_reason, last.completion_tokens) == ([0, 1], "length", 2)
    assert (last.prompt_tokens, last.cached_tokens) == (3, CACHED)
    assert (last.spec_draft_tokens, last.spec_accepted_tokens) == (8, 5)
    assert last.WhichOneof("matched_stop") is None


async def test_what_is_not_streamed_comes_at_once(served: RunningServer) -> None:
    [whole] = await answers(served.worker.Generate(asking(stream=False)))
    assert (list(whole.output_ids), whole.finish_reason) == ([0, 1], "length")


async def test_the_engine_is_asked_what_the_api_would_ask(served: RunningServer) -> None:
    sampling = {"stop": ["x"], "stop_token_ids": [7], "logit_bias": {5: 1.0}, "min_tokens": 1, "seed": 4}
    await ended(served.worker.Generate(asking(skip_special_tokens=True, **sampling)))
    [request] = served.engine.submitted
    assert (request.request_id, request.prompt_token_ids, request.max_output_tokens) == ("r1", (1, 2, 3), 2)
    assert (request.stop, request.cache_use, request.shows_markers) == (("x",), CacheUse.READ_WRITE, False)
    params = request.sampling
    assert (params.stop_token_ids, params.logit_bias, params.seed) == ((7,), ((5, 1.0),), 4)
    assert params.min_output_token_count == 1


async def test_more_tokens_than_may_be_are_as_many_as_may_be(served: RunningServer) -> None:
    await ended(served.worker.Generate(asking(max_tokens=2**32 - 1)))
    assert served.engine.submitted[0].max_output_tokens == 32_768


async def test_text_is_tokenized_here(served: RunningServer) -> None:
    await ended(served.worker.Generate(messages.GenerateRequest(text="Hi")))
    assert served.engine.submitted[0].prompt_token_ids == tuple(b"Hi")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_each_of_several_outputs_has_its_index(served: RunningServer, temperature: float) -> None:
    told = await answers(served.worker.Generate(asking(n=2, temperature=temperature)))
    by_index = {index: [t for t in told if t.index == index] for index in (0, 1)}
    assert [len(each) for each in by_index.values()] == [3, 3]
    assert [each[-1].finish_reason for each in by_index.values()] == ["length", "length"]
    assert [each.cached_tokens for each in told] == [CACHED] * 6


def entry(token_id: int) -> TokenLogprobs:
    top = tuple(Logprob(rank, -rank / 2) for rank in range(3))
    return TokenLogprobs(token_id, -token_id / 4, 1, top)


def measured(request: GenerationRequest) -> Iterable[Event]:
    """Script: log probabilities of prompt and output."""
    yield started(request)
    yield PrefillProgress(3, 3, (entry(2), entry(3)))
    yield Delta("a", (8,), (entry(8),))
    yield Delta("", (9,), (entry(9),))
    yield finished(request, output_token_count=2)


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_log_probabilities_of_output_and_prompt(served: RunningServer, is_streamed: bool) -> None:
    served.engine.script = measured
    request = asking(stream=is_streamed, logprobs=1, prompt_logprobs=2)
    told = await answers(served.worker.Generate(request))
    wanted = served.engine.submitted[0].logprobs
    assert wanted is not None and (wanted.top_count, wanted.of_prompt) == (2, True)
    of_output = [each.output_logprobs for each in told if each.HasField("output_logprobs")]
    assert [list(each.token_ids) for each in of_output] == ([[8], [9]] if is_streamed else [[8, 9]])
    assert [value for each in of_output for value in each.token_logprobs] == [-2.0, -2.25]
    assert [list(top.token_ids) for each in of_output for top in each.top_logprobs] == [[0], [0]]
    [of_prompt] = [each.input_logprobs for each in told if each.HasField("input_logprobs")]
    assert list(of_prompt.token_ids) == [1, 2, 3]
    values = [each.value if each.HasField("value") else None for each in of_prompt.token_logprobs]
    assert values == [None, -0.5, -0.75]
    assert [list(top.token_ids) for top in of_prompt.top_logprobs] == [[], [0, 1], [0, 1]]


async def test_without_logprobs_none_are_told(served: RunningServer) -> None:
    told = await answers(served.worker.Generate(asking()))
    assert not any(each.HasField("output_logprobs") or each.HasField("input_logprobs") for each in told)


async def test_a_constraint_is_compiled_like_the_api_s(served: RunningServer) -> None:
    await ended(served.worker.Generate(asking(choice={"choices": ["a", "b"]})))
    assert served.grammars.compiled == [Choice(("a", "b"))]
    assert served.engine.submitted[0].grammar is not None


def ending(reason: FinishReason, *token_ids: int, stop_string: str | None = None) -> Any:
    def script(request: GenerationRequest) -> Iterable[Event]:
        yield started(request)
        yield Delta("", token_ids)
        usage = usage_of(request, output_token_count=len(token_ids))
        stop_token_id = token_ids[-1] if reason is FinishReason.STOP_TOKEN else None
        yield Finished(reason, stop_string, usage, stop_token_id=stop_token_id)

    return script


EOS = MODEL_INFO.eos_token_ids[0]


@pytest.mark.parametrize(
    ("script", "reason", "matched"),
    [
        (ending(FinishReason.STOP_STRING, 5, stop_string="x"), "stop", ("matched_stop_str", "x")),
        (ending(FinishReason.STOP_TOKEN, 5, 7), "stop", ("matched_token_id", 7)),
        (ending(FinishReason.STOP_TOKEN, 5, EOS), "stop", None),
        (ending(FinishReason.CONTEXT_LENGTH, 5), "length", None),
    ],
)
async def test_an_end_says_why(served: RunningServer, script: Any, reason: str, matched: Any) -> None:
    served.engine.script = script
    told = await answers(served.worker.Generate(asking(stop=["x"], stop_token_ids=[7, EOS])))
    assert told[-1].finish_reason == reason
    kind = told[-1].WhichOneof("matched_stop")
    assert (None if kind is None else (kind, getattr(told[-1], kind))) == matched


async def test_a_caller_that_leaves_ends_the_request(served: RunningServer) -> None:
    served.engine.script = hanging
    call = served.worker.Generate(asking())
    await call.read()
    call.cancel()
    assert await served.cancelled() == "r1"


async def test_an_abort_ends_every_output_and_says_so(served: RunningServer) -> None:
    served.engine.script = hanging
    call = served.worker.Generate(asking(n=2, temperature=1.0))
    for _ in range(2):
        await call.read()
    await served.worker.Abort(messages.AbortRequest(request_ids=["r1", "nobody"]))
    told = await rest_of(call)
    assert [(each.index, each.finish_reason) for each in told] == [(0, "abort"), (1, "abort")]
    assert [list(each.output_ids) for each in told] == [[1], [1]]
    assert {await served.cancelled(), await served.cancelled()} == {"r1", "r1#1"}


async def test_an_abort_is_for_ones_own_requests(tmp_path: Path) -> None:
    async with guarded_server(tmp_path, server={"worker": worker_parts()}) as served:
        served.engine.script = hanging
        call = served.worker.Generate(asking(), metadata=bearer(SEARCH))
        await call.read()
        order = messages.AbortRequest(request_ids=["r1"])
        await served.worker.Abort(order, metadata=bearer(ADS))
        info = messages.GetServerInfoRequest()
        counts = [
            (await served.worker.GetServerInfo(info, metadata=bearer(token))).active_requests
            for token in (SEARCH, ADS, BOSS)
        ]
        assert counts == [1, 0, 1]
        await served.worker.Abort(order, metadata=bearer(BOSS))
        assert [each.finish_reason for each in await rest_of(call)] == ["abort"]


async def test_a_name_that_another_tenant_used_first_is_one_s_own_too(tmp_path: Path) -> None:
    async with guarded_server(tmp_path, server={"worker": worker_parts()}) as served:
        served.engine.script = hanging
        # Its name is known, and it has not reached the engine yet.
        first = served.worker.Generate(asking(regex=HELD.pattern), metadata=bearer(ADS))
        assert await asyncio.to_thread(served.grammars.held.wait, BOUND_S)
        call = served.worker.Generate(asking(), metadata=bearer(SEARCH))
        await call.read()
        await served.worker.Abort(messages.AbortRequest(request_ids=["r1"]), metadata=bearer(SEARCH))
        async with asyncio.timeout(BOUND_S):
            assert [each.finish_reason for each in await rest_of(call)] == ["abort"]
        served.grammars.let_go.set()
        assert (await first.read()).chunk.token_ids == [1]


async def test_an_abort_of_what_has_ended_leaves_the_next_one_of_its_name_alone(tmp_path: Path) -> None:
    """The engine has ended the first, so its id is free, but its reader has not taken what is left."""

    def unread(request: GenerationRequest) -> Iterable[Event]:
        yield started(request)
        # Far more than the connection's window holds.
        yield from [Delta("x", (1,) * 10_000)] * 200
        yield finished(request)

    options = {"worker": worker_parts(), "outbox_byte_limit": 1 << 30}
    async with guarded_server(tmp_path, server=options) as served:
        served.engine.script = unread
        first = served.worker.Generate(asking(), metadata=bearer(SEARCH))
        await first.read()
        await served.settle()
        served.engine.script = hanging
        call = served.worker.Generate(asking(), metadata=bearer(ADS))
        await call.read()
        info = messages.GetServerInfoRequest()
        assert (await served.worker.GetServerInfo(info, metadata=bearer(BOSS))).active_requests == 1
        await served.worker.Abort(messages.AbortRequest(request_ids=["r1"]), metadata=bearer(SEARCH))
        assert served.engine.cancelled.empty()
        served.engine.publish(served.engine.submitted[1], finished(served.engine.submitted[1]))
        assert [each.finish_reason for each in await rest_of(call)] == ["length"]
        assert (await rest_of(first))[-1].finish_reason == "length"


async def test_more_names_than_are_aborted_at_once_are_refused(served: RunningServer) -> None:
    refusal = await refused(served.worker.Abort(messages.AbortRequest(request_ids=["x"] * 257)))
    assert (refusal.code, refusal.field) == (grpc.StatusCode.INVALID_ARGUMENT, "request_ids")
    assert "257" in refusal.message and "256" in refusal.message


async def test_the_proved_tenant_is_the_tenant(tmp_path: Path) -> None:
    async with guarded_server(tmp_path, server={"worker": worker_parts()}) as served:
        await ended(served.worker.Generate(asking(), metadata=bearer(SEARCH)))
        named = (*bearer(BOSS), ("icehouse-tenant", "ads"))
        await ended(served.worker.Generate(asking(), metadata=named))
        assert [request.tenant for request in served.engine.submitted] == ["search", "ads"]
        other = (*bearer(SEARCH), ("icehouse-tenant", "ads"))
        refusal = await refused(ended(served.worker.Generate(asking(), metadata=other)))
        assert refusal.reason == "TENANT_FORBIDDEN"
        for method in (served.worker.GetLoads, served.worker.FlushCache):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await method(_empty(method), metadata=bearer(SEARCH))
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


def _empty(method: Any) -> Any:
    return common.FlushCacheRequest() if b"Flush" in method._method else messages.GetLoadsRequest()


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "sampling.temperature": ({"temperature": -1.0}, "PARAMETER_OUT_OF_RANGE"),
    "sampling.top_p": ({"top_p": 1.5}, "PARAMETER_OUT_OF_RANGE"),
    "sampling.min_output_tokens": ({"min_tokens": 3}, "PARAMETER_OUT_OF_RANGE"),
    "logprobs.top_count": ({"logprobs": -1}, "PARAMETER_OUT_OF_RANGE"),
    "stop[0]": ({"stop": [""]}, "PARAMETER_OUT_OF_RANGE"),
    "completions": ({"n": 17}, "PARAMETER_OUT_OF_RANGE"),
    "sampling.logit_bias[-1]": ({"logit_bias": {-1: 1.0}}, "TOKEN_OUT_OF_RANGE"),
    "response_format.choice.texts": ({"choice": {}}, "RESPONSE_FORMAT_INVALID"),
    "response_format.regex": ({"regex": "wrong"}, "RESPONSE_FORMAT_INVALID"),
    "sampling_params.structural_tag": ({"structural_tag": "{}"}, "UNSUPPORTED"),
}


@pytest.mark.parametrize("field", REFUSALS)
async def test_a_refusal_names_the_field_by_the_api_or_by_the_protocol_that_alone_has_it(
    served: RunningServer, field: str
) -> None:
    params, reason = REFUSALS[field]
    refusal = await refused(ended(served.worker.Generate(asking(**params))))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.INVALID_ARGUMENT, reason)
    assert refusal.field == field
    assert field in refusal.message
    assert served.engine.submitted == []


async def test_a_prompt_is_needed(served: RunningServer) -> None:
    for request in (messages.GenerateRequest(), messages.GenerateRequest(tokenized={})):
        refusal = await refused(ended(served.worker.Generate(request)))
        assert refusal.code is grpc.StatusCode.INVALID_ARGUMENT
        assert refusal.field in ("prompt", "prompt.tokens")


async def test_two_prompts_are_one_too_many(served: RunningServer) -> None:
    both = messages.GenerateRequest(text="a").SerializeToString() + asking().SerializeToString()
    call: Any = served.channel.unary_stream("/vllm.grpc.engine.VllmEngine/Generate")
    refusal = await refused(ended(call(both)))
    assert refusal.reason == "PROMPT_AMBIGUOUS"


async def test_a_full_queue_is_told_before_the_first_message(served: RunningServer) -> None:
    served.engine.refusal = overloaded()
    refusal = await refused(ended(served.worker.Generate(asking())))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    assert refusal.retry is not None


async def test_an_engine_that_fails_a_request_fails_the_call(served: RunningServer) -> None:
    def failing(request: GenerationRequest) -> Iterable[Event]:
        yield started(request)
        yield Failed(CannotFit(Reason.MEMORY_NEVER_FITS, "too large"))

    served.engine.script = failing
    refusal = await refused(ended(served.worker.Generate(asking())))
    assert refusal.code is grpc.StatusCode.FAILED_PRECONDITION


async def test_health_follows_the_server() -> None:
    async with running(ready=False, worker=worker_parts()) as served:
        # An answer, whatever it says, makes a gateway take in a worker whose model it cannot be told yet.
        for call in (
            served.worker.HealthCheck(messages.HealthCheckRequest()),
            served.worker.GetModelInfo(messages.GetModelInfoRequest()),
        ):
            refusal = await refused(call)
            assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "LOADING")
    async with running(worker=worker_parts()) as served:
        assert (await served.worker.HealthCheck(messages.HealthCheckRequest())).healthy
        served.router.state_changed(EngineState.DRAINING, None)
        await served.settle()
        assert not (await served.worker.HealthCheck(messages.HealthCheckRequest())).healthy


async def test_the_model_is_described(served: RunningServer) -> None:
    info = await served.worker.GetModelInfo(messages.GetModelInfoRequest())
    assert info == messages.GetModelInfoResponse(
        model_path="/models/tiny",
        tokenizer_path="/models/tiny",
        is_generation=True,
        max_context_length=64,
        max_req_input_len=63,
        vocab_size=300,
        served_model_name="tiny",
        model_type="llama",
        architectures=["LlamaForCausalLM"],
        eos_token_ids=[299],
        pad_token_id=2,
        bos_token_id=1,
        default_sampling_params_json='{"temperature":0.5}',
    )


async def test_the_server_is_described(served: RunningServer) -> None:
    served.clock.now += 5
    await ended(served.worker.Generate(asking()))
    info = await served.worker.GetServerInfo(messages.GetServerInfoRequest())
    assert (info.server_type, info.data_parallel_size, info.block_size) == ("vllm-grpc", 1, 256)
    assert (info.max_num_seqs, info.model_dtype, info.uptime_seconds) == (64, "float32", 5.0)
    assert info.last_receive_timestamp == served.clock.wall()
    assert (info.active_requests, info.constrained_decoding_start) == (0, "first_token")


async def test_loads_are_of_now_where_the_edge_counts_them(served: RunningServer) -> None:
    served.engine.script = hanging
    running_call = served.worker.Generate(asking())
    await running_call.read()
    served.engine.script = lambda request: []
    waiting = asyncio.ensure_future(ended(served.worker.Generate(asking().__class__(text="waits"))))
    while len(served.engine.submitted) < 2:
        await served.settle()
    served.engine.stats = EngineStats(
        prompt_token_total=100, cached_token_total=25, kv_limit_bytes=10_000, kv_used_bytes=2_000
    )
    await served.server.observation.sample()
    response = await served.worker.GetLoads(messages.GetLoadsRequest())
    [load] = response.loads
    assert (response.dp_rank_count, response.timestamp[:4]) == (1, "2023")
    assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (1, 1, 2)
    assert (load.cache_hit_rate, load.num_waiting_uncached_tokens) == (0.25, round(5 * 0.75))
    # A token takes 128 bytes.
    assert (load.token_usage, load.max_total_num_tokens, load.num_used_tokens) == (0.2, 10_000 // 128, 15)
    assert load.max_running_requests == 64
    waiting.cancel()
    running_call.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_the_tokenizer_comes_in_chunks_with_its_digest_last(served: RunningServer) -> None:
    chunks = [chunk async for chunk in served.worker.GetTokenizer(common.GetTokenizerRequest())]
    assert b"".join(chunk.data for chunk in chunks) == ARCHIVE.data
    assert [chunk.sha256 for chunk in chunks if chunk.sha256] == [chunks[-1].sha256] == [ARCHIVE.sha256_hex]
    assert max(len(chunk.data) for chunk in chunks) <= 64 << 10


async def test_the_archive_is_there_once_for_all_callers() -> None:
    parts, read_count = worker_parts(), 0

    def read_archive() -> TokenizerArchive:
        nonlocal read_count
        read_count += 1
        return ARCHIVE

    async with running(worker=dataclasses.replace(parts, read_archive=read_archive)) as served:
        calls = [served.worker.GetTokenizer(common.GetTokenizerRequest()) for _ in range(3)]
        assert len({b"".join([chunk.data async for chunk in call]) for call in calls}) == 1
        assert read_count == 1


async def test_flushing_removes_every_block(served: RunningServer) -> None:
    served.engine.order_answer = EvictReport()
    assert (await served.worker.FlushCache(common.FlushCacheRequest())).success
    assert served.engine.orders == [ListKnown(None), EvictBlocks(())]
    served.engine.order_answer = CannotFit(Reason.CACHE_UNSUPPORTED, "no cache here")
    response = await served.worker.FlushCache(common.FlushCacheRequest())
    assert (response.success, response.message) == (False, "no cache here")


async def test_a_vector_is_the_api_s() -> None:
    def embedding(request: GenerationRequest) -> Iterable[Event]:
        yield started(request)
        yield dataclasses.replace(finished(request), embedding=np.array([3.0, 4.0], np.float32))

    async with running(
        info=dataclasses.replace(MODEL_INFO, embedding_size=2), worker=worker_parts()
    ) as served:
        served.engine.script = embedding
        response = await served.worker.Embed(messages.EmbedRequest(request_id="e1", tokenized=PROMPT))
        assert response.embedding == pytest.approx([0.6, 0.8])
        assert (response.prompt_tokens, response.embedding_dim) == (3, 2)
        [request] = served.engine.submitted
        assert (request.request_id, request.pooling) == ("e1", Pooling.LAST_TOKEN)
        nothing, empty = messages.EmbedRequest(), messages.EmbedRequest(tokenized={})
        for wrong, field in ((nothing, "tokenized"), (empty, "inputs[0].tokens")):
            refusal = await refused(served.worker.Embed(wrong))
            assert (refusal.code, refusal.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)


@pytest.mark.parametrize(
    ("method", "request_type"),
    [
        ("StartProfile", common.StartProfileRequest),
        ("StopProfile", common.StopProfileRequest),
        ("SubscribeKvEvents", common.SubscribeKvEventsRequest),
    ],
)
async def test_what_is_not_there_is_unimplemented(
    served: RunningServer, method: str, request_type: Any
) -> None:
    call = getattr(served.worker, method)(request_type())
    refusal = await refused(ended(call) if method.startswith("Sub") else call)
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNIMPLEMENTED, "METHOD_UNSUPPORTED")


class Source:
    """Tells one batch, then nothing until it is closed."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()
        self.asked: list[int] = []

    async def subscribe(self, request: Any, caller: Any, load: Any) -> AsyncGenerator[Any, None]:
        self.asked.append(request.start_sequence_number)
        try:
            yield common.KvEventBatch(sequence_number=7)
            await asyncio.Event().wait()
        finally:
            self.closed.set()


async def test_kv_events_are_handed_on_until_the_caller_leaves() -> None:
    source = Source()
    async with running(worker=worker_parts(kv_events=source)) as served:
        call = served.worker.SubscribeKvEvents(common.SubscribeKvEventsRequest(start_sequence_number=5))
        assert (await call.read()).sequence_number == 7
        assert source.asked == [5]
        call.cancel()
        async with asyncio.timeout(BOUND_S):
            await source.closed.wait()


async def next_removed(stream: Any) -> int:
    """Return the block of the next batch, which has one event, past records of the load alone."""
    while (batch := await stream.read()).load.load_only:
        pass
    [event] = batch.events
    [removed] = event.removed.block_hashes
    return int(removed)


async def test_a_tenant_is_told_nothing_of_what_another_does(tmp_path: Path) -> None:
    source = source_of(BlockLog(), block_token_count=4)
    parts = worker_parts(kv_events=KvEventStreams(source))
    async with guarded_server(tmp_path, server={"worker": parts}) as served:
        served.engine.script = hanging
        call = served.worker.Generate(asking(), metadata=bearer(ADS))
        await call.read()
        running, received = [], []
        streams = {}
        for token in (SEARCH, ADS, BOSS):
            request = common.SubscribeKvEventsRequest()
            streams[token] = served.worker.SubscribeKvEvents(request, metadata=bearer(token))
            state = await streams[token].read()
            running.append(state.load.running_requests)
            info = await served.worker.GetServerInfo(messages.GetServerInfoRequest(), metadata=bearer(token))
            received.append(info.last_receive_timestamp)
        assert running == [0, 1, 1]
        assert received == [0.0, served.clock.wall(), served.clock.wall()]
        source.feed.publish([BlockRemoved(1, Tier.RAM, Tenant("ads"))])
        source.feed.publish([BlockRemoved(2, Tier.RAM, Tenant("search"))])
        for token, hashes in ((SEARCH, [2]), (ADS, [1]), (BOSS, [1, 2])):
            assert [await next_removed(streams[token]) for _ in hashes] == hashes
        call.cancel()


async def test_the_api_is_served_beside_it(served: RunningServer) -> None:
    served.engine.script = counting
    response = await served.inference.Generate(
        native.GenerateRequest(prompt={"text": "Hi"}, max_output_tokens=2)
    )
    assert list(response.token_ids) == [0, 1]
