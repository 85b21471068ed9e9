"""Open requests: what engines are working on, or will be once the model is loaded, to list and to cancel.
Event loop."""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence, Set

from icehouse_server.domain.events import Delta, Event, Started
from icehouse_server.domain.ids import RequestId, Tenant
from icehouse_server.domain.request import GenerationRequest
from icehouse_server.errors import Cancelled, InvalidRequest, NotFound, Reason
from icehouse_server.rpc.access.caller import Caller, CallerRole
from icehouse_server.rpc.engine_client.outbox import Outbox
from icehouse_server.rpc.engine_client.seat import Seat, Seats


class RequestPhase(enum.IntEnum):
    """How far a request has got, in this order."""

    LOADING_MODEL = 0
    WAITING = 1
    PREFILLING = 2
    DECODING = 3


class OpenRequest:
    """One call's requests, submitted to the engine together, each with the outbox for its events.

    Once the engine has ended a request, its id is free: a little before its call closes or, if the reader
    stalls, long before. By then another tenant's request may have the same id, so the router is asked.
    """

    def __init__(
        self,
        number: int,
        method: str,
        outboxes: Mapping[RequestId, Outbox],
        requests: Sequence[GenerationRequest],
        seat: Seat,
    ) -> None:
        self._engine = seat.engine
        self._router = seat.router
        model = seat.router.model
        self.model_id = "" if model is None else model.info.model_id
        self._outboxes = outboxes
        self.number = number
        """Later requests have higher numbers."""
        self.method = method
        self.first = requests[0]
        """The one that has the call's name."""
        self.part_count = len(requests)
        prompts = {id(request.prompt_token_ids): len(request.prompt_token_ids) for request in requests}
        self._is_one_prompt = len(prompts) == 1
        self.prompt_token_count = sum(prompts.values())
        """A prompt with several outputs counts once."""
        self.phase = RequestPhase.WAITING
        self.cached_token_count = 0
        self.output_token_count = 0
        self.is_cancelled = False
        """Whether somebody else than its caller ended it."""

    def note(self, event: Event) -> None:
        if isinstance(event, Started):
            self.phase = max(self.phase, RequestPhase.PREFILLING)
            cached = event.cache.cached_token_count
            before = self.cached_token_count
            self.cached_token_count = max(before, cached) if self._is_one_prompt else before + cached
        elif isinstance(event, Delta):
            self.phase = RequestPhase.DECODING
            self.output_token_count += len(event.token_ids)

    @property
    def is_running(self) -> bool:
        """Whether the engine has not yet ended all of them."""
        return any(self._router.routes(*each) for each in self._outboxes.items())

    def cancel(self) -> None:
        """End the requests that the engine has not ended, within a step."""
        self.is_cancelled = True
        for request_id, outbox in self._outboxes.items():
            if self._router.routes(request_id, outbox):
                self._engine.cancel(request_id)


class LoadingRequest:
    """One call's request that waits for its model to load: its prompt is not known yet."""

    phase = RequestPhase.LOADING_MODEL
    is_running = True
    part_count = 1
    prompt_token_count = cached_token_count = output_token_count = 0

    def __init__(
        self, number: int, method: str, first: GenerationRequest, model_id: str, end: Callable[[], None]
    ) -> None:
        self.number = number
        self.method = method
        self.first = first
        self.model_id = model_id
        self._end = end
        self.is_cancelled = False

    def cancel(self) -> None:
        """End the wait."""
        if not self.is_cancelled:
            self.is_cancelled = True
            self._end()


ListedRequest = OpenRequest | LoadingRequest


def ended_by_request() -> Cancelled:
    """Return the error of a request that CancelRequest has ended."""
    return Cancelled(Reason.CANCELLED, "the request was ended by CancelRequest")


