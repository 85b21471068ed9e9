"""Prefetcher: computes the beginnings of next prompts while the engine is otherwise idle. Event loop.

It computes one prompt at a time, that of the latest reply first. A call that makes the engine run cancels
this before it is submitted, so that it waits for one pass at most; what was computed by then stays in the
cache. The number of waiting prompts is bounded, and losing one costs only the time that it would have saved.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import NamedTuple

from icehouse_server.domain.events import Failed
from icehouse_server.domain.ids import RequestId, Tenant
from icehouse_server.domain.model import EngineState
from icehouse_server.domain.request import GenerationRequest, request_id_of
from icehouse_server.errors import Cancelled, IcehouseError
from icehouse_server.rpc.engine_client.engine_ports import EnginePort
from icehouse_server.rpc.engine_client.outbox import Outbox
from icehouse_server.rpc.engine_client.router import Router

WAITING_LIMIT = 64
"""Conversations whose next turn waits to be computed."""
WAITING_TOKEN_LIMIT = 1 << 20
"""Total tokens of their histories, which are kept meanwhile."""
_IDLE_S = 0.1
"""How long nothing may run before one begins: most agents answer a tool call sooner."""
_ATTEMPT_LIMIT = 3
"""How often one is begun that other calls interrupt."""
_EVENT_LIMIT, _BYTE_LIMIT = 8, 1 << 16
"""For the events of a prefetched prompt, whose progress is merged into one event."""


class TurnKey(NamedTuple):
    """The conversation of a next turn. Conversations of one session have different openings."""

    tenant: Tenant
    session_id: str
    opening: int
    parent_session_id: str = ""


def conversation_of(request: GenerationRequest) -> TurnKey:
    """Return the conversation that a request is a turn of."""
    return TurnKey(request.tenant, request.session_id, request.opening, request.parent_session_id)


@dataclasses.dataclass(slots=True)
class NextTurn:
    """A conversation's next prompt, as far as it is known."""

    key: TurnKey
    token_count: int
    """Of the prompt and its reply."""
    make: Callable[[RequestId], Awaitable[GenerationRequest | None]]
    """Returns the warm-up to run; None if there is nothing to compute. Raises what refuses it."""
    context: contextvars.Context = dataclasses.field(default_factory=contextvars.copy_context)
    """The call's context: the tokenizer's work counts against its caller."""
    attempt_count: int = 0


class Prefetcher:
    """Bounded by WAITING_LIMIT conversations. Beyond it the tenant with the most loses its oldest."""

    def __init__(self, *, engine: EnginePort, router: Router) -> None:
        self._engine = engine
        self._router = router
        self._waiting: dict[TurnKey, NextTurn] = {}
        """Oldest first."""
        self._busy_count = 0
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._current: NextTurn | None = None
        """The turn that is being computed; None once it is no longer wanted."""
        self._request_id: RequestId | None = None
        """Its request, while the engine runs it."""
        self._number = 0
        self._is_closed = False

    def note(self, turn: NextTurn) -> None:
        """Have a next turn computed when nothing else runs; it replaces the conversation's previous one."""
        if self._is_closed or turn.token_count > WAITING_TOKEN_LIMIT:
            return
        self._waiting.pop(turn.key, None)
        self._waiting[turn.key] = turn
        while len(self._waiting) > WAITING_LIMIT or self._waiting_token_count > WAITING_TOKEN_LIMIT:
            counts = Counter(key.tenant for key in self._waiting)
            [(greediest, _)] = counts.most_common(1)
            del self._waiting[next(key for key in self._waiting if key.tenant == greediest)]
        self._resume()

    @property
    def _waiting_token_count(self) -> int:
        return sum(turn.token_count for turn in self._waiting.values())

    @contextlib.contextmanager
    def paused(self, requests: Sequence[GenerationRequest]) -> Iterator[None]:
        """Compute nothing until the block ends. A running computation is cancelled, and the next turns of the
        requests' conversations are dropped: they have arrived."""
        for request in requests:
            if request.ends_session:
                self.forget(request.tenant, request.session_id)
            self._forget(conversation_of(request))
        self._busy_count += 1
        self._give_up()
        try:
            yield
        finally:
            self._busy_count -= 1
            self._resume()

    def forget(self, tenant: Tenant | None = None, session_id: str | None = None) -> None:
        """Drop waiting turns: of a tenant's session and its children, of all of a tenant's sessions, or
        all."""
        current = () if self._current is None else (self._current.key,)
        for key in (*self._waiting, *current):
            if tenant in (None, key.tenant) and session_id in (None, key.session_id, key.parent_session_id):
                self._forget(key)

    def _forget(self, key: TurnKey) -> None:
        self._waiting.pop(key, None)
        if self._current is not None and self._current.key == key:
            self._current = None
            self._give_up()

    def close(self) -> None:
        """Drop everything, for good."""
        self._is_closed = True
        self.forget()
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _give_up(self) -> None:
        if self._request_id is not None:
            self._engine.cancel(self._request_id)

    def _resume(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiting and not self._busy_count and self._task is None:
            self._timer = asyncio.get_running_loop().call_later(_IDLE_S, self._begin)

    def _begin(self) -> None:
        self._timer = None
        if self._router.state is not EngineState.READY:
            return
        _, turn = self._waiting.popitem()
        turn.attempt_count += 1
        self._current = turn
        self._task = asyncio.get_running_loop().create_task(self._compute(turn), context=turn.context)
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        turn, self._task, self._current = self._current, None, None
        if task.cancelled():
            return
        if turn is not None and task.exception() is None and turn.key not in self._waiting:
            self._waiting = {turn.key: turn, **self._waiting}
        self._resume()
        task.result()  # raises unexpected errors, for the loop to log

    async def _compute(self, turn: NextTurn) -> None:
        """Compute a next turn; `_current` is still set at the end if it is to be tried again."""
        if self._busy_count:
            return
        self._number += 1
        request_id = request_id_of(
            f"~prefetch-{self._number}", turn.key.tenant
        )  # no caller's name has the sign
        request = None
        with contextlib.suppress(IcehouseError):  # the next turn's own call will get this error
            request = await turn.make(request_id)
        is_refused = request is None or not await self._run(request)
        if is_refused or turn.attempt_count >= _ATTEMPT_LIMIT:
            self._current = None

    async def _run(self, request: GenerationRequest) -> bool:
        """Run a warm-up if it is still wanted; return whether it may be tried again."""
        if self._busy_count or self._current is None:
            return True
        outbox = Outbox(event_limit=_EVENT_LIMIT, byte_limit=_BYTE_LIMIT, on_stall=lambda: None)
        self._router.open(request.request_id, outbox)
        try:
            self._engine.submit(request)
        except IcehouseError:
            self._router.forget(request.request_id)
            return False
        self._request_id = request.request_id
        try:
            while not outbox.ended:
                event = await outbox.take()
            return isinstance(event, Failed) and isinstance(event.error, Cancelled)
        finally:
            self._request_id = None
            if self._router.release(request.request_id, outbox):
                self._engine.cancel(request.request_id)
