"""Both faces of the Python client: results, options, errors, cancelling."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import socket
from collections.abc import Callable
from typing import Any, TypeVar, cast

import grpc
import pytest
from icehouse.v1 import tool_pb2
from icehouse.v1.inference_service_pb2 import GenerateRequest
from icehouse.v1.rerank_service_pb2 import RerankRequest
from icehouse_client import (
    PREFIX_KEY_HEADER,
    AsyncClient,
    Client,
    FinishReason,
    IcehouseClientError,
    Infill,
    Message,
    Tool,
    formats,
    options,
    prefix_key,
)
from icehouse_client.embeddings import embed_request
from icehouse_client.requests import Options, generate_request
from icehouse_client.reranking import RerankOptions, rerank_request
from icehouse_server.domain.cache_commands import (
    EvictBlocks,
    EvictReport,
    Explain,
    Explanation,
    ListKnown,
    ListStored,
    Pin,
    PinReport,
    Unpin,
    Verify,
    VerifyReport,
)
from icehouse_server.domain.events import CacheReport, Delta, Finished, PrefillProgress
from icehouse_server.domain.events import FinishReason as EngineFinishReason
from icehouse_server.domain.ids import BlockHash, CacheScope, Tenant
from icehouse_server.domain.model import EmbeddingPrompt
from icehouse_server.domain.request import CacheUse
from icehouse_server.domain.response_format import Choice, JsonObject, JsonSchema, LarkGrammar, Regex

from tests.fixtures.patience import BOUND_S
from tests.fixtures.rpc.fake_engine import finished, hanging, overloaded, started, usage_of
from tests.unit.rpc.conftest import SEED, RunningServer, running
from tests.unit.rpc.services.test_embedding_service import EMBEDDING, embedding, vector_of
from tests.unit.rpc.services.test_rerank_service import vowels

Result = TypeVar("Result")


async def threaded(served: RunningServer, use: Callable[[Client], Result]) -> Result:
    """Use a synchronous client in a thread, beside the server's loop."""

    def run() -> Result:
        with Client(served.server.address) as client:
            return use(client)

    return await asyncio.to_thread(run)


async def test_generate_gives_a_whole_reply(served: RunningServer) -> None:
    reply = await threaded(served, lambda client: client.generate("Hi", max_output_tokens=2))
    assert (reply.text, reply.token_ids) == (" w0 w1", (0, 1))
    assert reply.finish_reason is FinishReason.LENGTH and reply.stop_string is None
    assert (reply.model, reply.seed, reply.reuse_limit) == ("tiny", SEED, "DIVERGED")
    assert (reply.usage.prompt_tokens, reply.usage.cached_tokens) == (2, 3)
    assert (reply.usage.ttft_s, reply.usage.restore_s) == (3.5, 0.25)


async def test_stream_gives_the_same_piece_by_piece(served: RunningServer) -> None:
    def use(client: Client) -> Any:
        with client.stream("Hi", max_output_tokens=3, request_id="s") as stream:
            with pytest.raises(ValueError, match="not ended"):
                _ = stream.reply
            return list(stream), stream.started, stream.reply

    pieces, began, reply = await threaded(served, use)
    await served.settle()
    whole = await threaded(served, lambda c: c.generate("Hi", max_output_tokens=3, request_id="s"))
    assert pieces == [" w0", " w1", " w2"]
    assert reply == whole
    assert (began.request_id, began.prompt_tokens, began.cached_tokens) == ("s", 2, 3)


