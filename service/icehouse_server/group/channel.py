"""Channel of a group: one gRPC call from each follower to rank 0; orders go one way, reports the other.

Rank 0 listens; followers wait until it does. Each side sends heartbeats, and learns that the other is gone
when the call ends or when nothing has come for a while. gRPC's own threads run here; nothing here waits for
the inference thread.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import grpc
from icehouse.group.v1 import group_service_pb2 as group
from icehouse.group.v1 import group_service_pb2_grpc as stubs

from icehouse_server.clock import Clock
from icehouse_server.domain.stats import RankState, RankStats
from icehouse_server.engine.core.ports import LoadCalledOff
from icehouse_server.errors import Reason, StartError
from icehouse_server.group.leader_tier import LeaderTier
from icehouse_server.group.membership import Membership, difference
from icehouse_server.group.messages import tier_from
from icehouse_server.group.order_log import ORDER_LIMIT, OrderLog
from icehouse_server.group.silence import BEAT_S, SILENCE_S, Silence

_log = logging.getLogger("icehouse.boot")

_TELL_S = 5.0
"""How often the log names the ranks that are still missing."""
_ASK_S = 1.0
_MOMENT_S = 0.1
_ORDERS_BYTES = 64 << 20
"""An order may contain a whole prompt."""
_REPORT_BYTES = 1 << 20
_LEAST_SHARE = 0.98
"""Share of rank 0's memory that every rank must have: machines of one kind differ a little."""
_TEXT_LIMIT = 300
"""Characters of a rank's message that are logged."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Report:
    """What a rank last reported about itself."""

    report: group.RankReport
    behind_order_count: int
    come_time: float


class ChannelBroken(Exception):
    """Rank 0 is gone."""


@dataclasses.dataclass(frozen=True, slots=True)
class ChannelTls:
    """A rank's certificates, in PEM: it shows them to the others and checks theirs with them."""

    certificate: bytes
    key: bytes
    authorities: bytes

    def server(self) -> grpc.ServerCredentials:
        """Return the credentials with which rank 0 listens."""
        return grpc.ssl_server_credentials(
            [(self.key, self.certificate)],
            root_certificates=self.authorities,
            require_client_auth=True,
        )

    def channel(self) -> grpc.ChannelCredentials:
        """Return the credentials with which a follower connects."""
        return grpc.ssl_channel_credentials(
            root_certificates=self.authorities, private_key=self.key, certificate_chain=self.certificate
        )


