"""What of a prompt is known: chains over two tiers, ends inside blocks, tails, checkpoints, tenants."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from icehouse_server.domain import blocks
from icehouse_server.domain.blocks import RegionKind, image_keys
from icehouse_server.domain.ids import BlockHash, ImageDigest
from icehouse_server.engine.core.block_log import Came, KvTier
from icehouse_server.engine.prefix_cache.tiers.entry import Entry
from icehouse_server.engine.prefix_cache.tiers.index import IndexRules

from tests.fixtures.known_blocks import (
    HYBRID,
    KV_ONLY,
    ROOT,
    SHORT_WINDOWS,
    SIZE,
    STATE_ONLY,
    WINDOWS,
    Shelf,
    SizedRegion,
    record_of,
    root_of,
)

LONG = list(range(100, 100 + 5 * SIZE))


def test_nothing_is_known_at_first() -> None:
    match = Shelf().index.match(root=ROOT, token_ids=LONG, token_limit=len(LONG))
    assert (match.entries, match.token_count, match.known_token_count) == ((), 0, 0)


def test_the_last_token_always_runs() -> None:
    shelf = Shelf()
    shelf.chain(LONG, ram=True)
    assert shelf.matched(LONG) == len(LONG) - 1
    assert shelf.matched([*LONG, 1]) == len(LONG)
    assert shelf.matched(LONG[:1]) == 0


def test_a_match_ends_where_the_prompt_differs_even_inside_a_block() -> None:
    shelf = Shelf()
    shelf.chain(LONG, ram=True)
    for length in range(len(LONG)):
        assert shelf.matched([*LONG[:length], 7, 7, 7, 7, 7]) == length


@pytest.mark.parametrize("rules", [SHORT_WINDOWS, HYBRID], ids=["short windows", "hybrid"])
def test_blocks_that_cannot_be_cut_match_whole_only(rules: IndexRules) -> None:
    shelf = Shelf(rules)
    shelf.chain(LONG, ram=True)
    for length in range(len(LONG)):
        assert shelf.matched([*LONG[:length], 7, 7, 7, 7, 7]) == length // SIZE * SIZE


def test_a_chain_over_two_tiers_is_one_match() -> None:
    shelf = Shelf()
    shelf.chain(LONG[: 2 * SIZE], ram=True)
    shelf.chain(LONG, ssd=True)
    assert shelf.matched([*LONG, 1]) == len(LONG)
    assert shelf.matched([*LONG, 1], with_ssd=False) == 2 * SIZE


def test_ram_after_a_block_that_only_the_ssd_has_is_not_used() -> None:
    shelf = Shelf()
    entries = shelf.chain(LONG, ram=True)
    shelf.index.add_stored(record_of(entries[1], RegionKind.KV))
    entries[1].ram.clear()
    assert shelf.matched([*LONG, 1]) == 2 * SIZE
    shelf.index.add_stored(record_of(entries[2], RegionKind.KV))
    assert shelf.matched([*LONG, 1]) == 3 * SIZE


def test_a_tail_in_ram_is_found_beside_a_longer_block_on_ssd() -> None:
    shelf = Shelf()
    shelf.chain(LONG[: SIZE + 2], ram=True)
    shelf.chain(LONG, ssd=True)
    assert shelf.matched([*LONG, 1], with_ssd=False) == SIZE + 2
    assert shelf.matched([*LONG, 1]) == len(LONG)


def test_the_longest_of_several_tails() -> None:
    shelf = Shelf()
    shelf.chain([1, 2, 3, 4, 5], ram=True)
    shelf.chain([1, 2, 3, 4, 5, 6, 7], ram=True)
    shelf.chain([1, 2, 3, 4, 9, 9], ram=True)
    assert shelf.matched([1, 2, 3, 4, 5, 6, 7, 8]) == 7
    assert shelf.matched([1, 2, 3, 4, 9, 8]) == 5


def test_a_stored_block_of_unknown_tokens_is_found_by_its_hash_alone() -> None:
    shelf, other = Shelf(), Shelf()
    for entry in other.chain(LONG, ram=True):
        shelf.index.add_stored(record_of(entry, RegionKind.KV))
    assert all(entry.token_ids is None for entry in shelf.index)
    assert shelf.matched([*LONG, 1]) == len(LONG)
    # Whether it begins like this prompt is not known before its header was read.
    fork = [*LONG[: 2 * SIZE + 1], 7, 7, 7]
    assert shelf.matched(fork) == 2 * SIZE
    unread_blocks = shelf.index.unread_blocks(root=ROOT, token_ids=fork, token_limit=len(fork) - 1)
    assert [entry.start_token_index for entry in unread_blocks] == [2 * SIZE]
    unread_blocks[0].token_ids = tuple(LONG[2 * SIZE : 3 * SIZE])
    assert shelf.matched(fork) == 2 * SIZE + 1
    assert shelf.index.unread_blocks(root=ROOT, token_ids=fork, token_limit=len(fork) - 1) == []


@pytest.mark.parametrize("is_computed", [False, True])
def test_tokens_that_become_known_of_a_stored_block_are_noted_once(is_computed: bool) -> None:
    """Whoever follows the log may have failed to read them from the file."""
    shelf, (made, *_) = Shelf(), Shelf().chain(LONG)
    shelf.log.begin()
    stored = shelf.index.add_stored(record_of(made, RegionKind.KV))
    (*_, came) = shelf.log.take(limit=10)
    assert came == Came(KvTier.SSD, stored.hash, ROOT, True, SIZE, None)
    for _ in range(2):
        if is_computed:
            shelf.block(ROOT, 0, LONG[:SIZE], ram=False, ssd=False)
        else:
            shelf.index.learn_tokens(stored, tuple(LONG[:SIZE]))
    assert shelf.log.take(limit=10) == [came._replace(keys=tuple(LONG[:SIZE]))]


def test_tokens_that_become_known_are_not_noted_while_nobody_listens() -> None:
    shelf, (made, *_) = Shelf(), Shelf().chain(LONG)
    stored = shelf.index.add_stored(record_of(made, RegionKind.KV))
    shelf.index.learn_tokens(stored, tuple(LONG[:SIZE]))
    assert stored.token_ids == tuple(LONG[:SIZE]) and len(shelf.log) == 0


def test_an_equal_hash_is_not_enough() -> None:
    shelf = Shelf()
    entries = shelf.chain(LONG, ram=True)
    entries[1].token_ids = (9, 9, 9, 9)
    assert shelf.matched([*LONG, 1]) == SIZE
    with pytest.raises(AssertionError, match="share the hash"):
        shelf.index.add(
            parent=entries[0].hash, start_token_index=SIZE, token_ids=tuple(LONG[SIZE : 2 * SIZE])
        )


def test_roots_of_tenants_never_meet() -> None:
    shelf = Shelf()
    shelf.chain(LONG, ram=True, root=root_of("one"))
    assert shelf.matched([*LONG, 1], root=root_of("one")) == len(LONG)
    for stranger in ("two", "", "on", "one "):
        assert shelf.matched([*LONG, 1], root=root_of(stranger)) == 0


def test_windows_are_asked_for_inside_the_window_only() -> None:
    shelf = Shelf(WINDOWS)
    entries = shelf.chain(LONG, ram=True)
    for entry in entries[:3]:
        del entry.ram[RegionKind.WINDOW]
    # 20 tokens, window 6: from token 14 on, in the blocks that begin at 12 and 16.
    assert shelf.matched([*LONG, 1]) == len(LONG)
    # At 18 the window begins at 12; at 17 it begins at 11, in a block that has none any more.
    assert shelf.matched([*LONG[:18], 7, 7]) == 18
    assert shelf.matched([*LONG[:17], 7, 7]) == 0


def test_a_window_may_come_from_the_other_tier() -> None:
    shelf = Shelf(WINDOWS)
    entries = shelf.chain(LONG, ram=True)
    del entries[3].ram[RegionKind.WINDOW]
    assert shelf.matched([*LONG, 1]) < len(LONG)
    shelf.index.add_stored(record_of(entries[3], RegionKind.KV, RegionKind.WINDOW))
    assert shelf.matched([*LONG, 1]) == len(LONG)
    assert shelf.matched([*LONG, 1], with_ssd=False) < len(LONG)


def test_a_model_with_states_resumes_at_checkpoints_only() -> None:
    shelf = Shelf(HYBRID)
    entries = shelf.chain(LONG, ram=True)
    for entry in (entries[1], entries[3], entries[4]):
        del entry.ram[RegionKind.CHECKPOINT]
    match = shelf.index.match(root=ROOT, token_ids=[*LONG, 1], token_limit=len(LONG))
    assert (match.token_count, match.known_token_count) == (3 * SIZE, len(LONG))
    assert shelf.matched([*LONG[: 2 * SIZE], 7]) == SIZE


def test_without_kv_the_blocks_between_checkpoints_may_be_unknown() -> None:
    shelf, names = Shelf(STATE_ONLY), Shelf(STATE_ONLY).chain(LONG)
    fourth = names[3]
    shelf.block(fourth.parent, 3 * SIZE, LONG[3 * SIZE : 4 * SIZE], ram=True, ssd=False)
    match = shelf.index.match(root=ROOT, token_ids=[*LONG, 1], token_limit=len(LONG))
    assert match.token_count == 4 * SIZE and [e.hash for e in match.entries] == [fourth.hash]
    assert shelf.matched([7, *LONG]) == 0


def test_known_chain_names_whole_blocks_in_order() -> None:
    shelf = Shelf()
    entries = shelf.chain(LONG[: 2 * SIZE + 2], ram=True)
    shelf.chain([*LONG[:SIZE], 7, 7, 7, 7], ram=True)
    found = shelf.index.known_chain(root=ROOT, token_ids=LONG)
    assert list(found) == entries
    assert shelf.index.known_chain(root=ROOT, token_ids=LONG[: 2 * SIZE + 1]) == tuple(entries[:2])


def test_an_entry_lives_as_long_as_a_tier_has_it() -> None:
    shelf = Shelf()
    (entry,) = shelf.chain(LONG[:SIZE], ram=True, ssd=True)
    entry.ram.clear()
    shelf.index.discard_if_empty(entry)
    assert shelf.index.get(entry.hash) is entry
    shelf.index.begin_spill(entry, size_bytes=10)
    shelf.index.forget_stored(entry.hash)
    assert len(shelf.index) == 1
    assert list(shelf.index.spilling) == [entry]
    shelf.index.end_spill(entry)
    assert not shelf.index.spilling and not entry.is_spilling
    shelf.index.discard_if_empty(entry)
    assert len(shelf.index) == 0 and shelf.index.children(ROOT) == ()
    assert shelf.index.forget_stored(entry.hash) is None


def test_what_the_row_says_is_kept() -> None:
    shelf = Shelf()
    (entry,) = Shelf().chain(LONG[:SIZE])
    stored = shelf.index.add_stored(record_of(entry, RegionKind.KV, pinned=True))
    assert stored.is_pinned and stored.ssd == {RegionKind.KV: 100} and stored.ssd_bytes == 1000
    stored.is_pinned = False
    assert not shelf.index.add_stored(record_of(entry, RegionKind.KV, pinned=True)).is_pinned


tokens = st.lists(st.integers(0, 2), min_size=1, max_size=4 * SIZE)


@settings(max_examples=60, deadline=None)
@given(
    known=st.lists(st.tuples(tokens, st.booleans(), st.booleans()), max_size=6),
    wanted=tokens,
    rules=st.sampled_from([KV_ONLY, WINDOWS, SHORT_WINDOWS, HYBRID, STATE_ONLY]),
    with_ssd=st.booleans(),
)
def test_a_match_is_always_a_true_prefix_that_its_tiers_can_make(known, wanted, rules, with_ssd) -> None:
    shelf = Shelf(rules)
    for stored, ram, ssd in known:
        shelf.chain(stored, ram=ram, ssd=ssd)
    match = shelf.index.match(root=ROOT, token_ids=wanted, token_limit=len(wanted) - 1, with_ssd=with_ssd)
    assert match.token_count <= len(wanted) - 1
    covered: list[int] = []
    for entry in match.entries:
        assert entry.start_token_index == len(covered)
        covered += entry.token_ids
        for kind in rules.needed_kinds(entry, match.token_count):
            assert isinstance(entry.ram.get(kind), SizedRegion) or (with_ssd and kind in entry.ssd)
    assert covered[: match.token_count] == wanted[: match.token_count]
    if rules == KV_ONLY and with_ssd:
        assert match.token_count >= longest_whole(known, wanted)


def longest_whole(known, wanted) -> int:
    """Return the longest common beginning with any one known sequence that is all in RAM or all on SSD."""
    best = 0
    for stored, ram, ssd in known:
        if not (ram or ssd):
            continue
        count = 0
        for a, b in zip(stored, wanted[:-1], strict=False):
            if a != b:
                break
            count += 1
        best = max(best, count)
    return best


def test_a_shared_chain_stands_for_blocks_that_are_missing() -> None:
    shelf, shared = Shelf(), root_of("shared")
    shelf.chain(LONG[: 3 * SIZE], ram=True, root=shared)
    assert shelf.matched([*LONG, 1]) == 0
    assert shelf.matched([*LONG, 1], shared_root=shared) == 3 * SIZE
    # Its own blocks go on where the shared ones end, by the names that they have without them.
    own = shelf.chain(LONG, ram=True)
    for entry in own[:3]:
        entry.ram.clear()
        shelf.index.discard_if_empty(entry)
    assert shelf.matched([*LONG, 1]) == 0
    assert shelf.matched([*LONG, 1], shared_root=shared) == len(LONG)
    assert shelf.matched([*LONG, 1], root=root_of("other"), shared_root=shared) == 3 * SIZE


@pytest.mark.parametrize("own_tiers", [{"ram": True}, {"ssd": True}])
@pytest.mark.parametrize("gap", [0, 1, 2, 5])
def test_of_two_blocks_the_one_that_the_chain_can_go_on_with_is_taken(
    own_tiers: dict[str, bool], gap: int
) -> None:
    """One chain is in RAM but for one block, the other is on SSD: RAM before the gap, SSD from there on."""
    shelf, shared = Shelf(), root_of("shared")
    shared_tiers = {"ssd": True} if "ram" in own_tiers else {"ram": True}
    chains = shelf.chain(LONG, **own_tiers), shelf.chain(LONG, **shared_tiers, root=shared)
    for entry in (entry for chain in chains for entry in chain[gap : gap + 1] if entry.ram):
        entry.ram.clear()
        shelf.index.discard_if_empty(entry)
    assert shelf.matched([*LONG, 1], shared_root=shared) == len(LONG)
    assert shelf.matched([*LONG, 1], shared_root=shared, with_ssd=False) == gap * SIZE


def test_a_shared_chain_of_ones_own_changes_nothing() -> None:
    shelf = Shelf()
    shelf.chain(LONG, ram=True)
    match = shelf.index.match(root=ROOT, token_ids=LONG, token_limit=len(LONG), shared_root=ROOT)
    assert match == shelf.index.match(root=ROOT, token_ids=LONG, token_limit=len(LONG))


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all that is hashed from here on."""
    sizes: list[int] = []
    digest = blocks._digest

    def counting(data: bytes, secret: bytes) -> BlockHash:
        sizes.append(len(data))
        return digest(data, secret)

    monkeypatch.setattr(blocks, "_digest", counting)
    return sizes


