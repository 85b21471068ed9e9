"""The mirror tells a block when its prefix is whole, and takes it back when it is no longer."""

from __future__ import annotations

from collections.abc import Iterable

from icehouse_server.domain.blocks import image_keys, split_keys, unpack_tokens
from icehouse_server.domain.cache_commands import KnownTokens, Tier
from icehouse_server.domain.ids import BlockHash, CacheScope, ImageDigest, Tenant
from icehouse_server.engine.core.block_log import (
    Came,
    Left,
    ListingBegan,
    ListingEnded,
    RootForgotten,
    RootsKnown,
)
from icehouse_server.rpc.kv_events.block_mirror import (
    BlockImage,
    BlockMirror,
    BlockRemoved,
    BlockStored,
    KvEvent,
    cut,
)

RAM, SSD = Tier.RAM, Tier.SSD
ROOT = BlockHash(b"r" * 32)
SCOPE = CacheScope(Tenant("t"))
KNOWN = RootsKnown(((ROOT, SCOPE),))


def name(letter: str) -> BlockHash:
    return BlockHash(letter.encode() * 32)


def came(letter: str, above: str = "", *, tier: Tier = RAM, count: int = 2, has_tokens: bool = True) -> Came:
    tokens = (ord(letter), 7)[:count] if has_tokens else None
    return Came(tier, name(letter), name(above) if above else ROOT, not above, count, tokens)


def told(events: Iterable[KvEvent]) -> list[str]:
    """Write events short: +a and -a for RAM, +A and -A for SSD."""
    letters = {cut(name(letter)): letter for letter in "abcdef"}
    out = []
    for event in events:
        assert isinstance(event, BlockStored | BlockRemoved)
        letter = letters[event.block.hash if isinstance(event, BlockStored) else event.hash]
        sign = "+" if isinstance(event, BlockStored) else "-"
        out.append(sign + (letter if event.tier is RAM else letter.upper()))
    return out


def mirror(*, block_limit: int = 100) -> BlockMirror:
    made = BlockMirror(block_token_count=2, block_limit=block_limit)
    assert told(made.apply([KNOWN])) == []
    return made


def test_each_tier_is_told_for_itself() -> None:
    made = mirror()
    assert told(made.apply([came("a"), came("a", tier=SSD), came("a"), Left(RAM, name("a"))])) == [
        *("+a", "+A", "-a")
    ]
    assert told(made.apply([Left(RAM, name("a")), Left(SSD, name("a")), Left(SSD, name("a"))])) == ["-A"]
    assert len(made) == 0


def test_a_block_says_what_it_is() -> None:
    made = mirror()
    first, second = list(made.apply([came("a"), came("b", "a")]))
    assert isinstance(first, BlockStored) and isinstance(second, BlockStored)
    assert (first.block.hash, first.block.parent, first.block.scope) == (cut(name("a")), None, SCOPE)
    assert second.block.parent == first.block.hash and second.block.scope == SCOPE
    assert unpack_tokens(first.block.packed_token_ids) == (ord("a"), 7) and first.block.token_count == 2


def test_tails_are_not_told() -> None:
    assert told(mirror().apply([came("a", count=1), Left(RAM, name("a"))])) == []


def test_a_block_waits_for_what_it_follows() -> None:
    made = mirror()
    assert told(made.apply([came("c", "b"), came("b", "a")])) == []
    assert told(made.apply([came("a")])) == ["+a", "+b", "+c"]


def test_what_follows_a_block_that_is_gone_goes_first() -> None:
    made = mirror()
    list(made.apply([came("a"), came("b", "a"), came("c", "b", tier=SSD), came("d", "a")]))
    assert told(made.apply([Left(RAM, name("a"))])) == ["-C", "-d", "-b", "-a"]
    assert told(made.apply([came("a", tier=SSD)])) == ["+A", "+b", "+d", "+C"]


def test_tokens_that_are_not_known_are_read_and_then_told() -> None:
    made = mirror()
    first = came("a", tier=SSD, has_tokens=False)
    assert told(made.apply([first, came("b", "a", tier=SSD, has_tokens=False), came("c", "b")])) == []
    assert made.take_unread(limit=1) == (name("a"),)
    assert told(made.learn([KnownTokens(name("a"), (1, 2)), KnownTokens(name("f"), (1, 2))])) == ["+A"]
    assert made.take_unread(limit=5) == (name("b"),) and made.take_unread(limit=5) == ()
    made.put_back([name("b"), name("f"), name("a")])
    assert made.take_unread(limit=5) == (name("b"),)
    # It came to RAM meanwhile, whole.
    assert told(made.apply([came("b", "a")])) == ["+B", "+b", "+c"]
    assert told(made.learn([KnownTokens(name("b"), (1, 2))])) == []


