"""Streams while nothing happens, when the caller goes, when the request fails, and beside other callers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from icehouse.v1.inference_service_pb2 import Delta as DeltaMessage
from icehouse.v1.inference_service_pb2 import Finished as FinishedMessage
from icehouse.v1.inference_service_pb2 import Started, StreamResponse
from icehouse.v1.tool_pb2 import ToolCallDelta
from icehouse.v1.usage_pb2 import FINISH_REASON_TOOL_CALLS
from icehouse_http.chat.answer import ChatAnswer
from icehouse_http.exchange import Answer
from icehouse_http.messages.answer import MessageAnswer
from icehouse_http.responses.answer import ResponseAnswer
from icehouse_http.responses.functions import Functions
from icehouse_server.domain.chat import Conversation, RenderedChat
from icehouse_server.domain.events import Delta, Event, Failed
from icehouse_server.domain.request import GenerationRequest
from icehouse_server.errors import EngineFailed, InvalidRequest, Reason
from icehouse_server.text.chat.kept_reply import KeptReply

from clients.http.tests.fronts import HttpFront, front_of
from tests.fixtures.patience import BOUND_S
from tests.fixtures.rpc.fake_engine import counting, finished, hanging, started
from tests.unit.rpc.conftest import RunningServer

CHAT: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 2,
    "stream": True,
    "messages": [{"role": "user", "content": "Hi"}],
}
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT,
    "/v1/responses": {"model": "tiny", "max_output_tokens": 2, "stream": True, "input": "Hi"},
    "/v1/completions": {"model": "tiny", "max_tokens": 2, "stream": True, "prompt": "Hi"},
}
PINGS = {
    "/v1/chat/completions": ": ping",
    "/v1/messages": 'data: {"type": "ping"}',
    "/v1/responses": "event: response.in_progress",
    "/v1/completions": ": ping",
}
each_protocol = pytest.mark.parametrize("path", ASKED)


def waiting(request: GenerationRequest) -> Iterable[Event]:
    """Script: nothing, as in a long queue."""
    return ()


def failing(request: GenerationRequest) -> Iterable[Event]:
    """Script: one word, and a fault."""
    yield started(request)
    yield Delta("hello", (1,))
    yield Failed(EngineFailed(Reason.ENGINE_FAILED, "the engine has failed"))


async def lines_of(front: HttpFront, path: str, *, until: str = "") -> list[str]:
    """Return the lines of a stream, up to the first that has `until` in it; then the caller goes."""
    lines = []
    async with front.http.stream("POST", path, json=ASKED[path]) as answer:
        assert answer.status_code == 200, await answer.aread()
        assert answer.headers["content-type"].startswith("text/event-stream")
        async for line in answer.aiter_lines():
            lines.append(line)
            if until and until in line:
                break
    return lines


@each_protocol
async def test_a_caller_who_goes_ends_the_request(front: HttpFront, served: RunningServer, path: str) -> None:
    served.engine.script = hanging
    await lines_of(front, path, until="hello")
    [request] = served.engine.submitted
    assert await served.cancelled() == request.request_id


@each_protocol
async def test_also_one_who_waits_for_a_whole_answer(
    front: HttpFront, served: RunningServer, path: str
) -> None:
    served.engine.script = hanging
    asking = asyncio.create_task(front.http.post(path, json=ASKED[path] | {"stream": False}))
    while not served.engine.submitted:
        await asyncio.sleep(0)
    asking.cancel()
    [request] = served.engine.submitted
    assert await served.cancelled() == request.request_id


@each_protocol
@pytest.mark.parametrize("script", [waiting, hanging], ids=["in the queue", "while nothing comes"])
async def test_a_silent_stream_is_kept_alive(served: RunningServer, path: str, script: Any) -> None:
    served.engine.script = script
    seen: list[str] = []
    async with (
        front_of(served.server.address, ping_interval_s=0.02) as front,
        front.http.stream("POST", path, json=ASKED[path]) as answer,
    ):
        async for line in answer.aiter_lines():
            seen.append(line)
            # The first pings may come before the engine knows of the request.
            if (
                served.engine.submitted
                and line == PINGS[path]
                and (script is waiting or "hello" in str(seen))
            ):
                break
        else:
            pytest.fail(f"the stream ended by itself: {seen}")
        await answer.aclose()
        await served.cancelled()
    assert ("hello" in str(seen)) == (script is hanging)
    if path == "/v1/responses":
        kinds = [line for line in seen if line.startswith("event: ")]
        assert (kinds[0], kinds.count(kinds[0])) == ("event: response.created", 1)


@pytest.mark.parametrize(
    ("path", "wish"),
    [
        ("/v1/messages", {}),
        (
            "/v1/responses",
            {
                "parallel_tool_calls": False,
                "tools": [{"type": "function", "name": "look", "parameters": {"type": "object"}}],
            },
        ),
    ],
    ids=["no reasoning", "one call at a time"],
)
async def test_a_wish_is_dropped_however_late_its_refusal_comes(
    served: RunningServer, path: str, wish: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a model is loaded first: the answer has begun by then, with a ping."""
    pinged, render = threading.Event(), served.tokenizer.render_chat
    read = list[Conversation]()

    def render_late(conversation: Conversation, kept: KeptReply | None = None) -> RenderedChat:
        assert pinged.wait(BOUND_S)
        read.append(conversation)
        if conversation.constrains_calls:
            raise InvalidRequest(Reason.TOOLS_UNSUPPORTED, "calls are no JSON here", field="tool_choice")
        return render(conversation, kept)

    monkeypatch.setattr(served.tokenizer, "render_chat", render_late)
    seen = list[str]()
    async with (
        front_of(served.server.address, ping_interval_s=0.02) as front,
        front.http.stream("POST", path, json=ASKED[path] | wish) as answer,
    ):
        async for line in answer.aiter_lines():
            seen.append(line)
            if line == PINGS[path]:
                pinged.set()
    assert len(read) == 2, "the first try was refused"
    assert "w1" in str(seen), seen


