"""The pool over models that a test loads by hand: who waits, who leaves, what fails, what expires."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from icehouse_server.domain.ids import Tenant
from icehouse_server.domain.model import EngineState, ModelState
from icehouse_server.errors import (
    CannotFit,
    IcehouseError,
    NotFound,
    Overloaded,
    Reason,
    Unavailable,
    model_invalid,
)
from icehouse_server.pool import model_pool
from icehouse_server.pool.places import LONGEST_STAY_S, ModelNeeds
from icehouse_server.rpc.access.caller import UNPROVED, Caller, CallerRole

from tests.fixtures.patience import BOUND_S
from tests.unit.pool.house import SIZE, A, B, C, FakeCall, House, house_of, settled


async def test_the_default_and_the_pinned_are_loaded_at_the_start() -> None:
    async with house_of(A, B, dataclasses.replace(C, is_pinned=True)) as house:
        house.pool._limit_bytes = 1000
        assert house.pool.state.name == "LOADING"
        await house.pool.start()
        assert house.started == ["a", "c"] and house.pool.state is EngineState.READY
        assert [*house.pool.loaded()] == ["a", "c"]


async def test_a_start_fails_with_the_first_reason_if_nothing_could_be_loaded() -> None:
    async with house_of(A, B) as house:
        house.broken["a"] = model_invalid("it is damaged")
        with pytest.raises(IcehouseError, match="it is damaged"):
            await house.pool.start()
    async with house_of(A, B) as house:
        house.pool._limit_bytes = SIZE - 1
        with pytest.raises(CannotFit):
            await house.pool.start()
    async with house_of(A, dataclasses.replace(B, is_pinned=True)) as house:
        house.broken["a"] = model_invalid("it is damaged")
        await house.pool.start()
        assert house.states() == {"a": ModelState.FAILED, "b": ModelState.READY}


async def test_those_who_wait_for_a_model_get_it_together_and_it_is_loaded_once() -> None:
    async with house_of(A, B) as house:
        house.held.add("b")
        waiting = [asyncio.ensure_future(house.use("b")) for _ in range(3)]
        await house.until_started("b")
        house.clock.now += 7.0
        house.models["b"].succeed()
        calls = await asyncio.gather(*waiting)
        assert house.started == ["b"] and [call.load_s for call in calls] == [7.0] * 3
        assert (await house.use("b")).load_s == 0.0


async def test_a_long_step_of_loading_is_not_taken_for_stuck() -> None:
    async with house_of(A, B) as house:
        house.pool._limit_bytes = 1000
        await house.pool.start()
        house.models["a"].engine.heartbeat_time = house.clock.now
        house.held.add("b")
        waiting = asyncio.ensure_future(house.use("b"))
        await house.until_started("a", "b")
        house.clock.now += model_pool.LOADING_PATIENCE_S
        assert house.pool.turns(patience_s=1.0)
        house.clock.now += 1.0
        assert not house.pool.turns(patience_s=1.0)
        house.models["b"].succeed()
        await waiting


async def test_a_model_that_nobody_waits_for_any_more_becomes_ready_all_the_same() -> None:
    async with house_of(A, B) as house:
        house.held.add("b")
        waiting = asyncio.ensure_future(house.use("b"))
        await house.until_started("b")
        waiting.cancel()
        await asyncio.wait((waiting,))
        house.models["b"].succeed()
        await house.until("b", ModelState.READY)
        # And it can give way at once: who left does not use it.
        await house.use("a")
        assert house.states() == {"a": ModelState.READY, "b": ModelState.ABSENT}


async def test_idle_models_give_way_and_running_ones_when_their_calls_have_ended() -> None:
    async with house_of(A, B) as house:
        call = await house.use("a")
        waiting = asyncio.ensure_future(house.use("b"))
        await house.until("a", ModelState.DRAINING)
        # New calls for it wait, and it is loaded again for them.
        again = asyncio.ensure_future(house.use("a"))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not house.models["a"].has_ended and house.started == ["a"]
        first = house.models["a"]
        call.holds.close()
        used = await waiting
        assert first.has_ended
        await house.until("b", ModelState.DRAINING)
        used.holds.close()
        await again
        assert house.started == ["a", "b", "a"]


async def loaded_in(house: House, name: str, load_s: float) -> FakeCall:
    """Load a model, which takes so long, and return the call that uses it."""
    house.held.add(name)
    using = asyncio.ensure_future(house.use(name))
    await house.until_started(*house.started, name)
    house.clock.now += load_s
    house.models[name].succeed()
    return await using


async def test_a_model_serves_for_as_long_as_its_loading_took_before_it_gives_way() -> None:
    async with house_of(A, B) as house:
        call = await loaded_in(house, "a", 8.0)
        waiting = asyncio.ensure_future(house.use("b"))
        for _ in range(3):
            await house.until_waiting_for_room("b")
            assert house.states() == {"a": ModelState.READY, "b": ModelState.ABSENT}
            # Its callers come back in time, so it takes their calls at once.
            house.clock.now += 2.0
            again = await house.use("a")
            call.holds.close()
            call = again
        house.clock.now += 2.0
        (await house.use("a")).holds.close()
        await house.until("a", ModelState.DRAINING)
        call.holds.close()
        await waiting
        assert house.started == ["a", "b"]


async def test_a_model_whose_callers_have_left_gives_way_soon() -> None:
    async with house_of(A, B) as house:
        call = await loaded_in(house, "a", 0.01)
        waiting = asyncio.ensure_future(house.use("b"))
        await settled()
        call.holds.close()
        await settled()
        assert house.states()["a"] is ModelState.READY and not waiting.done()
        house.clock.now += 0.0011
        await waiting
        assert house.models["a"].has_ended


async def test_a_slow_load_does_not_make_others_wait_for_ever() -> None:
    async with house_of(A, B) as house:
        call = await loaded_in(house, "a", 100 * LONGEST_STAY_S)
        waiting = asyncio.ensure_future(house.use("b"))
        await settled()
        assert house.states()["a"] is ModelState.READY
        house.clock.now += LONGEST_STAY_S
        (await house.use("a")).holds.close()
        await house.until("a", ModelState.DRAINING)
        call.holds.close()
        await waiting


async def test_those_of_two_models_in_turns_are_served_in_batches() -> None:
    """Each swap serves all who came by then, and who waits longest is next."""
    async with house_of(A, B, C) as house:
        ended: list[str] = []

        async def ask(name: str) -> None:
            call = await house.use(name)
            await asyncio.sleep(0)
            call.holds.close()
            ended.append(name)

        async with asyncio.timeout(BOUND_S), asyncio.TaskGroup() as group:
            for name in "abcabcabc":
                group.create_task(ask(name))
        assert house.started == ["a", "b", "c"] and "".join(ended) == "aaabbbccc"


async def test_a_draft_model_counts_with_its_model() -> None:
    async with house_of(A, B) as house:
        house.needs["a"] = ModelNeeds(SIZE + 10)
        house.pool._limit_bytes = 2 * SIZE
        await house.use("a")
        place = house.pool._models["a"].place
        assert place is not None and place.needs.weight_bytes == SIZE + 10


async def test_who_waits_for_room_too_long_is_refused_and_what_runs_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_pool, "GIVE_WAY_S", 0.0)
    async with house_of(A, B) as house:
        call = await house.use("a")
        with pytest.raises(Overloaded) as caught:
            await house.use("b")
        assert caught.value.reason is Reason.MEMORY_SHORT and "'a'" in caught.value.message
        assert house.states()["a"] is ModelState.READY and not house.models["a"].has_ended
        await house.use("a")
        call.holds.close()


async def test_a_pinned_model_gives_way_to_none() -> None:
    async with house_of(dataclasses.replace(A, is_pinned=True), B) as house:
        await house.pool.start()
        with pytest.raises(CannotFit):
            await house.use("b")
        assert house.states()["a"] is ModelState.READY


async def test_a_failed_model_is_told_to_all_and_tried_again_only_later() -> None:
    async with house_of(A, B) as house:
        house.broken["b"] = model_invalid("/secret/b is damaged")
        refusals = await asyncio.gather(house.use("b"), house.use("b"), return_exceptions=True)
        assert {type(refusal) for refusal in refusals} == {Unavailable}
        del house.broken["b"]
        with pytest.raises(Unavailable) as caught:
            await house.use("b")
        assert not house.started
        assert house.pool.takes("a", UNPROVED) and not house.pool.takes("b", UNPROVED)
        detail = house.pool.find("b", UNPROVED).detail
        for told in (*(str(refusal) for refusal in refusals), caught.value.message, detail):
            assert "MODEL_INVALID" in told and "secret" not in told
        house.clock.now += model_pool.RETRY_S
        assert house.pool.takes("b", UNPROVED), "nobody would send the call that tries it again"
        await house.use("b")
        assert house.states()["b"] is ModelState.READY


async def test_what_nobody_expects_of_a_load_fails_it_like_any_other_reason() -> None:
    async with house_of(A, B) as house:
        house.broken["b"] = OSError("the disk of /secret/b is gone")
        with pytest.raises(Unavailable) as caught:
            await house.use("b")
        assert "secret" not in caught.value.message
        assert house.states()["b"] is ModelState.FAILED
        del house.broken["b"]
        house.clock.now += model_pool.RETRY_S
        await house.use("b")


async def test_an_engine_that_cannot_be_ended_refuses_its_callers_and_none_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with house_of(A, B) as house:
        house.held.add("b")
        waiting = asyncio.ensure_future(house.use("b"))
        await house.until_started("b")

        async def end() -> None:
            raise OSError("it is stuck")

        monkeypatch.setattr(house.models["b"], "end", end)
        house.models["b"].fail(model_invalid("damaged"))
        with pytest.raises(Unavailable):
            await waiting
        house.clock.now += model_pool.RETRY_S
        with pytest.raises(Unavailable):
            await house.use("b")


async def test_callers_who_leave_are_not_kept_until_a_load_ends() -> None:
    async with house_of(A, B) as house:
        house.held.add("b")
        waiting = [asyncio.ensure_future(house.use("b")) for _ in range(50)]
        await house.until_started("b")
        for each in waiting[1:]:
            each.cancel()
        await asyncio.wait(waiting[1:])
        assert len(house.pool._models["b"].waiters) == 1
        house.models["b"].succeed()
        await waiting[0]


async def test_an_engine_that_fails_takes_its_model_out_and_no_other() -> None:
    async with house_of(A, B) as house:
        house.pool._limit_bytes = 1000
        await house.pool.start()
        await house.use("b")
        house.models["b"].fail(model_invalid("the loop broke"))
        await house.until("b", ModelState.FAILED)
        assert [*house.pool.loaded()] == ["a"] and house.pool.state is EngineState.READY
        house.models["a"].engine.heartbeat_time = house.clock.now
        assert house.pool.turns(patience_s=1.0)
        house.clock.now += 2.0
        assert not house.pool.turns(patience_s=1.0), "its loop is stuck"
        house.clock.now += model_pool.RETRY_S
        await house.use("b")


async def test_a_model_expires_after_its_time_without_a_call() -> None:
    async with house_of(A, dataclasses.replace(B, ttl_s=0.001)) as house:
        call = await house.use("b")
        held = house.models["b"]
        assert not held.has_ended
        call.holds.close()
        await house.until("b", ModelState.ABSENT)
        assert held.has_ended


async def test_an_unloaded_model_lets_its_calls_end_and_comes_back() -> None:
    async with house_of(A, B) as house:
        call = await house.use("b")
        unloading = asyncio.ensure_future(house.pool.unload("b", UNPROVED))
        await house.until("b", ModelState.DRAINING)
        assert not house.models["b"].has_ended
        call.holds.close()
        assert (await unloading).state is ModelState.ABSENT and house.models["b"].has_ended
        assert (await house.pool.unload("b", UNPROVED)).state is ModelState.ABSENT
        await house.use("b")


async def test_an_unloading_whose_caller_leaves_goes_on() -> None:
    async with house_of(A, B) as house:
        call = await house.use("b")
        unloading = asyncio.ensure_future(house.pool.unload("b", UNPROVED))
        await house.until("b", ModelState.DRAINING)
        unloading.cancel()
        await asyncio.wait((unloading,))
        call.holds.close()
        await house.until("b", ModelState.ABSENT)
        await house.use("b")


async def test_aliases_name_a_model_and_others_are_refused_with_the_names_there_are() -> None:
    mine = dataclasses.replace(B, aliases=("other",), tenants=frozenset((Tenant("t"),)))
    async with house_of(A, mine) as house:
        assert house.pool.find("other", UNPROVED).name == "b"
        owner, stranger = (Caller(Tenant(name), CallerRole.TENANT) for name in "tu")
        await house.use("b", FakeCall(owner))
        for name in ("b", "other", "none"):
            with pytest.raises(NotFound) as caught:
                await house.pool.use(name, FakeCall(stranger))
            assert "'a'" in caught.value.message and "or leave" in caught.value.message
            assert name == "b" or "'b'" not in caught.value.message
        assert [model.name for model in house.pool.listed(stranger)] == ["a"]


async def test_a_stop_refuses_who_waits_and_gives_all_that_is_open() -> None:
    async with house_of(A, B) as house:
        await house.use("a")
        house.pool._limit_bytes = 1000
        house.held.add("b")
        waiting = asyncio.ensure_future(house.use("b"))
        await house.until_started("a", "b")
        opened = house.pool.begin_stop()
        assert [model.name for model in opened] == ["a", "b"]
        with pytest.raises(Unavailable) as caught:
            await waiting
        assert caught.value.reason is Reason.DRAINING
        with pytest.raises(Unavailable):
            await house.pool.use("a", FakeCall())
        assert house.pool.ended.is_set()


async def test_a_model_is_opened_again_when_its_failed_engine_has_ended() -> None:
    """Until then that has its memory, and its place in the SSD tier, which no second one gets."""
    async with house_of(A, B) as house:
        await house.use("a")
        house.may_end.clear()
        failed = house.models["a"]
        failed.fail(model_invalid("it broke"))
        await house.until("a", ModelState.FAILED)
        house.clock.now += model_pool.RETRY_S
        again = asyncio.ensure_future(house.use("a"))
        await house.until_located("a", "a")
        for _ in range(10):
            await asyncio.to_thread(int)  # what opens it would have had its turn among the threads
        assert house.models["a"] is failed
        house.may_end.set()
        await again
        assert failed.has_ended and house.models["a"] is not failed


async def test_a_model_whose_engine_cannot_be_started_is_ended_and_may_be_tried_again() -> None:
    async with house_of(A, B) as house:
        house.unstartable.add("a")
        with pytest.raises(Unavailable, match="ENGINE_FAILED"):
            await house.use("a")
        assert house.models["a"].has_ended
        house.unstartable.clear()
        house.clock.now += model_pool.RETRY_S
        await house.use("a")
