"""Logs: one line per event on standard error, in the server's own form."""

from __future__ import annotations

import logging
import sys

from icehouse_client.log_lines import JsonFormatter, TextFormatter

LOGGER_NAME = "icehouse.http"


def setup_logging(*, is_json: bool, level: str) -> None:
    """Send the front's loggers to standard error; of its libraries errors only: callers cause the rest."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if is_json else TextFormatter())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    logging.getLogger(LOGGER_NAME).setLevel(level.upper())
