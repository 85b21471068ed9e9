"""Stats client of the command line, over CacheService.WatchStats. Blocking."""

from __future__ import annotations

from collections.abc import Generator
from types import TracebackType
from typing import Any, Self

import grpc
from icehouse.v1 import cache_service_pb2, cache_service_pb2_grpc

from icehouse_server.domain.stats import ServerStats
from icehouse_server.rpc.client.access import OPEN, Access
from icehouse_server.rpc.client.generate import failure_of
from icehouse_server.rpc.client.message_json import message_facts
from icehouse_server.rpc.messages.proto_map import from_proto


class StatsWatch:
    """One channel to one server."""

    def __init__(self, address: str, access: Access = OPEN) -> None:
        self.address = address
        self._metadata = access.metadata
        self._channel = access.open_channel(address)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._channel.close()

    def samples(self, *, interval_s: float, wait: bool) -> Generator[ServerStats, None, None]:
        """Yield counters at every interval until the server ends it. Raises CallFailed.

        With `wait` a server that is not there is waited for.
        """
        for answer in self._answers(interval_s=interval_s, wait=wait):
            yield from_proto(answer.stats, ServerStats)

    def facts(self, *, interval_s: float) -> Generator[dict[str, Any], None, None]:
        """Yield the same for JSON."""
        for answer in self._answers(interval_s=interval_s, wait=False):
            yield message_facts(answer.stats)

    def _answers(
        self, *, interval_s: float, wait: bool
    ) -> Generator[cache_service_pb2.WatchStatsResponse, None, None]:
        stub = cache_service_pb2_grpc.CacheServiceStub(self._channel)
        request = cache_service_pb2.WatchStatsRequest()
        request.interval.FromNanoseconds(round(interval_s * 1e9))
        try:
            yield from stub.WatchStats(request, metadata=self._metadata, wait_for_ready=wait)
        except grpc.RpcError as error:
            raise failure_of(error, self.address) from error
