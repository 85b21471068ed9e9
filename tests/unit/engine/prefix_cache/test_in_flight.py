"""Following a running prefill instead of computing the same blocks twice."""

from __future__ import annotations

from icehouse_server.domain.blocks import block_hash, root_hash
from icehouse_server.domain.ids import DEFAULT_TENANT, Fingerprint, SequenceId, Tenant
from icehouse_server.engine.core.sequence import Sequence
from icehouse_server.engine.prefix_cache.in_flight import InFlightPrefixes
from icehouse_server.text.detokenizer import TextStream

from tests.fixtures.engine import decode_ascii, request
from tests.fixtures.known_blocks import settings

ROOT = root_hash(fingerprint=Fingerprint(b"f" * 32), tenant=DEFAULT_TENANT)
BLOCK = 4
SETTINGS = settings(block_token_count=BLOCK)


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
    in_flight = InFlightPrefixes(SETTINGS, can_share=True)
    shared = list(range(10, 18))
    leader = sequence(0, [*shared, 1, 2, 3, 4, 5])
    follower = sequence(1, [*shared, 9, 9, 9, 9, 9])
    in_flight.lead(leader, ROOT)
    assert in_flight.follow(follower, ROOT)
    first, second, _ = names(list(leader.input_token_ids))
    in_flight.complete([first])
    assert in_flight.take_ready() == []
    in_flight.complete([second])
    assert in_flight.take_ready() == [follower]
    assert in_flight.take_ready() == []


def test_nobody_follows_what_is_not_in_flight_or_another_tenant() -> None:
    in_flight = InFlightPrefixes(SETTINGS, can_share=True)
    leader = sequence(0, list(range(10, 30)))
    assert not in_flight.follow(sequence(1, list(range(10, 30))), ROOT), "nothing is in flight yet"
    in_flight.lead(leader, ROOT)
    assert not in_flight.follow(sequence(2, list(range(50, 70))), ROOT)
    other_root = root_hash(fingerprint=Fingerprint(b"f" * 32), tenant=Tenant("other"))
    assert not in_flight.follow(sequence(3, list(range(10, 30))), other_root)


def test_a_leader_that_goes_away_frees_its_followers() -> None:
    in_flight = InFlightPrefixes(SETTINGS, can_share=True)
    leader, follower, gone = (sequence(i, list(range(10, 30))) for i in range(3))
    in_flight.lead(leader, ROOT)
    assert in_flight.follow(follower, ROOT) and in_flight.follow(gone, ROOT)
    in_flight.forget(gone)
    in_flight.forget(leader)
    assert in_flight.take_ready() == [follower]
    assert not in_flight.follow(follower, ROOT), "nothing is in flight any more"


def test_following_is_bounded() -> None:
    in_flight = InFlightPrefixes(SETTINGS, can_share=True)
    follower = sequence(99, list(range(10, 30)))
    rounds = 0
    for number in range(10):
        leader = sequence(number, list(range(10, 30)))
        in_flight.lead(leader, ROOT)
        rounds += in_flight.follow(follower, ROOT)
        in_flight.forget(leader)
        in_flight.take_ready()
    assert rounds == 3


def test_only_the_first_promise_of_a_block_counts() -> None:
    in_flight = InFlightPrefixes(SETTINGS, can_share=True)
    first, second, follower = (sequence(i, list(range(10, 30))) for i in range(3))
    in_flight.lead(first, ROOT)
    in_flight.lead(second, ROOT)
    assert in_flight.follow(follower, ROOT)
    in_flight.forget(second)
    assert in_flight.take_ready() == [], "the first leader still computes it"


def test_a_leader_that_goes_away_leaves_what_others_lead_alone() -> None:
    in_flight = InFlightPrefixes(SETTINGS, can_share=True)
    tokens = list(range(10, 30))
    first, second, follower = (sequence(i, tokens) for i in range(3))
    in_flight.lead(first, ROOT)
    # The first one's blocks are kept, and let go of at once; the second computes them again.
    in_flight.complete(names(tokens))
    in_flight.lead(second, ROOT)
    assert in_flight.follow(follower, ROOT)
    in_flight.forget(first)
    assert in_flight.take_ready() == [], "the second one still computes what the follower waits for"
    in_flight.forget(second)
    assert in_flight.take_ready() == [follower]
