"""Following a running prefill instead of computing the same blocks twice."""

from __future__ import annotations

from icehouse_server.domain.blocks import TokenKeys, block_hash, key_hash, root_hash
from icehouse_server.domain.ids import DEFAULT_TENANT, BlockHash, Fingerprint, SequenceId, Tenant
from icehouse_server.engine.core.sequence import Sequence
from icehouse_server.engine.prefix_cache.in_flight import InFlightPrefixes
from icehouse_server.engine.prefix_cache.tiers.prefix_settings import PrefixSettings
from icehouse_server.text.detokenizer import TextStream

from tests.fixtures.engine import decode_ascii, request
from tests.fixtures.known_blocks import settings

ROOT = root_hash(fingerprint=Fingerprint(b"f" * 32), tenant=DEFAULT_TENANT)
BLOCK = 4
SETTINGS = settings(block_token_count=BLOCK)


def sequence(number: int, tokens: list[int]) -> Sequence:
    text = TextStream(decode=decode_ascii, prompt_token_ids=[], stops=())
    return Sequence(SequenceId(number), request(f"r{number}", tokens), text, output_token_limit=5)


def name_of(parent: BlockHash, keys: TokenKeys) -> BlockHash:
    return key_hash(parent=parent, keys=keys)


def in_flight_prefixes(chosen: PrefixSettings = SETTINGS, *, can_cut_inside: bool = True) -> InFlightPrefixes:
    return InFlightPrefixes(chosen, name_of, can_share=True, can_cut_inside=can_cut_inside)


def follows(in_flight: InFlightPrefixes, newcomer: Sequence, root: BlockHash = ROOT) -> bool:
    shared = in_flight.shared(newcomer, root)
    if shared is not None:
        in_flight.follow(newcomer, shared)
    return shared is not None


def names(tokens: list[int]) -> list:
    chain: list = []
    for start in range(0, len(tokens) - 1, BLOCK):
        parent = chain[-1] if chain else ROOT
        chain.append(block_hash(parent=parent, token_ids=tokens[start : min(start + BLOCK, len(tokens) - 1)]))
    return chain


def test_a_follower_waits_for_the_last_block_it_shares() -> None:
    in_flight = in_flight_prefixes()
    shared = list(range(10, 18))
    leader = sequence(0, [*shared, 1, 2, 3, 4, 5])
    follower = sequence(1, [*shared, 9, 9, 9, 9, 9])
    in_flight.lead(leader, ROOT)
    assert follows(in_flight, follower)
    first, second, _ = names(list(leader.input_token_ids))
    in_flight.complete([first])
    assert in_flight.take_ready() == []
    in_flight.complete([second])
    assert in_flight.take_ready() == [follower]
    assert in_flight.take_ready() == []


def test_nobody_follows_what_is_not_in_flight_or_another_tenant() -> None:
    in_flight = in_flight_prefixes()
    leader = sequence(0, list(range(10, 30)))
    assert not follows(in_flight, sequence(1, list(range(10, 30)))), "nothing is in flight yet"
    in_flight.lead(leader, ROOT)
    assert not follows(in_flight, sequence(2, list(range(50, 70))))
    other_root = root_hash(fingerprint=Fingerprint(b"f" * 32), tenant=Tenant("other"))
    assert not follows(in_flight, sequence(3, list(range(10, 30))), other_root)


def test_a_leader_that_goes_away_frees_its_followers() -> None:
    in_flight = in_flight_prefixes()
    leader, follower, gone = (sequence(i, list(range(10, 30))) for i in range(3))
    in_flight.lead(leader, ROOT)
    assert follows(in_flight, follower) and follows(in_flight, gone)
    in_flight.forget(gone)
    in_flight.forget(leader)
    assert in_flight.take_ready() == [follower]
    assert not follows(in_flight, follower), "nothing is in flight any more"


def test_following_is_bounded() -> None:
    in_flight = in_flight_prefixes()
    follower = sequence(99, list(range(10, 30)))
    rounds = 0
    for number in range(10):
        leader = sequence(number, list(range(10, 30)))
        in_flight.lead(leader, ROOT)
        rounds += follows(in_flight, follower)
        in_flight.forget(leader)
        in_flight.take_ready()
    assert rounds == 3


def test_only_the_first_promise_of_a_block_counts() -> None:
    in_flight = in_flight_prefixes()
    first, second, follower = (sequence(i, list(range(10, 30))) for i in range(3))
    in_flight.lead(first, ROOT)
    in_flight.lead(second, ROOT)
    assert follows(in_flight, follower)
    in_flight.forget(second)
    assert in_flight.take_ready() == [], "the first leader still computes it"


def test_a_leader_that_goes_away_leaves_what_others_lead_alone() -> None:
    in_flight = in_flight_prefixes()
    tokens = list(range(10, 30))
    first, second, follower = (sequence(i, tokens) for i in range(3))
    in_flight.lead(first, ROOT)
    # The first one's blocks are kept, and let go of at once; the second computes them again.
    in_flight.complete(names(tokens))
    in_flight.lead(second, ROOT)
    assert follows(in_flight, follower)
    in_flight.forget(first)
    assert in_flight.take_ready() == [], "the second one still computes what the follower waits for"
    in_flight.forget(second)
    assert in_flight.take_ready() == [follower]


