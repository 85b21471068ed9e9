"""Logs: one line per event on standard error, for people, or as JSON for machines."""

from __future__ import annotations

import logging
import sys

from icehouse_client.log_lines import JsonFormatter, TextFormatter

from icehouse_server.config import LogConfig


def setup_logging(config: LogConfig) -> None:
    """Send the server's log to standard error; other libraries only from warnings on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if config.format == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    for name in ("icehouse", "icehouse_server"):
        logging.getLogger(name).setLevel(config.level.upper())
