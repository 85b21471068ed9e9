"""Fairness of the front: what one caller may have at once, so that others are answered beside it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import json

import pytest
from icehouse.v1.inference_service_pb2 import StreamResponse
from icehouse_client import AsyncClient
from icehouse_http.bounds import places
from icehouse_http.bounds.admission import Admission
from icehouse_http.bounds.json_size import JsonSize
from icehouse_http.bounds.pace import Pace
from icehouse_http.bounds.places import Places
from icehouse_http.bounds.reading_rate import ReadingRate
from icehouse_http.errors import ApiError
from icehouse_http.exchange import EventStream
from icehouse_http.fields import fields_of
from icehouse_http.settings import Settings
from icehouse_http.upstream import Upstream

from clients.http.tests.fronts import front_of
from clients.http.tests.test_hostile import error_of
from clients.http.tests.test_streams import CHAT
from tests.fixtures.rpc.fake_engine import counting, hanging
from tests.unit.rpc.conftest import RunningServer

PATH = "/v1/chat/completions"


async def turns(count: int = 20) -> None:
    """Let everything else on the event loop go on."""
    for _ in range(count):
        await asyncio.sleep(0)


def test_one_caller_gets_three_quarters_of_the_places_and_leaves_some_for_each_next_one() -> None:
    bounded = Places(limit=64)
    with contextlib.ExitStack() as held:
        counts = []
        for caller in ("a", "b", "c"):
            count = 0
            with pytest.raises(ApiError) as refused:
                while True:
                    held.enter_context(bounded.hold(caller))
                    count += 1
            assert (refused.value.status, refused.value.headers["retry-after"]) == (429, "1")
            counts.append(count)
    assert counts == [48, 12, 3]
    with bounded.hold("a"):
        pass


async def test_a_caller_with_too_many_requests_is_refused_and_another_one_is_not(
    served: RunningServer,
) -> None:
    served.engine.script = hanging
    body, hostile, good = json.dumps(CHAT), {"x-api-key": "a"}, {"x-api-key": "b"}
    async with front_of(served.server.address, max_requests=4) as front, contextlib.AsyncExitStack() as held:
        for _ in range(3):
            answer = await held.enter_async_context(
                front.http.stream("POST", PATH, content=body, headers=hostile)
            )
            assert answer.status_code == 200
        refused = await front.http.post(PATH, content=body, headers=hostile)
        assert error_of(refused, PATH, status=429)["code"] == "QUEUE_FULL"
        assert refused.headers["retry-after"] == "1"
        served.engine.script = counting
        assert (await front.http.post(PATH, content=body, headers=good)).status_code == 200


async def test_a_caller_that_goes_keeps_its_place_for_a_while(
    served: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "_GONE_S", 1e6)
    served.engine.script = hanging
    body, headers = json.dumps(CHAT), {"x-api-key": "a"}
    async with front_of(served.server.address, max_requests=4) as front:
        for _ in range(3):
            async with front.http.stream("POST", PATH, content=body, headers=headers) as answer:
                assert answer.status_code == 200
            await served.cancelled()
        assert (await front.http.post(PATH, content=body, headers=headers)).status_code == 429
        served.engine.script = counting
        answered = await front.http.post(PATH, content=body, headers={"x-api-key": "b"})
        assert answered.status_code == 200
        again = await front.http.post(PATH, content=body, headers={"x-api-key": "b"})
        assert again.status_code == 200, "an answer that was sent holds nothing"


BODY = json.dumps({"a": ['say "hi"', "back\\slash\\", "é", {"b": [1, 22.5, None]}], "c": "\\\\"}).encode()


@pytest.mark.parametrize("step", [1, 2, 3, 7, len(BODY)])
def test_the_work_of_a_body_does_not_depend_on_its_pieces(step: int) -> None:
    size = JsonSize(limit=1000)
    for begin in range(0, len(BODY), step):
        size.add(BODY[begin : begin + step])
    outside = b": [, , , : [1, 22.5, null]}], : "
    assert size.work == len(b"{" + outside + b"}") + 1 + 16 * 7 + len(BODY) // 64


def test_long_texts_are_little_work_and_values_are_much() -> None:
    text, values = JsonSize(limit=4000), JsonSize(limit=1000)
    for _ in range(100):
        text.add(b'{"a":"' + b"[1,{}]," * 10_000 + b'\\""}')
        with contextlib.suppress(ApiError):
            values.add(b"[]," * 5)
    assert text.work < 140_000
    with pytest.raises(ApiError) as refused:
        values.add(b"[],")
    assert (refused.value.status, refused.value.code) == (413, "body_too_large")


@pytest.mark.parametrize("item", [b"[],", b"1,", b'"",', b'{"a":1},'])
async def test_a_body_of_too_many_values_is_refused_unread(served: RunningServer, item: bytes) -> None:
    async with front_of(served.server.address, max_structure_bytes=10_000) as front:
        answer = await front.http.post(PATH, content=b'{"a": [' + item * 10_000 + b"1]}")
        assert error_of(answer, PATH, status=413)["code"] == "body_too_large"
        text = json.dumps({**CHAT, "stream": False, "user": "[" * 1_000_000})
        assert (await front.http.post(PATH, content=text)).status_code == 200


def test_garbage_is_looked_for_once_behind_a_body_and_not_while_it_is_parsed() -> None:
    begun = list[str]()

    def told(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            begun.append(phase)

    gc.callbacks.append(told)
    try:
        fields = fields_of(b'{"a": [' + b"[]," * 100_000 + b"1]}")
        assert len(begun) <= 1 and gc.isenabled()
    finally:
        gc.callbacks.remove(told)
    assert len(fields.items("a")) == 100_001


async def test_too_many_turns_are_refused(served: RunningServer) -> None:
    async with front_of(served.server.address) as front:
        answer = await front.http.post(PATH, json={**CHAT, "messages": CHAT["messages"] * 4097})
        assert error_of(answer, PATH)["param"] == "messages"


async def test_a_caller_waits_for_its_next_large_body_and_others_do_not() -> None:
    rate = ReadingRate()

    async def read(name: str, work: int) -> None:
        async with rate.turn(name):
            rate.charge(name, work)

    await read("a", 1 << 40)
    again = asyncio.create_task(read("a", 1))
    await read("b", 1)
    await turns()
    assert not again.done()
    again.cancel()


async def test_four_large_bodies_of_a_caller_are_read_at_once() -> None:
    rate, begun, going_on = ReadingRate(), list[str](), asyncio.Event()

    async def read(name: str) -> None:
        async with rate.turn(name):
            begun.append(name)
            await going_on.wait()

    async with asyncio.TaskGroup() as together:
        for name in "aaaaaab":
            together.create_task(read(name))
        await turns()
        assert sorted(begun) == ["a"] * 4 + ["b"]
        going_on.set()
    assert len(begun) == 7


async def test_a_caller_is_asked_about_once_and_one_that_was_refused_again() -> None:
    admission, asked = Admission(), list[str]()

    async def ask(name: str) -> None:
        asked.append(name)
        if name == "bad":
            raise ApiError(401, "no", code="CREDENTIALS_INVALID")

    for name in ("good", "bad", "good", "bad"):
        with contextlib.suppress(ApiError):
            await admission.admit(name, functools.partial(ask, name))
    assert asked == ["good", "bad", "bad"]


async def test_who_is_known_does_not_wait_behind_strangers() -> None:
    admission, strangers = Admission(), 0

    async def soon() -> None:
        pass

    async def never() -> None:
        nonlocal strangers
        strangers += 1
        await asyncio.Event().wait()

    await admission.admit("known", soon)
    waiting = [asyncio.create_task(admission.admit(f"stranger {i}", never)) for i in range(64)]
    await turns()
    assert strangers == 32, "each holds a call of the one connection"
    await admission.admit("known", never)
    with pytest.raises(ApiError) as refused:
        await admission.admit("one more", soon)
    assert refused.value.status == 429
    for task in waiting:
        task.cancel()


async def test_checks_of_health_at_the_same_time_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answered = 0, asyncio.Event()

    async def health(client: AsyncClient, service: str = "", *, timeout_s: float | None = None) -> str:
        nonlocal asked
        asked += 1
        await answered.wait()
        return "SERVING"

    monkeypatch.setattr(AsyncClient, "health", health)
    upstream = Upstream(Settings())
    caller = upstream.caller({}, "a machine")
    checking = [asyncio.create_task(upstream.health(caller)) for _ in range(20)]
    await turns()
    checking.pop().cancel()
    answered.set()
    assert set(await asyncio.gather(*checking)) == {"SERVING"} and asked == 1
    assert (await upstream.health(caller), asked) == ("SERVING", 2)
    await upstream.close()


class Source:
    """A stream of a reply that goes on for ever, and counts what was taken from it."""

    def __init__(self) -> None:
        self.taken_count = 0
        self.is_cancelled = False

    async def events(self):
        while True:
            self.taken_count += 1
            yield StreamResponse()

    def cancel(self) -> None:
        self.is_cancelled = True


class Echo:
    def feed(self, event: StreamResponse):
        return (Text(),)


class Text:
    def encode(self) -> bytes:
        return b"text"


async def never_gone() -> dict[str, str]:
    await asyncio.Event().wait()
    return {"type": "http.disconnect"}


async def test_what_nobody_reads_is_not_taken_from_the_server() -> None:
    source, sent = Source(), asyncio.Semaphore(3)

    async def send(message: dict[str, object]) -> None:
        await sent.acquire()

    response = EventStream(source, Echo(), ping_interval_s=60.0)
    await response.begin()
    answering = asyncio.create_task(response({}, never_gone, send))
    await turns(100)
    assert source.taken_count == 3, "one waits to be written"
    sent.release()
    await turns(100)
    assert source.taken_count == 4
    answering.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await answering


@pytest.mark.parametrize("turn_count", range(8))
async def test_a_second_cancel_does_not_keep_the_call(turn_count: int) -> None:
    """Wherever the first one has got to when the other comes."""
    source = Source()

    async def send(message: dict[str, object]) -> None:
        await asyncio.sleep(0)

    response = EventStream(source, Echo(), ping_interval_s=60.0)
    await response.begin()
    answering = asyncio.create_task(response({}, never_gone, send))
    await turns()
    for _ in range(2):
        answering.cancel()
        await turns(turn_count)
    with pytest.raises(asyncio.CancelledError):
        await answering
    assert source.is_cancelled


def test_a_pace_lets_some_go_at_once_and_the_others_one_by_one() -> None:
    pace = Pace(per_s=4.0, at_once=2.0, longest_s=1.0)
    assert [pace.delay_s("a", 100.0) for _ in range(8)] == [0, 0, 0.25, 0.5, 0.75, 1, 1, 1]
    assert pace.delay_s("b", 100.0) == 0
    assert pace.delay_s("a", 100.5) == 0.75
    assert [pace.delay_s("a", 900.0) for _ in range(3)] == [0, 0, 0.25]
    assert pace.delay_s("b", 900.0, count=3.0) == 0.25


def test_a_pace_does_not_remember_everybody() -> None:
    pace = Pace(per_s=1.0, at_once=1.0, longest_s=9.0)
    for index in range(1025):
        assert pace.delay_s(str(index), 100.0) == 0
    assert (pace.delay_s("1", 100.0), pace.delay_s("0", 100.0)) == (1.0, 0.0)


async def test_a_caller_pays_for_its_own_refusals_and_a_machine_for_those_of_strangers(
    served: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    paced = list[str]()
    monkeypatch.setattr(Pace, "delay_s", lambda pace, name, now, *, count=1.0: paced.append(name) or 0.0)
    async with front_of(served.server.address, max_body_bytes=100) as front:
        for key, body in (("a", "x" * 101), ("\u00e9", ""), ("a", "no JSON")):
            await front.http.post(PATH, content=body, headers={"x-api-key": key.encode("latin-1")})
    caller, machine = (name for name in paced if name)
    assert len(caller) == 64 and machine == "127.0.0.1"
