"""Each refusal: its code, reason and field, before the first message, and the server lives on."""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import Any

import grpc
import pytest
from icehouse.v1 import cache_policy_pb2, logprobs_pb2, prompt_pb2, sampling_pb2
from icehouse.v1 import inference_service_pb2 as messages
from icehouse_client.log_lines import JsonFormatter, fields_of
from icehouse_server.domain.events import Failed
from icehouse_server.domain.model import EngineState
from icehouse_server.errors import (
    AlreadyExists,
    Cancelled,
    CannotFit,
    DeadlineExceeded,
    EngineFailed,
    IcehouseError,
    Overloaded,
    Reason,
    Unavailable,
)

from tests.fixtures.rpc.details import refusal_of, refused
from tests.fixtures.rpc.fake_engine import MODEL_INFO, overloaded
from tests.unit.rpc.conftest import RunningServer, running

INVALID = grpc.StatusCode.INVALID_ARGUMENT


def request(*, text: str = "Hi", adapter: str = "", **fields: Any) -> messages.GenerateRequest:
    return messages.GenerateRequest(prompt={"text": text, "adapter": adapter}, **fields)


def sampled(**fields: Any) -> messages.GenerateRequest:
    return request(sampling=sampling_pb2.SamplingParams(**fields))


samplings = sampling_pb2.SamplingParams


def token_sequence(*ids: int) -> sampling_pb2.TokenSequence:
    return sampling_pb2.TokenSequence(ids=ids)


def chat(*turns: tuple[str, str]) -> messages.GenerateRequest:
    turns_proto = [
        prompt_pb2.ChatMessage(role=prompt_pb2.Role.Value(f"ROLE_{role.upper()}"), content=content)
        for role, content in turns
    ]
    return messages.GenerateRequest(prompt={"chat": prompt_pb2.ChatPrompt(messages=turns_proto)})


def turn(**fields: Any) -> messages.GenerateRequest:
    return messages.GenerateRequest(prompt={"chat": {"messages": [{**fields, "content": "hi"}]}})


def tokens(*ids: int) -> messages.GenerateRequest:
    return messages.GenerateRequest(prompt={"tokens": prompt_pb2.TokenPrompt(ids=ids)})


OUT_OF_RANGE = [
    ("max_output_tokens", request(max_output_tokens=-1)),
    ("max_reasoning_tokens", request(max_reasoning_tokens=-1)),
    ("max_reasoning_tokens", request(max_reasoning_tokens=0)),
    ("completions", request(completions=-1)),
    ("completions", request(completions=17)),
    ("sampling.temperature", sampled(temperature=-1)),
    ("sampling.temperature", sampled(temperature=math.nan)),
    ("sampling.temperature", sampled(temperature=math.inf)),
    ("sampling.top_p", sampled(top_p=-0.5)),
    ("sampling.top_p", sampled(top_p=1.01)),
    ("sampling.top_p", sampled(top_p=math.nan)),
    ("sampling.top_k", sampled(top_k=-1)),
    ("sampling.min_p", sampled(min_p=1)),
    ("sampling.min_p", sampled(min_p=math.nan)),
    ("sampling.xtc_probability", sampled(xtc_probability=1.5)),
    ("sampling.xtc_threshold", sampled(xtc_threshold=0.6)),
    ("sampling.repetition_penalty", sampled(repetition_penalty=-1)),
    ("sampling.repetition_penalty", sampled(repetition_penalty=math.nan)),
    ("sampling.repetition_window", sampled(repetition_window=-1)),
    ("sampling.presence_penalty", sampled(presence_penalty=2.5)),
    ("sampling.frequency_penalty", sampled(frequency_penalty=math.nan)),
    ("sampling.frequency_window", sampled(frequency_window=-3)),
    ("sampling.logit_bias[7]", sampled(logit_bias={7: 101.0})),
    ("sampling.logit_bias[7]", sampled(logit_bias={7: math.inf})),
    ("sampling.logit_bias", sampled(logit_bias=dict.fromkeys(range(1025), 1.0))),
    ("sampling.bad_words[1]", sampled(bad_words=["a", ""])),
    ("sampling.bad_words[0]", sampled(bad_words=["x" * 257])),
    ("sampling.bad_words[0]", sampled(bad_words=["x" * 33])),
    ("sampling.bad_words", sampled(bad_words=["a"] * 129)),
    ("sampling.bad_token_sequences[0]", sampled(bad_token_sequences=[token_sequence()])),
    ("sampling.bad_token_sequences[0]", sampled(bad_token_sequences=[token_sequence(*[1] * 33)])),
    ("sampling.bad_token_sequences", sampled(bad_token_sequences=[token_sequence(1)] * 129)),
    ("sampling.min_output_tokens", sampled(min_output_tokens=-1)),
    ("sampling.min_output_tokens", request(max_output_tokens=4, sampling=samplings(min_output_tokens=5))),
    ("stop", request(stop=[str(i) for i in range(17)])),
    ("stop[1]", request(stop=["a", ""])),
    ("stop[0]", request(stop=["é" * 129])),
    ("stop_token_ids", request(stop_token_ids=[1] * 129)),
    ("logprobs.top_count", request(logprobs=logprobs_pb2.LogprobsOptions(top_count=21))),
    ("logprobs.top_count", request(logprobs=logprobs_pb2.LogprobsOptions(top_count=-1))),
    ("logprobs.token_ids", request(logprobs=logprobs_pb2.LogprobsOptions(token_ids=[1] * 21))),
    ("request_id", request(request_id="a b")),
    ("request_id", request(request_id="a" * 129)),
    ("priority", request(priority=101)),
    ("cache.tenant", request(cache=cache_policy_pb2.CachePolicy(tenant="t" * 129))),
    ("cache.use", request(cache=cache_policy_pb2.CachePolicy(use=99))),  # type: ignore[arg-type]
]

