"""Marks of `cache_control` become pins behind the answer, with Anthropic's own client."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from icehouse.v1.cache_service_pb2 import PinResponse
from icehouse_client import AsyncClient, Message
from icehouse_http.exchange import Asked
from icehouse_http.fields import Fields
from icehouse_http.messages.pins import Pins, marks_of
from icehouse_server.domain.cache_commands import CacheCommand, Pin, PinReport

from clients.http.tests.fronts import HttpFront
from tests.fixtures.patience import BOUND_S
from tests.unit.rpc.conftest import RunningServer

HOUR, MINUTES = 3600.0, 300.0
SYSTEM = "The ice house keeps what was cut in winter. " * 8


def mark(ttl: str | None = None) -> dict[str, Any]:
    return {"cache_control": {"type": "ephemeral", **({"ttl": ttl} if ttl else {})}}


def text(said: str, **marked: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **marked}


TOOL = {"name": "look", "input_schema": {"type": "object"}, **mark("1h")}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": [text("found", **mark())]}
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": [text("one", **mark()), text("two")]},
    {"role": "assistant", "content": "three"},
    {"role": "user", "content": [RESULT, text("four")]},
]


@pytest.mark.parametrize(
    ("request_fields", "marks"),
    [
        ({"messages": [{"role": "user", "content": "Hi"}]}, []),
        ({"system": [text(SYSTEM, **mark())], "messages": TALK[1:2]}, [(MINUTES, (-1, -1))]),
        ({"tools": [TOOL], "messages": TALK[:2]}, [(HOUR, (-1, -1)), (MINUTES, (0, 0))]),
        ({"messages": TALK}, [(MINUTES, (2, 0))]),
        (
            {"messages": [{"role": "user", "content": [text("a", **mark()), text("b", **mark("1h"))]}]},
            [(HOUR, (0, 1))],
        ),
        ({"messages": TALK, **mark("1h")}, [(HOUR, (2, 2))]),
        (
            {"messages": [{"role": "user", "content": [text("a", cache_control={"ttl": 7})]}]},
            [(MINUTES, (0, 0))],
        ),
    ],
)
def test_the_deepest_mark_of_each_time_counts(request_fields: dict[str, Any], marks: list[Any]) -> None:
    assert marks_of(Fields(request_fields)) == marks


def pins_of(served: RunningServer) -> list[Pin]:
    return [order for order in served.engine.orders if isinstance(order, Pin)]


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
async def test_marks_are_pinned_for_their_times(
    served: RunningServer, front: HttpFront, monkeypatch: pytest.MonkeyPatch, is_streamed: bool
) -> None:
    both = asyncio.Event()
    loop = asyncio.get_running_loop()
    submit = served.engine.submit_command

    def submitted(command: CacheCommand, reply: Any) -> None:
        submit(command, reply)
        if len(pins_of(served)) == 2:
            loop.call_soon_threadsafe(both.set)

    monkeypatch.setattr(served.engine, "submit_command", submitted)
    served.engine.order_answer = PinReport(1, 2, 3)
    messages = [{"role": "user", "content": [text("one", **mark()), text("two")]}]
    system = [text("Be brief.", **mark("1h"))]
    asked: dict[str, Any] = {"model": "m", "max_tokens": 2, "system": system, "messages": messages}
    if is_streamed:
        async with front.anthropic.messages.stream(**asked) as stream:
            await stream.get_final_message()
    else:
        await front.anthropic.messages.create(**asked)
    async with asyncio.timeout(BOUND_S):
        await both.wait()
    (whole,) = (request.prompt_token_ids for request in served.engine.submitted)
    head, beginning = sorted(pins_of(served), key=lambda pin: len(pin.prompt_token_ids))
    assert (head.ttl_s, beginning.ttl_s) == (HOUR, MINUTES)
    assert len(head.prompt_token_ids) < len(beginning.prompt_token_ids) < len(whole)


async def test_a_refused_pin_costs_the_caller_nothing(served: RunningServer, front: HttpFront) -> None:
    messages: Any = [{"role": "user", "content": [text("one", **mark())]}]
    for _ in range(2):
        answer = await front.anthropic.messages.create(model="m", max_tokens=2, messages=messages)
        assert answer.stop_reason


@pytest.mark.parametrize("is_in_head", [True, False], ids=["system", "turn"])
async def test_the_blocks_before_a_mark_are_pinned(whole: HttpFront, is_in_head: bool) -> None:
    system = [text(SYSTEM, **(mark("1h") if is_in_head else {}))]
    said = text("What is ice? " * 8, **({} if is_in_head else mark()))
    messages: Any = [{"role": "user", "content": [said]}]
    await whole.anthropic.messages.create(model="m", max_tokens=2, system=system, messages=messages)
    prompt = [Message("system", SYSTEM), Message("user", said["text"])]
    async with AsyncClient(whole.address) as client, asyncio.timeout(BOUND_S):
        pinned: list[bool] = []
        while not any(pinned):
            told = await client.cache.explain(prompt, template_arguments={"enable_thinking": False})
            pinned = [block.pinned for block in told.blocks]
    assert pinned == sorted(pinned, reverse=True), "the beginning of the prompt is pinned"
    assert all(pinned[:8]) and all(pinned) is not is_in_head


class SlowCache:
    """A cache whose pins are answered when the test says so."""

    def __init__(self) -> None:
        self.asked_count = 0
        self.may_answer = asyncio.Event()

    async def pin(self, prompt: Any, **options: Any) -> PinResponse:
        self.asked_count += 1
        await self.may_answer.wait()
        return PinResponse()


async def test_pins_in_flight_are_bounded_and_end_with_the_front() -> None:
    cache, pins = SlowCache(), Pins()
    client: Any = type("Client", (), {"cache": cache})()
    fields = Fields({"messages": TALK})
    asked = Asked([Message("user", "one")], {}, is_streamed=False)
    for _ in range(40):
        pins.ask(client, fields, asked)
    await asyncio.sleep(0)
    assert cache.asked_count == 16
    await pins.close()
    pins.ask(client, fields, asked)
    await asyncio.sleep(0)
    assert cache.asked_count == 17
    cache.may_answer.set()
    await pins.close()
