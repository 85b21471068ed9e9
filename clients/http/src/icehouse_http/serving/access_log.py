"""Access log: one line for each request when it has ended. Never what was asked or answered, nor a token."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from icehouse_http.serving.logs import LOGGER_NAME

_log = logging.getLogger(f"{LOGGER_NAME}.access")

REFUSAL_LINES_PER_S = 20.0
REFUSAL_LINE_BURST_COUNT = 64
"""Lines of refusals that are written at once."""


class AccessLog:
    """Writes the lines. Those of refusals come only so fast, or any caller could fill the disk."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._left_count = float(REFUSAL_LINE_BURST_COUNT)
        self._last_time = monotonic()
        self._left_out_count = 0

    def write(self, facts: dict[str, object], *, is_refusal: bool) -> None:
        """Write one request's line; after others were left out it says how many."""
        if is_refusal:
            if not self._may_write():
                self._left_out_count += 1
                return
            if self._left_out_count:
                facts["left_out"], self._left_out_count = self._left_out_count, 0
        _log.info("http_request_ended", extra=facts)

    def _may_write(self) -> bool:
        now = self._monotonic()
        more_count = (now - self._last_time) * REFUSAL_LINES_PER_S
        self._left_count = min(self._left_count + more_count, REFUSAL_LINE_BURST_COUNT)
        self._last_time = now
        if self._left_count < 1:
            return False
        self._left_count -= 1
        return True
