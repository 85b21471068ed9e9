"""Answers of one call: the bytes kept for them and those not yet read count against its caller. Event loop.

gRPC holds a message until the connection has taken it. If a handler is ended meanwhile, gRPC holds the
message until the call is over, so it counts until then.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final, Protocol

import grpc

from icehouse_server.errors import CannotFit, Overloaded, Reason
from icehouse_server.rpc.access.shares import FairShare, retrieve_error

FREE_BYTES: Final = 4 << 10
"""Less than this is not counted."""
_COPIES: Final = 2
"""A message's bytes, and gRPC's copy of them."""


class AnswerMessage(Protocol):
    """A message to be written."""

    def ByteSize(self) -> int: ...


class Writable(Protocol):
    """What we need of a call's context."""

    async def send_initial_metadata(self, initial_metadata: Any) -> None: ...
    async def write(self, message: Any) -> None: ...


class CallAnswers:
    """One call's share of the memory for answers, until `close`."""

    def __init__(self, memory: FairShare, *, origin: str) -> None:
        self._memory = memory
        self._origin = origin
        self._buffered_bytes = 0
        self._held_bytes = 0

    def buffer(self, size_bytes: int) -> None:
        """Count these bytes for answers that are not written yet; raises as `hold` does."""
        self._buffered_bytes = size_bytes
        self.hold(0)

    def hold(self, unread_bytes: int) -> None:
        """Count the bytes that are kept and being written. Raises Overloaded if the caller's answers would
        take more than it may have now, and CannotFit for more than it could ever have."""
        wanted = self._buffered_bytes + unread_bytes
        wanted = wanted if wanted > FREE_BYTES else 0
        # While nobody else holds anything, one caller may have half.
        if 2 * wanted > self._memory.limit:
            raise CannotFit(
                Reason.MEMORY_NEVER_FITS,
                f"the answer takes {wanted} bytes so far; the answers of one caller may take half of the "
                f"{self._memory.limit} bytes of server.answer_memory_bytes; ask for less, or stream it",
                metadata={"answer_bytes": wanted, "answer_memory_bytes": self._memory.limit},
            )
        more = wanted - self._held_bytes
        if more > 0:
            self._memory.take(self._origin, more)
        elif more < 0:
            self._memory.give_back(self._origin, -more)
        self._held_bytes = wanted

    def close(self) -> None:
        self._buffered_bytes = 0
        self.hold(0)


current: contextvars.ContextVar[CallAnswers | None] = contextvars.ContextVar("answers", default=None)
"""The answers of this task's call."""


def count_buffered(size_bytes: int) -> None:
    """Count these bytes for this task's answers that are not written yet; raises as `Answers.buffer`."""
    answers = current.get()
    if answers is not None:
        answers.buffer(size_bytes)


async def write(context: Writable, message: AnswerMessage) -> None:
    """Send a message, which may wait for the reader; raises as `Answers.hold` before anything is written, and
    CancelledError if the connection ends first."""
    answers = current.get()
    if answers is not None:
        answers.hold(_COPIES * message.ByteSize())
    with disconnect_as_cancel():
        await context.write(message)
    # Not if the write was cancelled: gRPC still holds the message then.
    if answers is not None:
        answers.hold(0)


_HEADERS_S = 1.0
"""How long an ending call waits for headers to be sent; only a stalled connection takes that long."""


class StallTimer:
    """Ends a stream whose reader takes nothing for too long or leaves too much unread."""

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._scope: asyncio.Timeout | None = None
        self._has_begun = False

    @contextlib.asynccontextmanager
    async def guard(self) -> AsyncIterator[None]:
        """Raise Overloaded READER_STALLED out of the block once the reader has stalled in it."""
        try:
            async with asyncio.timeout(None) as self._scope:
                yield
        except TimeoutError:
            raise Overloaded(
                Reason.READER_STALLED,
                f"the reader took nothing for {self._timeout_s:g} s or left too much unread; "
                "read the stream faster or ask for less",
                metadata={"stall_timeout_s": f"{self._timeout_s:g}"},
            ) from None
        finally:
            self._scope = None

    async def begin(self, context: Writable) -> None:
        """Send the headers, for a reader that waits for them before the first message."""
        if not self._has_begun:
            self._has_begun = True
            sending = asyncio.ensure_future(context.send_initial_metadata(()))
            sending.add_done_callback(retrieve_error)
            try:
                with disconnect_as_cancel():
                    await asyncio.shield(sending)
            except asyncio.CancelledError:
                # gRPC believes that headers whose sending was cancelled were not sent, and sends them again.
                # Its core refuses that, and the caller would never learn that the call ended.
                await asyncio.wait((sending,), timeout=_HEADERS_S)
                raise

    async def write(self, context: Writable, message: AnswerMessage) -> None:
        """Pass a message to the connection, which may wait for the reader; only within `guard`.

        Raises as `write` does.
        """
        # Send them separately from the message: if headers wait with it, the call cannot be ended with a
        # status (grpc 1.85).
        await self.begin(context)
        self._reschedule(asyncio.get_running_loop().time() + self._timeout_s)
        await write(context, message)
        self._reschedule(None)

    def _reschedule(self, when: float | None) -> None:
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(when)

    def expire(self) -> None:
        self._reschedule(asyncio.get_running_loop().time())


@contextlib.contextmanager
def disconnect_as_cancel() -> Iterator[None]:
    """End the call as cancelled if its connection ends before it takes what the block sends.

    gRPC reports this as a server error (`InternalError`), although it is the caller that left.
    """
    try:
        yield
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None
