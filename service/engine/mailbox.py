"""The one door into the inference thread.

Any thread puts messages in; the inference thread alone takes them out, and waits here and
nowhere else. New work is bounded by count; control messages (cancel, a query, a storage
outcome) always fit, because each of their senders is bounded by work that was let in.
"""

from __future__ import annotations

import collections
import threading
from typing import Generic, TypeVar

Message = TypeVar("Message")


class Mailbox(Generic[Message]):
    """A queue with one reader. `limit` bounds the new-work messages that wait in it."""

    def __init__(self, *, limit: int) -> None:
        self.limit = limit
        self._messages: collections.deque[tuple[bool, Message]] = collections.deque()
        self._work_count = 0
        self._closed = False
        self._changed = threading.Condition()

    def offer(self, message: Message, *, work_count: int = 1) -> bool:
        """Put new work in, which counts as `work_count`; False, and nothing kept, when more than `limit`
        would wait or the door is shut."""
        with self._changed:
            if self._closed or self._work_count + work_count > self.limit:
                return False
            self._work_count += work_count
            self._messages.append((True, message))
            self._changed.notify()
            return True

    def post(self, message: Message) -> bool:
        """Put a control message in; False when the door is shut."""
        with self._changed:
            if self._closed:
                return False
            self._messages.append((False, message))
            self._changed.notify()
            return True

    def take_all(self, *, timeout_s: float) -> list[Message]:
        """Return what waits, oldest first, after waiting at most `timeout_s` for something to come."""
        with self._changed:
            if not self._messages and timeout_s > 0:
                self._changed.wait(timeout_s)
            return self._drain()

    def close(self) -> list[Message]:
        """Shut the door for good and return what was left behind it."""
        with self._changed:
            self._closed = True
            return self._drain()

    def __len__(self) -> int:
        return len(self._messages)

    def _drain(self) -> list[Message]:
        messages = [message for _, message in self._messages]
        self._messages.clear()
        self._work_count = 0
        return messages