def test_a_block_names_its_images_wherever_its_tokens_come_from() -> None:
    cat = ImageDigest(b"\xca" * 32)
    keys = image_keys(cat, (7, 7, 7))
    seen = came("a")._replace(keys=(1, keys[0])), came("b", "a")._replace(keys=keys[1:])
    expected = [(BlockImage("ca" * 32, 1),), (BlockImage("ca" * 32, -1),)]
    assert [event.block.images for event in mirror().apply(seen)] == expected
    made = mirror()
    unread = [each._replace(keys=None, tier=SSD) for each in seen]
    read = [KnownTokens(each.name, *split_keys(each.keys)) for each in seen]
    assert told(made.apply(unread)) == []
    stored = list(made.learn(read))
    assert [event.block.images for event in stored] == expected
    assert [unpack_tokens(event.block.packed_token_ids) for event in stored] == [(1, 7), (7, 7)]


def test_a_block_with_marks_of_another_version_is_not_told() -> None:
    made = mirror()
    assert told(made.apply([came("a", tier=SSD, has_tokens=False)])) == []
    assert told(made.learn([KnownTokens(name("a"), (1, 2), b"what is this")])) == []
    assert told(made.apply([Left(SSD, name("a"))])) == []


def test_a_block_that_left_is_not_read() -> None:
    made = mirror()
    list(made.apply([came("a", tier=SSD, has_tokens=False), Left(SSD, name("a"))]))
    assert made.take_unread(limit=5) == ()


def test_nothing_is_told_below_an_unknown_root() -> None:
    made = BlockMirror(block_token_count=2, block_limit=9)
    assert told(made.apply([came("a"), came("b", "a")])) == []
    assert told(made.apply([KNOWN])) == ["+a", "+b"]
    assert told(made.apply([KNOWN])) == []


def test_a_forgotten_root_lasts_as_long_as_its_blocks() -> None:
    made = mirror()
    assert told(made.apply([came("a"), RootForgotten(ROOT), came("b", "a")])) == ["+a", "+b"]
    assert told(made.apply([Left(RAM, name("b")), Left(RAM, name("a")), came("a")])) == ["-b", "-a"]
    assert told(made.apply([KNOWN])) == ["+a"]
    assert told(made.apply([RootForgotten(ROOT), KNOWN, Left(RAM, name("a")), came("a")])) == ["-a", "+a"]


def test_a_listing_mends_what_was_missed() -> None:
    made = mirror()
    list(made.apply([came("a"), came("a", tier=SSD), came("b", "a"), came("c", "b")]))
    changes = [ListingBegan(), came("c", "b"), came("a", tier=SSD), came("b", "a"), came("d", "a")]
    assert told(made.apply(changes)) == ["+d"]
    assert told(made.apply([ListingEnded()])) == ["-a"]
    assert told(made.apply([ListingBegan(), came("d", "a"), ListingEnded()])) == ["-c", "-d", "-b", "-A"]


def test_a_change_during_a_listing_counts_as_named_by_it() -> None:
    made = mirror()
    list(made.apply([came("a")]))
    assert told(made.apply([ListingBegan(), Left(RAM, name("a")), came("a"), ListingEnded()])) == ["-a", "+a"]


def test_blocks_beyond_the_limit_are_counted_and_not_told() -> None:
    made = mirror(block_limit=2)
    assert told(made.apply([came("a"), came("b", "a"), came("c", "b"), came("c", "b")])) == ["+a", "+b"]
    assert made.unpublished_total == 2 and len(made) == 2


def test_the_state_is_told_parents_first() -> None:
    made = mirror()
    list(made.apply([came("b", "a"), came("a"), came("c", "b"), Left(RAM, name("a")), came("a", tier=SSD)]))
    assert [(block.parent is None, held) for block, held in made.published_blocks(None)] == [
        (True, (SSD,)),
        (False, (RAM,)),
        (False, (RAM,)),
    ]
