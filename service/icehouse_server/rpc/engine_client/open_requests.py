"""Open requests: what the engine was asked and has not ended, to be listed and to be ended. Event loop."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator, Sequence

from icehouse_server.domain.events import Delta, Event, Started
from icehouse_server.domain.ids import RequestId
from icehouse_server.domain.request import GenerationRequest
from icehouse_server.errors import InvalidRequest, NotFound, Reason
from icehouse_server.rpc.access.caller import Caller, Role
from icehouse_server.rpc.engine_client.outbox import Outbox
from icehouse_server.rpc.engine_client.ports import EnginePort
from icehouse_server.rpc.engine_client.router import Router


class RequestPhase(enum.IntEnum):
    """How far a request is, in this order."""

    WAITING = 1
    PREFILLING = 2
    DECODING = 3


class OpenRequest:
    """One call's requests, which the engine has taken together."""

    def __init__(self, number: int, method: str, submission: Submission) -> None:
        requests = submission.requests
        self.number = number
        """Higher for one that came later."""
        self.method = method
        self.first = requests[0]
        """The one that has the call's name."""
        self.submission = submission
        self.part_count = len(requests)
        prompts = {id(request.prompt_token_ids): len(request.prompt_token_ids) for request in requests}
        self._is_one_prompt = len(prompts) == 1
        self.prompt_token_count = sum(prompts.values())
        """Of several outputs of one prompt it counts once."""
        self.phase = RequestPhase.WAITING
        self.cached_token_count = 0
        self.output_token_count = 0
        self.is_cancelled = False
        """Whether somebody else than its caller ended it."""

    def note(self, event: Event) -> None:
        """Follow the request."""
        if isinstance(event, Started):
            self.phase = max(self.phase, RequestPhase.PREFILLING)
            cached = event.cache.cached_token_count
            before = self.cached_token_count
            self.cached_token_count = max(before, cached) if self._is_one_prompt else before + cached
        elif isinstance(event, Delta):
            self.phase = RequestPhase.DECODING
            self.output_token_count += len(event.token_ids)


class OpenRequests:
    """All of them, the oldest first."""

    def __init__(self) -> None:
        self._number = 0
        self._open: dict[int, OpenRequest] = {}
        """By number: a name is free again when the engine has ended it, a little before its call closes."""

    @contextlib.contextmanager
    def opened(self, method: str, submission: Submission) -> Iterator[OpenRequest]:
        """Know a call's requests until the block ends."""
        self._number += 1
        request = self._open[self._number] = OpenRequest(self._number, method, submission)
        try:
            yield request
        finally:
            del self._open[request.number]

    def visible_to(self, caller: Caller) -> tuple[OpenRequest, ...]:
        """Return those that a caller may know of, and end; none whose reader takes what an end has left."""
        return tuple(r for r in self._open.values() if _is_visible(r, caller) and r.submission.is_running)

    def cancel(self, request_id: str, caller: Caller, *, tenant: str | None = None) -> OpenRequest:
        """End a request; raises NotFound for what is not there and, without a difference, for another's, and
        InvalidRequest where the caller has to say which of several tenants' it is."""
        named = [r for r in self.visible_to(caller) if r.first.name == request_id]
        if tenant is not None:
            named = [r for r in named if r.first.tenant == tenant]
        owner_count = len({r.first.tenant for r in named})
        if owner_count > 1:
            raise InvalidRequest(
                Reason.PARAMETER_OUT_OF_RANGE,
                f"{owner_count} tenants have a request {request_id!r}; say whose by `tenant`",
                field="tenant",
                metadata={"request_id": request_id, "tenant_count": owner_count},
            )
        if not named:
            raise NotFound(
                Reason.REQUEST_NOT_FOUND,
                f"no request {request_id!r} of yours waits or runs here; ListRequests shows those that do",
                field="request_id",
                metadata={"request_id": request_id},
            )
        request = named[-1]
        request.is_cancelled = True
        request.submission.cancel()
        return request


def _is_visible(request: OpenRequest, caller: Caller) -> bool:
    return caller.role is Role.OPERATOR or request.first.tenant == caller.tenant


class Submission:
    """One call's requests that the engine takes together, each with the outbox that its events go to.

    Once the engine has ended a request, its id is free, a little before its call closes or, where the reader
    stalls, long before. By then another tenant's request may have the same id, so it is checked.
    """

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
