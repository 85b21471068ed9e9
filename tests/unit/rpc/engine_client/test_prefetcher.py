"""Next turns that are computed ahead: only while nothing else runs, given up at once, and bounded."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Iterable

import pytest
from icehouse_server.domain.events import Event
from icehouse_server.domain.ids import RequestId, Tenant
from icehouse_server.domain.model import EngineState
from icehouse_server.domain.request import GenerationRequest
from icehouse_server.domain.sampling import SamplingParams
from icehouse_server.errors import InvalidRequest, Reason
from icehouse_server.rpc.engine_client import prefetcher
from icehouse_server.rpc.engine_client.prefetcher import NextTurn, Prefetcher, TurnKey
from icehouse_server.rpc.engine_client.router import Router

from tests.fixtures.patience import BOUND_S
from tests.fixtures.rpc.fake_engine import FakeEngine, finished, overloaded, started


class House:
    """A prefetcher before a scripted engine, and what was made of next turns."""

    def __init__(self) -> None:
        self.router = Router(asyncio.get_running_loop())
        self.router.state = EngineState.READY
        self.engine = FakeEngine(self.router, script=at_once)
        self.prefetcher = Prefetcher(engine=self.engine, router=self.router)
        self.made: list[str] = []
        self.refuses = False

    def turn(
        self,
        session_id: str,
        *,
        tenant: str = "",
        token_count: int = 10,
        opening: int = 0,
        parent_session_id: str = "",
    ) -> NextTurn:
        async def make(request_id: RequestId) -> GenerationRequest | None:
            self.made.append(session_id)
            if self.refuses:
                raise InvalidRequest(Reason.PROMPT_TOO_LONG, "it is too long", field="prompt")
            return None if session_id == "nothing new" else request(request_id, session_id, tenant)

        key = TurnKey(Tenant(tenant), session_id, opening, parent_session_id)
        return NextTurn(key, token_count, make)

    @property
    def ran(self) -> list[str]:
        return [request.session_id for request in self.engine.submitted]

    async def until_ran(self, *sessions: str) -> None:
        async with asyncio.timeout(BOUND_S):
            while self.ran != list(sessions):
                await asyncio.sleep(0)
        await self.settle()

    async def until_made(self, *sessions: str) -> None:
        async with asyncio.timeout(BOUND_S):
            while self.made != list(sessions) or self.prefetcher._task is not None:
                await asyncio.sleep(0)

    async def settle(self) -> None:
        """Return when the engine's thread has done all it was given, and the loop has heard of it."""
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        self.engine.call_on_thread(lambda: loop.call_soon_threadsafe(done.set_result, None))
        await done
        await asyncio.sleep(0)


def request(request_id: RequestId, session_id: str, tenant: str = "") -> GenerationRequest:
    return GenerationRequest(
        request_id, (1, 2), 0, SamplingParams(), (), 0.0, tenant=Tenant(tenant), session_id=session_id
    )


def at_once(request: GenerationRequest) -> Iterable[Event]:
    return (started(request), finished(request))


def for_ever(request: GenerationRequest) -> Iterable[Event]:
    return (started(request),)


def call(session_id: str = "", tenant: str = "") -> GenerationRequest:
    return request(RequestId("call"), session_id, tenant)


