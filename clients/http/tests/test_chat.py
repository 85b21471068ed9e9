"""Chat completions with OpenAI's own client, before a real server with a tiny model."""

from __future__ import annotations

import json
from typing import Any

import pytest

from clients.http.tests.fronts import HttpFront

TEXT = "The quick brown fox jumps over the lazy dog"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Ulm"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "", "parameters": SCHEMA}}
# The model is random, and draws white space wherever a schema lets it, the less the more there was.
OPEN = {"frequency_penalty": 2, "max_tokens": 1000}


async def chat(front: HttpFront, text: str = TEXT, **options: Any) -> Any:
    said = [{"role": "user", "content": text}]
    asked = {"model": "tiny", "temperature": 0, "max_tokens": 8, **options}
    return await front.openai.chat.completions.create(messages=said, **asked)


async def test_the_model_is_listed_and_found(whole: HttpFront) -> None:
    listed = await whole.openai.models.list()
    assert [model.id for model in listed.data] == ["tiny"]
    assert (await whole.openai.models.retrieve("tiny")).id == "tiny"


async def test_a_chat_is_the_same_streamed_and_whole(whole: HttpFront) -> None:
    answer = await chat(whole, model="any-name")
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 8)
    assert answer.model == "tiny"
    text, usage, reasons = "", None, []
    async for chunk in await chat(whole, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasons.append(choice.finish_reason)
    assert text == answer.choices[0].message.content != ""
    assert reasons[-1] == "length" and set(reasons[:-1]) == {None}
    assert (usage.prompt_tokens, usage.completion_tokens) == (answer.usage.prompt_tokens, 8)


async def test_a_prompt_that_was_seen_is_not_computed_again(whole: HttpFront) -> None:
    first = await chat(whole)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    again = await chat(whole)
    assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens - 1


async def test_several_outputs_of_one_prompt(whole: HttpFront) -> None:
    answer = await chat(whole, n=3, temperature=1, seed=7)
    texts = [choice.message.content for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2] and len(set(texts)) == 3
    assert answer.usage.completion_tokens == 24
    streamed = ["", "", ""]
    async for chunk in await chat(whole, n=3, temperature=1, seed=7, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


async def test_log_probabilities_are_the_same_streamed_and_whole(whole: HttpFront) -> None:
    options = {"logprobs": True, "top_logprobs": 2}
    [choice] = (await chat(whole, **options)).choices
    told = choice.logprobs.content
    assert len(told) == 8 and all(entry.logprob <= 0 for entry in told)
    assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
    streamed: list[Any] = []
    async for chunk in await chat(whole, stream=True, **options):
        for choice in chunk.choices:
            streamed += choice.logprobs.content if choice.logprobs else []
    assert [entry.token for entry in streamed] == [entry.token for entry in told]
    # The second prompt is read from the cache, and the last of it computed alone.
    assert [entry.logprob for entry in streamed] == pytest.approx([entry.logprob for entry in told], abs=1e-3)


async def test_a_stop_string_ends_the_output(whole: HttpFront) -> None:
    text = (await chat(whole, max_tokens=16)).choices[0].message.content
    stop = text[len(text) // 2]
    [choice] = (await chat(whole, max_completion_tokens=16, stop=stop)).choices
    assert (choice.finish_reason, choice.message.content) == ("stop", text[: text.index(stop)])


async def test_a_schema_is_kept_to(whole: HttpFront) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
    [choice] = (await chat(whole, response_format=form, **OPEN)).choices
    assert choice.finish_reason == "stop" and json.loads(choice.message.content)["city"] in ("Rome", "Ulm")


async def test_a_bias_decides_and_a_huge_limit_is_lowered(whole: HttpFront) -> None:
    answer = await chat(whole, logit_bias={"50": 100}, logprobs=True, max_tokens=4)
    tokens = {entry.token for entry in answer.choices[0].logprobs.content}
    assert len(tokens) == 1
    assert (await chat(whole, max_tokens=1 << 40, stop=["e"])).choices