async def test_options_and_prompts_of_every_kind_arrive(served: RunningServer) -> None:
    def use(client: Client) -> None:
        client.generate(
            "Hi",
            temperature=0.5,
            top_p=0.9,
            top_k=3,
            min_p=0.1,
            seed=7,
            stop=["x"],
            stop_token_ids=[9],
            model="tiny",
            request_id="o",
            session_id="s",
            parent_session_id="p",
            ends_session=True,
            cache_use="off",
            tenant="blue",
            priority=2,
        )
        client.chat([Message("user", "Hi")], max_output_tokens=1)
        client.generate([1, 2, 3], max_output_tokens=1)

    await threaded(served, use)
    full, chat, tokens = served.engine.submitted
    sampling = full.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 3)
    assert (sampling.min_p, sampling.seed) == (0.1, 7)
    assert (full.stop, full.name, full.cache_use) == (("x",), "o", CacheUse.OFF)
    assert sampling.stop_token_ids == (9,)
    assert (full.tenant, full.priority, full.session_id, full.parent_session_id) == ("blue", 2, "s", "p")
    assert full.ends_session and not chat.ends_session
    assert chat.prompt_token_ids == tuple(b"user:Hi;")
    assert tokens.prompt_token_ids == (1, 2, 3)


async def test_a_conversations_form_arrives(served: RunningServer) -> None:
    """Only a stable prompt is normalised, where the server's setting says nothing."""
    said = [Message("system", "a=1; cch=2;\nBe kind."), Message("user", "Hi")]

    def use(client: Client) -> None:
        client.chat(said, max_output_tokens=1, prompt_form="stable")
        client.chat(said, max_output_tokens=1, prompt_form="exact")
        client.chat(said, max_output_tokens=1)
        with pytest.raises(ValueError, match="prompt_form"):
            client.chat(said, prompt_form="other")  # type: ignore[arg-type]

    await threaded(served, use)
    stable, exact, plain = served.tokenizer.conversations
    assert stable.messages[0].content == "Be kind."
    assert exact.messages[0].content == plain.messages[0].content == said[0].content


async def test_every_call_has_a_deadline_unless_told_otherwise(served: RunningServer) -> None:
    def use(client: Client) -> None:
        client.generate("Hi", max_output_tokens=1)
        client.generate("Hi", max_output_tokens=1, timeout_s=7)
        client.generate("Hi", max_output_tokens=1, timeout_s=None)

    await threaded(served, use)
    remaining = [r.deadline_time and r.deadline_time - served.clock.now for r in served.engine.submitted]
    # Without one of the client's the server's own holds.
    assert remaining == [pytest.approx(seconds, abs=5) for seconds in (120, 7, 4 * 3600)]


async def test_refusal_is_an_error_with_its_facts(served: RunningServer) -> None:
    def use(client: Client) -> IcehouseClientError:
        with pytest.raises(IcehouseClientError) as caught:
            client.generate("x" * 100)
        return caught.value

    error = await threaded(served, use)
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "PROMPT_TOO_LONG")
    assert (error.field, error.metadata["context_tokens"]) == ("prompt.text", "64")
    assert error.retry_after_s is None and "100 tokens" in str(error)


async def test_overload_says_when_to_come_back(served: RunningServer) -> None:
    served.engine.refusal = overloaded()

    def use(client: Client) -> IcehouseClientError:
        with pytest.raises(IcehouseClientError) as caught:
            list(client.stream("Hi"))
        return caught.value

    error = await threaded(served, use)
    assert (error.reason, error.retry_after_s, error.field) == ("QUEUE_FULL", 1.5, None)


async def test_no_server_is_an_error_too() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        async with AsyncClient(address) as client:
            with pytest.raises(IcehouseClientError) as caught:
                await client.generate("Hi")
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE")


async def test_leaving_a_stream_cancels_it(served: RunningServer) -> None:
    served.engine.script = hanging

    def use(client: Client) -> str:
        with client.stream("Hi", request_id="left") as stream:
            return next(iter(stream))

    assert await threaded(served, use) == "hello"
    assert await served.cancelled() == "left"


@pytest.mark.parametrize("iteration", ["__iter__", "indexed"])
async def test_an_iteration_that_is_left_cancels_a_stream_that_is_kept(
    served: RunningServer, iteration: str
) -> None:
    served.engine.script = hanging
    left = asyncio.Event()
    loop = asyncio.get_running_loop()

    def use(client: Client) -> None:
        stream = client.stream("Hi", request_id="left")
        for _ in getattr(stream, iteration)():
            break
        # The stream and its connection live on until the server has seen the end.
        asyncio.run_coroutine_threadsafe(left.wait(), loop).result()
        stream.cancel()

    leaving = asyncio.create_task(threaded(served, use))
    assert await served.cancelled() == "left"
    left.set()
    await leaving