@pytest.fixture
async def house(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[House]:
    monkeypatch.setattr(prefetcher, "_IDLE_S", 0.0)
    house = House()
    with contextlib.closing(house.engine), contextlib.closing(house.prefetcher):
        yield house


async def test_the_latest_of_what_waits_is_computed_first_one_after_the_other(house: House) -> None:
    with house.prefetcher.paused([call()]):
        for name in ("a", "b", "nothing new", "a"):
            house.prefetcher.note(house.turn(name))
        await house.settle()
        assert house.made == []
    await house.until_ran("a", "b")
    assert house.made == ["a", "nothing new", "b"]


async def test_a_call_has_it_given_up_before_it_is_submitted_and_it_goes_on_later(house: House) -> None:
    house.engine.script = for_ever
    house.prefetcher.note(house.turn("a"))
    await house.until_ran("a")
    house.engine.script = at_once
    with house.prefetcher.paused([call("b")]):
        [cancelled] = [house.engine.cancelled.get(timeout=BOUND_S)]
        assert cancelled == house.engine.submitted[0].request_id
        await house.settle()
        assert house.ran == ["a"]
    await house.until_ran("a", "a")


async def test_who_is_interrupted_again_and_again_is_dropped(house: House) -> None:
    house.engine.script = for_ever
    house.prefetcher.note(house.turn("a"))
    for count in (1, 2, 3):
        await house.until_ran(*"a" * count)
        with house.prefetcher.paused([call()]):
            await house.settle()
    await house.until_made("a", "a", "a")
    assert house.prefetcher._waiting == {}


@pytest.mark.parametrize("how", ["its next turn", "its end", "all of its tenant", "all"])
async def test_a_session_that_goes_on_or_ends_is_computed_no_more(house: House, how: str) -> None:
    house.engine.script = for_ever
    house.prefetcher.note(house.turn("a", tenant="t"))
    await house.until_ran("a")
    with house.prefetcher.paused([call("a", "t")] if how == "its next turn" else []):
        if how == "its end":
            house.prefetcher.forget(Tenant("t"), "a")
        elif how != "its next turn":
            house.prefetcher.forget(Tenant("t") if how == "all of its tenant" else None)
        house.engine.cancelled.get(timeout=BOUND_S)
    await house.until_made("a")
    assert house.prefetcher._waiting == {}


async def test_the_conversations_of_a_session_do_not_replace_each_other(house: House) -> None:
    with house.prefetcher.paused([]):
        for opening in (1, 2, 3, 2):
            house.prefetcher.note(house.turn("a", opening=opening))
        with house.prefetcher.paused([dataclasses.replace(call("a"), opening=3)]):
            assert [key.opening for key in house.prefetcher._waiting] == [1, 2]
        with house.prefetcher.paused([dataclasses.replace(call("a"), opening=4, ends_session=True)]):
            assert not house.prefetcher._waiting


async def test_a_child_ends_with_its_parent_and_not_the_other_way_round(house: House) -> None:
    with house.prefetcher.paused([]):
        for turn in (house.turn("a"), house.turn("a/b", parent_session_id="a"), house.turn("b")):
            house.prefetcher.note(turn)
        house.prefetcher.forget(Tenant(""), "a/b")
        assert [key.session_id for key in house.prefetcher._waiting] == ["a", "b"]
        house.prefetcher.note(house.turn("a/b", parent_session_id="a"))
        house.prefetcher.forget(Tenant(""), "a")
        assert [key.session_id for key in house.prefetcher._waiting] == ["b"]


async def test_another_tenants_session_of_the_same_name_is_another_one(house: House) -> None:
    with house.prefetcher.paused([]):
        house.prefetcher.note(house.turn("a", tenant="t"))
        house.prefetcher.forget(Tenant("u"), "a")
        house.prefetcher.forget(Tenant("u"))
    await house.until_ran("a")


async def test_millions_of_sessions_are_bounded_and_a_tenant_floods_only_itself(house: House) -> None:
    with house.prefetcher.paused([]):
        house.prefetcher.note(house.turn("small", tenant="small"))
        for number in range(10_000):
            house.prefetcher.note(house.turn(f"s{number}", tenant="large"))
        waiting = list(house.prefetcher._waiting)
        assert len(waiting) == prefetcher.WAITING_LIMIT and TurnKey(Tenant("small"), "small", 0) in waiting
        assert waiting[-1] == ("large", "s9999", 0, "")
        for number in range(10):
            house.prefetcher.note(house.turn(f"long{number}", tenant="large", token_count=500_000))
        house.prefetcher.note(house.turn("too long", token_count=prefetcher.WAITING_TOKEN_LIMIT + 1))
        assert house.prefetcher._waiting_token_count <= prefetcher.WAITING_TOKEN_LIMIT
        assert [key.session_id for key in house.prefetcher._waiting][-2:] == ["long8", "long9"]
        house.prefetcher.forget()


async def test_what_is_refused_is_not_tried_again(house: House) -> None:
    house.refuses = True
    house.prefetcher.note(house.turn("a"))
    await house.until_made("a")
    house.refuses = False
    house.engine.refusal = overloaded()
    house.prefetcher.note(house.turn("b"))
    await house.until_made("a", "b")
    house.engine.refusal = None
    house.prefetcher.note(house.turn("c"))
    await house.until_ran("c")
    assert house.made == ["a", "b", "c"]


async def test_nothing_is_begun_where_the_engine_is_not_ready(house: House) -> None:
    house.router.state = EngineState.DRAINING
    house.prefetcher.note(house.turn("a"))
    await house.settle()
    assert house.made == []


async def test_once_closed_nothing_runs_and_what_ran_is_cancelled(house: House) -> None:
    house.engine.script = for_ever
    house.prefetcher.note(house.turn("a"))
    await house.until_ran("a")
    house.prefetcher.close()
    assert house.engine.cancelled.get(timeout=BOUND_S) == house.engine.submitted[0].request_id
    house.prefetcher.note(house.turn("b"))
    await house.until_made("a")


async def test_a_fault_is_told_and_the_next_one_runs(house: House) -> None:
    told: list[BaseException] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["exception"]))

    async def make(_: RequestId) -> GenerationRequest | None:
        raise ZeroDivisionError

    house.prefetcher.note(dataclasses.replace(house.turn("a"), make=make))
    async with asyncio.timeout(BOUND_S):
        while not told:
            await asyncio.sleep(0)
    assert isinstance(told[0], ZeroDivisionError) and house.prefetcher._waiting == {}
    house.prefetcher.note(house.turn("b"))
    await house.until_ran("b")
