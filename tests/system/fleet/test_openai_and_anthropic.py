"""OpenAI's and Anthropic's own clients through the gateway: what they ask for is what they get."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.system.fleet.conftest import BLOCK, MODEL, Fleet, until

pytestmark = pytest.mark.fleet

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


def text_of(stream: Any) -> tuple[str, Any]:
    """Return a streamed reply and the last thing that was said of its cost."""
    text, usage = "", None
    for chunk in stream:
        usage = chunk.usage or usage
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
    return text, usage


def test_the_model_is_listed(fleet: Fleet) -> None:
    assert [model.id for model in fleet.openai().models.list().data] == [MODEL]


def test_a_chat_is_the_same_streamed_and_whole(fleet: Fleet) -> None:
    whole = fleet.chat(TEXT)
    assert (whole.choices[0].finish_reason, whole.usage.completion_tokens) == ("length", 8)
    text, usage = text_of(fleet.chat(TEXT, stream=True, stream_options={"include_usage": True}))
    assert text == whole.choices[0].message.content != ""
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, 8)


def test_a_prompt_that_was_seen_is_not_computed_again(fleet: Fleet) -> None:
    words = TEXT * 3
    before = fleet.known_blocks()
    first = fleet.chat(words).usage
    # The answer may be here before the gateway hears who has its blocks.
    cached = first.prompt_tokens_details.cached_tokens if first.prompt_tokens_details else 0
    new_count = first.prompt_tokens // BLOCK - cached // BLOCK
    until(lambda: fleet.known_blocks() >= before + new_count)
    usage = fleet.chat(words).usage
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1 > BLOCK
    _, streamed = text_of(fleet.chat(words, stream=True, stream_options={"include_usage": True}))
    assert streamed.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1


def test_a_completion(fleet: Fleet) -> None:
    client = fleet.openai()
    options = {"model": MODEL, "prompt": TEXT, "max_tokens": 8, "temperature": 0}
    whole = client.completions.create(**options)
    assert (whole.choices[0].finish_reason, whole.usage.completion_tokens) == ("length", 8)
    streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(**options, stream=True))
    assert streamed == whole.choices[0].text != ""


def test_several_outputs_of_one_prompt(fleet: Fleet) -> None:
    answer = fleet.chat(TEXT, n=3, temperature=1, seed=7)
    texts = [choice.message.content for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len(set(texts)) == 3 and answer.usage.completion_tokens == 24
    again = fleet.chat(TEXT, n=3, temperature=1, seed=7)
    assert [choice.message.content for choice in again.choices] == texts


def test_log_probabilities(fleet: Fleet) -> None:
    [choice] = fleet.chat(TEXT, logprobs=True, top_logprobs=2).choices
    assert choice.logprobs.content
    for entry in choice.logprobs.content:
        assert entry.logprob <= 0 and len(entry.top_logprobs) == 2
        assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob), "greedy"


def test_a_stop_string_ends_the_output(fleet: Fleet) -> None:
    text = fleet.chat(TEXT, max_tokens=16).choices[0].message.content
    stop = text[len(text) // 2]
    [choice] = fleet.chat(TEXT, max_tokens=16, stop=[stop]).choices
    assert (choice.finish_reason, choice.message.content) == ("stop", text[: text.index(stop)])


def test_a_schema_is_kept_to(fleet: Fleet) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
    [choice] = fleet.chat(TEXT, response_format=form, **OPEN).choices
    assert choice.finish_reason == "stop"
    assert json.loads(choice.message.content)["city"] in ("Rome", "Ulm")


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=["any", "named"]
)
def test_a_tool_is_called_with_what_its_schema_allows(fleet: Fleet, choice: Any) -> None:
    [answer] = fleet.chat(TEXT, tools=[TOOL], tool_choice=choice, **OPEN).choices
    assert answer.message.tool_calls, answer
    for call in answer.message.tool_calls:
        assert call.function.name == "weather"
        assert json.loads(call.function.arguments)["city"] in ("Rome", "Ulm")


def test_what_clients_send_to_any_server_is_served(fleet: Fleet) -> None:
    assert fleet.chat("", max_tokens=800_000, stop=["e"]).choices
    first, second = fleet.chat(TEXT, n=2).choices
    assert first.message.content == second.message.content


def test_a_refusal_names_the_field(fleet: Fleet) -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match=r"stop\[0\] is 300 bytes"):
        fleet.chat(TEXT, stop=["x" * 300])
    with pytest.raises(openai.BadRequestError, match="maximum context length is 4096 tokens"):
        fleet.chat("word " * 5000)


def test_anthropic_messages(fleet: Fleet) -> None:
    client = fleet.anthropic()
    options: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 8,
        # The client's own methods have no temperature any more.
        "extra_body": {"temperature": 0},
        "system": "Be brief.",
        "messages": [{"role": "user", "content": TEXT}],
    }
    whole = client.messages.create(**options)
    assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 8)
    with client.messages.stream(**options) as stream:
        streamed = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert streamed == whole.content[0].text != ""
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 8)


def test_anthropic_tools_may_be_left_alone(fleet: Fleet) -> None:
    # That one is called cannot be had of a random model here: the API knows no penalty against white space.
    answer = fleet.anthropic().messages.create(
        model=MODEL,
        max_tokens=8,
        extra_body={"temperature": 0},
        messages=[{"role": "user", "content": TEXT}],
        tools=[{"name": "weather", "description": "", "input_schema": SCHEMA}],
        tool_choice={"type": "auto"},
    )
    assert (answer.stop_reason, answer.content[0].type) == ("max_tokens", "text")
