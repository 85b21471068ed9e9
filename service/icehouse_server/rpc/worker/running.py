"""Running requests of the worker protocol by the gateway's names for them, to be aborted. Event loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from icehouse_server.domain.events import Event, Started
from icehouse_server.domain.ids import RequestId
from icehouse_server.domain.request import GenerationRequest
from icehouse_server.rpc.access.caller import Caller, Role
from icehouse_server.rpc.messages.validation import refuse_value

ABORT_LIMIT = 256
"""Most names in one Abort; a gateway sends one for each client that left."""


class RunningRequest:
    """One call of Generate, from its first look at the message to its end."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self.is_aborted = False
        self._requests: tuple[GenerationRequest, ...] = ()
        self._has_started = False

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Note what the engine is asked."""
        self._requests = tuple(requests)

    def note(self, event: Event) -> None:
        """Follow the request."""
        self._has_started = self._has_started or isinstance(event, Started)

    @property
    def request_ids(self) -> tuple[RequestId, ...]:
        """Names of what the engine was asked."""
        return tuple(request.request_id for request in self._requests)

    @property
    def waiting_token_count(self) -> int:
        """Tokens of its prompt while it has not started, else 0."""
        return len(self._requests[0].prompt_token_ids) if self._requests and not self._has_started else 0


class RunningRequests:
    """All of them."""

    def __init__(self, cancel: Callable[[RequestId], None]) -> None:
        self._cancel = cancel
        self._all: dict[RunningRequest, str] = {}

    @contextlib.contextmanager
    def running(self, name: str, caller: Caller) -> Iterator[RunningRequest]:
        """Know a request by its name until the block ends; others, of any tenant, may have the same."""
        request = RunningRequest(caller)
        self._all[request] = name
        try:
            yield request
        finally:
            del self._all[request]

    def abort(self, names: Sequence[str], caller: Caller) -> None:
        """End the caller's own requests of these names; others, and unknown ones, are passed over.

        Each is cancelled once, however often it is named while its reader takes what is left. Raises
        InvalidRequest for more than `ABORT_LIMIT` names.
        """
        if len(names) > ABORT_LIMIT:
            refuse_value("request_ids", f"{len(names)} names", f"at most {ABORT_LIMIT} names")
        wanted = set(names) - {""}
        for request, name in self._all.items():
            if name in wanted and not request.is_aborted and _may_command(caller, request):
                request.is_aborted = True
                for request_id in request.request_ids:
                    self._cancel(request_id)

    def count(self, caller: Caller) -> int:
        """Return how many the caller may know of."""
        return sum(_may_command(caller, request) for request in self._all)

    @property
    def waiting_token_count(self) -> int:
        """Tokens of the prompts that have not started."""
        return sum(request.waiting_token_count for request in self._all)


def _may_command(caller: Caller, request: RunningRequest) -> bool:
    return caller.role is Role.OPERATOR or caller.tenant == request.caller.tenant