class GroupServer(stubs.GroupServiceServicer):
    """Rank 0's end. `on_lost` is called on its threads."""

    def __init__(
        self,
        membership: Membership,
        facts: Mapping[str, str],
        log: OrderLog,
        *,
        clock: Clock,
        tier: Callable[[], LeaderTier | None],
        on_lost: Callable[[str], None],
        tls: ChannelTls | None,
        memory_limit_bytes: int,
    ) -> None:
        self._memory_limit_bytes = memory_limit_bytes
        self._membership = membership
        self._facts = {**facts, **membership.facts}
        self._log = log
        self._clock = clock
        self._tier = tier
        self._on_lost = on_lost
        self._tls = tls
        self._lock = threading.Lock()
        self._silence: Silence[int] = Silence()
        self._stopping: Silence[int] = Silence()
        """Ranks that were told to stop. All of a group, rank 0 too, may be told at about the same time."""
        self._strangers: Silence[grpc.ServicerContext] = Silence()
        """Calls that have not identified themselves yet."""
        self._joined: dict[int, int] = {}
        """Ranks that have joined, and how much memory each may use."""
        self._reports: dict[int, _Report] = {}
        """The last report of each rank about itself."""
        self._gone: set[int] = set()
        """Ranks that ended cleanly, or were lost."""
        self._joining: set[int] = set()
        """Ranks that are ready to join the ring."""
        self._has_begun = False
        self._is_called_off = False
        self._broken = ""
        """Which rank was lost and why."""
        self._changed = threading.Event()
        self._ended = threading.Event()
        self._told_time = clock.monotonic()
        workers = ThreadPoolExecutor(4 * membership.world, thread_name_prefix="group")
        self._server = grpc.server(
            workers, options=[*_limits(receive=_REPORT_BYTES, send=_ORDERS_BYTES), _ONE_LISTENER]
        )

    def start(self) -> None:
        """Listen for the followers. Raises StartError."""
        stubs.add_GroupServiceServicer_to_server(self, self._server)
        address = self._membership.control
        try:
            if self._tls is None:
                self._server.add_insecure_port(address)
            else:
                self._server.add_secure_port(address, self._tls.server())
        except RuntimeError as error:
            raise StartError(
                Reason.ADDRESS_IN_USE, f"rank 0 cannot listen for its group at {address}: {error}"
            ) from error
        self._server.start()
        threading.Thread(target=self._watch, name="group-watch", daemon=True).start()

    def wait_for_all(self) -> int | None:
        """Wait briefly; return how much memory each rank may use once all are about to join the ring,
        otherwise None. Logs from time to time which ranks are missing.

        MLX holds the interpreter's lock while it joins, so no rank may begin before all have been told.
        Raises LoadCalledOff; once the ranks begin to join, they can only end together.
        """
        self._changed.wait(_MOMENT_S)
        self._changed.clear()
        if self._is_called_off and not self._has_begun:
            raise LoadCalledOff
        with self._lock:
            least_bytes = min([self._memory_limit_bytes, *self._joined.values()])
        if len(self._joining) == self._membership.world - 1:
            return least_bytes
        if len(self._joined) == self._membership.world - 1 and not self._has_begun:
            self._has_begun = True
            self._log.add(group.Order(begin=group.Begin(memory_limit_bytes=least_bytes)))
        now = self._clock.monotonic()
        if now - self._told_time >= _TELL_S:
            self._told_time = now
            missing = [rank for rank in self._membership.followers if rank not in self._joining]
            hosts = ", ".join(f"{rank} ({self._membership.host(rank)})" for rank in missing)
            _log.warning("ranks_missing", extra={"ranks": hosts, "control": self._membership.control})
        return None

    def call_off(self) -> None:
        """Stop waiting for ranks: the server stops."""
        self._is_called_off = True
        self._changed.set()

    def stop(self, *, timeout_s: float) -> None:
        """Wait for the followers to end cleanly, and close."""
        deadline_time = self._clock.monotonic() + timeout_s
        while len(self._gone) < len(self._joined) and self._clock.monotonic() < deadline_time:
            self._ended.wait(0.05)
        self._ended.set()
        self._server.stop(grace=0)

    def Follow(
        self, request_iterator: Iterator[group.FollowRequest], context: grpc.ServicerContext
    ) -> Iterator[group.FollowResponse]:
        self._strangers.hear(context)
        first = next(request_iterator, group.FollowRequest())
        self._strangers.excuse(context)
        hello = first.hello
        if self._broken:
            context.abort(grpc.StatusCode.UNAVAILABLE, f"rank 0 stops because it lost {self._broken}")
        refusal = self._refusal(hello, context)
        if refusal:
            _log.warning("rank_refused", extra={"rank": hello.rank, "detail": refusal})
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, refusal)
        _log.info("rank_joined", extra={"rank": hello.rank})
        threading.Thread(
            target=self._read, args=(hello.rank, request_iterator), name="group-reports", daemon=True
        ).start()
        self._changed.set()
        sequence = 0
        while context.is_active() and not self._ended.is_set():
            response = self._log.take(hello.rank, sequence, timeout_s=BEAT_S)
            if self._broken:
                # Rank 0's last orders would end this rank as if all were well.
                context.abort(grpc.StatusCode.UNAVAILABLE, self._broken)
            if response is None and hello.rank in self._gone:
                return
            response = response or group.FollowResponse(sequence=sequence)
            sequence += len(response.orders)
            yield response

    def Compare(self, request: group.CompareRequest, context: grpc.ServicerContext) -> group.CompareResponse:
        if unproved := self._unproved(request, context):
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, unproved)
        # The asker does not know all facts of a rank: it has not read the model.
        ours = {name: self._facts[name] for name in request.facts if name in self._facts}
        return group.CompareResponse(
            difference=difference(ours, request.facts)[:_TEXT_LIMIT],
            wall_time=self._clock.wall(),
            padding=request.padding,
        )

    def _unproved(self, who: group.Hello | group.CompareRequest, context: grpc.ServicerContext) -> str:
        """Return why the sender cannot be the rank that it claims to be; empty if it may be."""
        if who.world != self._membership.world or who.rank not in self._membership.followers:
            return f"rank {who.rank} of {who.world} is not one of {self._membership.world}"
        host = self._membership.host(who.rank).strip("[]")
        names = [*context.auth_context().get("x509_subject_alternative_name", ())]
        if self._tls is not None and host.encode() not in names:
            # Callers may have certificates of the same authority, but they are not ranks.
            return f"the certificate of rank {who.rank} is not for {host}"
        return ""

    def _refusal(self, hello: group.Hello, context: grpc.ServicerContext) -> str:
        """Return why a rank cannot join; otherwise "", after noting that it has joined."""
        with self._lock:
            if unproved := self._unproved(hello, context):
                return unproved
            if unlike := difference(self._facts, hello.facts):
                return f"rank {hello.rank} does not fit: {unlike[:_TEXT_LIMIT]}"
            if hello.memory_limit_bytes < _LEAST_SHARE * self._memory_limit_bytes:
                return (
                    f"rank {hello.rank} may take {hello.memory_limit_bytes} bytes, and rank 0, which plans "
                    f"for all, {self._memory_limit_bytes}; set engine.memory_limit_bytes to the least of all"
                )
            if hello.rank in self._joined:
                return f"there is a rank {hello.rank} already"
            self._joined[hello.rank] = hello.memory_limit_bytes
        self._silence.hear(hello.rank)
        return ""

    def _read(self, rank: int, reports: Iterator[group.FollowRequest]) -> None:
        try:
            for report in reports:
                self._silence.hear(rank)
                kind = report.WhichOneof("report")
                if kind == "bye":
                    self._silence.excuse(rank)
                    self._gone.add(rank)
                elif kind == "joining":
                    # MLX holds the interpreter's lock from then on until all have joined.
                    self._silence.excuse(rank)
                    self._joining.add(rank)
                    self._changed.set()
                elif kind == "stopping":
                    self._stopping.hear(rank)
                elif kind == "failed":
                    self._lose(rank, report.failed.detail[:_TEXT_LIMIT])
                else:
                    if kind == "heartbeat":
                        self._note(rank, report.heartbeat.rank)
                    if (tier := self._tier()) is not None:
                        tier.report(rank, report)
        except grpc.RpcError as error:
            self._lose(rank, f"its connection broke: {error!r}")
        except Exception as error:  # in the code that handles the report
            _log.error("report_failed", exc_info=error)
            self._lose(rank, "its report could not be processed")
        else:
            self._lose(rank, "it ended its connection")

    def _note(self, rank: int, report: group.RankReport) -> None:
        behind_count = self._log.order_count - report.order_total
        self._reports[rank] = _Report(report, max(0, behind_count), self._clock.monotonic())

    def ranks(self) -> tuple[RankStats, ...]:
        """Return what is known about the followers. Any thread."""
        return tuple(map(self._stats_of, self._membership.followers))

    def _stats_of(self, rank: int) -> RankStats:
        said = self._reports.get(rank)
        stats = RankStats(
            rank,
            self._membership.host(rank),
            self._state_of(rank, said),
            memory_limit_bytes=max(0, self._joined.get(rank, 0)),
        )
        if said is None:
            return stats
        report = said.report
        return dataclasses.replace(
            stats,
            report_age_s=max(0.0, self._clock.monotonic() - said.come_time),
            order_total=max(0, report.order_total),
            behind_order_count=said.behind_order_count,
            active_memory_bytes=max(0, report.active_memory_bytes),
            ssd=tier_from(report.ssd) if report.HasField("ssd") else None,
            ssd_trouble=report.ssd_trouble[:_TEXT_LIMIT],
        )

    def _state_of(self, rank: int, said: _Report | None) -> RankState:
        if rank in self._gone:
            return RankState.GONE
        if rank not in self._joined:
            return RankState.MISSING
        has_loaded = said is not None and said.report.order_total > 0
        return RankState.READY if has_loaded else RankState.LOADING

    def _watch(self) -> None:
        """Notice ranks that are silent or too slow, and calls that do not identify themselves."""
        while not self._ended.wait(BEAT_S):
            self._beat()

    def _beat(self) -> None:
        for rank in self._silence.beat():
            self._lose(rank, f"nothing came from it for {SILENCE_S:.1f} s")
        for rank in self._stopping.beat():
            if not self._is_called_off:
                self._lose(rank, "it was told to stop, and rank 0 was not")
        for rank in [*self._log.behind]:
            self._lose(rank, f"it is {ORDER_LIMIT} orders behind")
        for context in self._strangers.beat():
            self._strangers.excuse(context)
            context.cancel()

    def _lose(self, rank: int, why: str) -> None:
        if rank in self._gone or self._ended.is_set():
            return
        self._gone.add(rank)
        self._silence.excuse(rank)
        self._broken = f"rank {rank}: {why}"
        _log.error("rank_lost", extra={"rank": rank, "detail": why})
        self._on_lost(self._broken)


