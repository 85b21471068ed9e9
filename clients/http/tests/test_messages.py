"""Messages with Anthropic's own client, before a real server with a tiny model."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest
from icehouse_client import AsyncClient

from clients.http.tests.fronts import HttpFront

TEXT = "The quick brown fox jumps over the lazy dog"
ASKED: dict[str, Any] = {
    "model": "any-name",
    "max_tokens": 8,
    # The client's own methods have no temperature any more.
    "extra_body": {"temperature": 0},
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "messages": [{"role": "user", "content": [{"type": "text", "text": TEXT}]}],
}


async def test_a_message_is_the_same_streamed_and_whole(whole: HttpFront) -> None:
    answer = await whole.anthropic.messages.create(**ASKED)
    assert (answer.stop_reason, answer.usage.output_tokens, answer.model) == ("max_tokens", 8, "tiny")
    async with whole.anthropic.messages.stream(**ASKED) as stream:
        streamed = "".join([text async for text in stream.text_stream])
        final = await stream.get_final_message()
    assert streamed == answer.content[0].text != ""
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 8)


async def test_the_cost_tells_what_was_read_and_what_was_kept(whole: HttpFront) -> None:
    counted = await whole.anthropic.messages.count_tokens(
        model="tiny", system=ASKED["system"], messages=ASKED["messages"]
    )
    count = counted.input_tokens
    first = (await whole.anthropic.messages.create(**ASKED)).usage
    assert (first.input_tokens, first.cache_creation_input_tokens) == (0, count)
    assert first.cache_read_input_tokens == 0
    events = [event async for event in await whole.anthropic.messages.create(**ASKED, stream=True)]
    again, final = events[0].message.usage, events[-2].usage
    for usage in (again, final):
        told = (usage.input_tokens, usage.cache_creation_input_tokens, usage.cache_read_input_tokens)
        assert told == (1, 0, count - 1)
    assert final.output_tokens == 8


async def test_no_tokens_bring_the_prompt_into_the_cache(whole: HttpFront) -> None:
    warmed = await whole.anthropic.messages.create(**ASKED | {"max_tokens": 0})
    assert (warmed.content, warmed.stop_reason, warmed.usage.output_tokens) == ([], "max_tokens", 0)
    assert warmed.usage.cache_read_input_tokens == 0
    kept = warmed.usage.cache_creation_input_tokens
    for max_tokens in (8, 0):
        usage = (await whole.anthropic.messages.create(**ASKED | {"max_tokens": max_tokens})).usage
        assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (kept, 0)
        # Each request computes the last token itself.
        assert usage.input_tokens == warmed.usage.input_tokens == 1
    with pytest.raises(anthropic.BadRequestError, match="stream must be false"):
        await whole.anthropic.messages.create(**ASKED | {"max_tokens": 0}, stream=True)


async def test_the_events_come_in_their_order(whole: HttpFront) -> None:
    events = [event.type async for event in await whole.anthropic.messages.create(**ASKED, stream=True)]
    deltas = events.count("content_block_delta")
    assert deltas and events == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * deltas,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


async def test_a_stop_sequence_is_named(whole: HttpFront) -> None:
    text = (await whole.anthropic.messages.create(**ASKED)).content[0].text
    stop = text[len(text) // 2]
    answer = await whole.anthropic.messages.create(**ASKED, stop_sequences=[stop])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)


async def test_an_answer_that_was_begun_is_continued(whole: HttpFront) -> None:
    messages = [{"role": "user", "content": TEXT}, {"role": "assistant", "content": "It"}]
    asked = {**ASKED, "messages": messages, "system": ""}
    async with AsyncClient(whole.address) as client:
        reply = await client.chat(messages, continue_final_message=True, max_output_tokens=8)
        new = await client.chat(messages, max_output_tokens=8)
    assert (await whole.anthropic.messages.create(**asked)).content[0].text == reply.text != new.text