@pytest.mark.parametrize("iteration", ["__aiter__", "indexed"])
async def test_an_asyncio_iteration_that_is_left_cancels_a_stream_that_is_kept(
    served: RunningServer, iteration: str
) -> None:
    served.engine.script = hanging
    async with AsyncClient(served.server.address) as client:
        stream = client.stream("Hi", request_id="left")
        async for _ in getattr(stream, iteration)():
            break
        assert await served.cancelled() == "left"
        stream.cancel()


async def test_tokenize_stats_and_models(served: RunningServer) -> None:
    def use(client: Client) -> Any:
        return client.tokenize("Hi"), client.stats(), client.cache_stats(), client.models()

    tokens, stats, cache_stats, models = await threaded(served, use)
    assert [(token.id, token.piece) for token in tokens] == [(72, "<72>"), (105, "<105>")]
    assert stats.engine.step_total == 7
    assert cache_stats.HasField("collect_time") and not cache_stats.HasField("cache")
    assert [model.id for model in models] == ["tiny"]


async def test_the_asyncio_face_says_the_same(served: RunningServer) -> None:
    served.engine.script = lambda request: [
        started(request),
        Delta("so", (1,)),
        Finished(EngineFinishReason.STOP_STRING, "END", usage_of(request, output_token_count=1)),
    ]
    async with AsyncClient(served.server.address) as client:
        whole = await client.chat([Message("user", "Hi")], request_id="a")
        await served.settle()
        async with client.stream([Message("user", "Hi")], request_id="a") as stream:
            pieces = [text async for text in stream]
        assert pieces == ["so"] and stream.reply == whole
        assert (whole.finish_reason, whole.stop_string) == (FinishReason.STOP_STRING, "END")
        assert stream.started is not None and stream.started.request_id == "a"
        assert [token.id for token in await client.tokenize("Hi")] == [72, 105]
        assert (await client.stats()).engine.step_total == 7
        assert [model.id for model in await client.models()] == ["tiny"]
        with pytest.raises(IcehouseClientError) as caught:
            async for _ in client.stream("Hi", temperature=-1):
                pytest.fail("a refused stream has no text")
        assert caught.value.field == "sampling.temperature"


async def test_both_faces_show_the_server_and_end_requests(served: RunningServer) -> None:
    served.engine.script = hanging

    def use(client: Client) -> Any:
        with client.stream("Hi", request_id="first") as stream:
            events = stream.events()
            next(events)
            listed = client.requests()
            ended = client.cancel("first")
        return client.detokenize([72, 105]), client.server(), listed, ended

    text, server, listed, ended = await threaded(served, use)
    assert (text, server.limits.max_completions) == ("Hi", 16)
    assert [request.request_id for request in listed] == [ended.request_id] == ["first"]
    async with AsyncClient(served.server.address) as client:
        assert await client.detokenize([72, 105]) == "Hi"
        assert (await client.server()).version == server.version
        with pytest.raises(IcehouseClientError) as caught:
            await client.cancel("nothing")
        assert [request.request_id for request in await client.requests()] in ([], ["first"])
    assert caught.value.reason == "REQUEST_NOT_FOUND"


async def test_leaving_an_asyncio_stream_cancels_it(served: RunningServer) -> None:
    served.engine.script = hanging
    async with AsyncClient(served.server.address) as client:
        async with client.stream("Hi", request_id="left") as stream:
            async for text in stream:
                assert text == "hello"
                break
        assert await served.cancelled() == "left"


@pytest.mark.parametrize(
    ("prompt", "wanted"), [(["Hi"], "token ids"), ([Message("user", "Hi"), "ho"], "Message"), (7, "int")]
)
def test_a_prompt_of_no_known_kind_is_refused_here(prompt: Any, wanted: str) -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(TypeError, match=wanted):
        client.generate(prompt)


