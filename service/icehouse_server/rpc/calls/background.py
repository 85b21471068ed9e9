"""Background tasks of the event loop: a failure is logged at once, and ending a task never fails.

Nobody awaits such a task before the server stops. Otherwise its failure would stay unseen until then and
would break the stop, and RAM would not be saved.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

_logger = logging.getLogger("icehouse_server.rpc.calls.background")


def start(work: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
    """Run `work` until `end`; an error is logged at once."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_log_failure)
    return task


async def end(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait for it. Its error was logged and is not raised again."""
    task.cancel()
    await asyncio.wait((task,))


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _logger.error("background_task_failed", extra={"task": task.get_name()}, exc_info=error)
