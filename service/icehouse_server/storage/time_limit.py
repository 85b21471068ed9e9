"""Time limit for what a start does on a disk that may hang, before there is a storage thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")

TIME_LIMIT_S = 5.0


def in_time(action: Callable[[], Result], *, timeout_s: float | None = None) -> Result:
    """Return what an action returns, or raise what it raises; a `TimeoutError` when it takes longer.

    Nothing can end a thread that waits for a disk: it goes on, and what it comes to is dropped.
    """
    limit_s = TIME_LIMIT_S if timeout_s is None else timeout_s
    ended: Future[Result] = Future()

    def run() -> None:
        try:
            ended.set_result(action())
        except BaseException as error:
            ended.set_exception(error)

    threading.Thread(target=run, name="disk-action", daemon=True).start()
    try:
        return ended.result(limit_s)
    except TimeoutError as error:
        if ended.done():
            raise
        raise TimeoutError(f"the disk does not answer for {limit_s:g} s") from error
