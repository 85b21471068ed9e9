"""Log of grpc itself: a caller that leaves just as its answer is sent is no error of this server.

grpc.aio writes an error with a traceback when the core could not send an answer and the caller's leaving has
not reached the event loop yet. Any caller could fill the log with it.
"""

from __future__ import annotations

import logging

import grpc

CORE_LOGGER_NAME = "grpc._cython.cygrpc"
_LOST_ANSWER = "ExecuteBatchError"
"""Names private to grpc: a test holds them to what is installed."""

_log = logging.getLogger(__name__)


def quiet_lost_answers() -> None:
    """Log answers that the core could not send as DEBUG lines without a traceback."""
    # The same function is added once, however often.
    logging.getLogger(CORE_LOGGER_NAME).addFilter(_is_kept)


def _is_kept(record: logging.LogRecord) -> bool:
    kind = record.exc_info[0] if record.exc_info else None
    if kind is None or kind.__name__ != _LOST_ANSWER:
        return True
    _log.debug(
        "a caller left as its answer was sent", extra={"grpc": grpc.__version__, "event": record.getMessage()}
    )
    return False