@pytest.mark.parametrize(
    ("call", "option", "wanted"),
    [
        ("generate", "max_tokens", "did you mean 'max_output_tokens'?"),
        ("generate", "temprature", "did you mean 'temperature'?"),
        ("generate", "n", "did you mean 'completions'?"),
        ("stream", "timeout", "did you mean 'timeout_s'?"),
        ("chat", "zzzz", "there are adapter, allowed_tools"),
        ("embed", "dimension", "did you mean 'dimensions'?"),
        ("embed", "temperature", "there is no option 'temperature'"),
        ("rerank", "top_n", "did you mean 'top_count'?"),
    ],
)
async def test_an_option_that_no_request_has_is_refused(call: str, option: str, wanted: str) -> None:
    given: dict[str, tuple[Any, ...]] = {
        "rerank": ("q", ["a"]),
        "embed": (["q"],),
        "chat": ([Message("user", "q")],),
    }
    arguments = given.get(call, ("q",))
    with Client("127.0.0.1:1") as client, pytest.raises(TypeError, match=re.escape(wanted)):
        getattr(client, call)(*arguments, **{option: 1})
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(TypeError, match=re.escape(wanted)):
            await getattr(client, call)(*arguments, **{option: 1})


def test_what_constrains_tool_calls_is_written_into_the_choice() -> None:
    tools = [Tool("f", strict=True), Tool("g")]
    request = generate_request(
        [Message("user", "Hi")],
        {"tools": tools, "tool_choice": "required", "allowed_tools": tools[:1], "parallel_tool_calls": False},
    )
    assert [tool.strict for tool in request.prompt.tools] == [True, False]
    choice = request.tool_choice
    assert (choice.mode, list(choice.allowed)) == (tool_pb2.TOOL_CHOICE_MODE_REQUIRED, ["f"])
    assert choice.HasField("parallel_tool_calls") and not choice.parallel_tool_calls


def test_names_of_other_apis_are_hints_to_options_that_exist() -> None:
    known = {**Options.__annotations__, **RerankOptions.__annotations__}
    assert {name for name in options.MEANT if options.MEANT[name] not in known or name in known} == set()


async def test_response_formats_arrive_and_json_is_read_from_complete_outputs_only(
    served: RunningServer,
) -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}

    def use(client: Client) -> list[Any]:
        wanted = [
            formats.json_schema(schema, compact=True),
            formats.json_schema('{"type":"integer"}'),
            formats.json_object(),
            formats.regex("a+"),
            formats.lark('start: "a"'),
            formats.choice("yes", "no"),
        ]
        return [client.generate("Hi", max_output_tokens=1, response_format=form) for form in wanted]

    replies = await threaded(served, use)
    assert served.grammars.compiled == [
        JsonSchema(json.dumps(schema), is_compact=True),
        JsonSchema('{"type":"integer"}'),
        JsonObject(),
        Regex("a+"),
        LarkGrammar('start: "a"'),
        Choice(("yes", "no")),
    ]
    with pytest.raises(ValueError, match="LENGTH"):
        replies[0].json()
    complete = dataclasses.replace(replies[0], text='{"a":[1]}', finish_reason=FinishReason.STOP_TOKEN)
    assert complete.json() == {"a": [1]}


