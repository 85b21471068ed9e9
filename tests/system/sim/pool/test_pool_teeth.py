"""Breaks a server of several models on purpose, one thing at a time: some story must notice each."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import pytest
from icehouse_server.engine.core.memory_budget import BudgetShare, MemoryBudget
from icehouse_server.engine.engine import Engine
from icehouse_server.engine.engine_loop import EngineLoop
from icehouse_server.engine.prefix_cache.tiers.spill import Spills
from icehouse_server.engine.prefix_cache.tiers.tenant_quota import TenantQuotas
from icehouse_server.engine.scheduling.memory_guard import MemoryGuard
from icehouse_server.pool import model_pool, places
from icehouse_server.pool.model_pool import ModelPool
from icehouse_server.rpc.engine_client.router import Router
from icehouse_server.storage.local.open_model import OpenModels
from icehouse_server.storage.local.storage_state import QueueLimit

from tests.system.sim.pool.pool_story import POOL_SEED, PoolStory
from tests.system.sim.scenario import SimulationFailed
from tests.system.sim.stories import play

_SEED_LIMIT = 100
Break = Callable[[pytest.MonkeyPatch], None]


def keep_the_share_of_a_failed_load(patch: pytest.MonkeyPatch) -> None:
    real = MemoryBudget.leave
    patch.setattr(
        MemoryBudget, "leave", lambda self, share: None if share.reserved_bytes else real(self, share)
    )


def keep_the_memory_of_a_failed_engine(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Engine, "_free", lambda self, prefix: None)


def free_a_failed_engine_only_beside_others(patch: pytest.MonkeyPatch) -> None:
    real = Engine._free

    def free(self, prefix):
        if self._thread.engine_count > 1:
            real(self, prefix)

    patch.setattr(Engine, "_free", free)


def look_at_memory_only_before_a_load(patch: pytest.MonkeyPatch) -> None:
    """Others take meanwhile what is still to be loaded."""
    patch.setattr(BudgetShare, "_loading_bytes", property(lambda self: 0))


def believe_what_the_files_say(patch: pytest.MonkeyPatch) -> None:
    real = Engine._check_room

    def check_room(self, share, active_bytes, *, missing_bytes=0):
        if missing_bytes:
            real(self, share, active_bytes, missing_bytes=missing_bytes)

    patch.setattr(Engine, "_check_room", check_room)


def let_who_decodes_alone_go_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryGuard, "has_company", False)


def count_no_other_model(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BudgetShare, "others_bytes", 0)
    patch.setattr(BudgetShare, "excess_bytes", lambda self, used_bytes: 0)


def forget_who_waits_for_a_load_that_fails(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ModelPool, "_refuse", lambda self, model, error: None)


def hold_a_model_for_a_caller_who_left(patch: pytest.MonkeyPatch) -> None:
    real = ModelPool._admit

    def admit(self, model, place):
        for waiter in model.waiters:
            if waiter.done():
                self._taken(place)
        real(self, model, place)

    patch.setattr(ModelPool, "_admit", admit)
    # Callers who leave stay in the list, as if nobody took them out.
    patch.setattr(places.PooledModel, "waiters", _Lasting())


class _Lasting:
    """A list of waiters that loses none before it is replaced."""

    def __init__(self) -> None:
        self._lists: dict[int, list[Any]] = {}

    def __get__(self, model: Any, owner: Any = None) -> Any:
        return self if model is None else self._lists.setdefault(id(model), _NothingRemoved())

    def __set__(self, model: Any, waiters: list[Any]) -> None:
        self._lists[id(model)] = _NothingRemoved(waiters)


class _NothingRemoved(list[Any]):
    def remove(self, value: Any) -> None:
        """Keep it."""


def give_way_although_pinned(patch: pytest.MonkeyPatch) -> None:
    real = places.yielding

    def yielding(name, needs, occupants, **limit):
        own = {each.terms.name: each for each in occupants}
        loose = [
            dataclasses.replace(each, terms=dataclasses.replace(each.terms, is_pinned=False))
            for each in occupants
        ]
        return tuple(own[each.terms.name] for each in real(name, needs, loose, **limit))

    patch.setattr(model_pool, "yielding", yielding)


def unload_beneath_running_calls(patch: pytest.MonkeyPatch) -> None:
    real = ModelPool._unload

    async def unload(self, model, place, *, grace_s):
        place.idle.set()
        await real(self, model, place, grace_s=grace_s)

    patch.setattr(ModelPool, "_unload", unload)


def expire_in_the_middle_of_a_call(patch: pytest.MonkeyPatch) -> None:
    real = ModelPool._taken

    def taken(self, place):
        expiry = place.expiry
        place.expiry = None
        result = real(self, place)
        place.expiry = expiry
        return result

    patch.setattr(ModelPool, "_taken", taken)

    def expire(self, model, place):
        async def unload():
            async with self._turn:
                if model.place is place:
                    await self._unload(model, place, grace_s=0.0)

        self._begin(unload(), name="expiry")

    patch.setattr(ModelPool, "_expire", expire)


def unload_without_writing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EngineLoop, "flush", lambda self, deadline_time: iter(()))


def drop_what_a_full_queue_does_not_take_at_the_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Spills, "must_wait", lambda self, node: bool(self.under_way_count))


def hand_out_the_seat_of_before(patch: pytest.MonkeyPatch) -> None:
    real = ModelPool._admit
    first: dict[object, Any] = {}

    def admit(self, model, place):
        real(self, model, first.setdefault((id(self), model.terms.name), place))

    patch.setattr(ModelPool, "_admit", admit)


def keep_a_model_whose_engine_failed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ModelPool, "_engine_changed", lambda self, model, place: None)


def load_a_model_twice_at_once(patch: pytest.MonkeyPatch) -> None:
    async def load(self, model):
        await self._load_in_turn(model, await self._located(model))

    def ensure_loading(self, model):
        model.loading = self._begin(load(self, model), name="loading")

    patch.setattr(ModelPool, "_ensure_loading", ensure_loading)


def let_everybody_use_every_model(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(model_pool, "_may_use", lambda caller, terms: True)


def leave_the_place_in_the_ssd_tier_taken(patch: pytest.MonkeyPatch) -> None:
    real = OpenModels.end_one

    def end_one(self, model, last):
        claimed = dict(self._models)
        real(self, model, last)
        self._models = claimed

    patch.setattr(OpenModels, "end_one", end_one)


def leak_the_queue_of_a_model_that_ends(patch: pytest.MonkeyPatch) -> None:
    real = QueueLimit.release
    patch.setattr(QueueLimit, "release", lambda self, units: real(self, units if units == 1 else 0))


def name_blocks_alike_in_all_models(patch: pytest.MonkeyPatch) -> None:
    real = TenantQuotas.root

    def root(self, scope):
        tree = self._tree
        alike = dataclasses.replace(tree.settings, fingerprint=b"\1" * 32)
        settings, tree.settings = tree.settings, alike
        try:
            return real(self, scope)
        finally:
            tree.settings = settings

    patch.setattr(TenantQuotas, "root", root)


def answer_nobody_when_an_engine_fails(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Router, "_fail_everything", lambda self: None)
    patch.setattr(EngineLoop, "fail_all", lambda self, error: None)


BREAKS = (
    keep_the_share_of_a_failed_load,
    keep_the_memory_of_a_failed_engine,
    free_a_failed_engine_only_beside_others,
    look_at_memory_only_before_a_load,
    believe_what_the_files_say,
    let_who_decodes_alone_go_on,
    count_no_other_model,
    forget_who_waits_for_a_load_that_fails,
    hold_a_model_for_a_caller_who_left,
    give_way_although_pinned,
    unload_beneath_running_calls,
    expire_in_the_middle_of_a_call,
    unload_without_writing,
    drop_what_a_full_queue_does_not_take_at_the_end,
    hand_out_the_seat_of_before,
    keep_a_model_whose_engine_failed,
    load_a_model_twice_at_once,
    let_everybody_use_every_model,
    leave_the_place_in_the_ssd_tier_taken,
    leak_the_queue_of_a_model_that_ends,
    name_blocks_alike_in_all_models,
    answer_nobody_when_an_engine_fails,
)
FIRST_SEEDS = {
    free_a_failed_engine_only_beside_others: POOL_SEED + 2,
    look_at_memory_only_before_a_load: POOL_SEED + 64,
    believe_what_the_files_say: POOL_SEED + 6,
    let_who_decodes_alone_go_on: POOL_SEED + 101,
    forget_who_waits_for_a_load_that_fails: POOL_SEED + 2,
    give_way_although_pinned: POOL_SEED + 4,
    unload_beneath_running_calls: POOL_SEED + 3,
    expire_in_the_middle_of_a_call: POOL_SEED + 94,
    unload_without_writing: POOL_SEED + 4,
    drop_what_a_full_queue_does_not_take_at_the_end: POOL_SEED + 141,
    keep_a_model_whose_engine_failed: POOL_SEED + 2,
    load_a_model_twice_at_once: POOL_SEED + 2,
    let_everybody_use_every_model: POOL_SEED + 1,
    leak_the_queue_of_a_model_that_ends: POOL_SEED + 2,
    name_blocks_alike_in_all_models: POOL_SEED + 12,
}
"""Where the search begins, at a story that notices soon: each takes 0.2 s."""


@pytest.mark.skipif("ICEHOUSE_SIM_SEED" in os.environ, reason="one story was asked for")
@pytest.mark.parametrize("break_it", BREAKS, ids=lambda break_it: break_it.__name__)
def test_some_story_of_several_models_notices(break_it: Break, monkeypatch: pytest.MonkeyPatch) -> None:
    break_it(monkeypatch)
    first = FIRST_SEEDS.get(break_it, POOL_SEED)
    with pytest.raises(SimulationFailed, match="play it again with ICEHOUSE_SIM_SEED=") as found:
        play(range(first, first + _SEED_LIMIT), make=PoolStory)
    assert not isinstance(found.value.__cause__, TypeError | AttributeError), "the break itself is broken"