class GroupClient:
    """A follower's end."""

    def __init__(
        self,
        membership: Membership,
        facts: Mapping[str, str],
        *,
        tls: ChannelTls | None,
        memory_limit_bytes: int,
    ) -> None:
        self._membership = membership
        self._hello = group.Hello(
            rank=membership.rank,
            world=membership.world,
            facts={**facts, **membership.facts},
            memory_limit_bytes=memory_limit_bytes,
        )
        self._reports: queue.SimpleQueue[tuple[group.FollowRequest, threading.Event] | None] = (
            queue.SimpleQueue()
        )
        self._channel = open_channel(membership, tls)
        self._ready = grpc.channel_ready_future(self._channel)

    def report(self, report: group.FollowRequest) -> threading.Event:
        """Queue a report; any thread. The event is set when gRPC has sent it."""
        is_sent = threading.Event()
        self._reports.put((report, is_sent))
        return is_sent

    def send(self, report: group.FollowRequest) -> None:
        """Send a report, and wait until gRPC has sent it or cannot."""
        self.report(report).wait(SILENCE_S)

    def orders(self) -> Iterator[Sequence[group.Order]]:
        """Connect, and yield orders as they arrive; an empty list is a heartbeat of rank 0. Raises StartError
        if rank 0 refuses this rank, and ChannelBroken if it is gone."""
        self._connect()
        expected = 0
        try:
            for response in stubs.GroupServiceStub(self._channel).Follow(self._outgoing()):
                if response.sequence != expected:
                    raise ChannelBroken(f"order {response.sequence} came where {expected} was due")
                expected += len(response.orders)
                yield response.orders
        except grpc.RpcError as error:
            raise error_of(error) from error

    def _connect(self) -> None:
        while True:
            try:
                self._ready.result(timeout=_TELL_S)
                return
            except grpc.FutureCancelledError as error:
                raise ChannelBroken("it was not there, and is waited for no more") from error
            except grpc.FutureTimeoutError:
                _log.warning(
                    "rank_0_missing",
                    extra={"control": self._membership.control, "detail": self._why_missing()},
                )

    def _why_missing(self) -> str:
        """Return why rank 0 cannot be reached: it is not there yet, or a certificate is not accepted."""
        hello = self._hello
        try:
            known = group.CompareRequest(rank=hello.rank, world=hello.world)
            stubs.GroupServiceStub(self._channel).Compare(known, timeout=_ASK_S)
        except grpc.RpcError as error:
            return str(error_of(error))[:_TEXT_LIMIT]
        return "it has just come"

    def _outgoing(self) -> Iterator[group.FollowRequest]:
        yield group.FollowRequest(hello=self._hello)
        while (waiting := self._reports.get()) is not None:
            report, is_sent = waiting
            yield report
            # gRPC asks for the next report once this one was sent.
            is_sent.set()

    def close(self) -> None:
        """Say goodbye if rank 0 was there, and close."""
        if self._ready.done():
            self.send(group.FollowRequest(bye=group.Bye()))
        self._ready.cancel()
        self._reports.put(None)


def open_channel(membership: Membership, tls: ChannelTls | None) -> grpc.Channel:
    """Return a channel to rank 0."""
    address = membership.control
    options = [*_limits(receive=_ORDERS_BYTES, send=_REPORT_BYTES), *_SOON]
    if tls is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, tls.channel(), options=options)


def error_of(error: grpc.RpcError) -> StartError | ChannelBroken:
    """Return what the end of a call says about rank 0: it refused this rank, or it is gone."""
    call = cast("grpc.Call", error)
    if call.code() is grpc.StatusCode.FAILED_PRECONDITION:
        return StartError(Reason.CONFIG_INVALID, f"rank 0 refused: {call.details()}")
    return ChannelBroken(f"{call.code().name}: {call.details()}")


_ONE_LISTENER = ("grpc.so_reuseport", 0)
_SOON = (("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 500))
"""How soon a follower retries: all ranks start at the same time, and each second counts at a restart."""


def _limits(*, receive: int, send: int) -> list[tuple[str, int]]:
    return [("grpc.max_receive_message_length", receive), ("grpc.max_send_message_length", send)]