BAD_PROMPTS = [
    (Reason.PROMPT_MISSING, "prompt", messages.GenerateRequest()),
    (Reason.PROMPT_EMPTY, "prompt.text", messages.GenerateRequest(prompt={"text": ""})),
    (Reason.PROMPT_EMPTY, "prompt.tokens", tokens()),
    (
        Reason.PROMPT_EMPTY,
        "prompt.infill",
        messages.GenerateRequest(prompt={"infill": prompt_pb2.InfillPrompt()}),
    ),
    (
        Reason.PROMPT_TOO_LONG,
        "prompt.infill",
        messages.GenerateRequest(prompt={"infill": prompt_pb2.InfillPrompt(prefix="x" * 64)}),
    ),
    (Reason.PROMPT_TOO_LONG, "prompt.text", request(text="x" * 64)),
    (Reason.PROMPT_TOO_LONG, "prompt.tokens", tokens(*[1] * 64)),
    (Reason.TOKEN_OUT_OF_RANGE, "prompt.tokens.ids[1]", tokens(0, 300)),
    (Reason.TOKEN_OUT_OF_RANGE, "prompt.tokens.ids[0]", tokens(-1)),
    (
        Reason.TOKEN_OUT_OF_RANGE,
        "logprobs.token_ids[1]",
        request(logprobs=logprobs_pb2.LogprobsOptions(token_ids=[1, 300])),
    ),
    (Reason.TOKEN_OUT_OF_RANGE, "stop_token_ids[1]", request(stop_token_ids=[299, 300])),
    (Reason.TOKEN_OUT_OF_RANGE, "sampling.logit_bias[300]", sampled(logit_bias={4: 1.0, 300: 1.0})),
    (
        Reason.TOKEN_OUT_OF_RANGE,
        "sampling.bad_token_sequences[0].ids[1]",
        sampled(bad_token_sequences=[token_sequence(1, 300)]),
    ),
    (Reason.CHAT_INVALID, "prompt.chat.messages", chat()),
    (Reason.CHAT_INVALID, "prompt.chat.messages[0].role", chat(("unspecified", "hi"))),
    (Reason.CHAT_INVALID, "prompt.chat.messages[0].role", turn(role=99)),
    (Reason.CHAT_INVALID, "prompt.chat.messages[0].role_name", turn(role="ROLE_USER", role_name="critic")),
    (Reason.CHAT_INVALID, "prompt.chat.messages[0].role_name", turn(role_name="user")),
    (Reason.CHAT_INVALID, "prompt.chat.messages[0].role_name", turn(role_name="<|user|>")),
    (Reason.CHAT_INVALID, "prompt.chat", chat(("user", "hi"), ("assistant", "ho"))),
]