async def test_a_wish_is_given_up_once(
    front: HttpFront, served: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[bool]()

    def refuse(conversation: Conversation, kept: KeptReply | None = None) -> RenderedChat:
        seen.append(conversation.tools[0].is_strict)
        raise InvalidRequest(Reason.TOOLS_UNSUPPORTED, "no", field="prompt.tools[0].strict")

    monkeypatch.setattr(served.tokenizer, "render_chat", refuse)
    tool = {"type": "function", "name": "look", "strict": True, "parameters": {"type": "object"}}
    answer = await front.http.post("/v1/responses", json={"model": "m", "input": "Hi", "tools": [tool]})
    assert answer.status_code == 400 and seen == [True, False]


@each_protocol
async def test_a_fault_in_the_middle_is_told_in_the_stream(
    front: HttpFront, served: RunningServer, path: str
) -> None:
    served.engine.script = failing
    lines = [line for line in await lines_of(front, path) if line]
    last = json.loads(lines[-1].removeprefix("data: "))
    if path == "/v1/responses":
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        last = last["response"]
    if path == "/v1/messages":
        assert (lines[-2], last["type"], last["error"]["type"]) == ("event: error", "error", "api_error")
    assert last["error"]["code"] == "ENGINE_FAILED" and "engine has failed" in last["error"]["message"]


async def test_two_callers_are_served_beside_a_slow_one(front: HttpFront, served: RunningServer) -> None:
    def script(request: GenerationRequest) -> Iterable[Event]:
        return hanging(request) if request.max_output_tokens == 7 else counting(request)

    served.engine.script = script
    path = "/v1/chat/completions"
    async with front.http.stream("POST", path, json=CHAT | {"max_tokens": 7}) as slow:
        lines = slow.aiter_lines()
        async for line in lines:
            if "hello" in line:
                break
        texts = await asyncio.gather(lines_of(front, path), lines_of(front, "/v1/messages"))
        assert all("w1" in str(text) for text in texts)
        held = served.engine.submitted[0]
        served.engine.publish(held, Delta(" again", (2,)), finished(held, output_token_count=2))
        rest = [line async for line in lines if line]
    assert any("again" in line for line in rest) and rest[-1] == "data: [DONE]"


def called(index: int, text: str, *, name: str = "", withdrawn: bool = False) -> StreamResponse:
    piece = ToolCallDelta(
        index=index, id=name and f"id{index}", name=name, arguments_json=text, withdrawn=withdrawn
    )
    return StreamResponse(delta=DeltaMessage(tool_call=piece))


WITHDRAWN = (
    StreamResponse(started=Started(model="tiny")),
    called(0, '{"a":', name="first"),
    called(0, "1}"),
    called(1, '{"b"', name="second"),
    called(1, "", withdrawn=True),
    StreamResponse(delta=DeltaMessage(text="second(b")),
    called(2, "{}", name="third"),
    StreamResponse(finished=FinishedMessage(finish_reason=FINISH_REASON_TOOL_CALLS)),
)


every_answer = pytest.mark.parametrize(
    "make",
    [
        lambda: ChatAnswer("c", {}, tells_usage=False),
        lambda: MessageAnswer("m", lambda: None),
        lambda: ResponseAnswer("r", {}, Functions(), seals=False, keep=lambda *kept: None),
    ],
    ids=["chat", "messages", "responses"],
)


def told_by(answer: Answer, *events: StreamResponse) -> str:
    return "".join(frame.encode().decode() for event in events for frame in answer.feed(event))


@every_answer
def test_a_call_that_is_taken_back_is_never_seen(make: Callable[[], Answer]) -> None:
    told = told_by(make(), *WITHDRAWN)
    assert told.index('"first"') < told.index("second(b") < told.index('"third"')
    assert '"second"' not in told and '{\\"b\\"' not in told
    assert '{\\"a\\":1}' in told, "the pieces of a call come as one"


SPACED = (
    StreamResponse(started=Started(model="tiny")),
    StreamResponse(delta=DeltaMessage(text="\n\n")),
    called(0, "{}", name="first"),
    StreamResponse(delta=DeltaMessage(text="\n")),
    called(1, "{}", name="second"),
    StreamResponse(delta=DeltaMessage(text="\n")),
    StreamResponse(finished=FinishedMessage(finish_reason=FINISH_REASON_TOOL_CALLS)),
)


@every_answer
def test_white_space_around_calls_is_no_text(make: Callable[[], Answer]) -> None:
    told = told_by(make(), *SPACED)
    assert "\\n" not in told and '"first"' in told and '"second"' in told


@every_answer
def test_white_space_before_a_word_and_white_space_alone_are_text(make: Callable[[], Answer]) -> None:
    spoken = [StreamResponse(delta=DeltaMessage(text=text)) for text in ("\n", "\n", "ice", " ")]
    end = StreamResponse(finished=FinishedMessage())
    told = told_by(make(), SPACED[0], *spoken, end)
    assert '"\\n\\nice"' in told and '" "' in told
    assert '"\\n\\n"' in told_by(make(), SPACED[0], *spoken[:2], end)