async def test_documents_are_ranked(served: RunningServer) -> None:
    served.engine.script = vowels
    answers: Any = {"positive_answer": "y", "negative_answer": "n"}

    def use(client: Client) -> Any:
        options = {"text": "{query}/{document}", "cache_use": "off", "tenant": "t", **answers}
        return client.rerank("q", ["x", "aei", "a"], top_count=2, **options)

    ranked = await threaded(served, use)
    assert [(one.index, one.log_odds) for one in ranked] == [(1, -2.75), (2, -3.75)]
    assert 0.0 < ranked[1].score < ranked[0].score < 0.1
    assert {(r.cache_use, r.tenant) for r in served.engine.submitted} == {(CacheUse.OFF, "t")}
    async with AsyncClient(served.server.address) as client:
        turns = {"system": "{query}", "user": "{document}"}
        assert [one.index for one in await client.rerank("q", ["x", "a"], **turns, **answers)] == [1, 0]
    prompts = [bytes(request.prompt_token_ids) for request in served.engine.submitted[-2:]]
    assert prompts == [b"system:q;user:x;", b"system:q;user:a;"]
    with pytest.raises(TypeError, match="list of texts"):
        rerank_request("q", "one text", {})
    with pytest.raises(TypeError, match="not of both"):
        rerank_request("q", ["a"], {"text": "{query}{document}", "user": "a"})


async def test_the_cache_is_inspected_and_managed(served: RunningServer) -> None:
    served.engine.script = lambda request: [started(request), finished(request)]
    chat = [Message("user", "Hi")]

    def use(client: Client) -> Any:
        warmed = client.cache.warm(chat, tenant="blue", request_id="w", priority=3)
        served.engine.order_answer = PinReport(1, 2, 3)
        return warmed, client.cache.pin("Hi", tenant="blue"), client.cache.unpin([1, 2])

    warmed, pinned, unpinned = await threaded(served, use)
    [run] = served.engine.submitted
    assert (run.tenant, run.name, run.priority, run.max_output_tokens) == ("blue", "w", 3, 0)
    assert (warmed.request_id, pinned.block_count, unpinned.size_bytes) == ("w", 1, 3)
    async with AsyncClient(served.server.address) as client:
        await client.cache.pin(chat)
        await client.cache.unpin(chat)
        await client.cache.pin(Infill("a", "b"))
        served.engine.order_answer = EvictReport(4)
        assert (await client.cache.evict("Hi")).ram_block_count == 4
        served.engine.order_answer = Explanation(CacheReport(ssd_token_count=2), ())
        assert (await client.cache.explain([1, 2], model="tiny")).cache.ssd_tokens == 2
        await served.settle()
        assert (await client.cache.warm("Hi")).request_id
    blue, default = CacheScope(Tenant("blue")), CacheScope()
    assert served.engine.orders == [
        Pin(tuple(b"Hi"), blue),
        Unpin((1, 2), default),
        Pin(tuple(b"user:Hi;"), default),
        Unpin(tuple(b"user:Hi;"), default),
        Pin((256, *b"a", 257, *b"b", 258), default),
        ListKnown(tuple(b"Hi"), default),
        EvictBlocks(()),
        Explain((1, 2), default),
    ]
    for method in ("explain", "evict", "pin", "warm"):
        with Client("127.0.0.1:1") as nobody, pytest.raises(TypeError, match="there is no option"):
            getattr(nobody.cache, method)("Hi", temperature=1)


async def test_warm_ups_and_checks_tell_how_far_they_are(served: RunningServer) -> None:
    served.engine.script = lambda request: [started(request), PrefillProgress(2, 2), finished(request)]
    served.engine.stored = (BlockHash(bytes(32)),) * 65
    served.engine.order_answer = VerifyReport(7, 70, (), 0.5)
    warmed: list[int] = []
    checked: list[int] = []

    def use(client: Client) -> Any:
        warm = client.cache.warm(
            "Hi", request_id="w", on_progress=lambda p: warmed.append(p.processed_tokens)
        )
        return warm, client.cache.verify(on_progress=lambda p: checked.append(p.verified_block_count))

    warm, verified = await threaded(served, use)
    assert (warm.request_id, warmed[-1]) == ("w", 2)
    assert (verified.verified_block_count, checked) == (14, [0, 7, 14])
    await served.settle()
    async with AsyncClient(served.server.address) as client:
        warmed.clear()
        answer = await client.cache.warm("Hi", request_id="w", on_progress=lambda p: warmed.append(1))
        assert answer.request_id == "w" and set(warmed) == {1}
        assert await client.cache.verify(on_progress=lambda p: checked.append(0)) == verified
        assert (await client.cache.verify(block_limit=3)).verified_block_count == 7
    assert served.engine.orders[-2:] == [ListStored(3), Verify(served.engine.stored[:3])]