@pytest.mark.parametrize(("field", "bad"), OUT_OF_RANGE)
async def test_values_out_of_range_are_named(
    served: RunningServer, field: str, bad: messages.GenerateRequest
) -> None:
    for answer in (await refused(served.inference.Generate(bad)), await first_refusal(served, bad)):
        assert (answer.code, answer.reason, answer.field) == (INVALID, "PARAMETER_OUT_OF_RANGE", field)
        assert answer.message.startswith(f"{field} is ") and "must be" in answer.message
        assert answer.info.metadata["field"] == field
    assert served.engine.submitted == []
    assert (await served.inference.Generate(request(max_output_tokens=1))).text == " w0"


@pytest.mark.parametrize(("reason", "field", "bad"), BAD_PROMPTS)
async def test_bad_prompts_are_named(
    served: RunningServer, reason: Reason, field: str, bad: messages.GenerateRequest
) -> None:
    for answer in (await refused(served.inference.Generate(bad)), await first_refusal(served, bad)):
        assert (answer.code, answer.reason, answer.field) == (INVALID, reason.value, field)
    assert served.engine.submitted == []


async def test_numbers_of_a_message_are_in_the_metadata(served: RunningServer) -> None:
    long = await refused(served.inference.Generate(request(text="x" * 100)))
    assert long.info.metadata == {"prompt_tokens": "100", "context_tokens": "64"}
    outside = await refused(served.inference.Generate(tokens(0, 300)))
    assert outside.info.metadata == {"index": "1", "token_id": "300", "vocabulary_size": "300"}


async def test_values_in_the_metadata_are_as_they_were_sent(served: RunningServer) -> None:
    """Programs read them: no quotes, no words around a number."""
    policy = cache_policy_pb2.CachePolicy
    name = 'it\'s "none"'
    for bad, key, value in (
        (request(model=name), "model", name),
        (request(adapter=name), "adapter", name),
        (request(adapter=name), "served_adapters", ""),
        (request(request_id=name), "value", name),
        (sampled(top_p=1.5), "value", "1.5"),
        (request(stop=["é" * 129]), "value", "258"),
        (request(stop=["é" * 129]), "unit", "bytes"),
        (request(stop_token_ids=[1] * 129), "value", "129"),
        (request(cache=policy(tenant="t" * 129)), "value", "129"),
    ):
        answer = await refused(served.inference.Generate(bad))
        assert answer.info.metadata[key] == value, answer.info


async def test_more_tokens_than_may_be_are_as_many_as_may_be() -> None:
    """Clients send 100,000 to whatever serves them; the context ends most outputs before."""
    async with running(max_output_tokens_limit=50) as served:
        for count, limit in ((2**31 - 1, 50), (50, 50), (3, 3)):
            answer = await served.inference.Generate(request(max_output_tokens=count))
            assert served.engine.submitted[-1].max_output_tokens == limit
            assert answer.max_output_tokens == limit
        call = served.inference.Stream(request(max_output_tokens=100_000))
        assert (await call.read()).started.max_output_tokens == 50
        call.cancel()
        long = request(text="x" * 60, max_output_tokens=100_000)
        assert (await served.inference.Generate(long)).max_output_tokens == 4, "what the context leaves"


async def test_a_turn_may_be_empty(served: RunningServer) -> None:
    for role in ("user", "system", "assistant", "tool"):
        await served.inference.Generate(chat(("user", "hi"), (role, ""), ("user", "")))


async def test_longest_prompt_that_fits_is_taken(served: RunningServer) -> None:
    await served.inference.Generate(request(text="x" * 63, max_output_tokens=1))
    assert len(served.engine.submitted[0].prompt_token_ids) == 63


