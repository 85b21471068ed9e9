"""What OpenAI's and Anthropic's packages do by themselves: parse, sum up streams, try again, and give up."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable
from typing import Any

import anthropic
import openai
import pydantic
import pytest
from icehouse_server.domain.events import Delta, Event, FinishReason
from icehouse_server.domain.request import GenerationRequest
from icehouse_server.errors import Overloaded, Reason
from openai.types import chat, responses

from clients.http.tests.fronts import HttpFront
from tests.fixtures.rpc.fake_engine import finished, hanging, started
from tests.unit.rpc.conftest import RunningServer

SAID: Any = [{"role": "user", "content": "Hi"}]
CHAT: Any = {"model": "tiny", "messages": SAID}
MESSAGES: Any = {"model": "tiny", "max_tokens": 9, "messages": SAID}
RESPONSES: Any = {"model": "tiny", "input": "Hi"}


class Person(pydantic.BaseModel):
    """What is asked for."""

    name: str
    age: int


ADA = Person(name="Ada", age=36)
PIECES = ('{"name": "Ada"', ', "age": ', "36}")


def saying(*pieces: str) -> Callable[[GenerationRequest], Iterable[Event]]:
    """Return a script that writes some pieces of text."""

    def script(request: GenerationRequest) -> Iterable[Event]:
        yield started(request)
        for index, piece in enumerate(pieces, 1):
            yield Delta(piece, (index,))
        end = finished(request, output_token_count=len(pieces))
        yield dataclasses.replace(end, reason=FinishReason.STOP_TOKEN)

    return script


@pytest.fixture
def ada(served: RunningServer) -> None:
    """The model says who."""
    served.engine.script = saying(*PIECES)


@pytest.mark.usefixtures("ada")
async def test_an_answer_is_parsed_into_a_class(front: HttpFront, served: RunningServer) -> None:
    chat = await front.openai.chat.completions.parse(**CHAT, response_format=Person)
    assert chat.choices[0].message.parsed == ADA
    response = await front.openai.responses.parse(**RESPONSES, text_format=Person)
    assert response.output_parsed == ADA
    message = await front.anthropic.messages.parse(**MESSAGES, output_format=Person)
    assert message.parsed_output == ADA
    assert all(request.grammar is not None for request in served.engine.submitted)


@pytest.mark.usefixtures("ada")
async def test_streams_are_summed_up(front: HttpFront) -> None:
    async with front.openai.chat.completions.stream(**CHAT, response_format=Person) as chat:
        deltas = [event.delta async for event in chat if event.type == "content.delta"]
        whole = await chat.get_final_completion()
    assert deltas == ["", *PIECES], "the first one tells the role"
    assert whole.choices[0].message.parsed == ADA
    async with front.openai.responses.stream(**RESPONSES, text_format=Person) as response:
        deltas = [event.delta async for event in response if event.type == "response.output_text.delta"]
        done = await response.get_final_response()
    assert tuple(deltas) == PIECES and done.output_parsed == ADA
    async with front.anthropic.messages.stream(**MESSAGES) as message:
        texts = [text async for text in message.text_stream]
        assert tuple(texts) == PIECES and await message.get_final_text() == "".join(PIECES)
        assert (await message.get_final_message()).usage.output_tokens == len(PIECES)


@pytest.mark.usefixtures("ada")
async def test_raw_answers(front: HttpFront) -> None:
    raw = await front.openai.chat.completions.with_raw_response.create(**CHAT)
    assert raw.headers["content-type"] == "application/json"
    assert raw.parse().choices[0].message.content == "".join(PIECES)
    raw = await front.anthropic.messages.with_raw_response.create(**MESSAGES)
    assert (await raw.parse()).content[0].text == "".join(PIECES)
    async with front.openai.responses.with_streaming_response.create(**RESPONSES, stream=True) as streamed:
        lines = [line async for line in streamed.iter_lines() if line.startswith("event: ")]
    assert (lines[0], lines[-1]) == ("event: response.created", "event: response.completed")


def data_of(stream: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


STRICT: Any = [
    (
        "/v1/chat/completions",
        CHAT | {"n": 2, "logprobs": True},
        chat.ChatCompletion,
        chat.ChatCompletionChunk,
    ),
    ("/v1/completions", {"prompt": "Hi", "logprobs": 1}, openai.types.Completion, None),
    ("/v1/responses", RESPONSES, responses.Response, responses.ResponseStreamEvent),
    ("/v1/messages", MESSAGES, anthropic.types.Message, anthropic.types.RawMessageStreamEvent),
]


@pytest.mark.parametrize(("path", "body", "whole", "event"), STRICT, ids=[entry[0] for entry in STRICT])
async def test_answers_are_what_the_packages_types_say(
    front: HttpFront, path: str, body: dict[str, Any], whole: Any, event: Any
) -> None:
    """The packages themselves take what comes, without a field that their types require too."""
    answer = await front.http.post(path, json=body)
    pydantic.TypeAdapter(whole).validate_python(answer.json())
    streamed = data_of((await front.http.post(path, json=body | {"stream": True})).text)
    assert len(streamed) > 2
    if event is None:  # a completion's chunks have no finish reason before the last one
        return
    adapter = pydantic.TypeAdapter(event)
    for data in streamed:
        if data.get("type") != "ping":  # which is none of the events
            adapter.validate_python(data)


async def test_a_listed_model_is_one_for_both_packages(front: HttpFront) -> None:
    [told] = (await front.http.get("/v1/models")).json()["data"]
    for kind in (openai.types.Model, anthropic.types.ModelInfo):
        assert pydantic.TypeAdapter(kind).validate_python(told).id == "tiny"


async def test_what_is_not_there_is_told_in_each_packages_own_form(front: HttpFront) -> None:
    with pytest.raises(openai.NotFoundError) as missed:
        await front.openai.models.retrieve("none")
    assert (missed.value.code, missed.value.param) == ("model_not_found", "model")
    with pytest.raises(anthropic.NotFoundError) as lost:
        await front.anthropic.models.retrieve("none")
    assert lost.value.response.json()["error"]["type"] == "not_found_error" and lost.value.request_id
    nowhere = await front.http.get("/v1/none")
    assert "GET /v1/models/{model}, " in nowhere.json()["error"]["message"]


async def test_tokens_are_counted_without_an_answer(whole: HttpFront) -> None:
    asked = {**MESSAGES, "messages": [{"role": "user", "content": "The quick brown fox"}]}
    message = await whole.anthropic.messages.create(**asked)
    del asked["max_tokens"]
    counted = await whole.anthropic.messages.count_tokens(**asked)
    usage = message.usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_creation_input_tokens > 0


ASKING: Any = {
    "chat": lambda front: front.openai.with_options(max_retries=1).chat.completions.create(**CHAT),
    "responses": lambda front: front.openai.with_options(max_retries=1).responses.create(**RESPONSES),
    "messages": lambda front: front.anthropic.with_options(max_retries=1).messages.create(**MESSAGES),
}


@pytest.mark.parametrize("name", ASKING)
async def test_a_refusal_for_now_is_tried_again_as_soon_as_it_says(
    front: HttpFront, served: RunningServer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Both packages read `retry-after-ms` before `retry-after`, which knows whole seconds only."""
    submit = served.engine.submit
    refused: list[GenerationRequest] = []

    def refuse_once(request: GenerationRequest, *others: Any) -> None:
        if not refused:
            refused.append(request)
            raise Overloaded(Reason.QUEUE_FULL, "full", retry_after_s=0.001, metadata={})
        submit(request, *others)

    monkeypatch.setattr(served.engine, "submit", refuse_once)
    await ASKING[name](front)
    assert len(refused) == len(served.engine.submitted) == 1


async def test_a_caller_who_waits_no_longer_ends_the_request(front: HttpFront, served: RunningServer) -> None:
    served.engine.script = hanging
    with pytest.raises(openai.APITimeoutError):
        await front.openai.with_options(timeout=0.2).chat.completions.create(**CHAT)
    assert await served.cancelled() == served.engine.submitted[0].request_id
    with pytest.raises(anthropic.APITimeoutError):
        await front.anthropic.with_options(timeout=0.2).messages.create(**MESSAGES)
    assert await served.cancelled() == served.engine.submitted[1].request_id