class OpenRequests:
    """The open requests of all models. A caller sees its own, an operator everybody's."""

    def __init__(self, seats: Seats) -> None:
        self._seats = seats
        self._number = 0
        self._open: dict[int, ListedRequest] = {}
        """By number, since a name may be reused shortly before its first call closes."""

    @contextlib.contextmanager
    def opened(
        self, seat: Seat, method: str, requests: Sequence[GenerationRequest], outboxes: Sequence[Outbox]
    ) -> Iterator[OpenRequest]:
        """Have a seat's engine run a call's requests until the block ends; raises what refuses them."""
        known = {request.request_id: outbox for request, outbox in zip(requests, outboxes, strict=True)}
        with contextlib.ExitStack() as stack:
            # All engines share one thread, so prefetching for the other models pauses too.
            for other in self._seats.loaded().values():
                stack.enter_context(other.prefetcher.paused(requests if other is seat else ()))
            self._submit(seat, known, requests)
            opened = OpenRequest(self._next_number(), method, known, requests, seat)
            self._open[opened.number] = opened
            try:
                yield opened
            finally:
                del self._open[opened.number]
                for request_id, outbox in known.items():
                    if seat.router.release(request_id, outbox):
                        seat.engine.cancel(request_id)

    @contextlib.asynccontextmanager
    async def loading(self, method: str, request: GenerationRequest, model_id: str) -> AsyncIterator[None]:
        """The block waits for a request's model to load; raises Cancelled once CancelRequest ends it."""
        wait, now = asyncio.timeout(None), asyncio.get_running_loop().time
        number = self._next_number()
        waiting = LoadingRequest(number, method, request, model_id, end=lambda: wait.reschedule(now()))
        try:
            async with wait:
                self._open[number] = waiting
                yield
        except TimeoutError:
            if not waiting.is_cancelled:
                raise
            raise ended_by_request() from None
        finally:
            self._open.pop(number, None)

    def _next_number(self) -> int:
        self._number += 1
        return self._number

    def _submit(
        self, seat: Seat, outboxes: Mapping[RequestId, Outbox], requests: Sequence[GenerationRequest]
    ) -> None:
        opened: list[RequestId] = []
        try:
            for request_id, outbox in outboxes.items():
                for other in self._seats.loaded().values():
                    other.router.check_free(request_id)
                seat.router.open(request_id, outbox)
                opened.append(request_id)
            seat.engine.submit(requests[0], tuple(requests[1:]))
        except BaseException:
            for request_id in opened:
                seat.router.forget(request_id)
            raise

    def visible_to(self, caller: Caller) -> tuple[ListedRequest, ...]:
        """Return the requests that a caller may see and end, except those that the engine has ended."""
        is_operator = caller.role is CallerRole.OPERATOR
        visible = (r for r in self._open.values() if is_operator or r.first.tenant == caller.tenant)
        return tuple(request for request in visible if request.is_running)

    def cancel(self, request_id: str, caller: Caller, *, tenant: str | None = None) -> ListedRequest:
        """End a request. Raises NotFound, with the same message for another tenant's, and InvalidRequest if
        the caller must say which of several tenants it belongs to."""
        named = [r for r in self.visible_to(caller) if r.first.name == request_id]
        if tenant is not None:
            named = [r for r in named if r.first.tenant == tenant]
        owner_count = len({r.first.tenant for r in named})
        if owner_count > 1:
            raise InvalidRequest(
                Reason.PARAMETER_OUT_OF_RANGE,
                f"{owner_count} tenants have a request {request_id!r}; name one in `tenant`",
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
        named[-1].cancel()
        return named[-1]

    def abort(self, names: Set[str], caller: Caller) -> None:
        """End the caller's own requests with these names, each once; other names are ignored."""
        for request in self.visible_to(caller):
            if request.first.name in names and not request.is_cancelled:
                request.cancel()

    def waiting_token_count(self, tenant: Tenant | None) -> int:
        """Return the prompt tokens of requests that have not started, of one tenant, or of all if None."""
        waiting = (r for r in self._open.values() if r.phase is RequestPhase.WAITING)
        return sum(r.prompt_token_count for r in waiting if tenant in (None, r.first.tenant))
