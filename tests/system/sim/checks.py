"""Checks of what holds after every step, and of what holds when the server is at rest."""

from __future__ import annotations

from icehouse_server.domain.blocks import RegionKind
from icehouse_server.domain.cache_stats import CacheStats
from icehouse_server.domain.stats import EngineStats

from tests.fixtures.tree_check import check_tree
from tests.system.sim.server import SimServer


def check_ram(served: SimServer) -> None:
    """Assert that the tree agrees with its nodes, and that RAM less leaving blocks is within its budget."""
    tree, limit_bytes = served.cache.tree, served.cache.ram.limit_bytes
    check_tree(tree)
    assert all(node.ram_bytes for node in tree.in_ram()), "a node without bytes is in the RAM tier"
    spilling_bytes = sum(node.ram_bytes for node in tree.spilling)
    assert tree.ram.used_bytes <= limit_bytes + spilling_bytes, (
        f"{tree.ram.used_bytes} bytes in RAM, limit {limit_bytes}, waiting to be written {spilling_bytes}"
    )
    check_quotas(served)


def check_quotas(served: SimServer) -> None:
    """Assert that no tenant is over its quota, blocks that are leaving RAM aside."""
    limits, cache = served.setup.quotas, served.cache
    if limits.ram_bytes:
        for kin in {cache.quotas.kin_of(owner) for owner in cache.tree.ram.used_by}:
            used_bytes = sum(cache.tree.ram.used_by[root] for root in kin)
            leaving = (e.ram_bytes for e in cache.tree.in_ram() if e.owner in kin and e.is_spilling)
            assert used_bytes <= limits.ram_bytes + sum(leaving), (kin, used_bytes, limits)
    if limits.ssd_bytes and cache.facts.has_kv and not served.setup.has_shared_prefixes:
        # Without kv, or after another tenant's blocks, a chain has gaps on SSD; after a restart its owner is
        # then unknown until it is used.
        for kin in {cache.quotas.kin_of(owner) for owner in cache.tree.ssd.used_by}:
            stored_bytes = sum(cache.tree.ssd.used_by[root] for root in kin)
            assert None in kin or stored_bytes <= limits.ssd_bytes, (kin, stored_bytes, limits)


def check_disk(served: SimServer) -> None:
    """Assert that all files together are within the limit."""
    used_bytes = served.disk.used_bytes()
    limit_bytes = served.setup.disk_limit_bytes
    assert used_bytes <= limit_bytes, f"{used_bytes} bytes on disk, limit {limit_bytes}"


def check_rest(served: SimServer) -> None:
    """Assert that at rest nothing is held for work under way, and that all accounts agree."""
    assert served.runner.is_empty, vars(served.runner)
    assert not served.controller._restores and not served.cache.waits._waiting, "restores were left behind"
    assert not served.spilling(), "blocks wait to be written for ever"
    used_bytes, limit_bytes = served.cache.tree.ram.used_bytes, served.cache.ram.limit_bytes
    assert used_bytes <= limit_bytes, (used_bytes, limit_bytes)
    assert served.cache.restores.failed_restore_total == 0, "a plan promised what a restore did not find"


def check_agreement(served: SimServer) -> None:
    """Assert that the engine's index and the SSD tier know the same blocks with the same regions."""
    if served.storage is None or served.is_storage_dead or not served.store.is_open:
        return
    mine = {
        record.hash: (record.kv_bytes, record.window_bytes, record.checkpoint_bytes)
        for record in served.store.index
        if record.fingerprint == served.cache.settings.fingerprint
    }
    theirs = {
        entry.hash: tuple(entry.ssd.get(kind, 0) for kind in RegionKind)
        for entry in served.cache.tree
        if entry.ssd
    }
    assert theirs == mine, f"engine knows {len(theirs)} blocks on SSD, the SSD tier has {len(mine)}"
    assert {record.hash for record in served.store.index} == served.ledger.committed.keys()
    if not served.ledger.io_errors(served):
        back = served.ledger.ordered_away & served.ledger.committed.keys()
        assert not back, f"removed by order, and here again: {[name.hex()[:8] for name in back]}"


def check_pins_agree(served: SimServer) -> None:
    """Assert that a block on SSD is pinned there exactly if it is pinned in the engine."""
    if served.storage is None or served.is_storage_dead or not served.store.is_open:
        return
    now_time = served.clock.wall()
    for entry in served.cache.tree:
        record = served.store.index.get(entry.hash)
        if entry.ssd and record is not None:
            here, there = max(entry.pin_end_time, now_time), max(record.pin_end_time, now_time)
            assert here == there, f"{entry} is pinned in one tier only"


def check_counters(
    served: SimServer, engine: EngineStats, cache: CacheStats, storage: CacheStats | None
) -> None:
    """Assert that every total is the sum of its parts; call it at rest."""
    ended = engine.finished_total + engine.cancelled_total + engine.failed_total
    assert engine.accepted_total == ended, engine
    assert (engine.waiting_count, engine.loading_count, engine.prefilling_count, engine.decoding_count) == (
        0,
        0,
        0,
        0,
    )
    lookups = cache.lookups
    reused = lookups.ram_token_total + lookups.ssd_token_total
    assert reused == engine.cached_token_total, (lookups, engine)
    assert lookups.hit_total <= lookups.lookup_total
    assert cache.ram.size_bytes == served.cache.tree.ram.used_bytes
    if storage is None:
        return
    spill = cache.spill
    written = storage.spill
    dropped = sum(drop.block_total for drop in written.drops)
    assert written.accepted_block_total == written.persisted_block_total + dropped, storage
    assert (spill.queue_count, spill.queue_bytes) == (0, 0), spill
    assert storage.promote.queue_count == 0, storage
    assert cache.ssd is not None and cache.ssd.block_count == served.cache.tree.ssd.block_count
    limit = written.daily_limit_bytes
    assert limit == 0 or written.written_today_bytes <= limit, storage
