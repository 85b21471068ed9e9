"""CacheService and ModelService: commands reach the engine, answers come back whole."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import threading
from collections.abc import Iterable
from typing import Any

import grpc
import pytest
from icehouse.v1 import cache_policy_pb2, prompt_pb2
from icehouse.v1 import cache_service_pb2 as messages
from icehouse.v1 import model_service_pb2 as model_messages
from icehouse_server.domain.cache_commands import (
    BlockMatch,
    CacheCommand,
    EndSession,
    EvictBlocks,
    EvictReport,
    Explain,
    Explanation,
    ListKnown,
    ListStored,
    Pin,
    PinReport,
    SessionEndReport,
    Tier,
    Unpin,
    Verify,
    VerifyReport,
)
from icehouse_server.domain.events import CacheReport, Event, PrefillProgress
from icehouse_server.domain.ids import BlockHash, CacheScope, Tenant
from icehouse_server.domain.request import GenerationRequest
from icehouse_server.errors import NotFound, Reason, StorageError
from icehouse_server.rpc.engine_client.engine_ports import CommandReply

from tests.fixtures.patience import BOUND_S
from tests.fixtures.rpc.details import refused
from tests.fixtures.rpc.fake_engine import MODEL_INFO, REPORT, finished, started
from tests.fixtures.rpc.stubs import done
from tests.unit.rpc.calls.test_wire import watched_server
from tests.unit.rpc.conftest import RunningServer

BLUE = cache_policy_pb2.CachePolicy(tenant="blue")
BLOCK = BlockMatch(
    hash=BlockHash(bytes(range(32))),
    start_token_index=0,
    token_count=2,
    size_bytes=100,
    tier=Tier.SSD,
    has_checkpoint=True,
    pinned=False,
)


async def test_explain_tells_blocks_and_predictions(served: RunningServer) -> None:
    served.engine.order_answer = Explanation(
        cache=CacheReport(ssd_token_count=2),
        blocks=(BLOCK,),
        predicted_ttft_s=0.5,
        predicted_cold_ttft_s=None,
    )
    response = await served.cache.Explain(messages.ExplainRequest(prompt={"text": "Hi!"}, cache=BLUE))
    assert served.engine.orders == [Explain(tuple(b"Hi!"), CacheScope(Tenant("blue")))]
    assert (response.prompt_tokens, response.cache.ssd_tokens) == (3, 2)
    [block] = response.blocks
    assert block.hash == bytes(range(32)).hex()
    assert (block.tier, block.token_count, block.size_bytes) == (messages.CACHE_TIER_SSD, 2, 100)
    assert block.has_checkpoint and not block.pinned
    assert response.predicted_time_to_first_token.ToMilliseconds() == 500
    assert not response.HasField("predicted_time_to_first_token_cold")


async def test_a_gap_is_found_in_the_cache_as_it_is_generated_from(served: RunningServer) -> None:
    served.engine.order_answer = Explanation(cache=CacheReport(), blocks=())
    prompt: Any = {"infill": {"prefix": "ab", "suffix": "c"}}
    await served.cache.Explain(messages.ExplainRequest(prompt=prompt))
    await done(served.cache.Warm(messages.WarmRequest(prompt=prompt)))
    [submitted] = served.engine.submitted
    assert served.engine.orders == [Explain(submitted.prompt_token_ids, CacheScope())]
    assert submitted.prompt_token_ids == (256, *b"ab", 257, *b"c", 258)


async def test_warm_runs_the_prompt_without_output(served: RunningServer) -> None:
    def script(request: GenerationRequest) -> Iterable[Event]:
        end = finished(request)
        usage = dataclasses.replace(end.usage, promoted_token_count=1)
        return [started(request), dataclasses.replace(end, usage=usage)]

    served.engine.script = script
    warm = messages.WarmRequest(prompt={"text": "Hi there"}, request_id="w", cache=BLUE)
    response = await done(served.cache.Warm(warm))
    [request] = served.engine.submitted
    assert (request.max_output_tokens, request.tenant, request.name) == (0, "blue", "w")
    assert (response.request_id, response.cache.ram_tokens) == ("w", REPORT.ram_token_count)
    assert response.usage.output_tokens == 0
    assert (response.cache.ssd_tokens, response.promoted_tokens, response.computed_tokens) == (
        1,
        1,
        8 - 1 - 3,
    )


async def test_warm_refuses_a_policy_that_keeps_nothing(served: RunningServer) -> None:
    policy = cache_policy_pb2.CachePolicy(use=cache_policy_pb2.CACHE_USE_READ_ONLY)
    warm = messages.WarmRequest(prompt={"text": "Hi"}, cache=policy)
    answer = await refused(served.cache.Warm(warm).read())
    assert (answer.reason, answer.field) == ("PARAMETER_OUT_OF_RANGE", "cache.use")
    assert served.engine.submitted == []


async def test_pin_and_unpin(served: RunningServer) -> None:
    served.engine.order_answer = PinReport(block_count=1, token_count=2, size_bytes=3)
    tokens = prompt_pb2.TokenPrompt(ids=[1, 2])
    pinned = await served.cache.Pin(messages.PinRequest(prompt={"tokens": tokens}))
    unpinned = await served.cache.Unpin(messages.UnpinRequest(prompt={"tokens": tokens}, cache=BLUE))
    assert served.engine.orders == [Pin((1, 2)), Unpin((1, 2), CacheScope(Tenant("blue")))]
    for answer in (pinned, unpinned):
        assert (answer.block_count, answer.token_count, answer.size_bytes) == (1, 2, 3)


async def test_a_pin_may_have_an_end(served: RunningServer) -> None:
    served.engine.order_answer = PinReport(block_count=1, token_count=2, size_bytes=3)
    prompt = prompt_pb2.Prompt(text="Hi")
    await served.cache.Pin(messages.PinRequest(prompt=prompt, ttl={"seconds": 300, "nanos": 500_000_000}))
    assert served.engine.orders == [Pin(tuple(b"Hi"), ttl_s=300.5)]
    for seconds in (0, -1):
        answer = await refused(served.cache.Pin(messages.PinRequest(prompt=prompt, ttl={"seconds": seconds})))
        assert (answer.reason, answer.field) == ("PARAMETER_OUT_OF_RANGE", "ttl")


async def test_a_session_ends_for_its_tenant(served: RunningServer) -> None:
    served.engine.order_answer = SessionEndReport(block_count=3, ram_bytes=20, ssd_bytes=100)
    answer = await served.cache.EndSession(messages.EndSessionRequest(session_id="s", cache=BLUE))
    assert (answer.block_count, answer.ram_bytes, answer.ssd_bytes) == (3, 20, 100)
    await served.cache.EndSession(messages.EndSessionRequest(), metadata=(("session-id", "told"),))
    assert served.engine.orders == [EndSession("s", Tenant("blue")), EndSession("told")]
    for name in ("", "not a name"):
        refusal = await refused(served.cache.EndSession(messages.EndSessionRequest(session_id=name)))
        assert (refusal.reason, refusal.field) == ("PARAMETER_OUT_OF_RANGE", "session_id")


async def test_an_error_for_an_answer_becomes_a_status(served: RunningServer) -> None:
    served.engine.order_answer = NotFound(Reason.BLOCK_NOT_FOUND, "no block of this prompt is known")
    answer = await refused(served.cache.Pin(messages.PinRequest(prompt={"text": "Hi"})))
    assert (answer.code, answer.reason) == (grpc.StatusCode.NOT_FOUND, "BLOCK_NOT_FOUND")


async def test_evict_by_prompt_and_altogether(served: RunningServer) -> None:
    served.engine.stored = KNOWN[:2]
    served.engine.order_answer = EvictReport(1, 2, 3, 4)
    evict = messages.EvictRequest(prompt={"text": "Hi"}, cache=BLUE)
    response = await done(served.cache.Evict(evict))
    await done(served.cache.EvictAll(ALL))
    assert served.engine.orders == [
        ListKnown(tuple(b"Hi"), CacheScope(Tenant("blue"))),
        EvictBlocks(KNOWN[:2]),
        ListKnown(None),
        EvictBlocks(KNOWN[:2]),
    ]
    assert (response.ram_block_count, response.ram_bytes) == (1, 2)
    assert (response.ssd_block_count, response.ssd_bytes) == (3, 4)


@pytest.mark.parametrize(
    ("bad", "reason", "field"),
    [
        (messages.EvictRequest(), "PROMPT_MISSING", "prompt"),
        (messages.EvictRequest(prompt={}), "PROMPT_MISSING", "prompt"),
        (messages.EvictRequest(prompt={"text": ""}), "PROMPT_EMPTY", "prompt.text"),
        (messages.EvictRequest(prompt={"text": "Hi"}, model="other"), "MODEL_NOT_FOUND", "model"),
        (messages.EvictAllRequest(model="other"), "MODEL_NOT_FOUND", "model"),
    ],
)
async def test_evict_never_takes_more_than_was_named(
    served: RunningServer, bad: messages.EvictRequest | messages.EvictAllRequest, reason: str, field: str
) -> None:
    method = served.cache.Evict if isinstance(bad, messages.EvictRequest) else served.cache.EvictAll
    answer = await refused(method(bad).read())
    assert (answer.reason, answer.field) == (reason, field)
    assert served.engine.orders == []


async def test_verify_cuts_names_but_not_their_number(served: RunningServer) -> None:
    damaged = tuple(BlockHash(i.to_bytes(32, "big")) for i in range(1500))
    served.engine.order_answer = VerifyReport(2000, 9, damaged, 0.5)
    served.engine.stored = damaged[:3]
    response = await done(served.cache.Verify(messages.VerifyRequest(block_limit=2)))
    assert served.engine.orders == [ListStored(2), Verify(damaged[:2])]
    assert (len(response.damaged_hashes), response.damaged_block_count) == (1000, 1500)
    assert response.damaged_hashes[1] == "00" * 31 + "01"
    refusal = await refused(served.cache.Verify(messages.VerifyRequest(block_limit=-1)).read())
    assert refusal.field == "block_limit"


STORED = tuple(BlockHash(i.to_bytes(32, "big")) for i in range(150))
KNOWN = tuple(BlockHash(i.to_bytes(32, "big")) for i in range(600))
ALL = messages.EvictAllRequest()


async def test_verify_tells_how_far_it_is_in_slices(served: RunningServer) -> None:
    served.engine.stored = STORED
    served.engine.order_answer = VerifyReport(64, 640, STORED[:1], 0.5)
    told = [response async for response in served.cache.Verify(messages.VerifyRequest())]
    assert [r.progress.verified_block_count for r in told[:-1]] == [0, 64, 128, 192]
    assert {r.progress.block_count for r in told[:-1]} == {150}
    assert (told[1].progress.verified_bytes, told[2].progress.damaged_block_count) == (640, 2)
    found = told[-1].done
    assert (found.verified_block_count, found.damaged_block_count) == (192, 3)
    assert found.duration.ToMilliseconds() == 1500
    slices = [Verify(STORED[:64]), Verify(STORED[64:128]), Verify(STORED[128:])]
    assert served.engine.orders == [ListStored(), *slices]


@pytest.mark.parametrize("is_all", [True, False])
async def test_evict_tells_how_far_it_is_in_slices(served: RunningServer, is_all: bool) -> None:
    served.engine.stored = KNOWN
    served.engine.order_answer = EvictReport(1, 10, 200, 2000)
    evict = messages.EvictRequest(prompt={"text": "Hi"})
    call = served.cache.EvictAll(ALL) if is_all else served.cache.Evict(evict)
    told = [response async for response in call]
    assert [r.progress.processed_block_count for r in told[:-1]] == [0, 256, 512, 600]
    assert {r.progress.block_count for r in told[:-1]} == {600}
    assert [(r.progress.ram_bytes, r.progress.ssd_bytes) for r in told[1:3]] == [(10, 2000), (20, 4000)]
    assert told[-1].done == messages.EvictResult(
        ram_block_count=3, ram_bytes=30, ssd_block_count=600, ssd_bytes=6000
    )
    slices = [EvictBlocks(KNOWN[:256]), EvictBlocks(KNOWN[256:512]), EvictBlocks(KNOWN[512:])]
    target = ListKnown(None) if is_all else ListKnown(tuple(b"Hi"), CacheScope(Tenant("")))
    assert served.engine.orders == [target, *slices]


async def test_evict_waits_for_the_commands_before_it_also_where_nothing_is_known(
    served: RunningServer,
) -> None:
    served.engine.order_answer = EvictReport()
    request = messages.EvictRequest(prompt={"text": "Hi"}, cache=BLUE)
    told = [response async for response in served.cache.Evict(request)]
    assert [response.WhichOneof("event") for response in told] == ["progress", "progress", "done"]
    assert served.engine.orders == [ListKnown(tuple(b"Hi"), CacheScope(Tenant("blue"))), EvictBlocks(())]


async def test_an_evict_whose_store_breaks_says_how_far_it_was(served: RunningServer) -> None:
    served.engine.stored = KNOWN
    served.engine.order_answer = EvictReport(0, 0, 256, 2560)
    original = served.engine.submit_command

    def submit(command: CacheCommand, reply: CommandReply) -> None:
        if len(served.engine.orders) == 2:
            served.engine.order_answer = StorageError(Reason.STORE_UNUSABLE, "the disk refused")
        original(command, reply)

    served.engine.submit_command = submit  # type: ignore[method-assign]
    call = served.cache.EvictAll(ALL)
    told = [(await call.read()).progress.ssd_bytes for _ in range(2)]
    assert told == [0, 2560]
    assert (await refused(call.read())).reason == "STORE_UNUSABLE"
    assert len(served.engine.orders) == 3, "nothing more is asked of a broken store"


CHECKED = [ListStored(), Verify(STORED[:64]), Verify(STORED[64:128])]
REMOVED = [ListKnown(None), EvictBlocks(KNOWN[:256]), EvictBlocks(KNOWN[256:512])]


@pytest.mark.parametrize(
    ("method", "end"),
    [*itertools.product(("Verify", "EvictAll"), ("cancelled", "connection lost")), ("EvictAll", "deadline")],
)
async def test_a_command_that_may_be_long_ends_with_its_caller(method: str, end: str) -> None:
    async with watched_server() as (served, notes):
        evicts = method == "EvictAll"
        served.engine.stored = KNOWN if evicts else STORED
        served.engine.order_answer = EvictReport() if evicts else VerifyReport(64, 640, (), 0.5)
        reached, go_on = threading.Event(), threading.Event()

        def hold() -> None:
            reached.set()
            go_on.wait(BOUND_S)

        def submit(command: CacheCommand, reply: CommandReply) -> None:
            if len(served.engine.orders) == 2:
                # The second slice is asked for: nothing is answered until the caller has gone.
                served.engine.call_on_thread(hold)
            original(command, reply)

        original = served.engine.submit_command
        served.engine.submit_command = submit  # type: ignore[method-assign]
        request = ALL if evicts else messages.VerifyRequest()
        call = getattr(served.cache, method)(request, timeout=2.0 if end == "deadline" else None)
        waiting = asyncio.ensure_future(done(call))
        await asyncio.to_thread(reached.wait, BOUND_S)
        if end == "connection lost":
            await served.channel.close()
        elif end == "cancelled":
            call.cancel()
        await asyncio.wait([waiting])
        await notes.ended(1)
        go_on.set()
        await served.settle()
    assert served.engine.orders == (REMOVED if evicts else CHECKED)
    assert notes.calls[0].code == ("DEADLINE_EXCEEDED" if end == "deadline" else "CANCELLED")


async def test_warm_tells_how_far_it_is(served: RunningServer) -> None:
    served.engine.script = lambda request: [
        started(request),
        PrefillProgress(1, 2),
        PrefillProgress(2, 2),
        finished(request),
    ]
    request = messages.WarmRequest(prompt={"text": "Hi"}, request_id="w", cache=BLUE)
    told = [response async for response in served.cache.Warm(request)]
    # Progress that waits for the reader becomes one.
    kinds = [response.WhichOneof("event") for response in told]
    assert (set(kinds[:-1]), kinds[-1]) == ({"progress"}, "done")
    first, last = told[0].progress, told[-2].progress
    reused = REPORT.cached_token_count
    assert (first.request_id, first.processed_tokens, first.prompt_tokens) == ("w", reused, 2)
    assert (last.request_id, last.processed_tokens, last.prompt_tokens) == ("w", 2, 2)
    [submitted] = served.engine.submitted
    assert submitted.max_output_tokens == 0


async def test_a_warm_up_ends_with_its_caller(served: RunningServer) -> None:
    begun = threading.Event()

    def script(request: GenerationRequest) -> Iterable[Event]:
        begun.set()
        yield started(request)

    served.engine.script = script
    call = served.cache.Warm(messages.WarmRequest(prompt={"text": "Hi"}, request_id="w"))
    waiting = asyncio.ensure_future(done(call))
    await asyncio.to_thread(begun.wait, BOUND_S)
    call.cancel()
    await asyncio.wait([waiting])
    assert await served.cancelled() == "w"


async def test_models_are_listed_and_described(served: RunningServer) -> None:
    listed = await served.models.ListModels(model_messages.ListModelsRequest())
    [model] = listed.models
    assert (await served.models.GetModel(model_messages.GetModelRequest(model="tiny"))).model == model
    assert (await served.models.GetModel(model_messages.GetModelRequest())).model == model
    assert (model.id, model.context_tokens) == (MODEL_INFO.model_id, MODEL_INFO.context_token_limit)
    assert model.cache_classes == ["KVCache"] and model.has_chat_template
    assert (model.reply_format.calls, list(model.reply_format.evidence)) == ("hermes", ["calls: so"])
    assert model.reply_format.reasoning_end == "</think>" and model.reply_format.unread_markers == ["<qz>"]
    missing = await refused(served.models.GetModel(model_messages.GetModelRequest(model="other")))
    assert (missing.code, missing.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("page_size", model_messages.ListModelsRequest(page_size=-1)),
        ("page_token", model_messages.ListModelsRequest(page_token="x")),
    ],
)
async def test_bad_pages_are_named(
    served: RunningServer, field: str, bad: model_messages.ListModelsRequest
) -> None:
    answer = await refused(served.models.ListModels(bad))
    assert (answer.reason, answer.field) == ("PARAMETER_OUT_OF_RANGE", field)