def crowd(count: int, *, is_known: bool) -> Shelf:
    """Return the index of so many short prompts below one block; known are their tokens, or only names."""
    shelf = Shelf()
    (stem,) = shelf.chain(LONG[:SIZE], ram=True, ssd=True)
    for number in range(count):
        tail = (number, *range(number % (SIZE - 1)))
        entry = shelf.index.add(parent=stem.hash, start_token_index=SIZE, token_ids=tail)
        shelf.index.add_stored(record_of(entry, RegionKind.KV))
        if not is_known:
            entry.token_ids = None
    return shelf


@pytest.mark.parametrize("count", [10, 20_000])
def test_a_crowd_of_siblings_costs_a_capture_one_hash_for_each_length(count: int, hashed: list[int]) -> None:
    shelf = crowd(count, is_known=True)
    stem = shelf.index.get(shelf.index.chain_names(ROOT, LONG)[0])
    assert stem is not None
    new = shelf.index.add(parent=stem.hash, start_token_index=SIZE, token_ids=(5, 0, 1, 2))
    new.ram[RegionKind.KV] = SizedRegion()
    hashed.clear()
    assert [other.token_ids for other in shelf.index.superseded(new)] == [(5, 0, 1)]
    assert len(hashed) <= SIZE - 1


@pytest.mark.parametrize("is_known", [True, False], ids=["seen", "after a restart"])
@pytest.mark.parametrize("count", [10, 20_000])
def test_a_crowd_of_siblings_costs_a_match_one_hash_for_each_length(
    count: int, is_known: bool, hashed: list[int]
) -> None:
    shelf = crowd(count, is_known=is_known)
    hashed.clear()
    # An old one: the first to come are found as the last.
    assert shelf.matched([*LONG[:SIZE], 2, 0, 1, 9]) == SIZE + 3
    # The names of the two levels, and one for each shorter length.
    assert len(hashed) <= 2 + SIZE - 1


