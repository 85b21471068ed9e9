"""Each scenario of clients/scenarios.json that HTTP has a way for, with OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from icehouse_client import AsyncClient

from clients.http.tests.fronts import HttpFront, front_of
from clients.python.tests.scenario import Scenario

REASONS = {"LENGTH": "length", "STOP_TOKEN": "stop", "TOOL_CALLS": "tool_calls"}
USAGE: Any = {"include_usage": True}


def asked(scenario: Scenario) -> dict[str, Any]:
    """Return the scenario's request of /v1/completions."""
    return {"model": "any", "prompt": scenario.text, "max_tokens": scenario.input["max_output_tokens"]}


def said(scenario: Scenario) -> list[Any]:
    return [{"role": "user", "content": scenario.input["question"]}]


def shown(scenario: Scenario, image: str = "image") -> dict[str, Any]:
    """Return a request of /v1/chat/completions with a picture in it."""
    url = f"data:{scenario.input['media_type']};base64,{scenario.input[image]}"
    parts = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": scenario.input["question"]},
    ]
    turn = {"role": "user", "content": parts}
    return {"model": "any", "messages": [turn], "max_tokens": scenario.input["max_output_tokens"]}


async def streamed(front: HttpFront, scenario: Scenario) -> tuple[list[str], Any]:
    """Return the pieces of a stream and its usage."""
    pieces, usage = [], None
    stream = await front.openai.completions.create(**asked(scenario), stream=True, stream_options=USAGE)
    async for chunk in stream:
        pieces += [choice.text for choice in chunk.choices]
        usage = chunk.usage or usage
    return pieces, usage


def reason_of(error: openai.APIStatusError) -> str:
    return str(error.response.json()["error"]["code"])


def cached_of(usage: Any) -> int:
    return int(usage.prompt_tokens_details.cached_tokens)


async def test_unary(scenario: Scenario, front: HttpFront) -> None:
    reply = await front.openai.completions.create(**asked(scenario))
    assert reply.usage is not None and reply.usage.completion_tokens == scenario.expect["output_tokens"]
    assert reply.choices[0].finish_reason == REASONS[scenario.expect["finish_reason"]]
    assert reply.model == scenario.servers["model"]


async def test_stream(scenario: Scenario, front: HttpFront) -> None:
    whole = await front.openai.completions.create(**asked(scenario))
    pieces, usage = await streamed(front, scenario)
    assert "".join(pieces) == whole.choices[0].text and len(pieces) > 2
    assert usage.completion_tokens == scenario.expect["output_tokens"]


async def test_cancel(scenario: Scenario, front: HttpFront) -> None:
    stream = await front.openai.completions.create(**asked(scenario), stream=True)
    name = ""
    async for chunk in stream:
        name = chunk.id
        break
    async with AsyncClient(scenario.address) as client:
        await stream.close()
        while name in {request.request_id for request in await client.requests()}:
            pass


async def test_deadline(scenario: Scenario, front: HttpFront) -> None:
    asking = front.openai.with_options(timeout=scenario.input["timeout_ms"] / 1000)
    with pytest.raises(openai.APITimeoutError):
        await asking.completions.create(**asked(scenario))


async def test_cancelled_by_id(scenario: Scenario, front: HttpFront) -> None:
    stream = await front.openai.completions.create(**asked(scenario), stream=True)
    chunks = aiter(stream)
    async with AsyncClient(scenario.address) as client:
        told = await client.cancel((await anext(chunks)).id)
        assert told.method == scenario.expect["method"]
        with pytest.raises(openai.APIError) as caught:
            async for _ in chunks:
                pass
    assert isinstance(caught.value.body, dict) and caught.value.body["code"] == scenario.expect["reason"]


async def test_invalid_argument(scenario: Scenario, front: HttpFront) -> None:
    for is_streamed in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            await front.openai.completions.create(**asked(scenario), stream=is_streamed)
        assert caught.value.param == "max_tokens"
        assert "retry-after" not in caught.value.response.headers


