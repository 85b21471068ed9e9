"""Router: from the inference thread to the event loop, and what the loop knows about the engine.

`publish`, `state_changed` and `model_loaded` are for other threads; each call wakes the loop once, however
much it passes on. Everything else belongs to the event loop, except the listener, which the engine calls.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from icehouse_server.domain.events import Event, Failed, Finished
from icehouse_server.domain.ids import RequestId
from icehouse_server.domain.model import EngineState, ModelInfo, ReplyFormatInfo
from icehouse_server.domain.request import name_of
from icehouse_server.engine.core.refusals import engine_failed
from icehouse_server.errors import AlreadyExists, IcehouseError, Reason, Unavailable
from icehouse_server.rpc.engine_client.engine_ports import BlockFiles, ServedModel
from icehouse_server.rpc.engine_client.outbox import Outbox

if TYPE_CHECKING:
    # The first is slow to import, the second needs an optional extra.
    from icehouse_server.text.tokenizer import Tokenizer
    from icehouse_server.vision.image_reader import ImageReader

_log = logging.getLogger("icehouse.boot")

Answer = TypeVar("Answer")


class Router:
    """Passes events to the outboxes of their requests."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._outboxes: dict[RequestId, Outbox | None] = {}
        """For requests that the engine has not ended; None if the reader is gone."""
        self._questions: set[asyncio.Future[Any]] = set()
        self._listeners: list[Callable[[], None]] = []
        self.state = EngineState.LOADING
        self.left_ready = asyncio.Event()
        """Set when the engine was READY and will not be again."""
        self.model: ServedModel | None = None
        self._error: IcehouseError | None = None

    def publish(self, events: Sequence[tuple[RequestId, Event]]) -> None:
        """Deliver events, in order. Any thread."""
        self._hand_over(self._deliver, tuple(events))

    def state_changed(self, state: EngineState, error: IcehouseError | None) -> None:
        """Note the engine's state; FAILED and STOPPED fail every open request. Any thread."""
        self._hand_over(self._set_state, state, error)

    def model_loaded(self, model: ServedModel) -> None:
        """Note the model, before the state becomes READY. Any thread."""
        self._hand_over(setattr, self, "model", model)

    def add_listener(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    def require_model(self) -> ServedModel:
        """Return the model of a READY engine; raises Unavailable or EngineFailed otherwise."""
        if self.state is EngineState.READY and self.model is not None:
            return self.model
        if self.state is EngineState.FAILED:
            raise self._failure()
        if self.state in (EngineState.DRAINING, EngineState.STOPPED):
            raise Unavailable(Reason.DRAINING, "the server is stopping; send the request to another one")
        raise Unavailable(Reason.LOADING, "the model is loading; wait until health is SERVING")

    def open(self, request_id: RequestId, outbox: Outbox) -> None:
        """Route the request's events to `outbox`; raises AlreadyExists while its id is in use."""
        self.check_free(request_id)
        self._outboxes[request_id] = outbox

    def check_free(self, request_id: RequestId) -> None:
        """Raise AlreadyExists while a request's id is in use."""
        if request_id in self._outboxes:
            raise AlreadyExists(
                Reason.REQUEST_ID_IN_USE,
                f"you already have a running request {name_of(request_id)!r}; choose another request_id",
                field="request_id",
                metadata={"request_id": name_of(request_id)},
            )

    def routes(self, request_id: RequestId, outbox: Outbox) -> bool:
        """Whether the id is open with this outbox."""
        return self._outboxes.get(request_id) is outbox

    def forget(self, request_id: RequestId) -> None:
        """Undo `open` for a request that the engine did not accept."""
        del self._outboxes[request_id]

    def release(self, request_id: RequestId, outbox: Outbox) -> bool:
        """Note that the reader is gone; return whether the engine has not ended the request yet.

        Until it has, the id stays in use: otherwise the end of the old request could reach a new one with the
        same name. Once it has, the id may already belong to another request.
        """
        if not self.routes(request_id, outbox):
            return False
        self._outboxes[request_id] = None
        return True

    async def ask(self, send: Callable[[Callable[[Answer], None]], None]) -> Answer:
        """Pass `send` a reply function for another thread and return what it is called with.

        Raises what `send` raises, and EngineFailed or Unavailable if the engine ends first.
        """
        future: asyncio.Future[Answer] = self._loop.create_future()
        self._questions.add(future)
        try:
            send(lambda answer: self._hand_over(_resolve, future, answer))
            return await future
        finally:
            self._questions.discard(future)

    def _hand_over(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            # The loop ended before the engine did: nobody is left to notify.
            if not self._loop.is_closed():
                raise

    def _deliver(self, events: tuple[tuple[RequestId, Event], ...]) -> None:
        for request_id, event in events:
            outbox = self._outboxes.get(request_id)
            if isinstance(event, (Finished, Failed)):
                self._outboxes.pop(request_id, None)
            if outbox is not None:
                outbox.put(event)

    def _set_state(self, state: EngineState, error: IcehouseError | None) -> None:
        if self.state is EngineState.FAILED:
            # FAILED is final: an engine that does not know that a rank was lost may finish loading, or drain.
            return
        self.state = state
        self._error = error or self._error
        if state not in (EngineState.LOADING, EngineState.READY):
            self.left_ready.set()
        if state in (EngineState.FAILED, EngineState.STOPPED):
            self._fail_everything()
        for listener in self._listeners:
            listener()

    def _fail_everything(self) -> None:
        stopped = Unavailable(Reason.DRAINING, "the server stopped before the request ended; send it again")
        error = self._failure() if self.state is EngineState.FAILED else stopped
        self._deliver(tuple((request_id, Failed(error)) for request_id in self._outboxes))
        for future in self._questions:
            if not future.done():
                future.set_exception(error)

    def _failure(self) -> IcehouseError:
        return self._error or engine_failed()


def _resolve(future: asyncio.Future[Any], answer: object) -> None:
    if not future.done():
        future.set_result(answer)


@dataclasses.dataclass(frozen=True, slots=True)
class EngineListener:
    """Passes the engine's events to the router, and the model with what its callers need."""

    router: Router
    tokenizer: Tokenizer
    images: ImageReader | None
    block_files: BlockFiles | None

    def publish(self, events: Sequence[tuple[RequestId, Event]]) -> None:
        self.router.publish(events)

    def model_loaded(self, info: ModelInfo) -> None:
        if info.reply_format is not None:
            _log_replies(info.reply_format)
        self.router.model_loaded(ServedModel(info, self.tokenizer, self.images, self.block_files))

    def state_changed(self, state: EngineState, error: IcehouseError | None) -> None:
        self.router.state_changed(state, error)


def _log_replies(format: ReplyFormatInfo) -> None:
    """Log how chat replies will be parsed, and markers that nothing parses."""
    facts = {"calls": format.calls or "none", "reasoning": format.reasoning_start or "none"}
    _log.info("reply_format_found", extra={**facts, "evidence": "; ".join(format.evidence) or "none"})
    if format.unread_markers:
        _log.warning("reply_markers_unread", extra={"markers": " ".join(format.unread_markers)})
