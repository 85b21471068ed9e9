"""Fetching of a pool's models: who waits for it, and who does not."""

from __future__ import annotations

import asyncio
import threading

import pytest
from icehouse_server.domain.model import ModelState
from icehouse_server.errors import Unavailable, model_invalid
from icehouse_server.pool.places import ModelTerms
from icehouse_server.rpc.access.caller import UNPROVED

from tests.unit.pool.house import A, B, house_of, settled


@pytest.mark.parametrize("error", [OSError("the disk of /secret/b is gone"), model_invalid("no such model")])
async def test_files_that_cannot_be_fetched_are_not_said_to_be_here(error: Exception) -> None:
    async with house_of(A, B) as house:
        house.broken["b"] = error
        with pytest.raises(Unavailable) as caught:
            await house.pool.fetch("b", UNPROVED)
        assert "secret" not in caught.value.message and "could not be fetched" in caught.value.message
        assert house.states()["b"] is ModelState.ABSENT
        del house.broken["b"]
        await house.pool.fetch("b", UNPROVED)
        assert house.states()["b"] is ModelState.ABSENT and "b" not in house.models


async def test_other_models_are_loaded_while_the_files_of_one_are_fetched() -> None:
    async with house_of(A, B) as house:
        house.absent["b"] = threading.Event()
        waiting = asyncio.ensure_future(house.use("b"))
        await house.until_located("b")
        (await house.use("a")).holds.close()
        assert house.states() == {"a": ModelState.READY, "b": ModelState.FETCHING}
        house.absent["b"].set()
        await waiting
        assert house.states() == {"a": ModelState.ABSENT, "b": ModelState.READY}


async def test_all_who_want_the_files_of_a_model_wait_for_one_fetch_and_who_leaves_does_not_end_it() -> None:
    async with house_of(A, B) as house:
        house.absent["b"] = threading.Event()
        leaving = asyncio.ensure_future(house.use("b"))
        await house.until_located("b")
        fetching = asyncio.ensure_future(house.pool.fetch("b", UNPROVED))
        waiting = asyncio.ensure_future(house.use("b"))
        await settled()
        leaving.cancel()
        await asyncio.wait((leaving,))
        house.absent["b"].set()
        await asyncio.gather(fetching, waiting)
        assert house.located == ["b"] and house.started == ["b"]


async def test_a_request_that_joins_a_fetch_hears_why_it_failed() -> None:
    async with house_of(A, B) as house:
        house.absent["b"], house.broken["b"] = threading.Event(), model_invalid("no such model")
        fetching = asyncio.ensure_future(house.pool.fetch("b", UNPROVED))
        await house.until_located("b")
        waiting = asyncio.ensure_future(house.use("b"))
        await settled()
        house.absent["b"].set()
        refusals = await asyncio.gather(fetching, waiting, return_exceptions=True)
        assert [type(refusal) for refusal in refusals] == [Unavailable, Unavailable]
        assert house.located == ["b"] and house.states()["b"] is ModelState.FAILED


async def test_many_fetches_keep_no_thread_from_other_work() -> None:
    many = [ModelTerms(str(number)) for number in range(40)]
    async with house_of(A, *many) as house:
        house.absent.update((terms.name, threading.Event()) for terms in many)
        fetching = [asyncio.ensure_future(house.pool.fetch(terms.name, UNPROVED)) for terms in many]
        await house.until_located(*(terms.name for terms in many))
        await house.use("a")
        for fetched in house.absent.values():
            fetched.set()
        await asyncio.gather(*fetching)
