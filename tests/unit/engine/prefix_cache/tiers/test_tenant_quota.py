"""What a tenant's quota keeps of its blocks, beside their bytes."""

from __future__ import annotations

import weakref

import pytest
from icehouse_server.domain.blocks import RegionKind
from icehouse_server.domain.ids import BlockHash
from icehouse_server.engine.core.block_log import BlockLog
from icehouse_server.engine.prefix_cache.tiers.entry import Entry
from icehouse_server.engine.prefix_cache.tiers.ram_tier import RamTier
from icehouse_server.engine.prefix_cache.tiers.settings import QuotaLimits
from icehouse_server.engine.prefix_cache.tiers.tenant_quota import TenantQuotas

from tests.fixtures.known_blocks import SIZE, Shelf, root_of, settings

STALE_LIMIT = 64


class Watched(Entry):
    """A block that tells when nobody keeps it any more."""

    __slots__ = ("__weakref__",)


@pytest.fixture
def quotas() -> TenantQuotas:
    log = BlockLog()
    ram = RamTier(limit_bytes=0, block_token_count=SIZE, log=log)
    limits = settings(quotas=QuotaLimits(ssd_bytes=1 << 30))
    return TenantQuotas(limits, index=Shelf().index, ram=ram, log=log)


def come(quotas: TenantQuotas, number: int, owner: BlockHash | None) -> Watched:
    """Have a block of this owner come to SSD."""
    entry = Watched(BlockHash(number.to_bytes(32, "big")), root_of("a"), 0, SIZE, owner=owner)
    entry.ssd, entry.ssd_bytes = {RegionKind.KV: 10}, 10
    quotas.note_stored(entry, before_bytes=0, after_bytes=10)
    return entry


def leave(quotas: TenantQuotas, entry: Entry) -> None:
    """Have a block leave SSD as the tier's own eviction does it."""
    quotas.note_stored(entry, before_bytes=entry.ssd_bytes, after_bytes=0)
    entry.ssd, entry.ssd_bytes = {}, 0


def item_count(quotas: TenantQuotas) -> int:
    return sum(len(heap.items) for heap in quotas._stored_order._heaps.values())


def test_blocks_that_left_ssd_are_let_go_while_their_tenant_is_under_its_quota(quotas: TenantQuotas) -> None:
    kept = [come(quotas, number, root_of("a")) for number in range(10)]
    gone = []
    for number in range(10, 10_010):
        entry = come(quotas, number, root_of("a"))
        leave(quotas, entry)
        gone.append(weakref.ref(entry))
        assert item_count(quotas) <= 2 * len(kept) + STALE_LIMIT
    del entry
    assert sum(ref() is not None for ref in gone) <= len(kept) + STALE_LIMIT
    for entry in kept:
        leave(quotas, entry)
    del entry, kept
    assert item_count(quotas) == 0
    assert not any(ref() for ref in gone)


def test_a_shrinking_tier_keeps_no_more_than_it_holds(quotas: TenantQuotas) -> None:
    stored = [come(quotas, number, root_of("a")) for number in range(1_000)]
    while stored:
        leave(quotas, stored.pop(0))
        assert item_count(quotas) <= 2 * len(stored) + STALE_LIMIT


def test_pinning_and_unpinning_again_and_again_costs_no_memory(quotas: TenantQuotas) -> None:
    stored = [come(quotas, number, root_of("a")) for number in range(10)]
    for _ in range(1_000):
        for pinned in (True, False):
            for entry in stored:
                quotas.set_pinned(entry, pinned=pinned)
        assert item_count(quotas) <= 2 * len(stored) + STALE_LIMIT
    assert set(quotas._stored_order.victims([root_of("a")], needed_bytes=1e9, kept=())) == set(stored)


def test_a_claimed_block_goes_with_those_of_its_new_owner(quotas: TenantQuotas) -> None:
    stored = [come(quotas, number, None) for number in range(100)]
    quotas.claim(stored, root_of("a"))
    assert item_count(quotas) == len(stored)
    assert quotas._stored_order.victims([None], needed_bytes=1e9, kept=()) == []
    assert set(quotas._stored_order.victims([root_of("a")], needed_bytes=1e9, kept=())) == set(stored)
