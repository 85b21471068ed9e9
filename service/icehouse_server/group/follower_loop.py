"""Follower loop: takes orders off the channel and has them carried out, until rank 0 ends the group."""

from __future__ import annotations

import logging
import os
import queue
import threading

from icehouse.group.v1 import group_service_pb2 as group

from icehouse_server.errors import IcehouseError
from icehouse_server.group.channel import ChannelBroken, GroupClient
from icehouse_server.group.ending import leave_later
from icehouse_server.group.follower import Follower

_log = logging.getLogger("icehouse.boot")


class FollowerLoop:
    """Runs on the thread that is to own MLX's state; another thread receives."""

    def __init__(self, follower: Follower, client: GroupClient) -> None:
        self._follower = follower
        self._client = client
        self._orders: queue.SimpleQueue[group.Order | IcehouseError] = queue.SimpleQueue()

    def run(self) -> None:
        """Do as rank 0 does until it ends. Raises IcehouseError; a broken channel ends the process."""
        threading.Thread(target=self._receive, name="group-orders", daemon=True).start()
        while not self._follower.has_ended:
            order = self._orders.get()
            if isinstance(order, IcehouseError):
                raise order
            self._carry_out(order)

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
            for order in self._client.orders():
                is_ending = order.HasField("end")
                self._orders.put(order)
        except IcehouseError as error:
            self._orders.put(error)
            return
        except ChannelBroken as error:
            _log.error("rank_0_lost", extra={"detail": str(error)})
        if not is_ending:
            # The other thread may wait in a pass for rank 0, for ever.
            os._exit(1)
