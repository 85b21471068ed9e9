"""The channel: who may join and who may not, orders one way and reports the other, and who is gone."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from icehouse.group.v1 import group_service_pb2 as group
from icehouse.group.v1 import group_service_pb2_grpc as stubs
from icehouse_server.clock import SystemClock
from icehouse_server.domain.stats import RankState, RankTierStats
from icehouse_server.engine.core.ports import LoadCalledOff
from icehouse_server.errors import Reason, StartError
from icehouse_server.group import channel, order_log
from icehouse_server.group.channel import ChannelBroken, ChannelTls, GroupClient, GroupServer
from icehouse_server.group.membership import Membership
from icehouse_server.group.order_log import OrderLog
from icehouse_server.group.silence import BEAT_S, Silence
from icehouse_server.storage.api import StorageFailed

from tests.fixtures.patience import BOUND_S
from tests.fixtures.rpc.authority import Authority, uri
from tests.unit.group.served import FACTS, MEMORY, Served, serving, tls_of


class Following:
    """A follower's end, read on a thread of its own."""

    def __init__(self, client: GroupClient) -> None:
        self.client = client
        self.come: queue.SimpleQueue[object] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            for orders in self.client.orders():
                for order in orders:
                    self.come.put(order)
        except (ChannelBroken, StartError) as error:
            self.come.put(error)
        else:
            self.come.put(None)

    def next(self) -> object:
        return self.come.get(timeout=BOUND_S)


def joined(served: Served, *ranks: int) -> list[Following]:
    """Return followers that have joined, told to begin."""
    following = [Following(served.client(rank)) for rank in ranks]
    while not served.server.wait_for_all():
        with contextlib.suppress(queue.Empty):
            for each in following:
                order = each.come.get_nowait()
                assert isinstance(order, group.Order) and order.HasField("begin")
                each.client.send(group.FollowRequest(joining=group.Joining()))
    return following


def test_all_begin_once_all_are_there_and_orders_come_in_sequence() -> None:
    with serving(3) as served:
        first = Following(served.client(1))
        assert not served.server.wait_for_all()
        second = Following(served.client(2))
        begun = 0
        while not served.server.wait_for_all():
            for each in (first, second):
                with contextlib.suppress(queue.Empty):
                    order = each.come.get_nowait()
                    assert isinstance(order, group.Order) and order.HasField("begin")
                    begun += 1
                    each.client.send(group.FollowRequest(joining=group.Joining()))
        assert begun == 2
        for number in range(300):
            served.log.add(group.Order(run=group.Run(number=number)))
        for each in (first, second):
            orders = [each.next() for _ in range(300)]
            assert [order.run.number for order in orders if isinstance(order, group.Order)] == list(
                range(300)
            )


@pytest.mark.parametrize(
    ("rank", "world", "facts", "told"),
    [
        (1, None, {**FACTS, "mlx": "2"}, "rank 1 does not fit: mlx is 2 there and 1 on rank 0"),
        (1, None, {"mlx": "1"}, "the model is nothing there and a on rank 0"),
        (1, None, {**FACTS, "a": "x" * 100_000}, "rank 1 does not fit: a is xxx"),
        (1, 3, None, "rank 1 of 3 is not one of 2"),
        (0, None, None, "rank 0 of 2 is not one of 2"),
        (2, None, None, "rank 2 of 2 is not one of 2"),
    ],
)
def test_who_does_not_fit_is_refused_by_name(
    rank: int, world: int | None, facts: dict[str, str] | None, told: str
) -> None:
    with serving() as served:
        refused = Following(served.client(rank, world=world, facts=facts)).next()
        assert isinstance(refused, StartError) and told in refused.message
        assert refused.reason is Reason.CONFIG_INVALID and len(refused.message) < 1000
        joined(served, 1)


