"""Generate and Stream against a scripted engine."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from icehouse.v1 import cache_policy_pb2, logprobs_pb2, prompt_pb2, sampling_pb2, speculation_pb2, usage_pb2
from icehouse.v1 import inference_service_pb2 as messages
from icehouse_server.domain.events import Delta, FinishReason, PrefillProgress
from icehouse_server.domain.events import Finished as FinishedEvent
from icehouse_server.domain.ids import NO_ADAPTER
from icehouse_server.domain.request import CacheUse, Logprob, LogprobsWanted, TokenLogprobs
from icehouse_server.domain.sampling import SamplingParams

from tests.fixtures.rpc.details import refused
from tests.fixtures.rpc.fake_engine import MODEL_INFO, started, usage_of
from tests.unit.rpc.conftest import SEED, RunningServer


async def stream(served: RunningServer, request: messages.GenerateRequest) -> list[messages.StreamResponse]:
    return [response async for response in served.inference.Stream(request)]


async def test_text_alone_is_enough(served: RunningServer) -> None:
    response = await served.inference.Generate(messages.GenerateRequest(prompt={"text": "Hi"}))
    [request] = served.engine.submitted
    assert request.prompt_token_ids == tuple(b"Hi")
    assert request.max_output_tokens == 256
    assert request.sampling.temperature == 0 and request.sampling.top_p == 1
    assert request.sampling.seed == SEED == response.seed
    assert request.cache_use is CacheUse.READ_WRITE
    assert request.deadline_time == served.clock.now + 4 * 3600, "its method's"
    assert len(request.request_id) == 32 and response.request_id == request.request_id
    assert response.model == "tiny"


async def test_every_parameter_reaches_the_engine(served: RunningServer) -> None:
    sampling = sampling_pb2.SamplingParams(temperature=0.7, top_p=0.9, top_k=40, min_p=0.05, seed=2**64 - 1)
    wanted = messages.GenerateRequest(
        request_id="a.b:c-1",
        model="tiny",
        prompt={"text": "Hi"},
        max_output_tokens=3,
        sampling=sampling,
        stop=["x", "y", "x"],
        stop_token_ids=[9, 7, 9],
        priority=-5,
    )
    wanted.cache.use = cache_policy_pb2.CACHE_USE_READ_ONLY
    wanted.cache.tenant = "blue"
    await served.inference.Generate(wanted)
    [request] = served.engine.submitted
    assert request.name == "a.b:c-1"
    assert (request.sampling.temperature, request.sampling.top_p) == (0.7, 0.9)
    assert (request.sampling.top_k, request.sampling.min_p) == (40, 0.05)
    assert request.sampling.seed == 2**64 - 1
    assert request.stop == ("x", "y")
    assert request.sampling.stop_token_ids == (9, 7)
    assert (request.priority, request.tenant) == (-5, "blue")
    assert request.cache_use is CacheUse.READ_ONLY


async def test_a_gap_is_a_prompt_whose_markers_end_the_output(served: RunningServer) -> None:
    gap = prompt_pb2.InfillPrompt(prefix="ab", suffix="c")
    wanted = messages.GenerateRequest(prompt={"infill": gap}, max_output_tokens=1, stop_token_ids=[9])
    await served.inference.Generate(wanted)
    [request] = served.engine.submitted
    assert request.prompt_token_ids == (256, *b"ab", 257, *b"c", 258)
    assert request.sampling.stop_token_ids == (9, 256, 257, 258)
    tokens = await served.inference.Tokenize(messages.TokenizeRequest(prompt={"infill": gap}))
    assert tuple(token.id for token in tokens.tokens) == request.prompt_token_ids


async def test_every_sampling_parameter_reaches_the_engine(served: RunningServer) -> None:
    sampling = sampling_pb2.SamplingParams(
        temperature=0.5,
        xtc_probability=0.25,
        xtc_threshold=0.2,
        repetition_penalty=1.5,
        repetition_window=1,
        presence_penalty=-0.5,
        presence_window=2,
        frequency_penalty=0.75,
        frequency_window=3,
        logit_bias={9: 1.0, 3: -100.0},
        bad_words=["no", " yes", "no"],
        bad_token_sequences=[sampling_pb2.TokenSequence(ids=[5, 6])],
        min_output_tokens=2,
        ignore_end_tokens=True,
        seed=1,
    )
    await served.inference.Generate(messages.GenerateRequest(prompt={"text": "Hi"}, sampling=sampling))
    assert served.engine.submitted[0].sampling == SamplingParams(
        temperature=0.5,
        xtc_probability=0.25,
        xtc_threshold=0.2,
        repetition_penalty=1.5,
        repetition_window=1,
        presence_penalty=-0.5,
        presence_window=2,
        frequency_penalty=0.75,
        frequency_window=3,
        logit_bias=((3, -100.0), (9, 1.0)),
        banned=((5, 6), tuple(b"no"), tuple(b" no"), tuple(b" yes")),
        min_output_token_count=2,
        ignores_end_tokens=True,
        seed=1,
    )
    assert served.tokenizer.thread_names and all(
        n.startswith("tokenizer") for n in served.tokenizer.thread_names
    )


async def test_zero_is_the_default_unless_it_may_be_wished_for(served: RunningServer) -> None:
    zeros: Any = {"top_p": 0.0, "repetition_penalty": 0.0, "seed": 0, "xtc_threshold": 0.0}
    request = messages.GenerateRequest(prompt={"text": "Hi"}, max_output_tokens=1, sampling=zeros)
    await served.inference.Generate(request)
    sampling = served.engine.submitted[0].sampling
    assert (sampling.top_p, sampling.repetition_penalty) == (1.0, 1.0)
    assert (sampling.seed, sampling.xtc_threshold) == (0, 0.0)


async def test_absent_sampling_changes_nothing(served: RunningServer) -> None:
    await served.inference.Generate(messages.GenerateRequest(prompt={"text": "Hi"}))
    assert served.engine.submitted[0].sampling == SamplingParams(seed=SEED)


async def test_stream_and_generate_say_the_same(served: RunningServer) -> None:
    request = messages.GenerateRequest(request_id="one", prompt={"text": "Hi"}, max_output_tokens=5)
    responses = await stream(served, request)
    await served.settle()
    whole = await served.inference.Generate(request)
    kinds = [response.WhichOneof("event") for response in responses]
    assert kinds == ["started", "delta", "delta", "delta", "delta", "delta", "finished"]
    deltas = [response.delta for response in responses[1:-1]]
    assert "".join(delta.text for delta in deltas) == whole.text == " w0 w1 w2 w3 w4"
    assert [i for delta in deltas for i in delta.token_ids] == list(whole.token_ids)
    first, last = responses[0].started, responses[-1].finished
    assert (first.request_id, first.model, first.seed) == (whole.request_id, whole.model, whole.seed)
    assert first.cache == whole.cache
    assert first.receive_time.ToSeconds() == whole.receive_time.ToSeconds() == served.clock.wall()
    assert first.system_fingerprint == whole.system_fingerprint == MODEL_INFO.system_fingerprint(NO_ADAPTER)
    assert (last.usage, last.finish_reason) == (whole.usage, whole.finish_reason)


async def test_usage_is_told_field_by_field(served: RunningServer) -> None:
    usage = (
        await served.inference.Generate(messages.GenerateRequest(prompt={"text": "Hi"}, max_output_tokens=4))
    ).usage
    assert (usage.prompt_tokens, usage.output_tokens) == (2, 4)
    assert (usage.cached_tokens, usage.ram_tokens, usage.ssd_tokens) == (3, 2, 1)
    assert (usage.draft_tokens, usage.accepted_draft_tokens) == (8, 5)
    assert usage.speculation_limit == speculation_pb2.SPECULATION_LIMIT_SAMPLING
    seconds = [
        usage.queue_duration,
        usage.restore_duration,
        usage.prefill_duration,
        usage.decode_duration,
        usage.time_to_first_token,
        usage.total_duration,
    ]
    assert [duration.ToMilliseconds() for duration in seconds] == [500, 250, 1500, 2500, 3500, 4500]


async def test_stop_string_and_progress_are_told(served: RunningServer) -> None:
    served.engine.script = lambda request: [
        started(request),
        PrefillProgress(1, 2),
        Delta("so ", (1, 2)),
        FinishedEvent(FinishReason.STOP_STRING, "END", usage_of(request, output_token_count=3)),
    ]
    responses = await stream(served, messages.GenerateRequest(prompt={"text": "Hi"}, stop=["END"]))
    assert [r.WhichOneof("event") for r in responses] == ["started", "prefill_progress", "delta", "finished"]
    assert responses[1].prefill_progress.processed_tokens == 1
    assert responses[-1].finished.stop_string == "END"
    assert responses[-1].finished.finish_reason == usage_pb2.FINISH_REASON_STOP_STRING


async def test_the_token_that_ended_an_output_is_told(served: RunningServer) -> None:
    served.engine.script = lambda request: [
        started(request),
        Delta("so", (1, 0)),
        FinishedEvent(
            FinishReason.STOP_TOKEN, None, usage_of(request, output_token_count=2), stop_token_id=0
        ),
    ]
    request = messages.GenerateRequest(prompt={"text": "Hi"}, stop_token_ids=[0])
    told = (await stream(served, request))[-1].finished
    whole = await served.inference.Generate(request)
    for each in (told, whole):
        assert each.finish_reason == usage_pb2.FINISH_REASON_STOP_TOKEN
        assert (each.HasField("stop_token_id"), each.stop_token_id) == (True, 0)
        assert not each.stop_string


async def test_log_probabilities_are_told_token_by_token(served: RunningServer) -> None:
    of_prompt = TokenLogprobs(105, -0.25, 1)
    of_output = TokenLogprobs(5, -2.5, 3, (Logprob(6, -0.5), Logprob(7, -1.5)), (Logprob(9, -8.0),), 0)
    served.engine.script = lambda request: [
        started(request),
        PrefillProgress(1, 2, (of_prompt,)),
        Delta("", (5,), (of_output,)),
        Delta("x", (8,), (TokenLogprobs(8, -0.75, 1, text_offset=3),)),
        FinishedEvent(FinishReason.LENGTH, None, usage_of(request, output_token_count=2)),
    ]
    options = logprobs_pb2.LogprobsOptions(top_count=2, prompt=True, token_ids=[9])
    request = messages.GenerateRequest(prompt={"text": "Hi"}, logprobs=options)
    responses = await stream(served, request)
    whole = await served.inference.Generate(request)
    assert served.engine.submitted[0].logprobs == LogprobsWanted(2, of_prompt=True, token_ids=(9,))
    assert [(e.token_id, e.logprob, e.rank, e.piece) for e in whole.prompt_logprobs] == [
        (105, -0.25, 1, "<105>")
    ]
    assert [(e.token_id, e.logprob, e.rank) for e in whole.logprobs] == [(5, -2.5, 3), (8, -0.75, 1)]
    assert [(t.token_id, t.logprob, t.piece) for t in whole.logprobs[0].top] == [
        (6, -0.5, "<6>"),
        (7, -1.5, "<7>"),
    ]
    assert [(t.token_id, t.logprob, t.piece) for t in whole.logprobs[0].asked] == [(9, -8.0, "<9>")]
    assert [entry.text_offset for entry in whole.logprobs] == [0, 3]
    assert whole.logprobs[0].HasField("text_offset") and not whole.prompt_logprobs[0].HasField("text_offset")
    deltas = [response.delta for response in responses if response.HasField("delta")]
    assert [entry for delta in deltas for entry in delta.logprobs] == list(whole.logprobs)
    assert responses[1].prefill_progress.prompt_logprobs == whole.prompt_logprobs
    await served.inference.Generate(messages.GenerateRequest(prompt={"text": "Hi"}))
    assert served.engine.submitted[-1].logprobs is None


async def test_chat_is_rendered_and_tokens_are_taken_as_they_are(served: RunningServer) -> None:
    chat = prompt_pb2.ChatPrompt(messages=[prompt_pb2.ChatMessage(role=prompt_pb2.ROLE_USER, content="Hé")])
    await served.inference.Generate(messages.GenerateRequest(prompt={"chat": chat}))
    tokens = prompt_pb2.TokenPrompt(ids=[0, 299])
    await served.inference.Generate(messages.GenerateRequest(prompt={"tokens": tokens}))
    assert [r.prompt_token_ids for r in served.engine.submitted] == [tuple("user:Hé;".encode()), (0, 299)]


async def test_tokenizer_never_runs_on_the_event_loop(served: RunningServer) -> None:
    await served.inference.Generate(messages.GenerateRequest(prompt={"text": "Hi"}))
    assert served.tokenizer.thread_names and all(
        n.startswith("tokenizer") for n in served.tokenizer.thread_names
    )


async def test_deadline_reaches_the_engine_in_its_own_time(served: RunningServer) -> None:
    await served.inference.Generate(messages.GenerateRequest(prompt={"text": "Hi"}), timeout=50)
    [request] = served.engine.submitted
    assert request.deadline_time == pytest.approx(served.clock.now + 50, abs=5)


async def test_tokenize_names_each_token(served: RunningServer) -> None:
    response = await served.inference.Tokenize(messages.TokenizeRequest(prompt={"text": "Hi"}))
    assert [(t.id, t.piece) for t in response.tokens] == [(72, "<72>"), (105, "<105>")]
    assert response.token_count == 2
    tokens: Any = {"tokens": {"ids": [1]}}
    refusal = await refused(served.inference.Tokenize(messages.TokenizeRequest(prompt=tokens)))
    assert (refusal.reason, refusal.field) == ("UNSUPPORTED", "prompt.tokens")
    empty = await served.inference.Tokenize(messages.TokenizeRequest(prompt={"text": ""}))
    assert empty.token_count == 0


async def test_detokenize_gives_back_what_was_tokenized(served: RunningServer) -> None:
    tokens = (await served.inference.Tokenize(messages.TokenizeRequest(prompt={"text": "Größe"}))).tokens
    request = messages.DetokenizeRequest(token_ids=[token.id for token in tokens], model="tiny")
    assert (await served.inference.Detokenize(request)).text == "Größe"
    assert (await served.inference.Detokenize(messages.DetokenizeRequest())).text == ""
    assert (await served.inference.Detokenize(messages.DetokenizeRequest(token_ids=[0xC3]))).text == "\ufffd"


@pytest.mark.parametrize(
    ("request_message", "reason", "field"),
    [
        (messages.DetokenizeRequest(token_ids=[1, 300]), "TOKEN_OUT_OF_RANGE", "token_ids[1]"),
        (messages.DetokenizeRequest(token_ids=[-1]), "TOKEN_OUT_OF_RANGE", "token_ids[0]"),
        (messages.DetokenizeRequest(token_ids=[1] * ((1 << 20) + 1)), "PROMPT_TOO_LONG", "token_ids"),
        (messages.DetokenizeRequest(model="other"), "MODEL_NOT_FOUND", "model"),
    ],
    ids=["beyond", "below", "too many", "model"],
)
async def test_tokens_that_cannot_be_text_are_refused(
    served: RunningServer, request_message: messages.DetokenizeRequest, reason: str, field: str
) -> None:
    found = await refused(served.inference.Detokenize(request_message))
    assert found.reason == reason and field in (found.field, "model")


async def test_the_engine_hears_where_a_conversations_messages_end(
    served: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    render = served.tokenizer.render_chat
    monkeypatch.setattr(
        served.tokenizer,
        "render_chat",
        lambda said, kept=None: dataclasses.replace(render(said, kept), border_token_indices=(2, 5)),
    )
    request = messages.GenerateRequest(max_output_tokens=1)
    request.prompt.chat.messages.add(role=prompt_pb2.ROLE_USER, content="Hi")
    await served.inference.Generate(request)
    await served.inference.Generate(messages.GenerateRequest(prompt={"text": "Hi"}, max_output_tokens=1))
    assert [asked.border_token_indices for asked in served.engine.submitted] == [(2, 5), ()]
