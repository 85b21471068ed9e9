"""What holds in a server of several models between any two steps, and what holds when it is at rest."""

from __future__ import annotations

from icehouse_server.domain.blocks import RegionKind
from icehouse_server.domain.model import EngineState, ModelState
from icehouse_server.rpc.access.caller import UNPROVED

from tests.fixtures.tree_check import check_tree
from tests.system.sim.pool.house import HousedModel, PoolHouse
from tests.system.sim.setup import fingerprint
from tests.unit.storage.local.test_crash import check_is_clean


def check_memory(house: PoolHouse) -> None:
    """All models together are within the limit, and the budget's entries are what is held."""
    held, limit_bytes = house.device.weight_bytes, house.budget.limit_bytes
    kept = [share.fixed_bytes for share in house.budget._shares if share.fixed_bytes]
    assert sorted(kept) == sorted(held.values()), f"the budget knows {kept}, the device has {held}"
    used_bytes = house.device.running_bytes
    assert used_bytes <= limit_bytes, f"{used_bytes} bytes without blocks in RAM, limit {limit_bytes}: {held}"
    assert not house.device.complaints, house.device.complaints


def check_pinned(house: PoolHouse, told_to_go: set[str]) -> None:
    """A pinned model that is there stays there, unless somebody said otherwise."""
    for model in house.pool._models.values():
        may_go = not model.terms.is_pinned or model.terms.name in told_to_go
        assert may_go or model.state is not ModelState.DRAINING, f"{model.terms.name} gave way"


def check_pool_rest(house: PoolHouse, *, is_disk_sound: bool) -> None:
    """Nothing waits, nothing is held for what has gone, and all who know of a model say the same."""
    pool = house.pool
    waiting = [name for name, model in pool._models.items() if model.waiters or model.loading]
    assert not waiting, f"somebody waits for {waiting} for ever"
    assert not pool._tasks and not house.loop.jobs, (pool._tasks, house.loop.jobs)
    states = {model.name: model.state for model in pool.listed(UNPROVED)}
    ready = [name for name, state in states.items() if state is ModelState.READY]
    assert {*states.values()} <= {ModelState.READY, ModelState.ABSENT, ModelState.FAILED}, states
    assert [*pool.loaded()] == ready
    living = house.living()
    assert sorted(each.member.name for each in living) == sorted(ready), "an engine without a model"
    assert len(house.budget._shares) == len(living), "a share of a model that has gone"
    assert house.inference.engine_count == len(living), "turns of a model that has gone"
    assert house.device.weight_bytes == {each.member.name: each.member.size_bytes for each in living}
    assert {*map(id, pool._opened)} == {id(pool._models[name].place.opened) for name in ready}
    for each in house.models:
        _check_one(each, is_ready=each in living)
    assert pool.turns(patience_s=1e9), "a server at rest does not look alive"
    check_tiers(house, living, is_disk_sound=is_disk_sound)


def _check_one(each: HousedModel, *, is_ready: bool) -> None:
    engine, router, name = each.opened.engine, each.opened.seat.router, each.member.name
    assert (engine.state is EngineState.READY) == is_ready and router.state is engine.state, name
    assert not router._outboxes and not router._questions, f"{name} owes somebody an answer"
    assert each.runner.is_empty, f"sequences of {name} were left behind"
    assert len(each.opened.engine._mailbox) == 0, f"nobody reads what was sent to {name}"
    if is_ready:
        assert each.controller is not None
        check_tree(each.controller.cache.tree)
        assert not each.controller.cache.tree.spilling, f"blocks of {name} wait to be written for ever"
        assert each.controller.cache.restores.failed_restore_total == 0, "a plan promised what was not there"
    else:
        assert each.runner.loaded_bytes == 0, f"the weights of {name} are still there"
        assert each.runner.cache is None or not each.runner.cache.tree.ram.used_bytes, (
            f"blocks of {name} are there"
        )


def check_tiers(house: PoolHouse, living: list[HousedModel], *, is_disk_sound: bool) -> None:
    """Each engine's index and the directory know the same blocks; nothing is reserved for what has gone."""
    tiers, store = house.tiers, house.store
    open_names = {model.fingerprint for model in tiers._loop.models}
    assert open_names == {fingerprint(each.member.number) for each in living}
    assert {*tiers._loop._model_turns} == {*tiers._loop.models}
    assert tiers._loop.state.spill_queue.used == 0, "space in the write queue was not given back"
    for model in tiers._loop.models:
        held = (model.spill_queue.used, model.read_queue.used, model.order_queue.used)
        assert held == (0, 0, 0), f"places in a model's queues were not given back: {held}"
    if not store.is_open:
        assert not is_disk_sound, "the directory was never opened again"
        return
    stored, told = {record.hash for record in store.index}, house.ledger.committed.keys()
    assert stored == told, f"nobody was told of {len(stored - told)} blocks; gone are {len(told - stored)}"
    for each in living:
        name = fingerprint(each.member.number)
        mine = {
            record.hash: (record.kv_bytes, record.window_bytes, record.checkpoint_bytes)
            for record in store.index
            if record.fingerprint == name
        }
        theirs = {
            entry.hash: tuple(entry.ssd.get(kind, 0) for kind in RegionKind)
            for entry in each.controller.cache.tree
            if entry.ssd
        }
        assert theirs == mine, f"{each.member.name} knows {len(theirs)} blocks on SSD, there are {len(mine)}"
    if is_disk_sound and not store.report.clean:
        check_is_clean(house.directory)
    files = sum(path.stat().st_size for path in (house.directory / "blocks").glob("*/*.safetensors"))
    if is_disk_sound:
        assert store.index.block_bytes == files, f"{store.index.block_bytes} are accounted, {files} there"
