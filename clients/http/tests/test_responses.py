"""Responses with OpenAI's own client: order of events, forms, and what is kept."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from icehouse.v1.inference_service_pb2 import Delta, Finished, Started, StreamResponse
from icehouse.v1.tool_pb2 import ToolCallDelta
from icehouse.v1.usage_pb2 import (
    FINISH_REASON_CONTEXT_LENGTH,
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP_TOKEN,
    FINISH_REASON_TOOL_CALLS,
)
from icehouse_client import Message
from icehouse_client.stream_sum import StreamSum
from icehouse_http.responses.answer import ResponseAnswer
from icehouse_http.responses.functions import Functions
from icehouse_http.responses.store import ResponseStore

from clients.http.tests.fronts import HttpFront, front_of
from tests.unit.rpc.conftest import RunningServer

TEXT = "The quick brown fox jumps over the lazy dog"
ASKED: Any = {"model": "tiny", "input": TEXT, "temperature": 0, "max_output_tokens": 8}


async def test_a_response_is_the_same_streamed_and_whole(whole: HttpFront) -> None:
    answer = await whole.openai.responses.create(**ASKED)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert [item.status for item in answer.output] == ["incomplete"]
    assert (answer.model, answer.usage.output_tokens) == ("tiny", 8)
    events = [event async for event in await whole.openai.responses.create(**ASKED, stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    deltas = kinds.count("response.output_text.delta")
    assert deltas and kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert events[-1].response.output_text == answer.output_text != ""
    assert events[-4].text == events[-2].item.content[0].text == answer.output_text


def cut_output(*deltas: Delta, reason: int = FINISH_REASON_LENGTH) -> list[StreamResponse]:
    return [
        StreamResponse(started=Started(model="tiny")),
        *(StreamResponse(delta=delta) for delta in deltas),
        StreamResponse(finished=Finished(finish_reason=reason)),
    ]


HM, DRY = Delta(reasoning="Hm."), Delta(text="Dry.")
LOOK = Delta(tool_call=ToolCallDelta(id="1", name="look", arguments_json="{}"))
CUT_CALL = (
    Delta(tool_call=ToolCallDelta(index=1, id="2", name="look", arguments_json='{"a')),
    Delta(tool_call=ToolCallDelta(index=1, withdrawn=True)),
    Delta(text='look{"a'),
)
R, M, C = "reasoning", "message", "function_call"
DONE, CUT = "completed", "incomplete"


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (cut_output(HM), [(R, CUT)]),
        (cut_output(HM, DRY), [(R, DONE), (M, CUT)]),
        (cut_output(HM, LOOK), [(R, DONE), (C, DONE)]),
        (cut_output(*CUT_CALL), [(M, CUT)]),
        (cut_output(LOOK, *CUT_CALL), [(C, DONE), (M, CUT)]),
        (cut_output(DRY, reason=FINISH_REASON_CONTEXT_LENGTH), [(M, CUT)]),
        (cut_output(HM, DRY, LOOK, reason=FINISH_REASON_TOOL_CALLS), [(R, DONE), (M, DONE), (C, DONE)]),
        (cut_output(HM, DRY, reason=FINISH_REASON_STOP_TOKEN), [(R, DONE), (M, DONE)]),
    ],
)
def test_what_a_limit_has_cut_is_incomplete_and_no_call_is(
    events: list[StreamResponse], expected: list[tuple[str, str]]
) -> None:
    told = StreamSum(0)
    streaming, whole = (
        ResponseAnswer("r", {}, Functions(), seals=False, keep=lambda *kept: None) for _ in range(2)
    )
    frames: list[Any] = []
    for event in events:
        told.add(event)
        frames += [frame.data for frame in streaming.feed(event)]
    reply = told.reply
    assert reply is not None
    [last] = streaming.end(reply)
    response: Any = last.data
    done = [frame["item"] for frame in frames if frame["type"] == "response.output_item.done"]
    assert done == response["response"]["output"]
    assert [(item["type"], item["status"]) for item in done] == expected
    # As a whole, text comes before calls.
    body: Any = whole.whole(reply)
    assert sorted((item["type"], item["status"]) for item in body["output"]) == sorted(expected)
    is_cut = any(status == CUT for _, status in expected) or reply.finish_reason == "LENGTH"
    assert body["status"] == response["response"]["status"] == (CUT if is_cut else DONE)


async def test_a_form_is_kept_to(whole: HttpFront) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "name": "n", "schema": schema}
    asked = {**ASKED, "max_output_tokens": 1000, "temperature": 1, "text": {"format": form}}
    answer = await whole.openai.responses.create(**asked)
    if answer.status == "completed":
        assert json.loads(answer.output_text)["n"] in (1, 2)
    assert answer.output_text.lstrip().startswith("{")


async def test_a_response_of_another_token_or_not_kept_is_not_found(
    front: HttpFront, served: RunningServer
) -> None:
    asked = {**ASKED, "input": "Hi"}
    first = await front.openai.responses.create(**asked)
    again = await front.openai.responses.create(**asked, previous_response_id=first.id)
    assert again.usage.input_tokens > first.usage.input_tokens
    unkept = await front.openai.responses.create(**asked, store=False)
    stranger = front.openai.with_options(api_key="another")
    for client, name in ((stranger, first.id), (front.openai, unkept.id), (front.openai, "resp_none")):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(**asked, previous_response_id=name)
        assert (caught.value.code, caught.value.param) == (
            "previous_response_not_found",
            "previous_response_id",
        )


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_items_of_earlier_responses_may_be_named_instead_of_sent(
    front: HttpFront, served: RunningServer, stream: bool
) -> None:
    """As the AI SDK does wherever responses are stored."""
    said, more = {"role": "user", "content": "Hi"}, {"role": "user", "content": "And now?"}
    create = front.openai.responses.create
    if stream:
        events = [event async for event in await create(**ASKED | {"input": [said]}, stream=True)]
        [item] = events[-1].response.output
    else:
        [item] = (await create(**ASKED | {"input": [said]})).output
    named: Any = {"type": "item_reference", "id": item.id}
    for told in (named, item.model_dump(exclude_none=True)):
        await create(**ASKED | {"input": [said, told, more]})
    by_name, itself = [request.prompt_token_ids for request in served.engine.submitted[1:]]
    assert by_name == itself
    stranger = front.openai.with_options(api_key="another")
    with pytest.raises(openai.BadRequestError, match="send the item itself"):
        await stranger.responses.create(**ASKED | {"input": [said, named, more]})


def test_the_store_is_bounded() -> None:
    store = ResponseStore(max_entries=2, max_bytes=10_000)
    said = [Message("user", "x" * 500)]
    store.put("a", "1", said)
    store.put("a", "2", said)
    assert store.get("a", "1") == tuple(said) and store.get("b", "1") is None
    store.put("a", "3", said)
    assert store.get("a", "2") is None and store.get("a", "1") is not None, "the least recently used goes"
    store.put("a", "4", [Message("user", "x" * 2_000)])
    assert store.get("a", "3") is None and store.get("a", "4") is not None
    store.put("a", "5", [Message("user", "x" * 3_000)])
    assert store.get("a", "5") is None, "it is larger than all that may be kept"


async def test_one_call_at_a_time_is_asked_for_where_it_can_be_held_to(served: RunningServer) -> None:
    tool = {"type": "function", "name": "look", "parameters": {"type": "object"}}
    async with front_of(served.server.address) as front:
        await front.openai.responses.create(
            **{**ASKED, "input": "Hi"}, tools=[tool], parallel_tool_calls=False
        )
    assert served.tokenizer.conversations[-1].constrains_calls
