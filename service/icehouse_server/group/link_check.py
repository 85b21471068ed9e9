"""Link check: how a machine that is to be a rank compares with rank 0, and how fast their connection is.

For `icehouse doctor`; it asks rank 0, which answers while it waits for its group. It measures the group's own
channel, gRPC over TCP. MLX's connections have another port, and may have another cable.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import grpc
from icehouse.group.v1 import group_service_pb2 as group
from icehouse.group.v1 import group_service_pb2_grpc as stubs

from icehouse_server.clock import Clock
from icehouse_server.group.channel import ChannelTls, error_of, open_channel
from icehouse_server.group.membership import Membership

_CALL_S = 2.0
_ROUND_COUNT = 8
MESSAGE_BYTES = 512 << 10
"""Size of the messages that measure the bandwidth."""
_MESSAGE_LIMIT = 256
_MEASURE_S = 0.5


class ClockRound(NamedTuple):
    """One question to rank 0, by the clocks of both."""

    sent_time: float
    rank_0_time: float
    come_time: float


@dataclasses.dataclass(frozen=True, slots=True)
class RankLink:
    """The connection between this machine and rank 0."""

    difference: str
    """The first fact that differs between them; empty if they agree."""
    skew_s: float
    """How far rank 0's clock is ahead; the uncertainty is half a round trip."""
    round_trip_s: float
    """The shortest one."""
    bytes_per_s: float
    """Both directions together, with one message in flight."""


def check_link(
    membership: Membership, facts: Mapping[str, str], *, tls: ChannelTls | None, clock: Clock
) -> RankLink:
    """Ask rank 0, for a few seconds at most. Raises StartError if it refuses this machine, and ChannelBroken
    if it does not answer."""
    try:
        with open_channel(membership, tls) as channel:
            compare = stubs.GroupServiceStub(channel).Compare
            ours = {**facts, **membership.facts}
            known = group.CompareRequest(rank=membership.rank, world=membership.world, facts=ours)
            difference = compare(known, timeout=_CALL_S).difference
            rounds = []
            for _ in range(_ROUND_COUNT):
                sent_time = clock.wall()
                answer = compare(known, timeout=_CALL_S)
                rounds.append(ClockRound(sent_time, answer.wall_time, clock.wall()))
            known.padding = bytes(MESSAGE_BYTES)
            began_time, sent_bytes, elapsed_s = clock.monotonic(), 0, 0.0
            while elapsed_s < _MEASURE_S and sent_bytes < _MESSAGE_LIMIT * MESSAGE_BYTES:
                compare(known, timeout=_CALL_S)
                sent_bytes += MESSAGE_BYTES
                elapsed_s = clock.monotonic() - began_time
    except grpc.RpcError as error:
        raise error_of(error) from error
    skew_s, round_trip_s = skew_of(rounds)
    return RankLink(difference, skew_s, round_trip_s, 2 * sent_bytes / elapsed_s)


def skew_of(rounds: Sequence[ClockRound]) -> tuple[float, float]:
    """Return how far rank 0's clock is ahead, and the round trip of the most precise question: the shortest
    (NTP, RFC 5905)."""
    best = min(rounds, key=lambda each: each.come_time - each.sent_time)
    return best.rank_0_time - (best.sent_time + best.come_time) / 2, best.come_time - best.sent_time
