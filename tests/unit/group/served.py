"""Rank 0's end of a group's channel, on a port of loopback."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator, Mapping

from icehouse_server.clock import Clock, SystemClock
from icehouse_server.group.channel import ChannelTls, GroupClient, GroupServer
from icehouse_server.group.leader_tier import LeaderTier
from icehouse_server.group.membership import Membership
from icehouse_server.group.order_log import OrderLog

from tests.fixtures.rpc.authority import LOOPBACK, Authority
from tests.system.mesh.envoy import free_ports

MEMORY = 1 << 30
FACTS = {"mlx": "1", "the model": "a"}


class Served:
    """Rank 0's end, and what it notices."""

    def __init__(self, world: int, tls: ChannelTls | None, facts: Mapping[str, str], clock: Clock) -> None:
        ring = tuple((f"127.0.0.1:{5000 + rank}",) for rank in range(world))
        self.ring, self.control = ring, f"127.0.0.1:{free_ports(1)[0]}"
        self.tls = tls
        self.log = OrderLog(world)
        self.lost: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.posted: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.tier = LeaderTier(self.log, followers=range(1, world), post=self.posted.put)
        self.server = GroupServer(
            Membership(0, ring, self.control),
            facts,
            self.log,
            clock=clock,
            tier=lambda: self.tier,
            on_lost=self.lost.put,
            tls=tls,
            memory_limit_bytes=MEMORY,
        )

    def client(
        self, rank: int, *, world: int | None = None, facts: dict[str, str] | None = None, **how: object
    ) -> GroupClient:
        ring = (*self.ring, ("127.0.0.1:6000",))[: world or len(self.ring)]
        tls: ChannelTls | None = how.get("tls", self.tls)  # type: ignore[assignment]
        memory: int = how.get("memory", MEMORY)  # type: ignore[assignment]
        return GroupClient(
            Membership(rank, ring, self.control), facts or FACTS, tls=tls, memory_limit_bytes=memory
        )


@contextlib.contextmanager
def serving(
    world: int = 2,
    *,
    tls: ChannelTls | None = None,
    facts: Mapping[str, str] = FACTS,
    clock: Clock | None = None,
) -> Iterator[Served]:
    served = Served(world, tls, facts, clock or SystemClock())
    served.server.start()
    try:
        yield served
    finally:
        served.server.stop(timeout_s=0)


def tls_of(authority: Authority, *names: object, has_expired: bool = False) -> ChannelTls:
    certificate, key = authority.issue("a rank", *(names or LOOPBACK), has_expired=has_expired)  # type: ignore[arg-type]
    return ChannelTls(certificate, key, authority.pem)