def name_up_to(tokens: list[int], stop: int) -> BlockHash:
    """Return the name of what ends at `stop`, a whole block or a tail."""
    return names([*tokens[:stop], 0])[-1]


def led_and_followed(
    leader_tokens: list[int],
    *follower_tokens: list[int],
    processed_token_count: int = 0,
    can_cut: bool = True,
) -> tuple[InFlightPrefixes, Sequence, list[Sequence]]:
    in_flight = in_flight_prefixes(can_cut_inside=can_cut)
    leader = sequence(0, leader_tokens)
    in_flight.lead(leader, ROOT)
    leader.processed_token_count = processed_token_count
    followers = [sequence(1 + i, tokens) for i, tokens in enumerate(follower_tokens)]
    for follower in followers:
        follows(in_flight, follower)
    return in_flight, leader, followers


SHARED = list(range(10, 17))
"""A block and three tokens of the next one."""


def test_prompts_that_part_inside_a_block_get_a_tail_there() -> None:
    tokens = [*SHARED, 1, 2, 3, 4, 5, 6]
    in_flight, leader, followers = led_and_followed(tokens, [*SHARED, 9, 9, 9], [*SHARED, 8, 8])
    assert leader.capture_points == [7], "one for both"
    in_flight.complete([name_up_to(tokens, 4)])
    assert in_flight.take_ready() == []
    in_flight.complete([name_up_to(tokens, 7)])
    assert in_flight.take_ready() == followers


def test_who_waits_for_a_tail_that_another_one_has_left_before_is_freed_with_its_leader() -> None:
    tokens = [*SHARED, 1, 2, 3, 4, 5, 6]
    in_flight, leader, followers = led_and_followed(tokens, [*SHARED, 9, 9, 9])
    in_flight.complete([name_up_to(tokens, 7)])  # of one that follows nobody, and was ahead
    assert in_flight.take_ready() == followers
    late = sequence(9, [*SHARED, 8, 8])
    assert follows(in_flight, late)
    in_flight.forget(leader)
    assert in_flight.take_ready() == [late]


def test_a_tail_that_one_leads_already_frees_who_waits_when_that_one_goes_away() -> None:
    tokens = [*SHARED, 1, 2, 3, 4, 5, 6]
    in_flight, leader, _ = led_and_followed(tokens)
    other, follower = sequence(8, [*SHARED, 7]), sequence(9, [*SHARED, 8, 8])
    in_flight.lead(other, ROOT)
    assert follows(in_flight, follower) and leader.capture_points == [7]
    in_flight.forget(other)
    assert in_flight.take_ready() == [follower]
    in_flight.complete(names(tokens))
    assert not follows(in_flight, sequence(10, [*SHARED[:6], 8, 8])), "nobody is left to wait for"


def test_prompts_part_in_the_first_block_too_and_in_several_places() -> None:
    tokens = list(range(10, 30))
    _, leader, _ = led_and_followed(
        tokens, [*tokens[:2], 9, 9, 9], [*tokens[:11], 9, 9], [*tokens[:14], 9, 9]
    )
    assert leader.capture_points == [2, 11, 14]


def test_a_prompt_that_ends_inside_a_block_of_the_leader_shares_all_but_its_last_token() -> None:
    tokens = list(range(10, 30))
    _, leader, _ = led_and_followed(tokens, tokens[:11])
    assert leader.capture_points == [10]


def test_who_parts_where_the_leader_has_been_waits_for_its_block_where_that_can_be_cut() -> None:
    tokens = [*SHARED, 1, 2, 3, 4, 5, 6]
    in_flight, leader, followers = led_and_followed(tokens, [*SHARED, 9, 9], processed_token_count=7)
    assert leader.capture_points == []
    in_flight.complete([name_up_to(tokens, 8)])
    assert in_flight.take_ready() == followers
    in_flight, _, followers = led_and_followed(
        tokens, [*SHARED, 9, 9], processed_token_count=7, can_cut=False
    )
    in_flight.complete([name_up_to(tokens, 4)])
    assert in_flight.take_ready() == followers, "the whole block before it is all there is"


def test_a_leader_leaves_a_few_tails_only_and_none_when_it_is_gone() -> None:
    tokens = list(range(10, 80))
    others = [[*tokens[: 4 * i + 3], 99, 99] for i in range(1, 14)]
    in_flight, leader, followers = led_and_followed(tokens, *others)
    assert len(leader.capture_points) == 8
    in_flight.forget(leader)
    assert leader.capture_points == [] and set(in_flight.take_ready()) == set(followers)
    assert not follows(in_flight, sequence(99, others[0]))


def test_a_few_tokens_of_a_block_are_computed_sooner_than_waited_for() -> None:
    in_flight = in_flight_prefixes(settings(block_token_count=256))
    leader, tokens = sequence(0, list(range(1000))), list(range(1000))
    in_flight.lead(leader, ROOT)
    assert not follows(in_flight, sequence(1, [*tokens[:63], 5000, 5000]))
    assert follows(in_flight, sequence(2, [*tokens[:64], 5000, 5000]))
    assert leader.capture_points == [64]
