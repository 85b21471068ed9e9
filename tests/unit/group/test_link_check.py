"""The link check: how a machine compares with rank 0, how far clocks are apart, and how fast the way is."""

from __future__ import annotations

import pytest
from icehouse_server.clock import SystemClock
from icehouse_server.errors import StartError
from icehouse_server.group import link_check
from icehouse_server.group.channel import ChannelBroken
from icehouse_server.group.link_check import ClockRound, RankLink, skew_of
from icehouse_server.group.membership import Membership

from tests.fixtures.rpc.authority import Authority, uri
from tests.fixtures.storage.storage_thread import ManualClock
from tests.system.mesh.envoy import free_ports
from tests.unit.group.served import FACTS, Served, serving, tls_of


def asked(
    served: Served, facts: dict[str, str] | None = None, *, rank: int = 1, tls: object = None
) -> RankLink:
    """Return what a machine finds that asks rank 0."""
    membership = Membership(rank, served.ring, served.control)
    known = FACTS if facts is None else facts
    return link_check.check_link(membership, known, tls=tls or served.tls, clock=SystemClock())  # type: ignore[arg-type]


def test_a_machine_like_rank_0_fits_and_its_link_is_measured() -> None:
    with serving() as served:
        link = asked(served)
        assert link.difference == ""
        assert link.bytes_per_s > 0 and link.round_trip_s > 0
        assert not served.server._joined and served.lost.empty()


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        ({"mlx": "2"}, "mlx is 2 there and 1 on rank 0"),
        ({"mlx": "1"}, ""),
        ({}, ""),
        ({"mlx": "1", "colour": "red"}, "colour is red there and nothing on rank 0"),
        ({"mlx": "x" * 100_000}, "mlx is xxx"),
    ],
)
def test_facts_are_compared_as_far_as_they_are_known(facts: dict[str, str], told: str) -> None:
    with serving() as served:
        difference = asked(served, facts).difference
        assert difference.startswith(told) and bool(difference) == bool(told) and len(difference) <= 300


def test_a_clock_that_is_wrong_is_seen() -> None:
    clock = ManualClock()
    with serving(clock=clock) as served:
        clock.now_s = SystemClock().wall() + 1_000_000.0
        link = asked(served)
        # Rank 0's clock stands still; ours goes on while it is asked.
        assert 900_000 < link.skew_s <= 1_000_000


def test_the_shortest_round_trip_says_best_how_far_clocks_are_apart() -> None:
    rounds = [ClockRound(10.0, 115.0, 14.0), ClockRound(20.0, 121.0, 21.0), ClockRound(30.0, 130.0, 32.0)]
    assert skew_of(rounds) == (100.5, 1.0)
    assert skew_of([ClockRound(10.0, 9.5, 10.0)]) == (-0.5, 0.0)


def test_one_that_is_no_rank_is_refused() -> None:
    with serving() as served, pytest.raises(StartError, match="rank 5 of 2 is not one of 2"):
        asked(served, rank=5)


def test_a_callers_certificate_is_refused() -> None:
    authority = Authority()
    with serving(tls=tls_of(authority)) as served:
        assert asked(served).difference == ""
        with pytest.raises(StartError, match=r"the certificate of rank 1 is not for 127\.0\.0\.1"):
            asked(served, tls=tls_of(authority, uri("spiffe://tenants/one")))


def test_a_rank_0_that_is_not_there_does_not_answer() -> None:
    ring = (("127.0.0.1:1",), ("127.0.0.1:2",))
    membership = Membership(1, ring, f"127.0.0.1:{free_ports(1)[0]}")
    with pytest.raises(ChannelBroken, match="UNAVAILABLE"):
        link_check.check_link(membership, FACTS, tls=None, clock=SystemClock())
