"""The order of an owner's blocks on SSD against a plain sort of all of them."""

from __future__ import annotations

import random

import pytest
from icehouse_server.domain.blocks import RegionKind
from icehouse_server.domain.ids import BlockHash
from icehouse_server.engine.prefix_cache.tiers.entry import Entry
from icehouse_server.engine.prefix_cache.tiers.stored_order import StoredOrder

OWNERS = [BlockHash(bytes([number]) * 32) for number in range(3)]


def stored(number: int, owner: BlockHash | None, *, size_bytes: int = 10) -> Entry:
    entry = Entry(BlockHash(number.to_bytes(32, "big")), OWNERS[0], number % 7, 1, owner=owner)
    entry.ssd, entry.ssd_bytes = {RegionKind.KV: size_bytes}, size_bytes
    return entry


@pytest.mark.parametrize("seed", range(20))
def test_it_is_that_of_a_plain_sort(seed: int) -> None:
    dice = random.Random(seed)
    order, entries = StoredOrder(), [stored(number, dice.choice(OWNERS)) for number in range(60)]
    for entry in entries:
        order.add(entry)

    def change(entry: Entry, **values: object) -> None:
        if entry.ssd_bytes and not entry.is_pinned:
            order.remove(entry)
        for name, value in values.items():
            setattr(entry, name, value)
        if entry.ssd_bytes and not entry.is_pinned:
            order.add(entry)

    for now in range(1, 40):
        for entry in dice.sample(entries, 3):
            entry.last_used_time = float(now)
        entry = dice.choice(entries)
        change(entry, is_pinned=not entry.is_pinned)
        change(dice.choice(entries), owner=dice.choice(OWNERS))
        owners, kept = OWNERS[: dice.randint(1, 3)], {e.hash for e in dice.sample(entries, 5)}
        may_go = [
            e for e in entries if e.owner in owners and e.ssd and not e.is_pinned and e.hash not in kept
        ]
        expected = sorted((e.last_used_time, -e.start_token_index) for e in may_go)[:4]
        found = order.victims(owners, needed_bytes=40, kept=kept)
        assert [(e.last_used_time, -e.start_token_index) for e in found] == expected
        assert all(e in may_go for e in found) and len({e.hash for e in found}) == len(found)
        if dice.random() < 0.5:
            for gone in found[:1]:
                change(gone, ssd={}, ssd_bytes=0)


def test_a_victim_costs_no_look_at_all_the_others() -> None:
    order, looked = StoredOrder(), []

    class Watched(Entry):
        __slots__ = ()

        def __getattribute__(self, name: str) -> object:
            if name == "last_used_time":
                looked.append(name)
            return super().__getattribute__(name)

    for number in range(20_000):
        entry = stored(number, OWNERS[0])
        entry.__class__ = Watched
        order.add(entry)
    looked.clear()
    assert len(order.victims(OWNERS[:1], needed_bytes=30, kept=())) == 3
    assert len(looked) < 100
