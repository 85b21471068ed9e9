"""Submission: requests that the engine takes together, ended by their ids only while these are theirs.

Once the engine has ended a request its id is free, a little before its call closes or, where the reader
stalls, long before: by then another tenant's may have the same. Owned by the event loop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from icehouse_server.domain.ids import RequestId
from icehouse_server.domain.request import GenerationRequest
from icehouse_server.rpc.engine_client.outbox import Outbox
from icehouse_server.rpc.engine_client.ports import EnginePort
from icehouse_server.rpc.engine_client.router import Router


class Submission:
    """One call's requests, each with the outbox that its events go to."""

    def __init__(
        self,
        requests: Sequence[GenerationRequest],
        outboxes: Sequence[Outbox],
        *,
        engine: EnginePort,
        router: Router,
    ) -> None:
        self.requests = tuple(requests)
        self._outboxes = tuple(outboxes)
        self._engine = engine
        self._router = router

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Have the engine work on the requests until the block ends."""
        opened: list[RequestId] = []
        try:
            for request, outbox in zip(self.requests, self._outboxes, strict=True):
                self._router.open(request.request_id, outbox)
                opened.append(request.request_id)
            self._engine.submit(self.requests[0], self.requests[1:])
        except BaseException:
            for request_id in opened:
                self._router.forget(request_id)
            raise
        try:
            yield
        finally:
            for request_id, outbox in zip(opened, self._outboxes, strict=True):
                if self._router.release(request_id, outbox):
                    self._engine.cancel(request_id)

    @property
    def is_running(self) -> bool:
        """Whether there is one that the engine has not ended."""
        return any(True for _ in self._running_ids())

    def cancel(self) -> None:
        """End those that the engine has not ended, within a step."""
        for request_id in self._running_ids():
            self._engine.cancel(request_id)

    def _running_ids(self) -> Iterator[RequestId]:
        for request, outbox in zip(self.requests, self._outboxes, strict=True):
            if self._router.routes(request.request_id, outbox):
                yield request.request_id