def test_a_long_prompt_of_small_blocks_is_matched_in_one_pass_over_its_chain(hashed: list[int]) -> None:
    """No candidate is usable: each is judged by itself, not by all the blocks before it."""
    shelf = Shelf(HYBRID)
    prompt = list(range(2_000 * SIZE))
    asked = []

    class Counted(Entry):
        __slots__ = ()

        def has(self, kind: RegionKind, *, with_ssd: bool) -> bool:
            asked.append(kind)
            return Entry.has(self, kind, with_ssd=with_ssd)

    for entry in shelf.chain(prompt, ram=True):
        entry.ram.pop(RegionKind.CHECKPOINT, None)
        entry.__class__ = Counted
    hashed.clear()
    assert shelf.matched([*prompt, 1]) == 0
    assert len(asked) <= 2 * 2_000 and len(hashed) <= 2_001


@pytest.mark.slow
@pytest.mark.parametrize("count", [1_000, 1_000_000])
def test_a_million_blocks_cost_a_lookup_what_a_thousand_do(count: int, hashed: list[int]) -> None:
    """Half of them below one popular block, the others in chains of eight; known by their names only."""
    shelf = crowd(count // 2, is_known=False)
    pattern = record_of(next(iter(shelf.index)), RegionKind.KV)
    parent = BlockHash(bytes(32))
    for number in range(count // 2):
        name = BlockHash((number + 1).to_bytes(32, "big"))
        shelf.index.add_stored(
            pattern._replace(hash=name, parent=parent, start_token_index=number % 8 * SIZE)
        )
        parent = name if number % 8 < 7 else BlockHash((number + count).to_bytes(32, "little"))
    assert len(shelf.index) > 0.9 * count
    hashed.clear()
    assert shelf.matched([*LONG[:SIZE], 2, 0, 1, 9]) == SIZE + 3
    assert len(shelf.index.known_chain(root=ROOT, token_ids=[*LONG[:SIZE], 2, 0, 1])) >= 2
    assert len(hashed) <= 3 * (1 + SIZE)


def test_a_block_with_an_image_is_noted_with_the_keys_that_tell_it_apart() -> None:
    shelf = Shelf()
    shelf.log.begin()
    cat = ImageDigest(bytes(32))
    shelf.chain([*LONG[:SIZE], *image_keys(cat, [7] * SIZE)], ssd=True)
    noted = [(came.tier, came.keys) for came in shelf.log.take(limit=10) if isinstance(came, Came)]
    assert noted == [(KvTier.SSD, tuple(LONG[:SIZE])), (KvTier.SSD, image_keys(cat, [7] * SIZE))]


def test_a_match_ends_inside_a_block_where_the_image_is_another() -> None:
    shelf = Shelf()
    cat, dog = (ImageDigest(bytes([number]) * 32) for number in (1, 2))
    head, span, rest = LONG[:3], [7] * 6, LONG[3:6]
    shelf.chain([*head, *image_keys(cat, span), *rest], ram=True)
    assert shelf.matched([*head, *image_keys(cat, span), *rest, 1]) == 12
    assert shelf.matched([*head, *image_keys(dog, span), *rest, 1]) == len(head)
    assert shelf.matched([*head, *span, *rest, 1]) == len(head)
    assert shelf.matched([*head, *image_keys(cat, span[:4]), *image_keys(dog, span[4:]), 1]) == len(head) + 4
