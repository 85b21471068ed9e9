"""Following a running prefill instead of computing the same blocks twice."""

from __future__ import annotations

from icehouse_server.domain.blocks import block_hash, root_hash
from icehouse_server.domain.ids import DEFAULT_TENANT, Fingerprint, SequenceId, Tenant
from icehouse_server.engine.core.sequence import Sequence
from icehouse_server.engine.prefix_cache.in_flight import InFlightPrefixes
from icehouse_server.text.detokenizer import TextStream

from tests.fixtures.engine import decode_ascii, request

ROOT = root_hash(fingerprint=Fingerprint(b"f" * 32), tenant=DEFAULT_TENANT)
BLOCK = 4


def sequence(number: int, tokens: list[int]) -> Sequence:
    text = TextStream(decode=decode_ascii, prompt_token_ids=[], stops=())
    return Sequence(SequenceId(number), request(f"r{number}", tokens), text, output_token_limit=5)


def names(tokens: list[int]) -> list:
    chain: list = []
    for start in range(0, len(tokens) - 1, BLOCK):
        parent = chain[-1] if chain else ROOT
        chain.append(block_hash(parent=parent, token_ids=tokens[start : min(start + BLOCK, len(tokens) - 1)]))
    return chain


def test_a_follower_waits_for_the_last_block_it_shares() -> None:
    promises = InFlightPrefixes(block_token_count=BLOCK)
    shared = list(range(10, 18))
    leader = sequence(0, [*shared, 1, 2, 3, 4, 5])
    follower = sequence(1, [*shared, 9, 9, 9, 9, 9])
    promises.make(leader, ROOT)
    assert promises.follow(follower, ROOT)
    first, second, _ = names(list(leader.input_token_ids))
    promises.keep([first])
    assert promises.take_ready() == []
    promises.keep([second])
    assert promises.take_ready() == [follower]
    assert promises.take_ready() == []


def test_nobody_follows_what_is_not_promised_or_another_tenant() -> None:
    promises = InFlightPrefixes(block_token_count=BLOCK)
    leader = sequence(0, list(range(10, 30)))
    assert not promises.follow(sequence(1, list(range(10, 30))), ROOT), "nothing is promised yet"
    promises.make(leader, ROOT)
    assert not promises.follow(sequence(2, list(range(50, 70))), ROOT)
    other_root = root_hash(fingerprint=Fingerprint(b"f" * 32), tenant=Tenant("other"))
    assert not promises.follow(sequence(3, list(range(10, 30))), other_root)


def test_a_leader_that_goes_away_frees_its_followers() -> None:
    promises = InFlightPrefixes(block_token_count=BLOCK)
    leader, follower, gone = (sequence(i, list(range(10, 30))) for i in range(3))
    promises.make(leader, ROOT)
    assert promises.follow(follower, ROOT) and promises.follow(gone, ROOT)
    promises.forget(gone)
    promises.forget(leader)
    assert promises.take_ready() == [follower]
    assert not promises.follow(follower, ROOT), "nothing is promised any more"


def test_following_is_bounded() -> None:
    promises = InFlightPrefixes(block_token_count=BLOCK)
    follower = sequence(99, list(range(10, 30)))
    rounds = 0
    for number in range(10):
        leader = sequence(number, list(range(10, 30)))
        promises.make(leader, ROOT)
        rounds += promises.follow(follower, ROOT)
        promises.forget(leader)
        promises.take_ready()
    assert rounds == 3


def test_only_the_first_promise_of_a_block_counts() -> None:
    promises = InFlightPrefixes(block_token_count=BLOCK)
    first, second, follower = (sequence(i, list(range(10, 30))) for i in range(3))
    promises.make(first, ROOT)
    promises.make(second, ROOT)
    assert promises.follow(follower, ROOT)
    promises.forget(second)
    assert promises.take_ready() == [], "the first leader still computes it"


def test_a_leader_that_goes_away_leaves_the_promises_of_others_alone() -> None:
    promises = InFlightPrefixes(block_token_count=BLOCK)
    tokens = list(range(10, 30))
    first, second, follower = (sequence(i, tokens) for i in range(3))
    promises.make(first, ROOT)
    # The first one's blocks are kept, and let go of at once; the second computes them again.
    promises.keep(names(tokens))
    promises.make(second, ROOT)
    assert promises.follow(follower, ROOT)
    promises.forget(first)
    assert promises.take_ready() == [], "the second one still computes what the follower waits for"
    promises.forget(second)
    assert promises.take_ready() == [follower]