def test_a_rank_whose_file_of_hosts_is_another_one_is_refused() -> None:
    """MLX would have both wait for each other in the ring."""
    with serving() as served:
        own, served.ring = served.ring, served.ring[::-1]
        refused = Following(served.client(1)).next()
        assert isinstance(refused, StartError)
        shown = [" ".join(address for (address,) in ring) for ring in (served.ring, own)]
        assert f"the file of hosts is {shown[0]} there and {shown[1]} on rank 0" in refused.message


def test_a_second_follower_of_a_rank_is_refused_and_the_first_goes_on() -> None:
    with serving() as served:
        (first,) = joined(served, 1)
        refused = Following(served.client(1)).next()
        assert isinstance(refused, StartError) and "there is a rank 1 already" in refused.message
        served.log.add(group.Order(warm_up=group.WarmUp()))
        order = first.next()
        assert isinstance(order, group.Order) and order.HasField("warm_up")
        assert served.lost.empty()


def test_who_comes_when_a_rank_was_lost_hears_that_rank_0_ends() -> None:
    with serving() as served:
        (first,) = joined(served, 1)
        first.client.report(group.FollowRequest(failed=group.Failed(detail="no memory")))
        assert served.lost.get(timeout=BOUND_S) == "rank 1: no memory"
        refused = Following(served.client(1)).next()
        assert isinstance(refused, ChannelBroken)
        assert "rank 0 stops because it lost rank 1: no memory" in str(refused)


def test_all_ranks_may_take_what_the_least_of_them_may() -> None:
    """Else rank 0 would fill more pages than another one has, which then would copy its whole pool."""
    with serving(3) as served:
        each = [Following(served.client(rank, memory=MEMORY - rank * 4096)) for rank in (1, 2)]
        begun = 0
        while (limit_bytes := served.server.wait_for_all()) is None:
            for follower in each:
                with contextlib.suppress(queue.Empty):
                    order = follower.come.get_nowait()
                    assert isinstance(order, group.Order)
                    assert order.begin.memory_limit_bytes == MEMORY - 2 * 4096
                    begun += 1
                    follower.client.send(group.FollowRequest(joining=group.Joining()))
        assert (begun, limit_bytes) == (2, MEMORY - 2 * 4096)


