"""Follower loop: takes orders off the channel and has them carried out, until rank 0 ends the group."""

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
from icehouse_server.group.silence import BEAT_S, SILENCE_S, Silence

_log = logging.getLogger("icehouse.boot")


class FollowerLoop:
    """Runs on the thread that is to own MLX's state; another thread receives, and a third says every moment
    that this rank lives."""

    def __init__(
        self, follower: Follower, client: GroupClient, *, leave: Callable[[int], object] = os._exit
    ) -> None:
        """`leave` ends the process, whatever it waits for."""
        self._follower = follower
        self._client = client
        self._leave = leave
        self._orders: queue.SimpleQueue[group.Order | IcehouseError] = queue.SimpleQueue()
        self._silence: Silence[int] = Silence()
        self._is_over = threading.Event()

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

    def close(self) -> None:
        """Say goodbye, once all is written."""
        self._client.close()
        self._is_over.set()

    def _carry_out(self, order: group.Order) -> None:
        try:
            if order.HasField("begin"):
                self._client.send(group.FollowRequest(joining=group.Joining()))
                self._follower.load()
                _log.info("rank_loaded")
            else:
                self._follower.carry_out(order)
        except Exception as error:  # rank 0 is told, and the group ends
            detail = error.message if isinstance(error, IcehouseError) else repr(error)
            leave_later(1)
            self._client.send(group.FollowRequest(failed=group.Failed(detail=detail)))
            raise

    def _receive(self) -> None:
        is_ending = False
        try:
            for orders in self._client.orders():
                for order in orders:
                    is_ending |= order.HasField("end")
                    self._orders.put(order)
                (self._silence.excuse if is_ending else self._silence.hear)(0)
        except IcehouseError as error:
            self._orders.put(error)
            return
        except Exception as error:  # the channel is broken, or what comes makes no sense
            _log.error("rank_0_lost", extra={"detail": str(error)})
        self._silence.excuse(0)
        if not is_ending:
            # The other thread may wait in a pass for rank 0, for ever.
            self._leave(1)

    def _beat(self) -> None:
        """Say that this rank lives, and notice where rank 0 does not."""
        while not self._is_over.wait(BEAT_S):
            self._client.report(self._follower.heartbeat())
            if self._silence.beat():
                _log.error("rank_0_lost", extra={"detail": f"nothing came from it for {SILENCE_S:.1f} s"})
                self._silence.excuse(0)
                self._leave(1)