@pytest.mark.parametrize("method", ["Generate", "Stream"])
async def test_two_prompts_at_once_are_refused(served: RunningServer, method: str) -> None:
    both = messages.GenerateRequest(prompt={"text": "Hi"}).SerializeToString() + tokens(7).SerializeToString()
    path = f"/icehouse.v1.InferenceService/{method}"
    channel: Any = served.channel
    if method == "Generate":
        call = channel.unary_unary(path)(both)
    else:
        call = channel.unary_stream(path)(both).read()
    answer = await refused(call)
    assert (answer.code, answer.reason, answer.field) == (INVALID, "PROMPT_AMBIGUOUS", "prompt.tokens")
    assert answer.info.metadata == {"fields": "prompt.text,prompt.tokens"}
    assert served.engine.submitted == []


async def test_unknown_model_is_not_found(served: RunningServer) -> None:
    answer = await refused(served.inference.Generate(request(model="x" * 10_000)))
    assert (answer.code, answer.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
    assert answer.info.metadata["served_model"] == "tiny"
    assert len(answer.message) < 300, "a long name must not blow up the trailers"


async def test_full_queue_says_when_to_come_back(served: RunningServer) -> None:
    served.engine.refusal = overloaded()
    answer = await refused(served.inference.Generate(request()))
    assert (answer.code, answer.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    assert answer.retry.retry_delay.ToMilliseconds() == 1500
    assert answer.quota.violations[0].subject == "QUEUE_FULL"
    assert answer.info.metadata == {"waiting_limit": "8"}
    served.engine.refusal = None
    await served.inference.Generate(request(max_output_tokens=1))


ENGINE_ERRORS = [
    (CannotFit(Reason.MEMORY_NEVER_FITS, "needs 9, limit 8"), grpc.StatusCode.FAILED_PRECONDITION),
    (AlreadyExists(Reason.REQUEST_ID_IN_USE, "in use"), grpc.StatusCode.ALREADY_EXISTS),
    (Unavailable(Reason.DRAINING, "stopping"), grpc.StatusCode.UNAVAILABLE),
    (DeadlineExceeded(Reason.DEADLINE_EXCEEDED, "too late"), grpc.StatusCode.DEADLINE_EXCEEDED),
    (Cancelled(Reason.CANCELLED, "cancelled"), grpc.StatusCode.CANCELLED),
    (EngineFailed(Reason.ENGINE_FAILED, "the loop died"), grpc.StatusCode.INTERNAL),
]


@pytest.mark.parametrize(("error", "code"), ENGINE_ERRORS)
async def test_engine_errors_map_to_codes(
    served: RunningServer, error: IcehouseError, code: grpc.StatusCode
) -> None:
    served.engine.refusal = error
    at_once = await refused(served.inference.Generate(request()))
    served.engine.refusal = None
    served.engine.script = lambda _: [Failed(error)]
    later = await first_refusal(served, request())
    assert at_once == later
    assert (later.code, later.reason, later.message) == (code, error.reason.value, error.message)


async def test_unforeseen_exception_tells_the_log_and_not_the_caller(
    served: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    served.engine.refusal = ZeroDivisionError("/secret/path")  # type: ignore[assignment]
    answer = await refused(served.inference.Generate(request(request_id="r1", text="my prompt")))
    assert (answer.code, answer.reason) == (grpc.StatusCode.INTERNAL, "ENGINE_FAILED")
    assert "secret" not in answer.message
    [record] = [r for r in caplog.records if r.exc_info]
    assert (
        fields_of(record)["request_id"] == "r1"
        and record.exc_info
        and record.exc_info[0] is ZeroDivisionError
    )
    served.engine.refusal = None
    await served.inference.Generate(request(max_output_tokens=1))


async def test_one_log_line_per_call_without_its_text(
    served: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "icehouse.access"):
        await served.inference.Generate(request(request_id="r1", text="my prompt", max_output_tokens=2))
        await refused(served.inference.Generate(request(request_id="r2", text="my prompt", priority=999)))
    facts = [fields_of(record) for record in caplog.records]
    assert [(f["method"], f["code"], f["request_id"]) for f in facts] == [
        ("icehouse.v1.InferenceService/Generate", "OK", "r1"),
        ("icehouse.v1.InferenceService/Generate", "INVALID_ARGUMENT", "r2"),
    ]
    assert (facts[0]["prompt_tokens"], facts[0]["output_tokens"]) == (9, 2)
    assert not any("my prompt" in JsonFormatter().format(record) for record in caplog.records)


@pytest.mark.parametrize(
    ("kind", "reason", "pushback"),
    [
        (Unavailable, Reason.DRAINING, "1500"),
        (Overloaded, Reason.QUEUE_FULL, "1500"),
        (Overloaded, Reason.TOKEN_RATE_EXCEEDED, None),
        (Overloaded, Reason.DEADLINE_UNREACHABLE, None),
    ],
)
async def test_libraries_are_told_to_retry_only_what_is_theirs_to_retry(
    served: RunningServer, kind: type[IcehouseError], reason: Reason, pushback: str | None
) -> None:
    served.engine.refusal = kind(reason, "not now", retry_after_s=1.5)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.inference.Generate(request())
    assert dict(caught.value.trailing_metadata()).get("grpc-retry-pushback-ms") == pushback
    assert refusal_of(caught.value).retry.retry_delay.ToMilliseconds() == 1500


async def test_request_id_is_in_use_until_its_end(served: RunningServer) -> None:
    served.engine.script = lambda _: []
    running = served.inference.Stream(request(request_id="same"))
    while not served.engine.submitted:
        await served.settle()
    answer = await refused(served.inference.Generate(request(request_id="same")))
    assert (answer.code, answer.field) == (grpc.StatusCode.ALREADY_EXISTS, "request_id")
    running.cancel()
    assert await served.cancelled() == "same"


async def test_calls_beyond_the_limit_are_refused() -> None:
    async with running(max_concurrent_calls=1) as served:
        served.engine.script = lambda _: []
        first = served.inference.Stream(request())
        while not served.engine.submitted:
            await served.settle()
        answer = await refused(served.inference.Tokenize(messages.TokenizeRequest(prompt={"text": "Hi"})))
        assert (answer.code, answer.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        assert answer.retry is not None
        first.cancel()
        await served.cancelled()


@pytest.mark.parametrize(
    ("state", "code", "reason"),
    [
        (EngineState.LOADING, grpc.StatusCode.UNAVAILABLE, "LOADING"),
        (EngineState.DRAINING, grpc.StatusCode.UNAVAILABLE, "DRAINING"),
        (EngineState.FAILED, grpc.StatusCode.INTERNAL, "ENGINE_FAILED"),
    ],
)
async def test_calls_outside_ready_are_refused(
    served: RunningServer, state: EngineState, code: grpc.StatusCode, reason: str
) -> None:
    served.router.state_changed(state, None)
    await served.settle()
    for call in (
        served.inference.Generate(request()),
        served.inference.Tokenize(messages.TokenizeRequest(prompt={"text": "Hi"})),
        served.inference.CacheStats(messages.CacheStatsRequest()),
    ):
        answer = await refused(call)
        assert (answer.code, answer.reason) == (code, reason)


async def test_chat_needs_a_template() -> None:
    info = dataclasses.replace(MODEL_INFO, has_chat_template=False)
    async with running(info=info) as served:
        answer = await refused(served.inference.Generate(chat(("user", "hi"))))
        assert (answer.reason, answer.field) == ("CHAT_TEMPLATE_MISSING", "prompt.chat")


async def test_message_of_100_mb_is_refused_and_the_server_lives(served: RunningServer) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.inference.Generate(request(text="x" * 100_000_000))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await served.inference.Generate(request(max_output_tokens=1))).text == " w0"


async def first_refusal(served: RunningServer, bad: messages.GenerateRequest) -> Any:
    """Return the refusal of a stream; no message may come before it."""
    received = []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for response in served.inference.Stream(bad):
            received.append(response)
    assert received == []
    return refusal_of(caught.value)