@pytest.mark.parametrize(
    ("memory", "fits"), [(2 * MEMORY, True), (MEMORY - 4096, True), (MEMORY // 2, False)]
)
def test_a_rank_with_less_memory_than_rank_0_plans_for_is_refused(memory: int, fits: bool) -> None:
    with serving() as served:
        first = Following(served.client(1, memory=memory))
        while fits and not served.server._has_begun:
            served.server.wait_for_all()
        answer = first.next()
        if fits:
            assert isinstance(answer, group.Order)
        else:
            assert isinstance(answer, StartError)
            assert (
                f"rank 1 may take {memory} bytes, and rank 0, which plans for all, {MEMORY}" in answer.message
            )


def test_an_address_that_another_one_has_is_refused() -> None:
    with serving() as served:
        second = GroupServer(
            Membership(0, served.ring, served.control),
            FACTS,
            OrderLog(2),
            clock=SystemClock(),
            tier=lambda: None,
            on_lost=print,
            tls=None,
            memory_limit_bytes=MEMORY,
        )
        with pytest.raises(StartError) as refused:
            second.start()
        assert refused.value.reason is Reason.ADDRESS_IN_USE


def test_reports_come_to_the_tier_and_a_failure_ends_the_group() -> None:
    with serving() as served:
        (follower,) = joined(served, 1)
        follower.client.report(group.FollowRequest(tier_lost=group.TierLost(detail="no disk")))
        assert served.posted.get(timeout=BOUND_S) == StorageFailed("rank 1: no disk")
        follower.client.report(group.FollowRequest(failed=group.Failed(detail="out of memory" * 1000)))
        lost = served.lost.get(timeout=BOUND_S)
        assert lost.startswith("rank 1: out of memory") and len(lost) < 1000


def beat_of(**rank: object) -> group.FollowRequest:
    """Return a follower's report of itself."""
    return group.FollowRequest(heartbeat=group.Heartbeat(rank=group.RankReport(**rank)))  # type: ignore[arg-type]


def test_what_each_rank_is_at_is_known() -> None:
    with serving(3) as served:
        assert [each.state for each in served.server.ranks()] == [RankState.MISSING] * 2
        first, second = joined(served, 1, 2)
        assert [each.state for each in served.server.ranks()] == [RankState.LOADING] * 2
        served.log.add(group.Order(warm_up=group.WarmUp()))
        assert served.log.order_count == 2
        ssd = group.TierReport(block_count=4, written_byte_total=5)
        heard(first, served, beat_of(order_total=1, active_memory_bytes=3, ssd=ssd, ssd_trouble="It hangs"))
        one, two = served.server.ranks()
        assert (one.rank, one.host, one.state) == (1, "127.0.0.1", RankState.READY)
        assert (one.order_total, one.behind_order_count) == (1, 1)
        assert (one.active_memory_bytes, one.memory_limit_bytes) == (3, MEMORY)
        assert one.ssd == RankTierStats(block_count=4, written_byte_total=5)
        assert one.ssd_trouble == "It hangs"
        assert one.report_age_s is not None and two.report_age_s is None and two.ssd is None
        second.client.report(group.FollowRequest(failed=group.Failed(detail="no memory")))
        served.lost.get(timeout=BOUND_S)
        assert served.server.ranks()[1].state is RankState.GONE


def heard(follower: Following, served: Served, report: group.FollowRequest) -> None:
    """Bring a report to rank 0, which takes reports in turn."""
    follower.client.send(report)
    follower.client.report(group.FollowRequest(tier_lost=group.TierLost(detail="now")))
    served.posted.get(timeout=BOUND_S)


def test_numbers_that_cannot_be_and_long_texts_harm_nobody() -> None:
    with serving() as served:
        (follower,) = joined(served, 1)
        never = -(2**63)
        ssd = group.TierReport(block_count=never)
        text = "x" * 100_000
        heard(
            follower,
            served,
            beat_of(order_total=2**62, active_memory_bytes=never, ssd=ssd, ssd_trouble=text),
        )
        (one,) = served.server.ranks()
        assert (one.active_memory_bytes, one.behind_order_count, one.ssd) == (0, 0, RankTierStats())
        assert len(one.ssd_trouble) == channel._TEXT_LIMIT
        assert served.lost.empty()


def test_a_report_that_makes_no_sense_loses_its_rank() -> None:
    with serving() as served:
        (follower,) = joined(served, 1)
        follower.client.report(group.FollowRequest(lost=group.Lost(names=[b"x"])))
        assert served.lost.get(timeout=BOUND_S) == "rank 1: its report could not be processed"


def test_a_rank_whose_connection_ends_is_lost() -> None:
    with serving() as served:
        (follower,) = joined(served, 1)
        follower.client._channel.close()
        assert served.lost.get(timeout=BOUND_S).startswith("rank 1: ")


def test_when_a_rank_is_lost_the_others_are_told_and_do_not_end_in_order() -> None:
    with serving(3) as served:
        first, second = joined(served, 1, 2)
        second.client.report(group.FollowRequest(failed=group.Failed(detail="no memory")))
        assert served.lost.get(timeout=BOUND_S) == "rank 2: no memory"
        served.log.add(group.Order(end=group.End()))
        broken = first.next()
        assert isinstance(broken, ChannelBroken) and "rank 2: no memory" in str(broken)


def test_a_rank_that_takes_no_orders_is_lost_and_the_others_get_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(order_log, "ORDER_LIMIT", 100)
    with serving(3) as served:
        first = Following(served.client(1))
        for number in range(101):
            served.log.add(group.Order(run=group.Run(number=number)))
            order = first.next()
            assert isinstance(order, group.Order) and order.run.number == number
        assert served.lost.get(timeout=BOUND_S).startswith("rank 2: it is")


def test_what_waits_for_ranks_is_called_off_until_they_begin() -> None:
    with serving(3) as served:
        joined_one = Following(served.client(1))
        assert not served.server.wait_for_all()
        served.server.call_off()
        with pytest.raises(LoadCalledOff):
            served.server.wait_for_all()
        joined_one.client.close()
    with serving() as served:
        begun = Following(served.client(1))
        while not served.server._has_begun:
            served.server.wait_for_all()
        served.server.call_off()
        assert not served.server.wait_for_all(), "it began to join the ring"
        begun.client.send(group.FollowRequest(joining=group.Joining()))
        while not served.server.wait_for_all():
            pass


def test_a_goodbye_is_answered_by_the_end_of_the_call() -> None:
    with serving(3) as served:
        follower, _ = joined(served, 1, 2)
        follower.client.close()
        assert follower.next() is None
        assert served.lost.empty()


def test_a_rank_that_ends_in_order_is_not_lost() -> None:
    with serving() as served:
        (follower,) = joined(served, 1)
        follower.client.close()
        served.server.stop(timeout_s=BOUND_S)
        assert served.lost.empty()


def test_a_rank_that_says_nothing_is_lost_and_one_that_joins_may_be_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serving() as served:
        (follower,) = joined(served, 1)
        silence = served.server._silence
        for _ in range(100):
            assert silence.beat() == [], "it joins the ring, and cannot speak"
        monkeypatch.setattr(channel, "BEAT_S", 0.02)  # as many of them are counted as ever
        follower.client.send(group.FollowRequest(heartbeat=group.Heartbeat()))
        assert served.lost.get(timeout=BOUND_S).startswith("rank 1: nothing came from it for 3.0 s")


@pytest.mark.parametrize("is_rank_0_told", [False, True])
def test_a_rank_that_was_told_to_stop_is_lost_unless_rank_0_was_told_too(is_rank_0_told: bool) -> None:
    with serving() as served:
        (follower,) = joined(served, 1)
        heard(follower, served, group.FollowRequest(stopping=group.Stopping()))
        if is_rank_0_told:
            served.server.call_off()
        served.server._silence.excuse(1)
        for _ in range(7):
            served.server._beat()
        if is_rank_0_told:
            assert served.lost.empty()
        else:
            assert served.lost.get(timeout=BOUND_S) == "rank 1: it was told to stop, and rank 0 was not"


def test_rank_0_says_that_it_lives() -> None:
    with serving() as served:
        beats = served.client(1).orders()
        for _ in range(2):
            assert list(next(beats)) == []


def test_a_follower_learns_that_rank_0_is_gone() -> None:
    with serving() as served:
        (follower,) = joined(served, 1)
        served.server._server.stop(grace=0)
        end = follower.next()
        assert end is None or isinstance(end, ChannelBroken)


@pytest.fixture
def stranger() -> Iterator[Callable[[Served], grpc.Channel]]:
    with contextlib.ExitStack() as stack:
        yield lambda served: stack.enter_context(grpc.insecure_channel(served.control))


def code_of(call: Iterator[object]) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as refused:
        while True:
            next(call)
    return refused.value.code()  # type: ignore[no-any-return]


def test_who_does_not_say_who_they_are_is_refused(stranger: Callable[[Served], grpc.Channel]) -> None:
    with serving() as served:
        follow = stubs.GroupServiceStub(stranger(served)).Follow
        for first in ([], [group.FollowRequest()], [group.FollowRequest(bye=group.Bye())]):
            assert code_of(follow(iter(first), timeout=BOUND_S)) is grpc.StatusCode.FAILED_PRECONDITION
        joined(served, 1)


def test_garbage_and_what_is_too_large_is_refused(stranger: Callable[[Served], grpc.Channel]) -> None:
    with serving() as served:
        raw: Any = stranger(served).stream_stream("/icehouse.group.v1.GroupService/Follow")
        assert code_of(raw(iter([b"\xff" * 100]), timeout=BOUND_S)) is not grpc.StatusCode.OK
        large = group.FollowRequest(hello=group.Hello(facts={"a": "x" * (2 << 20)})).SerializeToString()
        assert code_of(raw(iter([large]), timeout=BOUND_S)) is grpc.StatusCode.RESOURCE_EXHAUSTED
        joined(served, 1)


def test_many_who_say_nothing_keep_no_rank_out(stranger: Callable[[Served], grpc.Channel]) -> None:
    with serving() as served:
        served.server._strangers = Silence(limit_s=BEAT_S)
        is_over = threading.Event()

        def say_nothing() -> Iterator[group.FollowRequest]:
            is_over.wait(BOUND_S)
            yield from ()

        stub = stubs.GroupServiceStub(stranger(served))
        calls = [stub.Follow(say_nothing(), timeout=BOUND_S) for _ in range(20)]
        joined(served, 1)
        assert {code_of(call) for call in calls} <= {grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN}
        is_over.set()
        assert served.lost.empty()


def test_ranks_show_each_other_certificates() -> None:
    authority = Authority()
    with serving(tls=tls_of(authority)) as served:
        joined(served, 1)


def test_a_callers_certificate_makes_no_rank() -> None:
    authority = Authority()
    with serving(tls=tls_of(authority)) as served:
        caller = tls_of(authority, uri("spiffe://tenants/one"))
        refused = Following(served.client(1, tls=caller)).next()
        assert isinstance(refused, StartError)
        assert "the certificate of rank 1 is not for 127.0.0.1" in refused.message


@pytest.mark.parametrize("has_one", [True, False])
def test_who_has_no_certificate_of_the_authority_is_not_heard(
    monkeypatch: pytest.MonkeyPatch, has_one: bool
) -> None:
    monkeypatch.setattr(channel, "_TELL_S", 0.01)
    with serving(tls=tls_of(Authority())) as served:
        follower = Following(served.client(1, tls=tls_of(Authority("another")) if has_one else None))
        assert not any(served.server.wait_for_all() for _ in range(5))
        assert follower.come.empty()
        follower.client.close()
        assert isinstance(follower.next(), ChannelBroken), "it goes on waiting"


@pytest.mark.parametrize(
    ("ours", "theirs", "told"),
    [
        ({"has_expired": True}, {}, "certificate has expired"),
        ({"names": (uri("spiffe://elsewhere"),)}, {}, "Hostname Verification Check failed"),
        ({"authority": Authority("another")}, {}, "unable to get local issuer certificate"),
        (None, {}, "WRONG_VERSION_NUMBER"),
        ({}, None, "closed"),
    ],
    ids=["expired", "for another host", "of another authority", "rank 0 is in the clear", "rank 1 is"],
)
def test_a_rank_says_why_it_does_not_reach_rank_0(
    ours: dict[str, Any] | None, theirs: dict[str, Any] | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority()

    def made(how: dict[str, Any] | None) -> ChannelTls | None:
        if how is None:
            return None
        chosen = {"authority": authority, "names": (), **how}
        return tls_of(chosen.pop("authority"), *chosen.pop("names"), **chosen)

    said: queue.SimpleQueue[str] = queue.SimpleQueue()
    monkeypatch.setattr(channel, "_TELL_S", 0.05)
    monkeypatch.setattr(channel._log, "warning", lambda event, extra: said.put(extra.get("detail", "")))
    with serving(tls=made(ours)) as served:
        client = served.client(1, tls=made(theirs))
        Following(client)
        try:
            # At first it may be about to connect still.
            assert any(told in said.get(timeout=BOUND_S) for _ in range(100))
        finally:
            client.close()


@pytest.mark.parametrize("is_secured", [True, False])
def test_strangers_that_send_junk_keep_no_rank_out(is_secured: bool) -> None:
    with serving(tls=tls_of(Authority()) if is_secured else None) as served, contextlib.ExitStack() as stack:
        host, _, port = served.control.rpartition(":")
        for number in range(50):
            stranger = stack.enter_context(socket.create_connection((host, int(port)), timeout=BOUND_S))
            with contextlib.suppress(OSError):  # the other end may have closed it
                stranger.sendall(bytes([number, 255 - number]) * 5000)
        joined(served, 1)
        assert served.lost.empty()