async def test_what_is_told_of_progress_can_end_a_warm_up(served: RunningServer) -> None:
    served.engine.script = lambda request: [started(request), PrefillProgress(1, 2)]

    def enough(progress: object) -> None:
        raise InterruptedError

    async with AsyncClient(served.server.address) as client:
        with pytest.raises(InterruptedError):
            await client.cache.warm("Hi", request_id="w", on_progress=enough)
        assert await served.cancelled() == "w"


async def test_commands_that_may_be_long_have_a_deadline_of_their_own(served: RunningServer) -> None:
    served.engine.script = lambda request: [started(request), finished(request)]

    def has_left(wanted_s: float) -> bool:
        time = served.engine.submitted[-1].deadline_time
        return time is not None and abs(time - served.clock.now - wanted_s) < BOUND_S

    async with AsyncClient(served.server.address) as client:
        await client.cache.warm("Hi")
        assert has_left(3600)
        await client.cache.warm("Hi", timeout_s=60)
        assert has_left(60)
        await client.cache.warm("Hi", on_progress=lambda p: None)
        assert has_left(3600)
    async with AsyncClient(served.server.address, timeout_s=None) as client:
        await client.cache.warm("Hi")
        assert has_left(4 * 3600)


class Headers:
    """A server that writes the prefix keys of its calls down and refuses them."""

    def __init__(self) -> None:
        self.keys: list[tuple[str, list[str]]] = []

    def service(self, details: grpc.HandlerCallDetails) -> None:
        sent = [str(value) for name, value in details.invocation_metadata if name == PREFIX_KEY_HEADER]
        self.keys.append((details.method.rpartition("/")[2], sent))


async def test_the_prefix_key_goes_with_every_call_whose_cache_it_concerns() -> None:
    headers = Headers()
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((cast(Any, headers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with AsyncClient(f"127.0.0.1:{port}", watches_health=False) as client:
            cache = client.cache
            for call in (client.generate, cache.warm, cache.explain, cache.pin, cache.unpin, cache.evict):
                with pytest.raises(IcehouseClientError):
                    await call("Hi")
            for other in (client.rerank("Hi", ["a"]), client.embed(["Hi"]), client.tokenize("Hi")):
                with pytest.raises(IcehouseClientError):
                    await other
    finally:
        await server.stop(None)
    ranked = prefix_key(RerankRequest(query="Hi", documents=["a"]))
    assert headers.keys == [
        *(
            (method, [prefix_key(GenerateRequest(prompt={"text": "Hi"}))])
            for method in ("Generate", "Warm", "Explain")
        ),
        *(
            (method, [prefix_key(GenerateRequest(prompt={"text": "Hi"}))])
            for method in ("Pin", "Unpin", "Evict")
        ),
        *(("Rerank", [ranked]), ("Embed", []), ("Tokenize", [])),
    ]


async def test_embeddings_come_in_the_order_of_their_inputs() -> None:
    info = dataclasses.replace(EMBEDDING, embedding_prompts=(EmbeddingPrompt("query", "find: "),))
    async with running(info=info) as served:
        served.engine.script = embedding

        def use(client: Client) -> Any:
            inputs = ["ab", [7, 8, 9, 10], "a"]
            client.embed(["ab"], prompt_name="query")
            return client.embed(inputs, normalize=False), client.embed(["ab"], pooling="mean", dimensions=1)

        several, one = await threaded(served, use)
        assert bytes(served.engine.submitted[0].prompt_token_ids) == b"find: ab"
        async with AsyncClient(served.server.address) as client:
            assert await client.embed(["ab"], normalize=False) == [vector_of(2).tolist()]
    assert several == [vector_of(length).tolist() for length in (2, 4, 1)]
    assert one == [[1.0]]
    with pytest.raises(TypeError, match="list of texts"):
        embed_request("one text", {})