async def test_not_found(scenario: Scenario) -> None:
    async with front_of(scenario.address, strict_models=True) as front:
        with pytest.raises(openai.NotFoundError) as caught:
            await front.openai.completions.create(model=scenario.input["model"], prompt=scenario.text)
    assert scenario.servers["model"] in caught.value.message


async def test_unauthenticated(scenario: Scenario) -> None:
    unknown = {"authorization": f"Bearer {scenario.input['unknown_token']}"}
    body = json.dumps(asked(scenario))
    async with secured(scenario) as front:
        for headers, reason in (({}, "missing_reason"), (unknown, "unknown_reason")):
            answer = await front.http.post("/v1/completions", content=body, headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == scenario.expect[reason]


async def test_tls_and_token(scenario: Scenario) -> None:
    body = json.dumps(asked(scenario))
    headers = {"authorization": f"Bearer {scenario.servers['token']}"}
    async with secured(scenario) as front:
        assert (await front.http.post("/v1/completions", content=body, headers=headers)).status_code == 200
    async with front_of(scenario.address) as front:
        assert (await front.http.post("/v1/completions", content=body, headers=headers)).status_code == 503


def secured(scenario: Scenario) -> Any:
    return front_of(scenario.address, ca_pem=Path(scenario.servers["ca_path"]).read_bytes())


async def test_resource_exhausted(scenario: Scenario, front: HttpFront) -> None:
    request: dict[str, Any] = {"model": "any", "prompt": scenario.text}
    request["max_tokens"] = scenario.servers["tokens_per_minute"]
    await front.openai.completions.create(**request)
    with pytest.raises(openai.RateLimitError) as caught:
        await front.openai.completions.create(**request)
    assert reason_of(caught.value) == scenario.expect["reason"]
    assert 0 < int(caught.value.response.headers["retry-after"]) <= scenario.expect["retry_after_limit_s"]


async def test_unavailable(scenario: Scenario, front: HttpFront) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        await front.openai.completions.create(**asked(scenario), stream=True)
    assert (caught.value.status_code, reason_of(caught.value)) == (503, scenario.expect["reason"])


async def test_tools_loop(scenario: Scenario, front: HttpFront) -> None:
    ask, turns = front.openai.chat.completions.create, said(scenario)
    options: dict[str, Any] = {
        "model": "any",
        "tools": [{"type": "function", "function": scenario.input["tool"]}],
    }
    reply = await ask(messages=turns, **options)
    message = reply.choices[0].message
    assert message.tool_calls is not None and reply.usage is not None
    (call,) = message.tool_calls
    assert call.type == "function" and call.function.name == scenario.input["tool"]["name"]
    assert json.loads(call.function.arguments) == scenario.expect["arguments"]
    told = (message.content, message.model_dump()["reasoning_content"])
    assert told == (scenario.expect["text"], scenario.expect["reasoning"])
    assert reply.choices[0].finish_reason == REASONS[scenario.expect["finish_reason"]]
    deltas = [chunk.choices[0].delta async for chunk in await ask(messages=turns, stream=True, **options)]
    assert "".join(delta.content or "" for delta in deltas) == message.content
    (same,) = [found for delta in deltas for found in delta.tool_calls or ()]
    assert same.function is not None and same.function.arguments == call.function.arguments
    answer: Any = {"role": "tool", "tool_call_id": call.id, "content": scenario.input["result"]}
    turns += [message.model_dump(), answer]
    following = await ask(messages=turns, tool_choice="none", max_tokens=1, **options)
    known = reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert following.usage is not None and following.usage.prompt_tokens > known
    assert cached_of(following.usage) > known - scenario.expect["uncached_known_tokens_limit"]


async def test_reasoning_budget(scenario: Scenario, front: HttpFront) -> None:
    request: dict[str, Any] = {"model": "any", "messages": said(scenario)}
    request["max_tokens"] = scenario.input["max_output_tokens"]
    for effort, expected in (
        ({}, "reasoning_tokens"),
        ({"reasoning_effort": "none"}, "closed_reasoning_tokens"),
    ):
        reply = await front.openai.chat.completions.create(**request, **effort)
        message, usage = reply.choices[0].message, reply.usage
        assert usage is not None and usage.completion_tokens_details is not None
        assert usage.completion_tokens_details.reasoning_tokens == scenario.expect[expected]
        assert (message.content or "").startswith(scenario.expect["text"])
        reasoning = message.model_dump().get("reasoning_content", "")
        assert reasoning == ("" if effort else scenario.expect["reasoning"])


async def test_infill(scenario: Scenario, front: HttpFront) -> None:
    reply = await front.openai.completions.create(
        model="any",
        prompt=scenario.input["prefix"],
        suffix=scenario.input["suffix"],
        max_tokens=scenario.input["max_output_tokens"],
    )
    choice = reply.choices[0]
    assert (choice.text, choice.finish_reason) == (
        scenario.expect["text"],
        REASONS[scenario.expect["finish_reason"]],
    )


async def test_images(scenario: Scenario, front: HttpFront) -> None:
    first, again, other = [
        await front.openai.chat.completions.create(**shown(scenario, image))
        for image in ("image", "image", "other_image")
    ]
    assert again.choices[0].message.content == first.choices[0].message.content
    assert again.usage is not None
    missing = again.usage.prompt_tokens - cached_of(again.usage)
    assert missing <= scenario.expect["uncached_tokens_limit"]
    assert cached_of(other.usage) < scenario.expect["other_cached_tokens_limit"]


async def test_broken_image(scenario: Scenario, front: HttpFront) -> None:
    await image_is_refused(scenario, front)


async def test_images_unsupported(scenario: Scenario, front: HttpFront) -> None:
    assert scenario.expect["message_part"] in await image_is_refused(scenario, front)


async def image_is_refused(scenario: Scenario, front: HttpFront) -> str:
    with pytest.raises(openai.BadRequestError) as caught:
        await front.openai.chat.completions.create(**shown(scenario))
    assert reason_of(caught.value) == scenario.expect["reason"]
    assert caught.value.param == "messages[0].content", "the caller's own field, not that of the gRPC message"
    return caught.value.message


async def test_structured_output(scenario: Scenario, front: HttpFront) -> None:
    schema = {"name": "city", "schema": scenario.input["schema"], "strict": True}
    reply = await front.openai.chat.completions.create(
        model="any",
        messages=[{"role": "user", "content": scenario.text}],
        max_tokens=scenario.input["max_output_tokens"],
        response_format={"type": "json_schema", "json_schema": schema},  # type: ignore[typeddict-item]
    )
    told = json.loads(reply.choices[0].message.content or "")
    assert told == json.loads(scenario.expect["text"])


async def test_hundred_streams(scenario: Scenario, front: HttpFront) -> None:
    whole = await front.openai.completions.create(**asked(scenario))
    streams = [streamed(front, scenario) for _ in range(scenario.input["stream_count"])]
    for pieces, usage in await asyncio.gather(*streams):
        assert "".join(pieces) == whole.choices[0].text
        assert usage.completion_tokens == scenario.expect["output_tokens"]


async def test_cache_report(scenario: Scenario, front: HttpFront) -> None:
    # Without a token nobody has a tenant of its own, so the prompt is its own.
    request = asked(scenario) | {"prompt": f"{scenario.own_name} {scenario.text}"}
    first, second = [await front.openai.completions.create(**request) for _ in range(2)]
    assert cached_of(first.usage) == scenario.expect["first_cached_tokens"]
    assert second.usage is not None
    missing = second.usage.prompt_tokens - cached_of(second.usage)
    assert 0 < missing <= scenario.expect["uncached_tokens_limit"]


async def test_embed(scenario: Scenario, front: HttpFront) -> None:
    answer = await front.openai.embeddings.create(
        model="any", input=scenario.input["texts"], dimensions=scenario.input["dimensions"]
    )
    assert len(answer.data) == scenario.expect["vector_count"] and answer.usage.prompt_tokens > 0
    assert {len(entry.embedding) for entry in answer.data} == {scenario.expect["vector_size"]}
