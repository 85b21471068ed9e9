"""Running requests of the worker protocol by the gateway's names for them: aborted, counted. Event loop."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator, Sequence

from icehouse_server.domain.events import Event, Started
from icehouse_server.domain.ids import Tenant
from icehouse_server.rpc.access.caller import Caller, Role
from icehouse_server.rpc.engine_client.open_requests import OpenRequest
from icehouse_server.rpc.messages.validation import refuse_value

ABORT_LIMIT = 256
"""Most names in one Abort; a gateway sends one for each client that left."""


class WaitingTokens:
    """Tokens of the prompts that have not started, kept as they come and go."""

    def __init__(self) -> None:
        self._total = 0
        self._of: collections.Counter[Tenant] = collections.Counter()

    def count(self, tenant: Tenant | None) -> int:
        """Return those of one tenant, or of all."""
        return self._total if tenant is None else self._of[tenant]

    def add(self, tenant: Tenant, token_count: int) -> None:
        """Count so many more, or fewer."""
        self._total += token_count
        self._of[tenant] += token_count
        if not self._of[tenant]:
            del self._of[tenant]


class RunningRequest:
    """One call of Generate, from its first look at the message to its end."""

    def __init__(self, caller: Caller, waiting: WaitingTokens) -> None:
        self.caller = caller
        self.is_aborted = False
        self._opened: OpenRequest | None = None
        self._waiting = waiting
        self._is_waiting = False

    def submit(self, opened: OpenRequest) -> None:
        """Note what the engine is asked."""
        self._opened = opened
        self._is_waiting = True
        self._waiting.add(opened.first.tenant, len(opened.first.prompt_token_ids))

    def note(self, event: Event) -> None:
        """Follow the request."""
        if isinstance(event, Started):
            self.wait_no_longer()

    def wait_no_longer(self) -> None:
        """Its prompt has started, or never will."""
        if self._opened is not None and self._is_waiting:
            self._is_waiting = False
            first = self._opened.first
            self._waiting.add(first.tenant, -len(first.prompt_token_ids))

    def abort(self) -> None:
        """End what the engine has not ended of it; it is not submitted any more if it was not yet."""
        self.is_aborted = True
        if self._opened is not None:
            self._opened.submission.cancel()


class RunningRequests:
    """All of them."""

    def __init__(self) -> None:
        self._all: dict[RunningRequest, str] = {}
        self.waiting_tokens = WaitingTokens()

    @contextlib.contextmanager
    def running(self, name: str, caller: Caller) -> Iterator[RunningRequest]:
        """Know a request by its name until the block ends; others, of any tenant, may have the same."""
        request = RunningRequest(caller, self.waiting_tokens)
        self._all[request] = name
        try:
            yield request
        finally:
            del self._all[request]
            request.wait_no_longer()

    def abort(self, names: Sequence[str], caller: Caller) -> None:
        """End the caller's own requests of these names; others, and unknown ones, are passed over.

        Each is cancelled once, however often it is named while its reader takes what is left. Raises
        InvalidRequest for more than `ABORT_LIMIT` names.
        """
        if len(names) > ABORT_LIMIT:
            refuse_value("request_ids", len(names), f"at most {ABORT_LIMIT} names", unit="names")
        wanted = set(names) - {""}
        for request, name in self._all.items():
            if name in wanted and not request.is_aborted and _may_command(caller, request):
                request.abort()

    def count(self, caller: Caller) -> int:
        """Return how many the caller may know of."""
        return sum(_may_command(caller, request) for request in self._all)


def _may_command(caller: Caller, request: RunningRequest) -> bool:
    return caller.role is Role.OPERATOR or caller.tenant == request.caller.tenant
