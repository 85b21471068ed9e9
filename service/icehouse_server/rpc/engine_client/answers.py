"""Answers of one call: what it keeps for them, and what its reader has not taken, count against its caller.

gRPC holds a message until the connection has taken it. A handler that is ended meanwhile leaves it there
until the call is over, so it is counted until then. Owned by the event loop.
"""

from __future__ import annotations

import contextvars
from typing import Any, Final, Protocol

from icehouse_server.errors import CannotFit, Reason
from icehouse_server.rpc.engine_client.disconnect import disconnect_as_cancel

FREE_BYTES: Final = 4 << 10
"""So little counts as nothing: there is no more of it than there are calls."""
_COPIES: Final = 2
"""A message's bytes, and gRPC's copy of them."""


class Message(Protocol):
    """What is written."""

    def ByteSize(self) -> int: ...


class Writable(Protocol):
    """What is wanted of a call's context."""

    async def write(self, message: Any) -> None: ...


class AnswerMemory(Protocol):
    """Bytes that callers have between them."""

    limit: int

    def take(self, origin: str, amount: int) -> None:
        """Raises Overloaded where the caller may have no more now."""
        ...

    def give_back(self, origin: str, amount: int) -> None: ...


class Answers:
    """One call's part of the memory for answers, from the call's beginning until `close`."""

    def __init__(self, memory: AnswerMemory, *, origin: str) -> None:
        self._memory = memory
        self._origin = origin
        self._kept_bytes = 0
        self._held_bytes = 0

    def keep(self, size_bytes: int) -> None:
        """Have the call keep so much for answers that are yet to be written; raises as `hold` does."""
        self._kept_bytes = size_bytes
        self.hold(0)

    def hold(self, unread_bytes: int) -> None:
        """Hold what is kept and what is being written; raises Overloaded where the caller's answers take all
        that it may have, and CannotFit for more than that would ever be."""
        wanted = self._kept_bytes + unread_bytes
        wanted = wanted if wanted > FREE_BYTES else 0
        # Of nothing held by anybody one caller gets half.
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
        """Hold nothing any more."""
        self._kept_bytes = 0
        self.hold(0)


current: contextvars.ContextVar[Answers | None] = contextvars.ContextVar("answers", default=None)
"""Of this task's call."""


def keep(size_bytes: int) -> None:
    """Have this task's call keep so much for answers that are yet to be written; raises as `Answers.keep`."""
    answers = current.get()
    if answers is not None:
        answers.keep(size_bytes)


async def write(context: Writable, message: Message) -> None:
    """Hand a message to the connection, which may wait for the reader; raises as `Answers.hold`, before
    anything is written, and CancelledError where the connection ends first."""
    answers = current.get()
    if answers is not None:
        answers.hold(_COPIES * message.ByteSize())
    with disconnect_as_cancel():
        await context.write(message)
    # Not where it was broken off: gRPC still has the message then.
    if answers is not None:
        answers.hold(0)
