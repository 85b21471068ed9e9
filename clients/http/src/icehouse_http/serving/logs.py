"""Logs: one line per event on standard error, in the server's own form."""

from __future__ import annotations

import logging
import sys

from icehouse_client.log_lines import JsonFormatter, TextFormatter

LOGGER_NAME = "icehouse.http"


_COURSE = frozenset({"http_started", "http_drain_started", "http_stopped"})


def setup_logging(*, is_json: bool, level: str, tells_course: bool = True) -> None:
    """Send the front's loggers to standard error; of its libraries errors only: callers cause the rest.

    Without `tells_course` nothing is told of start and end: whoever started the front shows these.
    """
    handler = logging.StreamHandler(sys.stderr)
    if not tells_course:
        handler.addFilter(lambda record: record.getMessage() not in _COURSE)
    handler.setFormatter(JsonFormatter() if is_json else TextFormatter())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    logging.getLogger(LOGGER_NAME).setLevel(level.upper())
