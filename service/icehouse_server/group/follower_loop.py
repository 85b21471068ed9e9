"""Follower loop: takes orders from the channel and has them carried out, until rank 0 ends the group."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable

from icehouse.group.v1 import group_service_pb2 as group

from icehouse_server.errors import IcehouseError
from icehouse_server.group.channel import GroupClient
from icehouse_server.group.ending import leave_later
from icehouse_server.group.follower import Follower
from icehouse_server.group.order_log import ORDER_LIMIT
from icehouse_server.group.silence import BEAT_S, SILENCE_S, Silence

_log = logging.getLogger("icehouse.boot")

ORDER_S = 60.0
"""Limit for one order, longer than any pass: a rank whose device or disk hangs still sends heartbeats."""


class FollowerLoop:
    """Runs on the thread that owns MLX's state; another thread receives orders, and a third sends
    heartbeats."""

    def __init__(
        self, follower: Follower, client: GroupClient, *, leave: Callable[[int], object] = os._exit
    ) -> None:
        """`leave` ends the process, whatever it waits for."""
        self._follower = follower
        self._client = client
        self._leave = leave
        self._orders: queue.SimpleQueue[group.Order | IcehouseError] = queue.SimpleQueue()
        self._silence: Silence[int] = Silence()
        self._at_hand: Silence[str] = Silence(ORDER_S)
        """The order being carried out, by its kind. Loading may take any time, and the end has its own
        limits."""
        self._is_over = threading.Event()
        self._has_heard_all = threading.Event()
        """Nothing more comes from rank 0."""
        self._has_begun = False
        self._is_told_to_stop = False
        self._is_alone = False
        """Whether rank 0 has not begun, or is gone: then it needs no goodbye."""

    def run(self) -> None:
        """Do as rank 0 does until it ends. Raises IcehouseError; a broken channel ends the process."""
        self._follower.open()
        threading.Thread(target=self._receive, name="group-orders", daemon=True).start()
        threading.Thread(target=self._beat, name="group-beats", daemon=True).start()
        while not self._follower.has_ended:
            try:
                order = self._orders.get(timeout=BEAT_S)
            except queue.Empty:
                self._follower.count()
                continue
            if isinstance(order, IcehouseError):
                raise order
            self._carry_out(order)

    def stop(self) -> bool:
        """End as soon as possible; False if rank 0 has begun, as its group can only end as a whole. Rank 0 is
        told: it either stops too, which ends this rank cleanly, or loses this rank."""
        if self._has_begun:
            self._is_told_to_stop = True
            self._client.report(group.FollowRequest(stopping=group.Stopping()))
        else:
            self._end_alone()
        return not self._has_begun

    def _end_alone(self) -> None:
        self._is_alone = True
        self._orders.put(group.Order(end=group.End()))

    def close(self) -> None:
        """Say goodbye after everything is written, and wait until rank 0 has heard it: otherwise it counts
        this rank as lost."""
        if not self._is_alone:
            self._client.close()
            self._has_heard_all.wait(SILENCE_S)
        self._is_over.set()

    def _carry_out(self, order: group.Order) -> None:
        kind = order.WhichOneof("order") or ""
        if kind not in ("begin", "end"):
            self._at_hand.hear(kind)
        try:
            if order.HasField("begin"):
                self._has_begun = True
                self._client.send(group.FollowRequest(joining=group.Joining()))
                self._follower.load(memory_limit_bytes=order.begin.memory_limit_bytes)
                _log.info("rank_loaded")
            else:
                self._follower.carry_out(order)
        except Exception as error:  # rank 0 is told, and the group ends
            if self._is_told_to_stop and self._has_heard_all.wait(SILENCE_S):
                # Rank 0 has lost this rank in the middle of a pass, as intended.
                self._leave(0)
                raise
            detail = error.message if isinstance(error, IcehouseError) else repr(error)
            leave_later(1)
            self._client.send(group.FollowRequest(failed=group.Failed(detail=detail)))
            raise
        finally:
            self._at_hand.excuse(kind)

    def _receive(self) -> None:
        try:
            self._take_orders()
        finally:
            self._has_heard_all.set()

    def _take_orders(self) -> None:
        is_ending = False
        try:
            for orders in self._client.orders():
                for order in orders:
                    is_ending |= order.HasField("end")
                    self._orders.put(order)
                (self._silence.excuse if is_ending else self._silence.hear)(0)
                if self._orders.qsize() > ORDER_LIMIT:
                    self._fail(f"it is {self._orders.qsize()} orders behind")
        except IcehouseError as error:
            self._orders.put(error)
            return
        except Exception as error:  # the channel is broken, or the data makes no sense
            _log.error("rank_0_lost", extra={"detail": str(error)})
        self._silence.excuse(0)
        if not is_ending:
            self._end_without_rank_0()

    def _end_without_rank_0(self) -> None:
        """End, at once or soon: the other thread may wait in a pass for rank 0, forever."""
        if self._is_told_to_stop:
            self._end_alone()
            leave_later(0)
        else:
            self._leave(1)

    def _beat(self) -> None:
        """Send heartbeats, and notice if rank 0 is silent or this rank hangs."""
        is_sent = None
        while not self._is_over.wait(BEAT_S):
            if is_sent is None or is_sent.is_set():  # while rank 0 is missing, one heartbeat waits for it
                is_sent = self._client.report(self._follower.heartbeat())
            for kind in self._at_hand.beat():
                self._fail(f"it has been at one order ({kind}) for {ORDER_S:.0f} s")
            if self._silence.beat():
                _log.error("rank_0_lost", extra={"detail": f"nothing came from it for {SILENCE_S:.1f} s"})
                self._silence.excuse(0)
                self._end_without_rank_0()

    def _fail(self, detail: str) -> None:
        """Tell rank 0, and end: the main thread cannot."""
        _log.error("rank_failed", extra={"detail": detail})
        self._client.send(group.FollowRequest(failed=group.Failed(detail=detail)))
        self._leave(1)
